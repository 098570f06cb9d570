"""Streams and scores at once: what a load asks of one group, or of one engine, and what it measures.

python -m bench.generate.mixed ADDRESS
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import IO

import msgspec
import numpy as np
import uvloop

from bench.generate.streams import Phase, StreamPrompt, run_phase, say
from bench.score.callers import START_S
from bench.score.load import own_voice
from enginepool import Pool

#: Scores items, each with the query before it.
ScoreItems = Callable[[list[int], list[list[int]]], Awaitable[object]]
LABELS = [100, 200]


class MixedPhase(Phase, forbid_unknown_fields=True):
    """Streams, and `scores` requests a second: a query of `query` ids with `items` items of `item` ids."""

    scores: float = 0.0
    query: int = 120
    items: int = 10
    item: int = 40


class BothMeasured(msgspec.Struct):
    """Tokens a second of the streams, and of each score request that began after the ramp its milliseconds."""

    per_second: float
    score_ms: list[float]
    failed: int = 0
    failure: str = ""


async def run_mixed(stream: StreamPrompt, score: ScoreItems, phase: MixedPhase) -> BothMeasured:
    """Keep the streams going, and ask for scores at their rate, however long the earlier ones take."""
    chance = np.random.default_rng(phase.seed)
    took, failures = list[float](), list[str]()
    begin = time.perf_counter()

    async def one(at: float, query: list[int], items: list[list[int]]) -> None:
        try:
            await score(query, items)
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}"[:200])
            return
        if at >= begin + 0.3 * phase.seconds:
            took.append((time.perf_counter() - at) * 1000)

    async def ask() -> None:
        waiting: list[asyncio.Task[None]] = []
        for number in range(int(phase.scores * phase.seconds)):
            at = begin + number / phase.scores
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            query = chance.integers(10, phase.vocab, phase.query).tolist()
            items = chance.integers(10, phase.vocab, (phase.items, phase.item)).tolist()
            waiting.append(asyncio.create_task(one(at, query, items)))
        await asyncio.gather(*waiting)

    streamed, _ = await asyncio.gather(run_phase(stream, phase), ask())
    failures += [streamed.failure] if streamed.failure else []
    return BothMeasured(streamed.per_second, took, streamed.failed + len(failures), failures[0] if failures else "")


async def serve_mixed(stream: StreamPrompt, score: ScoreItems, voice: IO[str]) -> None:
    """Say hello, then run the phases on stdin until its end. One JSON line for each."""
    say(voice, {"contestant": "ready"})
    while line := await asyncio.to_thread(sys.stdin.readline):
        say(voice, await run_mixed(stream, score, msgspec.json.decode(line, type=MixedPhase)))


async def from_pool(address: str) -> None:
    """The pool's own client."""
    voice = own_voice()
    pool = await Pool.connect(address, connect_timeout=60.0)
    await pool.ready(START_S)

    async def stream(prompt: list[int], tokens: int) -> AsyncIterator[int]:
        async for chunk in pool.stream(prompt, max_new_tokens=tokens, temperature=0.0, ignore_eos=True):
            yield len(chunk.token_ids)

    async def score(query: list[int], items: list[list[int]]) -> object:
        return await pool.score(query, items, label_token_ids=LABELS)

    await serve_mixed(stream, score, voice)
    await pool.close()


if __name__ == "__main__":
    uvloop.run(from_pool(sys.argv[1]))
