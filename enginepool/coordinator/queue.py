"""The queue of a group: requests in order of their constant key, a lane for each signature.

Only requests of one signature share a batch: hidden states wanted or not, and the classes of workers that can serve it. The
number of lanes is the number of signatures in use, so the head of the queue, or of what a class can serve, is the smallest of a
few lane heads. Entries of requests that no longer wait are left in place, dropped when they reach the top, and swept out
together once they are half of the queue: cancelling costs O(1) and memory stays in proportion to what waits.
"""

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from enginepool.coordinator.phases import QUEUED  # TEXT waits too: in the queue of suspects

if TYPE_CHECKING:
    from enginepool.coordinator.state import Request

#: every class of workers
ANY = -1

Entry = tuple[float, int, "Request"]


class Queue:
    """Requests that wait, smallest (key, seq) first. `request.lane` names the queue where its entry counts."""

    __slots__ = ("_lanes", "_stale", "size")

    def __init__(self) -> None:
        #: by signature: the classes' bits, shifted, and whether hidden states are wanted
        self._lanes: dict[int, list[Entry]] = {}
        #: entries in all lanes, waiting or stale
        self.size = 0
        #: roughly as many of them are stale
        self._stale = 0

    def push(self, request: "Request") -> None:
        """Add `request`, unless its entry stands here already: the key is constant, so that entry is right."""
        if request.lane is self:
            return
        request.lane = self
        signature = request.classes << 1 | request.work.hidden
        lane = self._lanes.get(signature)
        if lane is None:
            lane = self._lanes[signature] = []
        heappush(lane, (request.key, request.seq, request))
        self.size += 1

    def head(self, classes: int = ANY) -> list[Entry] | None:
        """The lane whose head is first of what `classes` can serve; None when nothing waits. The head is one that waits."""
        best: list[Entry] | None = None
        bits = classes << 1
        for signature, lane in self._lanes.items():
            while lane and signature & bits:
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

    def sort(self) -> None:
        """The classes of requests that wait have changed: put each into the lane where it belongs now."""
        entries = [entry for lane in self._lanes.values() for entry in lane]
        self._lanes.clear()
        self.size = self._stale = 0
        for _, _, request in entries:
            if request.lane is self:
                request.lane = None
                if request.state <= QUEUED:
                    self.push(request)

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
        for signature, lane in self._lanes.items():
            for i, entry in enumerate(lane):
                request = entry[2]
                assert i == 0 or lane[(i - 1) // 2] <= entry, (i, entry)
                if request.lane is self and request.state <= QUEUED:
                    assert signature == request.classes << 1 | request.work.hidden, (signature, request)
        seen = [request.seq for request in self.waiting()]
        assert len(seen) == len(set(seen)), "a request stands twice in a queue"
