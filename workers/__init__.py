"""Worker processes: the engine interface, the worker's machine and loop, and the engines behind it."""

if __name__ != "enginepool.workers":
    raise ImportError(f"import this package as enginepool.workers, not as {__name__}: install it with pip")
