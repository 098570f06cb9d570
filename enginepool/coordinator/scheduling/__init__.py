"""Which request is next, which rows make a batch, and which worker gets it. Pure."""
