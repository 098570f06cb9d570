"""The coordinator's log: one line for each event on stderr, with the time and a bounded rate.

A peer can cause some of these lines. Each kind of line has a budget, so that no peer can fill a disk, and the lines that one
peer causes do not take the place of those about workers and weights.
"""

import contextlib
import os
import select
import sys
import time

#: kind of line -> how many may come at once, and how many per second after that; "" is for every other kind
BUDGETS: dict[str, tuple[int, float]] = {"": (1000, 2.0), "client": (50, 0.2), "refused": (50, 0.2), "queue": (50, 0.2)}
#: characters of a line
LONGEST = 1000
#: control characters, which would make two lines of one, or command a terminal
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)}


class LineBudget:
    """How many lines of each kind may be written."""

    def __init__(self) -> None:
        #: kind -> lines that it has left, as of when, and lines that were left out since the last one
        self._left: dict[str, tuple[float, float, int]] = {}

    def take(self, kind: str, now: float) -> int | None:
        """Take one line at `now` (seconds): how many were left out before it; None if this one is left out, too."""
        most, per_s = BUDGETS.get(kind, BUDGETS[""])
        left, since, missing = self._left.get(kind, (float(most), now, 0))
        left = min(float(most), left + (now - since) * per_s)
        if left < 1.0:
            self._left[kind] = left, now, missing + 1
            return None
        self._left[kind] = left - 1.0, now, 0
        return missing


_budget = LineBudget()


def log(text: str, kind: str = "") -> None:
    """One line with the time (UTC), unless lines of this kind come too often."""
    missing = _budget.take(kind, time.monotonic())
    if missing is None:
        return
    now = time.time()
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now * 1000) % 1000:03}Z"
    more = f" ({missing} lines like this one were left out)" if missing else ""
    write(f"{stamp} enginepool: {one_line(text)}{more}")


def say(text: str) -> None:
    """One line without the time: the answer of a command that could not do its work."""
    write(f"enginepool: {one_line(text)}")


def one_line(text: str) -> str:
    """Bounded, and without control characters: parts of it may come from a peer."""
    return (text if len(text) <= LONGEST else f"{text[:LONGEST]} ...").translate(_CONTROL)


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
