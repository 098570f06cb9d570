"""Scoring load on a pool for as long as it is wanted, with a line for every answer; and what is asked about the pool meanwhile.

python -m bench.weights.load ADDRESS
"""

import asyncio
import sys
import time
from typing import Any

import msgspec
import uvloop

from bench.score.load import own_voice
from bench.score.workloads import VARIANTS, Shape
from bench.weights.figures import Answer
from bench.weights.obeying import obey_awaited
from enginepool import Pool
from enginepool.client.score import ScoreResult


class Load:
    """Each `do_` is an order."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._pool: Pool | None = None
        self._callers: list[asyncio.Task[None]] = []
        self._answers: list[Answer] = []
        self._failures: list[str] = []
        self._stop = asyncio.Event()

    async def do_connect(self) -> dict[str, object]:
        """Be a client of the pool, whose workers may still start."""
        self._pool = await Pool.connect(self._address, connect_timeout=60.0)
        return {}

    async def do_score(self, shape: dict[str, Any]) -> dict[str, object]:
        """The scores of one request, and their version."""
        result = await self._score(msgspec.convert(shape, Shape), 0)
        return {"scores": result.scores.tolist(), "version": result.version}

    async def do_begin(self, shape: dict[str, Any], in_flight: int) -> dict[str, object]:
        """Keep so many requests unanswered."""
        self._stop.clear()
        self._answers.clear()
        self._failures.clear()
        wanted = msgspec.convert(shape, Shape)
        self._callers = [asyncio.create_task(self._again(wanted, i, in_flight)) for i in range(in_flight)]
        return {}

    async def do_stop(self) -> dict[str, object]:
        """No more; every answer that came, oldest first."""
        self._stop.set()
        await asyncio.gather(*self._callers)
        return {"answers": self._answers, "failures": self._failures}

    async def do_workers(self) -> dict[str, object]:
        """The workers: name, process, stage and version of each."""
        assert self._pool is not None
        [group] = (await self._pool.status()).groups
        return {"workers": [[worker.name, worker.pid, worker.stage, worker.version] for worker in group.workers]}

    async def do_history(self) -> dict[str, object]:
        """The phases of each update, by version; by now that of the first answer is known too."""
        assert self._pool is not None
        report = await self._pool.weights()
        return {"phases": [[record.version, record.phases] for record in report.history if record.outcome == "committed"]}

    async def do_digests(self) -> dict[str, object]:
        """The digest of what every engine holds."""
        assert self._pool is not None
        report = await self._pool.weights_digest()
        return {"digests": [worker.digest or worker.message for worker in report.workers]}

    async def _again(self, shape: Shape, first: int, in_flight: int) -> None:
        number = first
        while not self._stop.is_set():
            asked = time.monotonic()
            try:
                result = await self._score(shape, number % VARIANTS)
            except Exception as error:
                self._failures.append(f"{type(error).__name__}: {error}")
                return
            self._answers.append(Answer(asked, time.monotonic(), result.timings.run_s, result.version, shape.items))
            number += in_flight

    async def _score(self, shape: Shape, number: int) -> ScoreResult:
        assert self._pool is not None
        query, items = shape.request(number)
        return await self._pool.score(query, items, label_token_ids=list(shape.labels))


async def main() -> None:
    """Take orders."""
    voice = own_voice()
    await obey_awaited(voice, Load(sys.argv[1]), {})


if __name__ == "__main__":
    uvloop.run(main())
