"""Load for the pure machine: requests of 10 rows are submitted, dispatched, answered and acknowledged; 5 % are cancelled."""

import random
import time
from collections.abc import Callable, Sequence

import numpy as np

from enginepool.config import GroupConfig, Limits, PoolConfig, Timing
from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.effects import Effect, ToClient, ToWorker
from enginepool.coordinator.core.machine import Machine
from enginepool.coordinator.operations.score import SCORE
from enginepool.protocol.messages import Batch, Capabilities, FrameSpec, Idle, Ready, Result, Score

CAPABILITIES = Capabilities(
    "causal", 50_000, 4096, batch_tokens=16_000, batch_rows=64, inflight_tokens=32_000, inflight_rows=128
)
SCORES = FrameSpec("scores", "float32", (10, 2))
CLIENTS = 16


def open_pool(handle: Callable[[ev.Event], object], links: Sequence[bytes], workers: int) -> None:
    """A client on each of these links and `workers` ready workers for the group `g` of a new machine."""
    handle(ev.Started(0.0, 1, {}))
    for i, link in enumerate(links):
        handle(ev.ClientHello(0.0, link, b"%016d" % i, bytes(16), 0))
    for i in range(workers):
        link = b"w%d" % i
        handle(ev.WorkerRegistered(0.0, link, "g", f"w{i}", 1, "h"))
        handle(ev.WorkerSaid(0.0, link, Idle(1)))
        handle(ev.WorkerSaid(0.0, link, Ready(CAPABILITIES, 0)))


class Load:
    """Drives one machine with `workers` workers and `depth` requests queued beyond what the workers hold."""

    def __init__(self, depth: int, workers: int, seed: int = 0) -> None:
        big = 10**9
        limits = Limits(queue_items=big, buffer_bytes=10**12, window_requests=big, window_bytes=10**12)
        config = PoolConfig(
            groups={"g": GroupConfig(model="none", engine="sim", workers=0)}, limits=limits, timing=Timing(client_silence_s=1e9)
        )
        self.machine = Machine(config)
        self.now = 0.0
        self.events = 0
        self.spent = 0.0
        self.random = random.Random(seed)
        self.depth = depth
        self.next_id = [0] * CLIENTS
        self.running: list[ev.BatchDone] = []
        self.waiting: list[tuple[int, int]] = []
        ids = np.random.default_rng(seed).integers(0, 50_000, 1920, dtype=np.int32)
        frames = [ids[:120].tobytes(), ids[120:].tobytes(), np.full(10, 180, np.uint32).tobytes()]
        specs = [
            FrameSpec("query", "int32", (120,)),
            FrameSpec("items", "int32", (1800,)),
            FrameSpec("item_lengths", "uint32", (10,)),
        ]
        self.work = SCORE.open(Score(1, specs, labels=[1, 2]), frames)
        self.links = [b"c%d" % i for i in range(CLIENTS)]
        open_pool(self.handle, self.links, workers)
        # Full workers hold 10 requests each; the rest waits.
        for _ in range(depth + 10 * workers):
            self.submit()

    def handle(self, event: ev.Event) -> list[Effect]:
        """Only the machine's own time is counted."""
        self.events += 1
        start = time.perf_counter()
        effects = self.machine.handle(event)
        self.spent += time.perf_counter() - start
        for effect in effects:
            if type(effect) is ToWorker and type(effect.message) is Batch:
                outcomes = [ev.Outcome([SCORES], [b""]) for _ in effect.message.parts]
                self.running.append(ev.BatchDone(0.0, effect.link, effect.message.batch, outcomes, 0, 1, 20_000))
        return effects

    def submit(self) -> None:
        client = self.random.randrange(CLIENTS)
        self.next_id[client] += 1
        id_ = self.next_id[client]
        self.waiting.append((client, id_))
        deadline = self.now + 3600 if id_ % 4 == 0 else None
        self.handle(ev.Submit(self.now, self.links[client], id_, self.work, self.random.randrange(-10, 10), deadline))

    def answer(self, *, acknowledge: bool = True) -> int:
        """Finish the batch that has run longest; returns the number of requests answered."""
        done = self.running.pop(0) if len(self.running) < 64 else self.running.pop(self.random.randrange(64))
        done.now = self.now
        answered = 0
        acks: dict[bytes, list[int]] = {}
        for effect in self.handle(done):
            if type(effect) is ToClient and type(effect.message) is Result:
                acks.setdefault(effect.link, []).append(effect.message.id)
                answered += 1
        for link, ids in acks.items() if acknowledge else ():
            self.handle(ev.Acked(self.now, link, ids))
        return answered

    def keep(self, requests: int) -> None:
        """Answer so many more requests, of which none is acknowledged."""
        for _ in range(requests):
            self.submit()
            while self.running:
                self.answer(acknowledge=False)

    def run(self, requests: int) -> float:
        """Answer `requests` of them, each replaced by a new one; returns events per second."""
        self.events = 0
        self.spent = 0.0
        answered = 0
        next_tick = self.now
        while answered < requests:
            self.now += 1e-5
            finished = self.answer()
            answered += finished
            for _ in range(finished):
                if self.random.random() < 0.05:
                    client, id_ = self.waiting[self.random.randrange(len(self.waiting))]
                    self.handle(ev.CancelAsked(self.now, self.links[client], id_))
                self.submit()
            if len(self.waiting) > 4 * (self.depth + 1000):
                del self.waiting[: len(self.waiting) // 2]
            if self.now >= next_tick:
                next_tick = self.now + 0.01
                self.handle(ev.Tick(self.now))
        return self.events / self.spent
