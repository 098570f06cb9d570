"""What publishers have stopped in a group until they say otherwise: engines that sleep, all of its work. Journaled. Pure."""

from collections.abc import Iterator

import msgspec
from msgspec.structs import replace

from enginepool.protocol.messages.control import MemoryTag
from enginepool.protocol.messages.weights import RunningGenerations

#: the key of `GroupHolds.asleep` for all workers of a group: no worker has this name
ALL = ""
_NOTHING: frozenset[MemoryTag] = frozenset()


class GroupHolds(msgspec.Struct, frozen=True):
    """`asleep`: the parts of engines' memory that are to be released, of all workers (`ALL`) or of one worker by its name.
    `paused`: the group starts no work. `mode`: what became of its generations then."""

    asleep: dict[str, frozenset[MemoryTag]] = {}
    paused: bool = False
    mode: RunningGenerations = "abort"

    @property
    def whole(self) -> bool:
        """No request of the group runs."""
        return self.paused or ALL in self.asleep

    @property
    def keeps(self) -> bool:
        """Generations stand still in their engines."""
        return self.paused and self.mode != "abort"

    @property
    def waits_for(self) -> str:
        """What lets requests of the whole group run again, after the name of the group; "": they may run."""
        sleeps = f"sleeps ({', '.join(sorted(self.asleep[ALL]))}) until it is woken" if ALL in self.asleep else ""
        return " and ".join(filter(None, ("is paused until it is resumed" if self.paused else "", sleeps)))

    def wanted(self, worker: str) -> frozenset[MemoryTag]:
        """The parts of the engine of this worker that are to sleep."""
        if not self.asleep:
            return _NOTHING
        return self.asleep.get(ALL, _NOTHING) | self.asleep.get(worker, _NOTHING)

    def with_sleep(self, worker: str, tags: frozenset[MemoryTag]) -> "GroupHolds":
        """These parts are to sleep as well, of the engine of `worker` or of all engines."""
        return replace(self, asleep={**self.asleep, worker: self.asleep.get(worker, _NOTHING) | tags})

    def without_sleep(self, worker: str, tags: frozenset[MemoryTag]) -> "GroupHolds":
        """These parts are to be awake, of the engine of `worker` or of all engines."""
        left = {name: was - tags if worker in (ALL, name) else was for name, was in self.asleep.items()}
        return replace(self, asleep={name: was for name, was in left.items() if was})


def told(group: str, before: GroupHolds, after: GroupHolds) -> Iterator[str]:
    """Lines for the operator's log: what has changed in a group of this name."""
    if before.paused != after.paused:
        yield f"group {group} is paused: its requests wait until it is resumed" if after.paused else f"group {group} is resumed"
    for name in sorted(before.asleep.keys() | after.asleep.keys()):
        tags = after.asleep.get(name, _NOTHING)
        if tags != before.asleep.get(name, _NOTHING):
            who = f"worker {name}" if name else f"group {group}"
            yield f"{who} is to sleep: {', '.join(sorted(tags))}" if tags else f"{who} is woken"
