"""The samples of one prompt: one call of the pool, whose tokens are reported sequence by sequence."""

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, Protocol

import numpy as np

from enginepool.client.generations import Generations
from enginepool.client.token_stream import TokenStream
from enginepool.errors import EnginepoolError
from enginepool.http.failures import status_of
from enginepool.http.sampling import pool_options
from enginepool.http.sequence import PoolSequence

#: Answers of a stream that its reader may leave unread before the pool is told to wait.
_MOST_UNREAD = 8


class Generator(Protocol):
    """The methods of `Pool` that generate."""

    def generate(self, prompts: Any, **options: Any) -> Coroutine[Any, Any, Generations]:
        """As `Pool.generate`."""
        ...

    def stream(self, prompt: Any, **options: Any) -> TokenStream:
        """As `Pool.stream`."""
        ...


class Reports(Protocol):
    """The part of the tokenizer manager that samples need."""

    pool: Generator
    context_len: int

    async def hand_in(self, sequence: PoolSequence, finished: dict[str, Any] | None) -> None:
        """Report the new tokens of a sequence."""
        ...

    def unread(self, rid: str) -> int:
        """Answers that the caller has not taken yet."""
        ...


class PoolCall:
    """One request of a caller.

    Args:
        options: of `Pool.generate`, for all its sequences: group, timeout, versions.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options
        #: what ended it before its time
        self.failure: EnginepoolError | None = None
        #: its sequences, by SGLang's id
        self.sequences: dict[str, PoolSequence] = {}
        #: arguments of `Pool.generate`: those of its prompt
        self.media: dict[str, list[str]] = {}
        #: one for each prompt
        self.prompts: list[Samples] = []
        #: the caller has taken an answer
        self.advanced = asyncio.Event()

    def cancel(self) -> None:
        """Take back what runs. Idempotent."""
        for samples in self.prompts:
            samples.task.cancel()


class Samples:
    """The samples of one prompt. The pool is asked once all of them were added.

    Args:
        request: SGLang's `TokenizedGenerateReqInput` of any of them.
    """

    def __init__(self, reports: Reports, call: PoolCall, request: Any) -> None:
        self._reports = reports
        self.call = call
        self._request = request
        self._sequences: list[PoolSequence] = []
        self._complete = asyncio.Event()
        #: ids whose answers are not wanted any more
        self._dropped: set[str] = set()
        self.task = asyncio.create_task(self._run())

    def takes(self, request: Any) -> bool:
        """Whether this request is a further sample of the prompt."""
        return request.input_ids is self._request.input_ids and not self._complete.is_set()

    def add(self, sequence: PoolSequence) -> None:
        """A further sample."""
        self._sequences.append(sequence)
        self.call.sequences[sequence.rid] = sequence
        if len(self._sequences) == (1 if _computes_prompt(self._request) else self._request.sampling_params.n):
            self._complete.set()

    def drop(self, rid: str) -> None:
        """One of them is not wanted any more."""
        self._dropped.add(rid)
        if len(self._dropped) == len(self._sequences):
            self.task.cancel()

    @property
    def unfinished(self) -> list[str]:
        """Ids that were not reported as finished."""
        return [sequence.rid for sequence in self._sequences if not sequence.has_ended]

    async def _run(self) -> None:
        """Answer them, with their tokens or with the error of the pool."""
        await self._complete.wait()
        try:
            if _computes_prompt(self._request):
                await self._hand_in(self._sequences[0], {"type": "length", "length": 0})
            elif self._request.stream:
                await self._stream()
            else:
                await self._generate()
        except EnginepoolError as error:
            self.call.failure = self.call.failure or error
            for sequence in self._sequences:
                if not sequence.has_ended:
                    await self._hand_in(sequence, {"type": "abort", "message": str(error), "status_code": status_of(error)})

    def _options(self) -> dict[str, Any]:
        request = self._request
        reasoning = bool(request.require_reasoning)
        options = pool_options(request.sampling_params, len(request.input_ids), self._reports.context_len, reasoning)
        if request.return_logprob:
            options |= {"logprobs": True, "top_logprobs": request.top_logprobs_num or 0}
            options["prompt_logprobs"] = request.logprob_start_len == 0
        return {**options, "priority": request.priority or 0, **self.call.options}

    async def _generate(self) -> None:
        media = {name: [urls] for name, urls in self.call.media.items()}
        whole = await self._reports.pool.generate([np.asarray(self._request.input_ids)], **self._options(), **media)
        for sequence, found in zip(self._sequences, whole[0], strict=True):
            sequence.cached_tokens = whole.usage.cached_tokens
            sequence.add_prompt(whole)
            first = 0
            for version, count in found.spans:
                sequence.add(found, slice(first, first + count), version)
                first += count
            await self._hand_in(sequence, _finished(found.finish_reason, found.matched, first))

    async def _stream(self) -> None:
        alone = len(self._sequences) == 1
        last: dict[str, Any] | None = None
        async with self._reports.pool.stream(
            np.asarray(self._request.input_ids), **self._options(), **self.call.media
        ) as stream:
            while (chunk := await stream.next_chunk()) is not None:
                sequence = self._sequences[chunk.sequence]
                sequence.add(chunk, slice(None), chunk.version)
                if chunk.finish_reason in ("", "interrupted"):  # of an interrupted one, the result says why
                    await self._hand_in(sequence, None)
                    await self._until_read(sequence.rid)
                    continue
                last = _finished(chunk.finish_reason, chunk.matched, len(sequence.output_ids))
                if not alone:
                    await self._hand_in(sequence, last)
            whole = await stream.result()
            if alone and last is not None:
                # The usage is known now; several samples do not wait for each other.
                self._sequences[0].cached_tokens = whole.usage.cached_tokens
                await self._hand_in(self._sequences[0], last)

    async def _hand_in(self, sequence: PoolSequence, finished: dict[str, Any] | None) -> None:
        # SGLang looks up what it waits for once it waits.
        await sequence.awaited.wait()
        if sequence.rid not in self._dropped:
            await self._reports.hand_in(sequence, finished)

    async def _until_read(self, rid: str) -> None:
        """Wait for the caller, so that the pool waits for it: what it leaves unread is bounded here and there."""
        while self._reports.unread(rid) >= _MOST_UNREAD:
            self.call.advanced.clear()
            await self.call.advanced.wait()


def _computes_prompt(request: Any) -> bool:
    """Whether SGLang wants a prompt computed ahead of its samples. The engines of the pool do so by themselves."""
    return request.sampling_params.max_new_tokens == 0


def _finished(reason: str, matched: int | str | None, tokens: int) -> dict[str, Any]:
    """SGLang's form of a finish reason."""
    return {"type": "length", "length": tokens} if reason == "length" else {"type": "stop", "matched": matched}
