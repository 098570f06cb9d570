"""Weight updates: the transaction, who publishes, how it ends, and workers brought back to what is committed. Pure."""
