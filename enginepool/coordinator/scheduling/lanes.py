"""Lanes of a queue: whose turn it is among the requests of one signature.

A lane has a line for each priority, and a line has a flow for each client: its requests, oldest first. `queue` says how the
next one is found, and what the steps cost.
"""

from collections import deque
from heapq import heapify, heappop, heappush, heapreplace
from itertools import islice
from math import inf
from operator import attrgetter
from typing import Protocol, TypeVar

from enginepool.coordinator.operations.base import Work

#: stands for the priority of all requests of clients without a link; below every other one
AWAY = -(1 << 20)
#: so many clients of one priority are remembered; above it, those that used no more than the others are forgotten
REMEMBERED = 64

arrival = attrgetter("seq")


class QueueClient(Protocol):
    """What a queue reads of a client."""

    @property
    def away(self) -> bool: ...


class Holder(Protocol):
    """A queue in which a request waits."""

    def forget(self) -> None:
        """A request that stood here no longer waits."""
        ...


class Waits(Protocol):
    """What a queue reads of a request, and `lane`, which it alone sets."""

    work: Work
    packs: bool
    priority: int
    key: float
    seq: int
    min_version: int
    state: int
    lane: "Holder | None"

    @property
    def client(self) -> QueueClient: ...


R = TypeVar("R", bound=Waits)

#: (start, arrival number, the waiting requests of one client): whose turn it is in a line
Turn = tuple[float, int, deque[R]]


class QueueLevel:
    """What clients have used of one priority, over all lanes."""

    __slots__ = ("charged", "most", "starts", "virtual")

    def __init__(self) -> None:
        #: what was charged later, by which its virtual time is to move
        self.charged = 0.0
        #: the latest virtual time of its lines
        self.virtual = 0.0
        #: by client that was served: where its next service begins, unless virtual time is further; others begin there
        self.starts: dict[QueueClient, float] = {}
        #: when to forget those who are not further than the virtual time
        self.most = REMEMBERED

    def enter(self, client: QueueClient, virtual: float) -> float:
        """The start of a client that had nothing waiting in a line of this virtual time."""
        starts = self.starts
        start = starts.get(client, virtual)
        if start < virtual:
            start = virtual
        if len(starts) > self.most:
            self.starts = {client: start for client, start in starts.items() if start > self.virtual}
            self.most = 2 * len(self.starts) + REMEMBERED
        return start


class Line(list[Turn[R]]):
    """The requests of one priority in a lane: a heap of the clients' turns.

    A turn whose requests were moved away has an empty flow. The first turn is never one of these.
    """

    __slots__ = ("flows", "gone", "keys", "late", "level", "listed", "priority", "virtual")

    def __init__(self, priority: int, level: QueueLevel) -> None:
        super().__init__()
        self.priority = priority
        self.level = level
        self.virtual = 0.0
        #: by client: its requests in the order of their arrival; none is empty
        self.flows: dict[QueueClient, deque[R]] = {}
        #: keys in the order in which they came, which is ascending, and a heap of keys that came out of order
        self.keys: deque[float] = deque()
        self.late: list[float] = []
        #: A heap of keys of requests that left without being served; each stands for the key that is least above it and is no
        #: more. There are as many other keys as requests. All of them are above the first key.
        self.gone: list[float] = []
        #: the key under which its lane lists it, at most its first one; None: it is not listed
        self.listed: float | None = None

    def key_of(self, request: R) -> float:
        return inf if self.priority == AWAY else request.key

    def first(self) -> float:
        """The smallest key. There is one."""
        keys, late = self.keys, self.late
        return late[0] if late and (not keys or late[0] < keys[0]) else keys[0]

    def add_key(self, key: float) -> None:
        """A request has come."""
        if not self.keys or key >= self.keys[-1]:
            self.keys.append(key)
        else:
            heappush(self.late, key)

    def take_key(self) -> None:
        """The smallest key leaves."""
        self._pop()
        gone = self.gone
        while gone and (self.keys or self.late) and gone[0] <= self.first():
            heappop(gone)
            self._pop()

    def _pop(self) -> None:
        keys, late = self.keys, self.late
        if late and (not keys or late[0] < keys[0]):
            heappop(late)
        else:
            keys.popleft()

    def forget(self, request: R) -> None:
        """`request` leaves without being served: the key goes that is least above its own."""
        key = self.key_of(request)
        if key <= self.first():
            self.take_key()
            return
        gone = self.gone
        heappush(gone, key)
        if len(gone) > 64 and 2 * len(gone) > len(self.keys) + len(self.late):
            self._sweep_keys()

    def _sweep_keys(self) -> None:
        """Take out the keys that have ended."""
        gone = deque(sorted(self.gone))
        keys: deque[float] = deque()
        for key in sorted([*self.keys, *self.late]):
            if gone and gone[0] <= key:
                gone.popleft()
            else:
                keys.append(key)
        for _ in gone:
            keys.pop()
        self.keys, self.late, self.gone = keys, [], []

    def settle(self) -> None:
        """Drop first turns without requests; without any request, drop everything that was left behind."""
        if not self.flows:
            self.clear()
            self.keys.clear()
            self.late.clear()
            self.gone.clear()
            return
        while not self[0][2]:
            heappop(self)

    def take_out(self, client: QueueClient) -> deque[R] | None:
        """The requests of `client` leave, to be moved elsewhere."""
        flow = self.flows.pop(client, None)
        if flow is None:
            return None
        taken = flow.copy()
        flow.clear()
        for request in taken:
            self.forget(request)
        if len(self) > 2 * len(self.flows) + 64:
            self[:] = [turn for turn in self if turn[2]]
            heapify(self)
        self.settle()
        return taken


class Lane(list[tuple[float, int, Line[R]]]):
    """A heap of lines by (smallest key, -priority).

    A line from which requests were moved away may be listed under a smaller key than it has, or have no requests left. The
    first line of the heap is never one of these.
    """

    __slots__ = ("head", "lines", "moved", "size")

    def __init__(self) -> None:
        super().__init__()
        #: the request whose turn it is, waiting or stale; None: the lane is empty
        self.head: R | None = None
        #: by priority; some are empty
        self.lines: dict[int, Line[R]] = {}
        #: requests were moved away since it was empty
        self.moved = False
        #: requests, waiting or stale
        self.size = 0

    def before(self, other: "Lane[R]") -> bool:
        """Whether its head is before that of `other`, a lane of the same queue."""
        if self[0][1] == other[0][1]:
            return self[0][2][0] < other[0][2][0]
        return self[0] < other[0]

    def before_suspect(self, other: "Lane[R]") -> bool:
        """Whether its head is before that of `other`, a lane of suspects. Those were first in their priority once already."""
        return self[0][1] != other[0][1] and self[0] < other[0]

    def defer(self) -> bool:
        """Whether the client whose turn it is was served in another lane since: then this turn begins later, too."""
        line = self[0][2]
        start, seq, flow = line[0]
        later = line.level.starts.get(flow[0].client, start)
        if later <= start:
            return False
        heapreplace(line, (later, seq, flow))
        line.settle()
        self.head = line[0][2][0]
        return True

    def order(self) -> None:
        """Build the heap again: keys have become smaller."""
        self.clear()
        for line in self.lines.values():
            line.listed = None
            if line.flows:
                line.listed = key = line.first()
                self.append((key, -line.priority, line))
        heapify(self)
        self.head = self[0][2][0][2][0] if self else None

    def settle(self) -> None:
        """Requests have left: put the first line in its place until it is one that is listed under its own key."""
        while self:
            key, priority, line = self[0]
            if not line.flows:
                heappop(self)
                line.listed = None
            elif (first := line.first()) != key:
                heapreplace(self, (first, priority, line))
                line.listed = first
            else:
                self.head = line[0][2][0]
                return
        self.head = None
        self.moved = False

    def some(self, most: int) -> list[R]:
        """Up to so many of them, waiting or stale, about in the order in which they are served."""
        return list(islice((request for _, _, line in self for _, _, flow in line for request in flow), most))

    def requests(self) -> list[R]:
        """All of them, waiting or stale, in no order."""
        return [request for line in self.lines.values() for flow in line.flows.values() for request in flow]
