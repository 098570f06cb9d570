"""Does the coordinator's memory stay where its bounds put it? Many requests through the pure machine, and its size on the way.

    python -m bench.memory [--quick] [--json FILE]

Half of the clients acknowledge their answers, the others never do; one request in twenty is cancelled, one in four has a
deadline. The size of the process is read after a tenth of the requests, when every bounded store is full, and at the end.
"""

import gc
import random
import time

import psutil

from bench.core_load import SCORES, open_pool
from bench.table import Row, parser, show, write
from enginepool.config import GroupConfig, Limits, PoolConfig
from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.effects import Effect, ToClient, ToWorker
from enginepool.coordinator.core.machine import Machine
from enginepool.coordinator.operations.score import SCORE
from enginepool.protocol.messages import Batch, FrameSpec, Result, Score

CLIENTS = 16
WORKERS = 4
#: requests waiting in addition to those in flight
DEPTH = 1000
ANSWERS_BYTES = 16 << 20


class Stream:
    """An endless stream of requests through one machine, with the answers of the workers played back at once."""

    def __init__(self) -> None:
        config = PoolConfig(
            groups={"g": GroupConfig(model="none", engine="sim", workers=0)}, limits=Limits(answers_bytes=ANSWERS_BYTES)
        )
        self.machine = Machine(config)
        self.random = random.Random(0)
        self.now = 0.0
        self.answered = 0
        self.next_id = 0
        self.running: list[ev.BatchDone] = []
        specs = [
            FrameSpec("query", "int32", (2,)),
            FrameSpec("items", "int32", (40,)),
            FrameSpec("item_lengths", "uint32", (10,)),
        ]
        self.score = Score(1, specs, labels=[1, 2])
        self.links = [b"c%d" % i for i in range(CLIENTS)]
        open_pool(self.do, self.links, WORKERS)

    def do(self, event: ev.Event) -> list[Effect]:
        effects = self.machine.handle(event)
        for effect in effects:
            if type(effect) is ToWorker and type(effect.message) is Batch:
                outcomes = [ev.Outcome([SCORES], [bytes(80)]) for _ in effect.message.parts]
                self.running.append(ev.BatchDone(0.0, effect.link, effect.message.batch, outcomes, 0, 1, 20_000))
        return effects

    def run(self, requests: int) -> None:
        """Until this many more are answered or cancelled."""
        end = self.next_id + requests
        frames = [bytes(8), bytes(160), (4).to_bytes(4, "little") * 10]
        while self.next_id < end:
            self.next_id += 1
            self.now += 1e-4
            client = self.next_id % CLIENTS
            # A content of its own for each request, as real ones have; freed with it.
            frames[1] = (self.next_id % 50_000).to_bytes(4, "little") * 40
            work = SCORE.open(self.score, list(frames))
            deadline = self.now + 30 if self.next_id % 4 == 0 else None
            self.do(ev.Submit(self.now, self.links[client], self.next_id, work, self.next_id % 21 - 10, deadline))
            if self.next_id % 20 == 0:
                old = self.next_id - self.random.randrange(DEPTH)
                self.do(ev.CancelAsked(self.now, self.links[old % CLIENTS], old))
            if self.next_id % 1000 == 0:
                self.do(ev.Tick(self.now))
                for i in range(WORKERS):
                    self.do(ev.WorkerHeard(self.now, b"w%d" % i))
            while self.machine.core.groups["g"].waiting > DEPTH:
                self.answer()

    def answer(self) -> None:
        done = self.running.pop(0)
        done.now = self.now
        for effect in self.do(done):
            if type(effect) is ToClient and type(effect.message) is Result:
                self.answered += 1
                if effect.link in self.links[: CLIENTS // 2]:
                    self.do(ev.Acked(self.now, effect.link, [effect.message.id]))


def size() -> float:
    """Resident memory of this process in MB."""
    gc.collect()
    return psutil.Process().memory_info().rss / 1e6


def main() -> None:
    args = parser("memory", "Does the coordinator's memory stay where its bounds put it?").parse_args()
    requests = 300_000 if args.quick else 10_000_000
    stream = Stream()
    rows = [Row("memory", "before", size(), "MB")]
    began = time.perf_counter()
    stream.run(requests // 10)
    early = size()
    rows.append(Row("memory", f"after {requests // 10:,} requests", early, "MB"))
    stream.run(requests - requests // 10)
    late = size()
    rows.append(Row("memory", f"after {requests:,} requests", late, "MB", late / early))
    core = stream.machine.core
    rows.append(Row("answers kept", "bytes", core.answers.nbytes / 1e6, "MB", core.answers.nbytes / ANSWERS_BYTES))
    rows.append(Row("answered", "in all", stream.answered, "requests"))
    rows.append(Row("took", "in all", time.perf_counter() - began, "s"))
    show("memory: the pure machine; ratio: to the early size, or to the bound", rows)
    if args.json:
        write(args.json, rows)


if __name__ == "__main__":
    main()
