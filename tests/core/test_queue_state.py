"""The queue and the heap of requests that wait for a version, against lists that are searched in full each time.

The model of fairness is told which of the waiting clients began where, and computes for itself who is next.
"""

from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from enginepool.coordinator.core.request_state import DONE, QUEUED, RUNNING
from enginepool.coordinator.scheduling.queue import Queue
from enginepool.coordinator.scheduling.version_queue import VersionQueue
from tests.core.invariants import check_queue, check_version_queue


@dataclass
class Content:
    signature: int


@dataclass(eq=False)
class Asks:
    """What a queue reads of a client."""

    number: int
    away: bool = False


@dataclass(eq=False)
class Waiting:
    """What a queue reads of a request."""

    client: Asks
    work: Any
    packs: bool
    priority: int
    seq: int
    min_version: int
    state: int = QUEUED
    lane: Any = None
    ageing: float = 0.0
    key: float = field(init=False)

    def __post_init__(self) -> None:
        self.key = self.ageing * self.seq - self.priority


class AnyOrder(RuleBasedStateMachine):
    #: levels of priority that an older request gains for each later one
    ageing = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.queue: Queue[Waiting] = Queue()
        self.early: VersionQueue[Waiting] = VersionQueue()
        self.version = 0
        self.requests: list[Waiting] = []
        self.clients = [Asks(number) for number in range(4)]
        #: taken by a worker; they may come back
        self.taken: list[Waiting] = []

    def place(self, request: Waiting) -> Queue[Waiting] | VersionQueue[Waiting]:
        return self.early if request.min_version > self.version else self.queue

    def live(self) -> list[Waiting]:
        return [request for request in self.requests if request.state == QUEUED]

    @rule(
        number=st.integers(1, 40),
        client=st.integers(0, 3),
        priority=st.integers(-1, 1),
        packs=st.booleans(),
        variant=st.integers(0, 1),
        later=st.integers(0, 3),
    )
    def submit(self, number: int, client: int, priority: int, packs: bool, variant: int, later: int) -> None:
        for _ in range(number):
            who, version = self.clients[client], self.version + later
            request = Waiting(who, Content(variant << 1), packs, priority, len(self.requests), version, ageing=self.ageing)
            self.requests.append(request)
            self.place(request).push(request)

    @precondition(lambda self: self.live())
    @rule(data=st.data(), number=st.integers(1, 40))
    def answer(self, data: st.DataObject, number: int) -> None:
        for _ in range(number):
            if live := self.live():
                request = live[data.draw(st.integers(0, len(live) - 1))]
                request.state = DONE
                request.lane.forget()

    @rule(number=st.integers(1, 10), weight=st.integers(1, 100), whole=st.booleans())
    def take(self, number: int, weight: int, whole: bool) -> None:
        for _ in range(number):
            lane = self.queue.head()
            mine = [r for r in self.live() if r.lane is self.queue]
            assert (lane is None) == (not mine)
            if lane is None:
                return
            request = lane.head
            assert request is not None
            rank = min((r.client.away, r.key) for r in mine)
            if not self.ageing:  # with it, a served request takes the key of an older one
                assert rank == (request.client.away, request.key) or rank[0], "the highest priority, of those who are here"
            same = [r for r in mine if (r.packs, r.work.signature) == (request.packs, request.work.signature)]
            older = [r for r in same if r.client is request.client and r.priority == request.priority and r.seq < request.seq]
            assert not older or request.client.away, "the oldest of its client"
            if not whole:
                self.queue.charge(lane, weight)
                continue
            self.queue.pop(lane, weight)
            request.state = RUNNING
            self.taken.append(request)

    @rule(client=st.integers(0, 3))
    def cut_or_hello(self, client: int) -> None:
        asks = self.clients[client]
        asks.away = not asks.away
        self.queue.move(asks)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def put_back(self, data: st.DataObject) -> None:
        request = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
        request.state = QUEUED
        self.place(request).push(request)

    @rule(by=st.integers(1, 2))
    def commit(self, by: int) -> None:
        self.version += by
        want = [r for r in self.requests if r.lane is self.early and r.state == QUEUED and r.min_version <= self.version]
        assert self.early.due(self.version) == want
        for request in want:
            self.queue.push(request)

    @rule(version=st.integers(0, 3))
    def begin_again(self, version: int) -> None:
        self.version = min(self.version, version)
        moved = [r for r in self.live() if r.lane is self.queue and r.min_version > self.version]
        for request in moved:
            self.early.push(request)
        if moved:
            self.queue.sort()

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def change_what_packs(self, data: st.DataObject) -> None:
        live = self.live()
        live[data.draw(st.integers(0, len(live) - 1))].packs = data.draw(st.booleans())
        self.queue.sort()

    @invariant()
    def nobody_is_missing(self) -> None:
        check_queue(self.queue)
        check_version_queue(self.early)
        live = self.live()
        assert all(request.lane is self.place(request) for request in live)
        assert sorted(r.seq for r in self.queue.waiting()) == [r.seq for r in live if r.lane is self.queue]
        assert sorted(r.seq for r in self.early.waiting()) == [r.seq for r in live if r.lane is self.early]
        assert len(self.early) == sum(request.lane is self.early for request in live)
        assert self.queue.size <= 2 * len(self.queue.waiting()) + 130, "stale entries are swept"


class AnyOrderAgeing(AnyOrder):
    """Keys within a priority differ, so that those that leave, come back and are moved are told apart."""

    ageing = 0.05


TestAnyOrder = AnyOrder.TestCase
TestAnyOrderAgeing = AnyOrderAgeing.TestCase
