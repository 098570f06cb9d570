"""Streams in flight, and scores next to them: what a load does, and what it measures. A contestant is a function that streams
one prompt, and one that scores items."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import IO

import msgspec
import numpy as np

#: The part of a phase that does not count: in it the contestant is not full yet.
RAMP = 0.3

#: Streams the answer to token ids with so many new tokens: yields how many tokens came.
StreamPrompt = Callable[[list[int], int], AsyncIterator[int]]
#: Scores items, each with the query before it.
ScoreItems = Callable[[list[int], list[list[int]]], Awaitable[object]]
LABELS = [100, 200]


class Phase(msgspec.Struct, forbid_unknown_fields=True):
    """So many streams at once for so many seconds: `prompt` random token ids below `vocab` each, `tokens` new ones.

    `apart`: the first answer of each stream is shorter, by a random number of tokens, so that streams do not end at the same
    moments. `scores`: requests a second next to them, of a query of `query` ids with `items` items of `item` ids.
    """

    streams: int
    seconds: float
    prompt: int
    tokens: int
    vocab: int
    seed: int
    apart: bool = False
    scores: float = 0.0
    query: int = 120
    items: int = 10
    item: int = 40


class Streamed(msgspec.Struct):
    """What a phase measured, after its ramp: tokens a second, milliseconds until the first token of each stream that began
    then, and until the answer of each score request; streams that did not get all their tokens, and scores that failed."""

    per_second: float
    first_ms: list[float]
    failed: int = 0
    failure: str = ""
    score_ms: list[float] = []


async def run_phase(stream: StreamPrompt, phase: Phase, score: ScoreItems | None = None) -> Streamed:
    """Keep the streams going, and ask for scores at their rate, however long the earlier ones take."""
    asking = asyncio.create_task(ask_for_scores(score, phase) if score is not None and phase.scores else _nothing())
    found = await keep_streaming(stream, phase)
    found.score_ms, failures = await asking
    found.failed += len(failures)
    found.failure = found.failure or next(iter(failures), "")
    return found


async def _nothing() -> tuple[list[float], list[str]]:
    return [], []


async def ask_for_scores(score: ScoreItems, phase: Phase) -> tuple[list[float], list[str]]:
    """(milliseconds until the answer of each request that began after the ramp, failures)"""
    chance = np.random.default_rng(phase.seed)
    took, failures = list[float](), list[str]()
    begin = time.perf_counter()

    async def one(at: float, query: list[int], items: list[list[int]]) -> None:
        try:
            await score(query, items)
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}"[:200])
            return
        if at >= begin + RAMP * phase.seconds:
            took.append((time.perf_counter() - at) * 1000)

    waiting: list[asyncio.Task[None]] = []
    for number in range(int(phase.scores * phase.seconds)):
        at = begin + number / phase.scores
        await asyncio.sleep(max(0.0, at - time.perf_counter()))
        query = chance.integers(10, phase.vocab, phase.query).tolist()
        items = chance.integers(10, phase.vocab, (phase.items, phase.item)).tolist()
        waiting.append(asyncio.create_task(one(at, query, items)))
    await asyncio.gather(*waiting)
    return took, failures


async def keep_streaming(stream: StreamPrompt, phase: Phase) -> Streamed:
    """Keep `phase.streams` streams going, a new one for each that ends."""
    chance = np.random.default_rng(phase.seed)
    begin = time.perf_counter()
    start, end = begin + RAMP * phase.seconds, begin + phase.seconds
    counted, first_ms, failures = 0, list[float](), list[str]()

    async def again(prompts: np.ndarray, wanted: int) -> None:  # type: ignore[type-arg]
        nonlocal counted
        for prompt in prompts.tolist():
            asked = time.perf_counter()
            if asked >= end:
                return
            got = 0
            async for count in stream(prompt, wanted):
                now = time.perf_counter()
                if not got and asked >= start:
                    first_ms.append((now - asked) * 1000)
                got += count
                if start <= now < end:
                    counted += count
                if now >= end:
                    break
            else:
                if got != wanted:
                    failures.append(f"{got} tokens of {wanted}")
            wanted = phase.tokens

    rounds = max(2, int(phase.seconds * 8))
    firsts = chance.integers(1, phase.tokens + 1, phase.streams).tolist() if phase.apart else [phase.tokens] * phase.streams
    tasks = [
        asyncio.create_task(again(chance.integers(10, phase.vocab, (rounds, phase.prompt), dtype=np.int64), first))
        for first in firsts
    ]
    await asyncio.gather(*tasks)
    return Streamed(counted / (end - start), first_ms, len(failures), failures[0] if failures else "")


async def serve(stream: StreamPrompt, score: ScoreItems | None, voice: IO[str], hello: dict[str, str]) -> None:
    """Say hello, then run the phases on stdin until its end. One JSON line for each."""
    say(voice, hello)
    reader = asyncio.StreamReader(limit=1 << 24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), _stdin())
    while line := await reader.readline():
        say(voice, await run_phase(stream, msgspec.json.decode(line, type=Phase), score))


def say(voice: IO[str], message: object) -> None:
    voice.write(msgspec.json.encode(message).decode() + "\n")
    voice.flush()


def _stdin() -> IO[bytes]:
    return open(0, "rb", buffering=0, closefd=False)
