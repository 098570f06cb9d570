"""What this process writes to stderr and stdout, its log: a full disk there must not end its work, nor lose weights."""

import io
import sys
from typing import Any


class _Unfailing(io.FileIO):
    """What cannot be written is lost; whoever wrote it goes on."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def never_fail() -> None:
    """From now on writing to stderr and stdout raises no OSError."""
    if sys.stderr is not None:  # closed by whoever started this process
        sys.stderr = _over(2)
    if sys.stdout is not None:
        sys.stdout = _over(1)


def _over(descriptor: int) -> io.TextIOWrapper:
    raw = io.BufferedWriter(_Unfailing(descriptor, "w", closefd=False))
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)
