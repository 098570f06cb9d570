"""How processes reach each other: addresses, keys, the options of sockets."""
