"""Lines of a log: one for each event, with the time and the name of the process, bounded in length and in rate.

A peer can cause some of these lines. Each kind of line has a budget, so that no peer can fill a disk, and the lines that one
peer causes do not take the place of other lines.
"""

import time
from collections.abc import Mapping

#: characters of a line
LONGEST = 1000
#: control characters, which would make two lines of one, or command a terminal
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)}

#: kind of line -> how many may come at once, and how many per second after that; "" is for every other kind
Budgets = Mapping[str, tuple[int, float]]


class LineBudget:
    """How many lines of each kind may be written."""

    def __init__(self, budgets: Budgets) -> None:
        self._budgets = budgets
        #: kind -> lines that it has left, as of when, and lines that were left out since the last one
        self._left: dict[str, tuple[float, float, int]] = {}

    def take(self, kind: str, now: float) -> int | None:
        """Take one line at `now` (seconds): how many were left out before it; None if this one is left out, too."""
        most, per_s = self._budgets.get(kind, self._budgets[""])
        left, since, missing = self._left.get(kind, (float(most), now, 0))
        left = min(float(most), left + (now - since) * per_s)
        if left < 1.0:
            self._left[kind] = left, now, missing + 1
            return None
        self._left[kind] = left - 1.0, now, 0
        return missing


class LogLines:
    """The lines of one process. `source` names it in each of them."""

    def __init__(self, source: str, budgets: Budgets) -> None:
        self.source = source
        self._budget = LineBudget(budgets)

    def line(self, text: str, kind: str = "") -> str | None:
        """A line without its end, with the time (UTC); None: lines of this kind come too often, and it is left out."""
        missing = self._budget.take(kind, time.monotonic())
        if missing is None:
            return None
        now = time.time()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now * 1000) % 1000:03}Z"
        more = f" ({missing} lines like this one were left out)" if missing else ""
        return f"{stamp} {self.source}: {one_line(text)}{more}"


def one_line(text: str) -> str:
    """Bounded, and without control characters: parts of it may come from a peer."""
    return (text if len(text) <= LONGEST else f"{text[:LONGEST]} ...").translate(_CONTROL)
