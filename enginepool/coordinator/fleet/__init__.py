"""Workers from their registration to their loss, and the slots that they are restarted in. Pure."""
