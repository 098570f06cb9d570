"""A group of ranks in which rank 0 broadcasts buckets, by torch or by copies: the interface of both."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

#: Broadcasts that may be under way at once: the queues of a GPU are bounded.
QUEUED = 32


class CollectiveError(Exception):
    """A peer is lost, late, or never joined. The group cannot be used any more. The message is one line."""


class Broadcast(NamedTuple):
    """One bucket that is being broadcast. Both functions take seconds and raise CollectiveError: a peer is lost, the time is
    over, or the group was aborted.

    order: makes later work on the current stream of the GPU wait for this broadcast. Between CPUs it is `wait`.
    wait: waits until the bytes have arrived, or are sent. Only `wait` tells whether the broadcast succeeded.
    """

    order: Callable[[float], None]
    wait: Callable[[float], None]


class ProcessGroup(ABC):
    """A group in which rank 0 broadcasts.

    Attributes:
        name: of the group; a later group has another name.
        world, rank: the number of ranks, and which of them this is.
        on_device: a GPU does the work: the CPU does not wait between `order` and `wait`.
    """

    def __init__(self, name: str, world: int, rank: int, device: Any, *, on_device: bool) -> None:
        self.name = name
        self.world = world
        self.rank = rank
        self.device = device
        self.on_device = on_device

    @abstractmethod
    def begin(self, bucket: Any) -> Broadcast:
        """Begin to broadcast `bucket`, a contiguous uint8 tensor on the group's device. Rank 0 sends it, the others receive.

        All ranks begin the same sizes in the same order. On a GPU the broadcast waits for the earlier work of the current
        stream. Later work waits for the broadcast after `Broadcast.order` or `wait`. Raises CollectiveError.
        """

    def broadcast(self, bucket: Any, timeout_s: float = 60.0) -> None:
        """Broadcast `bucket` and wait until its bytes have arrived, or are sent. Raises CollectiveError."""
        self.begin(bucket).wait(timeout_s)

    @abstractmethod
    def finish(self, timeout_s: float) -> None:
        """On rank 0, after its broadcasts: wait until no other rank needs this one for them. Raises CollectiveError."""

    @abstractmethod
    def abort(self) -> None:
        """Leave the group, without waiting for other ranks. Waiting broadcasts end with an error. Idempotent, any thread."""


def one_line(error: BaseException) -> str:
    """The first line of an error's message."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
