"""Groups that are paused and engines that sleep: who asks for that when, and what must not happen meanwhile.

- An engine is given no work, and no weights while its weights sleep.
- Once a caller was told that a group is paused, or sleeps, no engine of it works before a caller lets it go on; while it sleeps
  no process of it is started either. So it is also when processes die meanwhile. An external worker that the coordinator has
  given up may begin what it was sent before: the coordinator cannot end it, and takes none of its answers.
"""

from random import Random
from typing import get_args

from enginepool.protocol.messages.control import CommandName, ControlReport, MemoryTag
from enginepool.protocol.messages.weights import RunningGenerations

TAGS: tuple[MemoryTag, ...] = ("weights", "kv_cache", "cuda_graph")
#: a command that lets a group go on, of which the caller heard nothing, may arrive within this
LATE_S = 60.0
#: what a command holds, and which one lets it go on
HOLDS: dict[CommandName, CommandName] = {"sleep": "wake", "pause": "resume"}
ENDS: dict[CommandName, CommandName] = {end: held for held, end in HOLDS.items()}


class Wish:
    """What a command asks for. `worker`: "" for the whole group. `mode`: of pause."""

    def __init__(
        self,
        name: CommandName = "flush",
        worker: str = "",
        tags: tuple[MemoryTag, ...] = (),
        mode: RunningGenerations = "abort",
    ) -> None:
        self.name: CommandName = name
        self.mode: RunningGenerations = mode
        self.worker = worker
        self.tags = tags

    def __repr__(self) -> str:
        return " ".join(filter(None, (self.name, self.worker, *self.tags, self.mode if self.name == "pause" else "")))


def some_wish(random: Random, group: str, workers: int) -> Wish:
    """To sleep or to wake, all of a group or one of its workers; to pause or to resume."""
    names: tuple[CommandName, ...] = ("sleep", "sleep", "wake", "pause", "resume")
    name = random.choice(names)
    if name == "pause":
        modes = Random()
        modes.setstate(random.getstate())  # what is drawn later stays what it was before there were modes
        return Wish(name, mode=modes.choice(get_args(RunningGenerations)))
    if name == "resume":
        return Wish(name)
    worker = f"{group}-{random.randrange(workers)}" if workers and random.random() < 0.4 else ""
    tags: tuple[MemoryTag, ...] = tuple(tag for tag in TAGS if random.random() < 0.6)
    return Wish(name, worker, tags)


class SleepOracle:
    """What is held for certain."""

    def __init__(self) -> None:
        #: groups that callers were told to be paused, or to sleep
        self._held: dict[CommandName, set[str]] = {name: set() for name in HOLDS}
        #: by what lets a group go on, and the group: until when such a command may arrive
        self._ends: dict[tuple[CommandName, str], float] = {}
        #: those that are on their way, with their groups
        self._asked: dict[Wish, str] = {}

    def asked(self, now: float, group: str, wish: Wish) -> None:
        """A command is on its way."""
        self._asked[wish] = group
        self._may_end(group, wish, float("inf"))

    def ended(self, now: float, group: str, wish: Wish, *, reported: bool) -> None:
        """Its caller hears nothing more of it."""
        self._asked.pop(wish, None)
        others = any((other.name, at) == (wish.name, group) for other, at in self._asked.items())
        self._may_end(group, wish, float("inf") if others else now if reported else now + LATE_S)

    def _may_end(self, group: str, wish: Wish, until: float) -> None:
        if wish.name in ENDS:
            self._ends[wish.name, group] = until
            self._held[ENDS[wish.name]].discard(group)

    def told(self, asked: float, group: str, wish: Wish, report: ControlReport) -> None:
        """A caller hears its report. What lets the group go on and was on its way when it asked may have come after it."""
        if wish.name not in HOLDS or wish.worker or any(row.code for row in report.workers):
            return
        if self._ends.get((HOLDS[wish.name], group), -1.0) < asked:
            self._held[wish.name].add(group)

    def forgotten(self, group: str) -> None:
        """It could not be journaled."""
        for held, end in HOLDS.items():
            self._held[held].discard(group)
            self._ends[end, group] = float("inf")

    def works(self, group: str, what: str) -> None:
        """An engine of the group works."""
        held = [name for name, groups in self._held.items() if group in groups]
        assert not held, f"{what} during {held} of all of group {group}"

    def starts(self, group: str, what: str) -> None:
        """A process of the group is started."""
        assert group not in self._held["sleep"], f"{what} is started while all of group {group} sleeps"
