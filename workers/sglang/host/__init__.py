"""One `sglang.Engine` in the worker's process, from its start to its end."""
