"""Weight updates in the worker's process."""
