"""The queue of a group: requests in order of their constant key, a lane for each signature.

Only requests of one signature share a batch: hidden states wanted or not, and the classes of workers that can serve it. The
number of lanes is the number of signatures in use, so the head of the queue, or of what a class can serve, is the smallest of a
few lane heads. Within a lane, requests of one priority come in the order of their keys: each priority is a plain FIFO, and only
the first of each stands in the lane's heap, which therefore stays as small as the number of priorities in use however long the
queue is. Entries of requests that no longer wait are left in place, dropped when they reach the top, and swept out together
once they are half of the queue: cancelling costs O(1) and memory stays in proportion to what waits.
"""

from collections import deque
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, Generic, Protocol, TypeVar

from enginepool.coordinator.events import Work
from enginepool.coordinator.phases import DONE, QUEUED  # TEXT waits too: in the queue of suspects

#: every class of workers
ANY = -1


class Waits(Protocol):
    """What a queue reads of a request, and `lane`, which it alone sets."""

    work: Work
    classes: int
    priority: int
    key: float
    seq: int
    min_version: int
    state: int
    lane: "Queue[Any] | Early[Any] | None"


R = TypeVar("R", bound=Waits)


class Fifo(deque[R]):
    """Requests of one priority behind the one that stands in the heap, in the order of their arrival numbers."""

    __slots__ = ("last", "open")

    def __init__(self) -> None:
        super().__init__()
        #: its first request stands in the heap
        self.open = False
        #: arrival number of its newest request, in the heap or here
        self.last = 0


#: (key, seq, request, the fifo whose first it is; None when it came back and stands alone)
Entry = tuple[float, int, R, Fifo[R] | None]


class Lane(list[Entry[R]]):
    """A heap of the first entries; `lane[0]` is the first of all."""

    __slots__ = ("fifos",)

    def __init__(self) -> None:
        super().__init__()
        #: by priority
        self.fifos: dict[int, Fifo[R]] = {}

    def requests(self) -> list[R]:
        """All of them, waiting or stale, in no order."""
        return [entry[2] for entry in self] + [request for fifo in self.fifos.values() for request in fifo]


class Queue(Generic[R]):
    """Requests that wait, smallest (key, seq) first. `request.lane` names the queue where its entry counts."""

    __slots__ = ("_lanes", "_stale", "size")

    def __init__(self) -> None:
        #: by signature: the classes' bits, shifted, and whether hidden states are wanted
        self._lanes: dict[int, Lane[R]] = {}
        #: entries in all lanes, waiting or stale
        self.size = 0
        #: roughly as many of them are stale
        self._stale = 0

    def push(self, request: R) -> None:
        """Add `request`, unless its entry stands here already: the key is constant, so that entry is right."""
        if request.lane is self:
            return
        if request.lane is not None:
            request.lane.forget()
        request.lane = self
        self.size += 1
        signature = request.classes << 1 | request.work.hidden
        lane = self._lanes.get(signature)
        if lane is None:
            lane = self._lanes[signature] = Lane()
        fifo = lane.fifos.get(request.priority)
        if fifo is None:
            fifo = lane.fifos[request.priority] = Fifo()
        if not fifo.open:
            fifo.open = True
            fifo.last = request.seq
            heappush(lane, (request.key, request.seq, request, fifo))
        elif request.seq > fifo.last:
            fifo.last = request.seq
            fifo.append(request)
        else:
            # It came back: its place is before some that arrived after it.
            heappush(lane, (request.key, request.seq, request, None))

    def head(self, classes: int = ANY) -> list[Entry[R]] | None:
        """The lane whose head is first of what `classes` can serve; None when nothing waits. The head is one that waits."""
        best: list[Entry[R]] | None = None
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

    def pop(self, lane: list[Entry[R]]) -> None:
        """Drop the head of `lane`."""
        _, _, request, fifo = lane[0]
        if fifo:
            follower = fifo.popleft()
            heapreplace(lane, (follower.key, follower.seq, follower, fifo))
        else:
            heappop(lane)
            if fifo is not None:
                fifo.open = False
        if request.lane is self:
            request.lane = None
        self.size -= 1

    def forget(self) -> None:
        """A request that stood here no longer waits. Sweeps when half of the entries may be stale."""
        self._stale += 1
        if self._stale > 64 and self._stale * 2 > self.size:
            self.sort()

    def sort(self) -> None:
        """Build the lanes anew from what waits: most entries are stale, or the classes of requests have changed."""
        requests = [request for lane in self._lanes.values() for request in lane.requests()]
        self._lanes.clear()
        self.size = self._stale = 0
        requests.sort(key=lambda request: request.seq)
        for request in requests:
            if request.lane is self:
                request.lane = None
                if request.state <= QUEUED:
                    self.push(request)

    def waiting(self) -> list[R]:
        """The requests that wait, in no order."""
        return [
            request
            for lane in self._lanes.values()
            for request in lane.requests()
            if request.state <= QUEUED and request.lane is self
        ]  # fmt: skip

    def check(self) -> None:
        assert self.size == sum(len(lane.requests()) for lane in self._lanes.values()), self.size
        for signature, lane in self._lanes.items():
            for i, entry in enumerate(lane):
                assert i == 0 or lane[(i - 1) // 2][:2] <= entry[:2], (i, entry)
                assert entry[:2] == (entry[2].key, entry[2].seq), entry
            for request in lane.requests():
                if request.lane is self and request.state <= QUEUED:
                    assert signature == request.classes << 1 | request.work.hidden, (signature, request)
            for priority, fifo in lane.fifos.items():
                assert fifo.open == any(entry[3] is fifo for entry in lane), priority
                assert fifo.open or not fifo, priority
                first = [entry[:2] for entry in lane if entry[3] is fifo]
                order = first + [(request.key, request.seq) for request in fifo]
                assert order == sorted(order), (priority, order)
                assert not fifo or fifo.last == fifo[-1].seq, (priority, fifo.last)
        seen = [request.seq for request in self.waiting()]
        assert len(seen) == len(set(seen)), "a request stands twice in a queue"


class Early(Generic[R]):
    """Requests that wait for a later weight version, the smallest version first: a commit looks at those that it releases.

    Used like a `Queue`, and left in two ways only: by `due`, and by a final answer, after which the entry is stale.
    """

    __slots__ = ("_heap", "_stale")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, R]] = []
        #: entries of requests that have their answer
        self._stale = 0

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._heap) - self._stale

    def push(self, request: R) -> None:
        """Add `request`, unless it waits here already."""
        if request.lane is self:
            return
        if request.lane is not None:
            request.lane.forget()
        request.lane = self
        heappush(self._heap, (request.min_version, request.seq, request))

    def forget(self) -> None:
        """A request that waited here has its answer. Sweeps when half of the entries are stale."""
        self._stale += 1
        if self._stale > 64 and self._stale * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].state != DONE]
            heapify(self._heap)
            self._stale = 0

    def due(self, version: int) -> list[R]:
        """Take out the requests that wait for `version` or an earlier one, in the order of their arrival."""
        heap, out = self._heap, list[R]()
        while heap and heap[0][0] <= version:
            request = heappop(heap)[2]
            if request.state == DONE:
                self._stale -= 1
            else:
                request.lane = None
                out.append(request)
        out.sort(key=lambda request: request.seq)
        return out

    def waiting(self) -> list[R]:
        """The requests that wait, in no order."""
        return [request for _, _, request in self._heap if request.state != DONE]

    def check(self) -> None:
        waiting = self.waiting()
        assert len(self) == len(waiting), (len(self), len(waiting))
        assert all(request.lane is self and request.state == QUEUED for request in waiting), waiting
        assert len({request.seq for request in waiting}) == len(waiting), "a request waits twice for its version"
