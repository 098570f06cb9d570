"""The client's side of the protocol as a pure machine."""
