"""Weight updates: the transaction, its publisher, how it ends, and how workers come back to the committed weights. Pure."""
