"""Routing: which open worker of a group has the least outstanding work.

A heap of (outstanding tokens, turn, worker), updated on every send and reply. It is the coordinator's own count: a load that is
polled from workers would be stale. A changed worker gets a new entry. Its older entries carry an old stamp, and are dropped
when they reach the top. Among workers with equal load the one that changed longest ago comes first, so that they take turns.
"""

from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeVar


class Works(Protocol):
    """The attributes of a worker that routing reads, and `stamp`, which only routing sets."""

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
        """Call this after a change of the outstanding work of `worker`, or of whether it is open."""
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
