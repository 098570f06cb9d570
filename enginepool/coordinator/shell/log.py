"""The coordinator's log: one line for each event on stderr, with the time and a bounded rate."""

import contextlib
import os
import select
import sys

from enginepool.host.log_lines import LogLines, one_line

#: lines that peers can cause have kinds of their own
BUDGETS: dict[str, tuple[int, float]] = {
    "": (1000, 2.0),
    "client": (50, 0.2),
    "refused": (50, 0.2),
    "queue": (50, 0.2),
    "external": (50, 0.2),
    "update": (200, 0.5),
}

_lines = LogLines("enginepool", BUDGETS)


def log(text: str, kind: str = "") -> None:
    """One line with the time (UTC), unless lines of this kind come too often."""
    if (line := _lines.line(text, kind)) is not None:
        write(line)


def say(text: str) -> None:
    """One line without the time: the answer of a command that could not do its work."""
    write(f"enginepool: {one_line(text)}")


def write(line: str) -> None:
    """A log that nothing reads, or whose disk is full, must not keep the pool from its work: what it does not take at once is
    lost."""
    if sys.stderr is None:  # closed by the process that started this one: the descriptor may be another file by now
        return
    stream = select.poll()
    stream.register(2, select.POLLOUT)
    with contextlib.suppress(OSError):
        # A pipe that is ready takes PIPE_BUF bytes, and one that is full would hold up everything.
        if stream.poll(0):
            os.write(2, line.encode(errors="backslashreplace")[: select.PIPE_BUF - 1] + b"\n")
