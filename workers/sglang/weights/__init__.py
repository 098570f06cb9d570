"""New weights in the engine's own processes."""
