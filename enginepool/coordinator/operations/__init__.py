"""What can be asked of an engine, one file each. Pure."""
