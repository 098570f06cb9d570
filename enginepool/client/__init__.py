"""The client library: `Pool`, `BlockingPool` and their results. `session/` is the client's side of the protocol, pure."""
