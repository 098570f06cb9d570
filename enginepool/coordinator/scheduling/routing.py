"""Routing: which open worker of a group has the least outstanding work.

A heap of (outstanding tokens, turn, worker), changed on every send and reply: the coordinator's own ledger, never polled load,
which is stale when it matters. A changed worker gets a new entry; its older ones carry an old stamp and are dropped at the top.
Among equals the one that was changed longest ago is first, so that equal load goes round.
"""

from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeVar


class Works(Protocol):
    """What routing reads of a worker, and `stamp`, which it alone sets."""

    cost: int
    stamp: int

    @property
    def open(self) -> bool: ...


W = TypeVar("W", bound=Works)


class Routing(Generic[W]):
    """Open workers by outstanding tokens."""

    __slots__ = ("_heap", "_turn", "open")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, W]] = []
        self._turn = 0
        #: workers with a valid entry
        self.open = 0

    def update(self, worker: W) -> None:
        """Call after anything changed that routing depends on: outstanding work, or whether it is open."""
        if worker.open:
            self.moved(worker)
        elif worker.stamp:
            worker.stamp = 0
            self.open -= 1

    def moved(self, worker: W) -> None:
        """The outstanding work of an open worker changed."""
        if not worker.stamp:
            self.open += 1
        worker.stamp = self._turn = turn = self._turn + 1
        heappush(self._heap, (worker.cost, turn, worker))
        if not turn % 64 and len(self._heap) > 4 * self.open:
            self._heap = [entry for entry in self._heap if entry[2].stamp == entry[1]]
            heapify(self._heap)

    def least(self) -> W | None:
        """The open worker with the least outstanding tokens."""
        heap = self._heap
        while heap:
            _, turn, worker = heap[0]
            if worker.stamp == turn:
                return worker
            heappop(heap)
        return None
