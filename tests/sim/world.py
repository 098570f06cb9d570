"""Virtual time: one heap of (time, order, action), one source of chance, and a digest of all that happened.

Nothing in a simulation asks the real clock, sleeps, or draws from any other source of chance, so a seed replays exactly.
"""

import random
import zlib
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

#: lines that a failure shows
RECENT = 60
#: a state machine is checked as a whole on every so many of its events
SPARSE = 16


class World:
    """The clock, the dice and the order of everything. `say` gets each line of the trace as it happens."""

    def __init__(self, seed: int, say: Callable[[str], None] | None = None) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.digest = 0
        self.recent: deque[tuple[float, str, object]] = deque(maxlen=RECENT)
        self._say = say
        #: SPARSE, but each event where a trace is wanted: it ends at the event that broke something
        self.check_every = SPARSE if say is None else 1
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0

    def at(self, time: float, action: Callable[..., None], *args: Any) -> None:
        """Run `action` at `time`; actions of one time run in the order in which they were asked for."""
        self._order = order = self._order + 1
        heappush(self._heap, (time if time > self.now else self.now, order, action, args))

    def after(self, delay: float, action: Callable[..., None], *args: Any) -> None:
        now = self.now
        time = now + delay
        self._order = order = self._order + 1
        heappush(self._heap, (time if time > now else now, order, action, args))

    def run_until(self, time: float) -> None:
        """Let everything happen that is due until `time`."""
        heap = self._heap
        while heap and heap[0][0] <= time:
            self.now, _, action, args = heappop(heap)
            action(*args)
        self.now = max(self.now, time)

    def note(self, who: str, what: object) -> None:
        """Remember a line for the trace."""
        self.recent.append((self.now, who, what))
        if self._say is not None:
            self._say(line(self.now, who, what))

    def mix(self, data: bytes) -> None:
        """Let `data`, and the time, count in the digest."""
        self.digest = zlib.crc32(data, self.digest ^ (int(self.now * 1e6) & 0xFFFFFFFF))

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self.random.random()


def line(now: float, who: str, what: object) -> str:
    """One line of a trace."""
    text = what if isinstance(what, str) else repr(what)
    return f"{now:10.4f}  {who:<22} {text[:230]}"
