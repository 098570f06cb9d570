"""The process group of an update, as a group remembers it: the next update between the same sides needs no new one."""

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class ProcessGroupInfo:
    """A process group that stands: its name, where it meets, and the sides that are in it, in the order of their ranks."""

    name: str
    address: str
    backend: str
    sides: tuple[tuple[str, int], ...]

    @cached_property
    def world(self) -> int:
        """How many ranks it has. Each of them is told."""
        return sum(ranks for _, ranks in self.sides)
