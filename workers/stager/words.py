"""What a stager says in words: to its operator, and to its worker of what went wrong."""

import os
import sys
import traceback


def say(line: str) -> None:
    """One line on stderr, where the supervisor keeps it."""
    sys.stderr.write(f"enginepool stager {os.getpid()}: {line}\n")
    sys.stderr.flush()


def why(error: Exception) -> str:
    """One line; what nobody foresaw is told with its kind, and in full on stderr."""
    from enginepool.group import CollectiveError

    if isinstance(error, CollectiveError):
        return str(error)
    traceback.print_exception(error)
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
