"""File descriptors of this process: how many it may have, and whether some are free.

ZeroMQ aborts the process where it gets none for its threads, so a client looks before.
"""

import errno
import os
import resource

#: what ZeroMQ opens for a context with one connection: 6 of its own, the connection, and a lookup of a name
CONNECTION_FILES = 8
#: so many are enough for a command or a client
ENOUGH = 64


def check_free(count: int) -> None:
    """Raises OSError: this process may not open so many more files."""
    held: list[int] = []
    try:
        for _ in range(count):
            held.append(os.open("/", os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        text = f"{error.strerror}: a connection needs {count} file descriptors, {len(held)} are free; {advice()}"
        raise OSError(error.errno, text) from None
    finally:
        for descriptor in held:
            os.close(descriptor)


def is_short(error: BaseException) -> bool:
    """Whether this process, or the host, has no descriptor left. Errors of ZeroMQ are no OSError."""
    return getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE)


def advice() -> str:
    """The limit of this process, and what to do."""
    return f"RLIMIT_NOFILE is {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}: raise it to {ENOUGH} or more (ulimit -n)"
