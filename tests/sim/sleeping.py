"""Engines that sleep: who is put to sleep and woken when, and what must not happen meanwhile.

- An engine is given no work, and no weights while its weights sleep.
- Once a caller was told that a group sleeps, no engine of it works and no process of it is started before a caller wakes it:
  also when processes die meanwhile.
"""

from random import Random

from enginepool.protocol.messages.control import CommandName, ControlReport, MemoryTag

TAGS: tuple[MemoryTag, ...] = ("weights", "kv_cache", "cuda_graph")
#: a wake of which the caller heard nothing may arrive within this
LATE_S = 60.0


class Wish:
    """What a command asks for. `worker`: "" for the whole group."""

    def __init__(self, name: CommandName = "flush", worker: str = "", tags: tuple[MemoryTag, ...] = ()) -> None:
        self.name: CommandName = name
        self.worker = worker
        self.tags = tags

    def __repr__(self) -> str:
        return " ".join(filter(None, (self.name, self.worker, *self.tags)))


def some_wish(random: Random, group: str, workers: int) -> Wish:
    """To sleep or to wake, all of a group or one of its workers."""
    worker = f"{group}-{random.randrange(workers)}" if workers and random.random() < 0.4 else ""
    tags: tuple[MemoryTag, ...] = tuple(tag for tag in TAGS if random.random() < 0.6)
    names: tuple[CommandName, ...] = ("sleep", "sleep", "wake")
    return Wish(random.choice(names), worker, tags)


class SleepOracle:
    """What sleeps for certain."""

    def __init__(self) -> None:
        #: by group: parts that callers were told to sleep
        self._asleep: dict[str, set[MemoryTag]] = {}
        #: by group: until when a wake may arrive
        self._wakes: dict[str, float] = {}

    def asked(self, now: float, group: str, wish: Wish) -> None:
        """A command is on its way."""
        if wish.name == "wake":
            self._wakes[group] = float("inf")
            self._asleep.pop(group, None)

    def ended(self, now: float, group: str, wish: Wish, *, reported: bool) -> None:
        """Its caller hears nothing more of it."""
        if wish.name == "wake":
            self._wakes[group] = now if reported else now + LATE_S
            self._asleep.pop(group, None)

    def told(self, now: float, asked: float, group: str, wish: Wish, report: ControlReport) -> None:
        """A caller hears that engines sleep. A wake that was on its way when it asked may have come after the sleep."""
        woken = self._wakes.get(group, -1.0) >= asked
        if wish.name == "sleep" and not wish.worker and not woken and not any(row.code for row in report.workers):
            self._asleep.setdefault(group, set()).update(wish.tags or TAGS)

    def forgotten(self, group: str) -> None:
        """It could not be journaled."""
        self._asleep.pop(group, None)
        self._wakes[group] = float("inf")

    def works(self, group: str, what: str) -> None:
        """An engine of the group works, or a process of it is started."""
        assert not self._asleep.get(group), f"{what} while all of group {group} sleeps: {self._asleep[group]}"
