"""A pool of one worker in simulated time. Its engine has a host, which prepares and reads out, and a GPU, which computes."""

import heapq
from collections.abc import Callable
from functools import partial
from random import Random
from typing import NamedTuple

import msgspec
import numpy as np

from enginepool.coordinator.core import events as ev
from enginepool.protocol.basis import TaskId
from enginepool.protocol.capabilities import FORWARD_S
from enginepool.protocol.messages import Batch, Capabilities, FrameSpec, Result
from tests.core.invariants import check_machine
from tests.core.machines import CAN, Pool, Sent
from tests.core.test_packed_batches import shared

#: a request of bench/score_gpu.py's `pr`
QUERY, ITEMS, ITEM = 120, 10, 180
#: priority of the urgent ones
HIGH = 100
#: between coordinator and engine, one way
WIRE_S = 0.001
#: Hundreds of requests wait: the whole machine is checked on every so many events, as in tests/sim
SPARSE = 8
#: as in workers/sglang/patches/scheduler.py
NEARLY_DONE_S = 0.001


class Costs(NamedTuple):
    """What an engine needs: its host for each batch and row, `before` of that before the GPU has the batch and the rest after;
    the GPU for each forward and token."""

    batch_s: float
    row_s: float
    token_s: float
    forward_s: float = 0.0
    before: float = 0.6
    packed: bool = False

    @property
    def can(self) -> Capabilities:
        """What a worker with such an engine says that it can do."""
        return msgspec.structs.replace(
            CAN, context=32_000, batch_tokens=32_000, batch_rows=800, inflight_tokens=64_000, inflight_rows=1600,
            max_item=8_000 if self.packed else 0, pace=int(FORWARD_S / self.token_s),
        )  # fmt: skip

    def host_s(self, requests: int) -> float:
        return self.batch_s + requests * ITEMS * self.row_s

    def gpu_s(self, requests: int) -> float:
        tokens = QUERY + ITEMS * ITEM if self.packed else ITEMS * (QUERY + ITEM)
        return self.forward_s + requests * tokens * self.token_s


class Seen(NamedTuple):
    """Of one priority: seconds from question to answer, sorted, and how many came within the time that was asked for."""

    latencies: list[float]
    in_time: int

    def at(self, share: float) -> float:
        """A quantile, in seconds."""
        return self.latencies[int(share * (len(self.latencies) - 1))]


class Simulation:
    """One run: a pool, an engine, a load. `in_flight` requests at all times, or `rate` a second at random moments."""

    def __init__(
        self, costs: Costs, seconds: float, *, rate: float = 0.0, in_flight: int = 1, high_share: float = 0.0, seed: int = 0
    ) -> None:
        self._costs = costs
        self._rate, self._high_share = rate, high_share
        self._chance = Random(seed)
        self._pool = Pool()
        self._client = self._pool.client()
        self._pool.worker(can=costs.can)
        self._pool.check_every = SPARSE
        self._end = self._pool.now + seconds
        #: what happens when; the ordinal decides between what happens at one moment
        self._agenda: list[tuple[float, int, Callable[[float], None]]] = []
        self._ordinal = 0
        self._questions = 0
        #: of each question that waits: when it came, and its priority
        self._asked: dict[int, tuple[float, int]] = {}
        self._seen: dict[int, list[tuple[float, float]]] = {}
        #: batches in the engine: those that wait; those that were launched, with when the GPU is done with each
        self._waiting: list[Sent] = []
        self._launched: list[tuple[float, Sent]] = []
        self._host_busy = False
        self._gpu_free = 0.0
        self._arrived: dict[TaskId, float] = {}
        for _ in range(in_flight):
            self._later(self._pool.now, self._ask)

    def run(self) -> dict[int, Seen]:
        """All of it, until everything is answered; by priority."""
        while self._agenda:
            due = self._pool.machine.core.dispatch_at
            if due < self._agenda[0][0]:
                now = self._pool.now = max(self._pool.now, due)
                self._pool.do(ev.Tick(now))
            else:
                now, _, step = heapq.heappop(self._agenda)
                self._pool.now = now
                step(now)
            while self._pool.batches:
                self._later(now + WIRE_S, partial(self._arrive, self._pool.batches.pop(0)))
            self._pool.sent.clear()
        check_machine(self._pool.machine)
        return {
            priority: Seen(sorted(took for _, took in seen), sum(at <= self._end for at, _ in seen))
            for priority, seen in self._seen.items()
        }

    def _later(self, at: float, step: Callable[[float], None]) -> None:
        self._ordinal += 1
        heapq.heappush(self._agenda, (at, self._ordinal, step))

    def _ask(self, now: float) -> None:
        if now > self._end:
            return
        self._questions += 1
        content = shared(QUERY, *[ITEM] * ITEMS, first=self._questions % 997)
        priority = HIGH if self._chance.random() < self._high_share else 0
        self._asked[self._questions] = (now, priority)
        self._pool.submit(self._client, self._questions, content, priority=priority)
        if self._rate:
            self._later(now + self._chance.expovariate(self._rate), self._ask)

    def _arrive(self, batch: Sent, now: float) -> None:
        self._arrived[number(batch)] = now
        self._waiting.append(batch)
        self._turn(now)

    def _turn(self, now: float) -> None:
        """A turn of the engine's loop, unless one is under way: launch a batch that waits, then read out the one before it."""
        if self._host_busy or not (self._waiting or self._launched):
            return
        if self._waiting and not (self._launched and self._launched[0][0] <= now + NEARLY_DONE_S):
            self._host_busy = True
            self._waiting.sort(key=lambda one: (-urgency(one), number(one)))
            batch = self._waiting.pop(0)
            self._later(now + self._costs.before * self._costs.host_s(requests(batch)), partial(self._launch, batch))
        elif self._waiting or self._launched[0][0] <= now:
            self._host_busy = True
            self._read_out(now)
        else:
            # Nothing to launch: it looks for arrivals until the forward is over.
            self._later(self._launched[0][0], self._turn)

    def _read_out(self, now: float) -> None:
        at, batch = self._launched.pop(0)
        share = 1 - self._costs.before
        self._later(max(now, at) + share * self._costs.host_s(requests(batch)), partial(self._read, batch))

    def _launch(self, batch: Sent, now: float) -> None:
        before = bool(self._launched)
        self._gpu_free = max(self._gpu_free, now) + self._costs.gpu_s(requests(batch))
        self._launched.append((self._gpu_free, batch))
        if before:
            self._read_out(now)
        else:
            self._host_busy = False
            self._turn(now)

    def _read(self, batch: Sent, now: float) -> None:
        self._host_busy = False
        self._later(now + WIRE_S, partial(self._done, batch))
        self._turn(now)

    def _done(self, batch: Sent, now: float) -> None:
        scores = np.zeros((ITEMS, 2), np.float32)
        outcomes = [ev.Outcome([FrameSpec("scores", "float32", scores.shape)], [scores.tobytes()])] * requests(batch)
        run_us = int((now - self._arrived.pop(number(batch))) * 1e6)
        for sent in self._pool.do(ev.BatchDone(0, batch.link, number(batch), outcomes, 0, 1, run_us)):
            if isinstance(sent.message, Result):
                asked, priority = self._asked.pop(sent.message.id)
                self._seen.setdefault(priority, []).append((now, now - asked))
                if not self._rate:
                    self._later(now, self._ask)


def number(batch: Sent) -> TaskId:
    """The batch's own."""
    assert isinstance(batch.message, Batch)
    return batch.message.batch


def requests(batch: Sent) -> int:
    """How many it holds."""
    assert isinstance(batch.message, Batch)
    return len(batch.message.parts)


def urgency(batch: Sent) -> int:
    """Its priority."""
    assert isinstance(batch.message, Batch)
    return batch.message.priority
