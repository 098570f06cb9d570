"""The wire protocol, version 1: messages, frames, errors; PROTOCOL.md and WEIGHTS.md are the specification."""

if __name__ != "enginepool.protocol":
    raise ImportError(f"import this package as enginepool.protocol, not as {__name__}: install it with pip")
