"""Streams that are kept going while weights change: when tokens arrived, and which weights computed each of them."""

import asyncio
import time
from typing import NamedTuple

import numpy as np

from enginepool import Pool
from enginepool.errors import EnginepoolError


class Arrival(NamedTuple):
    """Tokens of one stream that arrived together, by `time.monotonic`. `first`: they begin an answer."""

    at: float
    stream: int
    version: int
    tokens: int
    first: bool


class Finished(NamedTuple):
    """An answer that has ended: its prompt, and for each token its id, its log-probability (of samples), and the version of the
    weights that its chunk named; how many were asked for, and the spans of its result."""

    prompt: list[int]
    wanted: int
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    spans: tuple[tuple[int, int], ...]

    @property
    def span_is_wrong(self) -> bool:
        """The spans are not what the chunks said."""
        return [version for version, count in self.spans for _ in range(count)] != self.versions


class WatchedStreams:
    """So many streams at a time, a new one for each that ends, until `end`.

    Args:
        prompt, tokens: random token ids below `vocab`, and new ones of each answer. The first answer of each stream is shorter,
            each by another length, so that they do not end together.
        samples: so many of the streams ask for log-probabilities, too.
    """

    def __init__(self, pool: Pool, streams: int, prompt: int, tokens: int, vocab: int, samples: int, seed: int) -> None:
        self.arrivals: list[Arrival] = []
        self.finished: list[Finished] = []
        self.failures: list[str] = []
        self._pool = pool
        self._prompt, self._tokens, self._vocab, self._samples = prompt, tokens, vocab, samples
        self._chance = np.random.default_rng(seed)
        self._ending = False
        self._seen: dict[int, set[int]] = {}
        self._heard = asyncio.Event()
        self._streams = streams
        self._tasks = [
            asyncio.create_task(self._again(number, max(1, tokens * (number + 1) // streams))) for number in range(streams)
        ]

    async def all_have(self, version: int, within: float) -> None:
        """Return once every stream has had tokens that weights of this version computed. Raises TimeoutError."""
        async with asyncio.timeout(within):
            while len(self._seen.get(version, ())) < self._streams:
                if self.failures:
                    raise RuntimeError(self.failures[0])
                self._heard.clear()
                await self._heard.wait()

    async def end(self, within: float) -> None:
        """Begin no other answer, and wait for those that are under way. Raises TimeoutError."""
        self._ending = True
        async with asyncio.timeout(within):
            await asyncio.gather(*self._tasks)

    async def _again(self, number: int, wanted: int) -> None:
        while not self._ending:
            prompt = self._chance.integers(0, self._vocab, self._prompt).tolist()
            try:
                await self._one(number, prompt, wanted)
            except EnginepoolError as error:
                self.failures.append(f"{type(error).__name__}: {error}"[:300])
                self._heard.set()
            wanted = self._tokens

    async def _one(self, number: int, prompt: list[int], wanted: int) -> None:
        asked = number < self._samples
        stream = self._pool.stream(prompt, max_new_tokens=wanted, temperature=0.0, ignore_eos=True, logprobs=asked)
        tokens, logprobs, versions = list[int](), list[float](), list[int]()
        async for chunk in stream:
            if not (count := len(chunk.token_ids)):
                continue
            self.arrivals.append(Arrival(time.monotonic(), number, chunk.version, count, not tokens))
            tokens += chunk.token_ids.tolist()
            versions += [chunk.version] * count
            if chunk.logprobs is not None:
                logprobs += chunk.logprobs.tolist()
            seen = self._seen.setdefault(chunk.version, set())
            if number not in seen:
                seen.add(number)
                self._heard.set()
        [[sequence]] = await stream.result()
        self.finished.append(Finished(prompt, wanted, tokens, logprobs, versions, sequence.spans))
