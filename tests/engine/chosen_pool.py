"""A stand-in for a pool, whose tokens are chosen: what OpenAI's API makes of them does not depend on a model."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from enginepool.client.generations import Generation, Generations, TokenChunk, TokenUsage
from enginepool.client.results import RequestTimings
from enginepool.errors import EnginepoolError
from enginepool.protocol.messages import AdapterStatus, GroupLimits, GroupStatus, StatusReport, WorkerStatus

CONTEXT = 1000
#: tokens of each prompt that were in a cache
CACHED = 7
#: tokens of the newest weights, at the end of each sequence
NEW = 2


class ChosenPool:
    """Answers each prompt with the next of `texts`, in turn; or fails.

    Attributes:
        encode: the tokenizer's, which makes tokens of the texts.
        failure: raised after `before` tokens of each sequence.
        asked: the options of each call.
        taken: tokens that were taken of all streams.
        cancelled: calls that were taken back.
        begun: the place in `texts` of the next sequence.
        hold: while it is cleared, no sequence goes on after its first token.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.encode: Callable[[str], list[int]] = lambda text: list(text.encode())
        self.reset()

    def reset(
        self, *texts: str, matched: int | str | None = None, failure: EnginepoolError | None = None, before: int = 0
    ) -> None:
        self.texts = list(texts) or [""]
        self.matched, self.failure, self.before = matched, failure, before
        self.asked: list[dict[str, Any]] = []
        self.taken = self.cancelled = self.begun = 0
        self.hold = asyncio.Event()
        self.hold.set()

    async def status(self, timeout: float | None = None) -> StatusReport:  # noqa: ASYNC109
        limits = GroupLimits("causal", 512, CONTEXT, 1, operations=("generate",), adapters=("math",))
        worker = WorkerStatus("0", "a", "ready")
        loaded = [AdapterStatus("code", 3, "")]
        group = GroupStatus("policy", model=self._folder, limits=limits, workers=[worker], adapters=loaded)
        return StatusReport(1, groups=[group])

    async def ready(self, timeout: float | None = None, *, group: str = "") -> StatusReport:  # noqa: ASYNC109
        return await self.status()

    def next_sequences(self, options: dict[str, Any]) -> list[Generation]:
        found = [self.sequence(text, options) for text in (self.texts * options["n"])[self.begun :][: options["n"]]]
        self.begun = (self.begun + options["n"]) % len(self.texts)
        self.asked.append(options)
        return found

    def sequence(self, text: str, options: dict[str, Any]) -> Generation:
        ids = np.array(self.encode(text), np.int32)
        logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32)
        first = max(len(ids) - NEW, 0)
        spans = tuple((version, count) for version, count in ((3, first), (4, len(ids) - first)) if count)
        reason = "length" if self.matched is None else "stop"
        none = Generation(ids, None, reason, self.matched, spans)
        if not options.get("logprobs"):
            return none
        k = np.arange(options["top_logprobs"], dtype=np.int32)
        tops = {"top_ids": ids[:, None] + k, "top_logprobs": logprobs[:, None] - k.astype(np.float32)} if k.size else {}
        return replace(none, logprobs=logprobs, **tops)

    async def generate(self, prompts: Any, **options: Any) -> Generations:
        found = self.next_sequences({"prompts": [row.tolist() for row in prompts], **options})
        if self.failure is not None:
            raise self.failure
        try:
            await self.hold.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return whole(found, of_prompt(options, prompts[0]))

    def stream(self, prompt: Any, **options: Any) -> "ChosenStream":
        return ChosenStream(self, self.next_sequences({"prompts": [prompt.tolist()], **options}))


class ChosenStream:
    """One token in each chunk, of each sequence in turn."""

    def __init__(self, pool: ChosenPool, found: list[Generation]) -> None:
        self._pool, self._found = pool, found
        self._left = [
            (at, number) for at in range(max(map(len, (one.token_ids for one in found)))) for number in range(len(found))
        ]
        self._left = [(at, number) for at, number in self._left if at < len(found[number].token_ids)]
        self._over = False

    async def next_chunk(self) -> TokenChunk | None:
        await asyncio.sleep(0)
        if not self._left:
            self._over = True
            return None
        at, number = self._left.pop(0)
        if self._pool.failure is not None and at == self._pool.before:
            self._over = True
            raise self._pool.failure
        if at:
            await self._pool.hold.wait()
        self._pool.taken += 1
        found = self._found[number]
        ids = found.token_ids
        rows: list[Any] = [found.logprobs, found.top_ids, found.top_logprobs]
        last = at + 1 == len(ids)
        logprobs, top_ids, top_logprobs = (None if row is None else row[at : at + 1] for row in rows)
        return TokenChunk(
            number, ids[at : at + 1], logprobs, 3 if at < len(ids) - NEW else 4, found.finish_reason if last else "",
            found.matched if last else None, top_ids, top_logprobs,
        )  # fmt: skip

    async def result(self) -> Generations:
        return whole(self._found)

    async def __aenter__(self) -> "ChosenStream":
        return self

    async def __aexit__(self, *exc: object) -> None:
        if not self._over and self._left:
            self._pool.cancelled += 1


def whole(found: list[Generation], of_prompt: Sequence[Any] = ()) -> Generations:
    usage = TokenUsage(len(found), 0, sum(len(one.token_ids) for one in found), CACHED)
    return Generations((tuple(found),), 4, usage, RequestTimings(0.0, 0.0), *of_prompt)


def of_prompt(options: dict[str, Any], prompt: Any) -> Sequence[Any]:
    """The token at position i of a prompt has the log-probability −i; the most probable tokens are itself and those after."""
    if not options.get("prompt_logprobs"):
        return ()
    k = np.arange(options["top_logprobs"], dtype=np.int32)
    logprobs = -np.arange(len(prompt), dtype=np.float32)
    logprobs[0] = np.nan
    ids = prompt[:, None] + k
    ids[0] = -1
    return (logprobs,), (ids,), (logprobs[:, None] - k.astype(np.float32),)
