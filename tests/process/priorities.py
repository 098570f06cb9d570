"""A load of two priorities on a pool: bulk requests that always wait, and urgent ones of which each waits for its answer."""

import asyncio
import random
import time
from statistics import median
from typing import Any, NamedTuple

from enginepool import Pool
from tests.process.waiting import check_running

#: bulk requests under way at all times; answers of urgent ones that a median is taken of
BULK, URGENT = 48, 30
#: priority of the urgent ones
HIGH = 100
#: seconds that all of it may take
PATIENCE_S = 200.0


class Medians(NamedTuple):
    """Seconds from question to answer."""

    urgent: float
    bulk: float

    @property
    def ratio(self) -> float:
        return self.urgent / self.bulk


def content(number: int, *, text: bool, words: int = 12) -> tuple[Any, list[Any]]:
    """A query and up to eight items, all different."""
    draw = random.Random(number)

    def one(length: int) -> str | list[int]:
        ids = [draw.randrange(3, 250) for _ in range(length)]
        return " ".join(map(str, ids)) if text else ids

    return one(words), [one(draw.randint(4, 16)) for _ in range(draw.randint(2, 8))]


async def medians(address: str, *, text: bool) -> Medians:
    """Of the pool at `address`, whose workers are ready."""
    urgent: list[float] = []
    bulk: list[float] = []
    numbers = iter(range(1 << 30))

    async def ask(pool: Pool, priority: int, seen: list[float]) -> None:
        query, items = content(next(numbers), text=text)
        began = time.monotonic()
        await pool.score(query, items, label_token_ids=[60, 70], priority=priority)
        seen.append(time.monotonic() - began)

    async def more(pool: Pool) -> None:
        while True:
            await ask(pool, 0, bulk)

    async with Pool.connect(address) as greedy, Pool.connect(address) as patient, asyncio.timeout(PATIENCE_S):
        tasks = [asyncio.create_task(more(greedy)) for _ in range(BULK)]
        try:
            while len(bulk) < 2 * BULK:
                check_running(tasks)
                await asyncio.sleep(0.05)
            bulk.clear()
            for _ in range(URGENT):
                await ask(patient, HIGH, urgent)
            while len(bulk) < BULK:
                check_running(tasks)
                await asyncio.sleep(0.05)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return Medians(median(urgent), median(bulk))
