"""A request from its message to its one final answer. Pure."""
