"""The process group of an update, as a group remembers it: the next update between the same sides needs no new one."""

from typing import NamedTuple


class ProcessGroupInfo(NamedTuple):
    """A process group that stands: its name, where it meets, and the sides that are in it, in the order of their ranks."""

    name: str
    address: str
    backend: str
    sides: tuple[tuple[str, int], ...]

    @property
    def world(self) -> int:
        """How many ranks it has."""
        return sum(ranks for _, ranks in self.sides)
