"""The queue of a group: requests in order of their constant key, a lane for each signature.

Only requests of one signature can share a batch. The number of lanes is the number of signatures in use, so the
head of the queue is the smallest of a few lane heads. Entries of requests that no longer wait are left in place, dropped when
they reach the top, and swept out together once they are half of the queue: cancelling costs O(1) and memory stays in
proportion to what waits.
"""

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from enginepool.coordinator.phases import QUEUED  # TEXT waits too: in the queue of suspects

if TYPE_CHECKING:
    from enginepool.coordinator.state import Request

Entry = tuple[float, int, "Request"]


class Queue:
    """Requests that wait, smallest (key, seq) first. `request.lane` names the queue where its entry counts."""

    __slots__ = ("_lanes", "_stale", "size")

    def __init__(self) -> None:
        self._lanes: dict[Hashable, list[Entry]] = {}
        #: entries in all lanes, waiting or stale
        self.size = 0
        #: roughly as many of them are stale
        self._stale = 0

    def push(self, request: "Request") -> None:
        """Add `request`, unless its entry stands here already: the key is constant, so that entry is right."""
        if request.lane is self:
            return
        request.lane = self
        signature = request.work.hidden
        lane = self._lanes.get(signature)
        if lane is None:
            lane = self._lanes[signature] = []
        heappush(lane, (request.key, request.seq, request))
        self.size += 1

    def head(self) -> list[Entry] | None:
        """The lane whose head is first in the whole queue; None when nothing waits. The head is a request that waits."""
        best: list[Entry] | None = None
        for lane in self._lanes.values():
            while lane:
                request = lane[0][2]
                if request.state <= QUEUED and request.lane is self:
                    if best is None or lane[0] < best[0]:
                        best = lane
                    break
                self.pop(lane)
                if self._stale:
                    self._stale -= 1
        return best

    def pop(self, lane: list[Entry]) -> None:
        """Drop the head of `lane`."""
        request = heappop(lane)[2]
        if request.lane is self:
            request.lane = None
        self.size -= 1

    def forget(self) -> None:
        """A request that stood here no longer waits. Sweeps when half of the entries may be stale."""
        self._stale += 1
        if self._stale > 64 and self._stale * 2 > self.size:
            self._sweep()

    def _sweep(self) -> None:
        self.size = 0
        for lane in self._lanes.values():
            kept: list[Entry] = []
            for entry in lane:
                request = entry[2]
                if request.lane is self:
                    if request.state <= QUEUED:
                        kept.append(entry)
                    else:
                        request.lane = None
            heapify(kept)
            lane[:] = kept
            self.size += len(kept)
        self._stale = 0

    def waiting(self) -> "list[Request]":
        """The requests that wait, in no order."""
        return [
            entry[2]
            for lane in self._lanes.values()
            for entry in lane
            if entry[2].state <= QUEUED and entry[2].lane is self
        ]  # fmt: skip

    def check(self) -> None:
        assert self.size == sum(len(lane) for lane in self._lanes.values()), self.size
        for lane in self._lanes.values():
            for i, entry in enumerate(lane):
                assert i == 0 or lane[(i - 1) // 2] <= entry, (i, entry)
        seen = [request.seq for request in self.waiting()]
        assert len(seen) == len(set(seen)), "a request stands twice in a queue"
