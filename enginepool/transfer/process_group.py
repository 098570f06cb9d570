"""The ranks of an update, however bytes travel between them: rank 0 gives buckets, the others take them in the same order."""

from abc import ABC, abstractmethod
from typing import Any

#: Broadcasts that one may begin before one waits for the first of them: a GPU's queues are long, and not endless.
QUEUED = 32


class CollectiveError(Exception):
    """A peer is gone, late, or was never there. The group is of no more use. The message is one line."""


class Broadcast(ABC):
    """One bucket on its way."""

    @abstractmethod
    def order(self, timeout_s: float) -> None:
        """What the current stream of a GPU does from now on comes after it; between CPUs it is `wait`.

        Whether it went well `wait` says. Raises CollectiveError.
        """

    @abstractmethod
    def wait(self, timeout_s: float) -> None:
        """Until its bytes are here, or sent. Raises CollectiveError: a peer is gone, the time is over, the group is aborted."""


class ProcessGroup(ABC):
    """A group in which rank 0 broadcasts.

    Attributes:
        name: of the group, never used again.
        world, rank: how many ranks it has, and which of them this is.
        on_device: a GPU does the work: the processor has nothing to do with a bucket between `order` and `wait`.
    """

    def __init__(self, name: str, world: int, rank: int, device: Any, *, on_device: bool) -> None:
        self.name = name
        self.world = world
        self.rank = rank
        self.device = device
        self.on_device = on_device

    @abstractmethod
    def begin(self, bucket: Any) -> Broadcast:
        """Begin to broadcast `bucket`, a contiguous uint8 tensor on the group's device: from rank 0, into it elsewhere.

        All ranks begin the same sizes in the same order. On a GPU what the current stream does before is waited for by the
        broadcast, and what it does after `Broadcast.order` or `wait` comes after it. Raises CollectiveError.
        """

    def broadcast(self, bucket: Any, timeout_s: float = 60.0) -> None:
        """Broadcast `bucket` and wait until its bytes are here, or sent. Raises CollectiveError."""
        self.begin(bucket).wait(timeout_s)

    @abstractmethod
    def finish(self, timeout_s: float) -> None:
        """At rank 0: until the others need it no more for the broadcasts that it has waited for. Raises CollectiveError."""

    @abstractmethod
    def abort(self) -> None:
        """Leave the group, whatever its other ranks do. Broadcasts that wait end with an error. Idempotent, any thread."""
