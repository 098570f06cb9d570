"""The queue and the heap of those who wait for a version, against lists that are searched anew each time."""

from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from enginepool.coordinator.phases import DONE, QUEUED, RUNNING
from enginepool.coordinator.queue import Early, Queue


@dataclass
class Content:
    hidden: bool


@dataclass(eq=False)
class Waiting:
    """What a queue reads of a request."""

    work: Any
    classes: int
    priority: int
    seq: int
    min_version: int
    state: int = QUEUED
    lane: Any = None
    key: float = field(init=False)

    def __post_init__(self) -> None:
        self.key = float(-self.priority)


class AnyOrder(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.queue: Queue[Waiting] = Queue()
        self.early: Early[Waiting] = Early()
        self.version = 0
        self.requests: list[Waiting] = []
        #: taken by a worker; they may come back
        self.taken: list[Waiting] = []

    def place(self, request: Waiting) -> Queue[Waiting] | Early[Waiting]:
        return self.early if request.min_version > self.version else self.queue

    def live(self) -> list[Waiting]:
        return [request for request in self.requests if request.state == QUEUED]

    @rule(
        number=st.integers(1, 40),
        priority=st.integers(-1, 1),
        classes=st.integers(1, 3),
        hidden=st.booleans(),
        later=st.integers(0, 3),
    )
    def submit(self, number: int, priority: int, classes: int, hidden: bool, later: int) -> None:
        for _ in range(number):
            request = Waiting(Content(hidden), classes, priority, len(self.requests), self.version + later)
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

    @rule(classes=st.sampled_from([-1, 1, 2]), number=st.integers(1, 10))
    def take(self, classes: int, number: int) -> None:
        for _ in range(number):
            lane = self.queue.head(classes)
            mine = [r for r in self.live() if r.lane is self.queue and r.classes & classes]
            assert (lane is None) == (not mine)
            if lane is None:
                return
            request = lane[0][2]
            assert request is min(mine, key=lambda r: (r.key, r.seq))
            self.queue.pop(lane)
            request.state = RUNNING
            self.taken.append(request)

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
    def change_classes(self, data: st.DataObject) -> None:
        live = self.live()
        live[data.draw(st.integers(0, len(live) - 1))].classes = data.draw(st.integers(1, 3))
        self.queue.sort()

    @invariant()
    def nobody_is_missing(self) -> None:
        self.queue.check()
        self.early.check()
        live = self.live()
        assert all(request.lane is self.place(request) for request in live)
        assert sorted(r.seq for r in self.queue.waiting()) == [r.seq for r in live if r.lane is self.queue]
        assert sorted(r.seq for r in self.early.waiting()) == [r.seq for r in live if r.lane is self.early]
        assert len(self.early) == sum(request.lane is self.early for request in live)
        assert self.queue.size <= 2 * len(self.queue.waiting()) + 130, "stale entries are swept"


TestAnyOrder = AnyOrder.TestCase
