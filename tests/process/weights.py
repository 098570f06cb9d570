"""What tests of weight updates share: the model's tensors, a source that waits, and load whose every answer is checked."""

import asyncio
import random
import threading
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from enginepool import Pool
from enginepool.client.score import ScoreResult
from enginepool.protocol.manifest import Tensor
from enginepool.workers.sim.scores import expected_scores
from tests.process.daemons import PATIENCE_S
from tests.process.waiting import check_running

#: of the sim model: two tensors of some buckets, and small ones
MANIFEST = (
    Tensor("embed", "float32", (300, 20)),
    Tensor("head", "bfloat16", (5000,)),
    Tensor("norm", "float32", (3,)),
)
#: the same as an option of the sim engine
TENSORS: list[Any] = [[tensor.name, tensor.dtype, list(tensor.shape)] for tensor in MANIFEST]
LABELS = [5, 6]
#: seconds between an answer and the next question of a caller: scenes wait for time limits, and their machine has more to do
PAUSE_S = 0.1
#: query, items, answer
Asked = tuple[list[int], list[list[int]], ScoreResult]


def some_weights(seed: int) -> dict[str, torch.Tensor]:
    """Other tensors for each seed."""
    generator = torch.Generator()
    generator.manual_seed(seed)
    return {tensor.name: torch.randn(tensor.shape, generator=generator).to(getattr(torch, tensor.dtype)) for tensor in MANIFEST}


class Gate:
    """A source that stops until it is opened, after its first tensor or so many."""

    def __init__(self, weights: Mapping[str, torch.Tensor], after: int = 1) -> None:
        self.weights, self.after = weights, after
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for count, (name, tensor) in enumerate(self.weights.items(), 1):
            yield name, tensor
            if count >= self.after:
                self.reached.set()
                assert self.opened.wait(PATIENCE_S)


@dataclass
class Load:
    """Clients that ask all the time. `check` compares every answer with what the committed weights must say."""

    address: str
    clients: int = 2
    #: version -> digests of what was committed as that (a new run may use a version again)
    committed: dict[int, list[str]] = field(default_factory=lambda: {0: [""]})
    answers: list[Asked] = field(default_factory=list[Asked])
    asked: int = 0
    callers: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]])

    @asynccontextmanager
    async def running(self) -> AsyncGenerator["Load"]:
        """Load for as long as the block runs; afterwards every call has its one answer, and each is right."""
        stop = asyncio.Event()
        pools = [await Pool.connect(self.address) for _ in range(self.clients)]
        callers = self.callers = [asyncio.create_task(self._ask(pool, stop, seed)) for seed in range(3) for pool in pools]
        try:
            await self.more(10)
            yield self
            await self.more(10)
            stop.set()
            await asyncio.wait_for(asyncio.gather(*callers), PATIENCE_S)
        finally:
            for caller in callers:
                caller.cancel()
            await asyncio.gather(*callers, return_exceptions=True)
            for pool in pools:
                await pool.close()
        self.check()

    async def more(self, count: int) -> None:
        """Wait for so many more answers: the pool serves."""
        goal = len(self.answers) + count
        async with asyncio.timeout(PATIENCE_S):
            while len(self.answers) < goal:
                check_running(self.callers)
                await asyncio.sleep(0.01)

    async def _ask(self, pool: Pool, stop: asyncio.Event, seed: int) -> None:
        rng = random.Random(seed)
        while not stop.is_set():
            query = [rng.randrange(1000) for _ in range(rng.randrange(1, 10))]
            items = [[rng.randrange(1000) for _ in range(rng.randrange(1, 30))] for _ in range(rng.randrange(1, 20))]
            self.asked += 1
            self.answers.append((query, items, await pool.score(query, items, label_token_ids=LABELS)))
            await asyncio.sleep(PAUSE_S)

    def check(self) -> None:
        """No answer is lost, and each is of a version that was committed, with exactly those weights."""
        assert len(self.answers) == self.asked
        for query, items, result in self.answers:
            wanted = [
                expected_scores(query, items, labels=LABELS, version=result.version, digest=digest)["scores"]
                for digest in self.committed[result.version]
            ]
            assert any(np.array_equal(result.scores, want) for want in wanted)

    def versions(self) -> set[int]:
        """Versions that answered."""
        return {result.version for _, _, result in self.answers}
