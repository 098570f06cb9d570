"""The log of a worker or a stager, on its stderr: lines with the time and the name of the worker, at a bounded rate.

A full disk must not end the work of the process, nor lose weights. A client can cause errors in an engine, so tracebacks have a
budget of their own.
"""

import io
import sys
import traceback
from typing import Any

from enginepool.host.log_lines import LogLines

BUDGETS: dict[str, tuple[int, float]] = {"": (1000, 2.0), "traceback": (20, 0.02)}
#: characters of a traceback; its end tells most
LONGEST_TRACEBACK = 16_000

_lines = LogLines("enginepool worker", BUDGETS)


def name_source(source: str) -> None:
    """What this process calls itself in its lines from now on: `worker` or `stager`, and the name of the worker."""
    _lines.source = f"enginepool {source}"


def say(text: str) -> None:
    """One line for the operator."""
    if (line := _lines.line(text)) is not None:
        _write(line)


def report(error: BaseException, where: str) -> None:
    """An unexpected error: a line that names it and says `where` it came up, and its traceback."""
    if (line := _lines.line(f"{where}: {type(error).__name__}, with this traceback", "traceback")) is not None:
        _write(f"{line}\n{''.join(traceback.format_exception(error)).rstrip()[-LONGEST_TRACEBACK:]}")


def _write(text: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


class _Unfailing(io.FileIO):
    """What cannot be written is lost; the process that wrote it goes on."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def never_fail() -> None:
    """From now on writing to stderr and stdout raises no OSError."""
    if sys.stderr is not None:  # closed by the process that started this one
        sys.stderr = _over(2)
    if sys.stdout is not None:
        sys.stdout = _over(1)


def _over(descriptor: int) -> io.TextIOWrapper:
    raw = io.BufferedWriter(_Unfailing(descriptor, "w", closefd=False))
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)
