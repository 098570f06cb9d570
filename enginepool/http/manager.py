"""SGLang's tokenizer manager over a pool: the pool takes the place of SGLang's scheduler.

Everything that SGLang does with a request in its main process stays as it is: templates, tokenizing, validation, `n`,
detokenizing, log-probabilities, finish reasons. What it would send to its scheduler becomes a call of the pool. The tokens of
the pool go through SGLang's detokenizer as those of a scheduler do.
"""

import asyncio
import importlib
import logging
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any, Protocol, cast

import numpy as np

from enginepool.client.generations import Generations
from enginepool.client.token_stream import TokenStream
from enginepool.errors import EnginepoolError
from enginepool.http.failures import status_of
from enginepool.http.refusals import refuse_dangerous, refused
from enginepool.http.sampling import pool_options
from enginepool.http.sequence import PoolSequence

_fastapi: Any = importlib.import_module("fastapi")
_messages: Any = importlib.import_module("sglang.srt.managers.io_struct")
_tokenizer: Any = importlib.import_module("sglang.srt.managers.tokenizer_manager")
_detokenizer: Any = importlib.import_module("sglang.srt.managers.detokenizer_manager")

log = logging.getLogger("enginepool")

#: Answers of a stream that its reader may leave unread before the pool is told to wait.
_MOST_UNREAD = 8


class Generator(Protocol):
    """Of `Pool`, what generates."""

    def generate(self, prompts: Any, **options: Any) -> Coroutine[Any, Any, Generations]:
        """As `Pool.generate`."""
        ...

    def stream(self, prompt: Any, **options: Any) -> TokenStream:
        """As `Pool.stream`."""
        ...


class PoolCall:
    """One request of a caller: the sequences of the pool that answer it.

    Args:
        options: of `Pool.generate`, for all of them: group, timeout, min_version.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options
        #: what ended it before its time
        self.failure: EnginepoolError | None = None
        #: running sequences, by SGLang's id
        self.running: dict[str, asyncio.Task[None]] = {}
        #: set once SGLang waits for answers of a sequence, by the same id
        self.awaited: dict[str, asyncio.Event] = {}
        #: weights that computed the newest token, by the same id
        self.versions: dict[str, int] = {}
        #: the caller has taken an answer
        self.advanced = asyncio.Event()
        #: samples that were begun of each prompt, by the identity of its ids, which are kept for that
        self._samples: dict[int, tuple[Any, int]] = {}

    def sample(self, ids: Any) -> int:
        """The place of the next sample of this prompt."""
        place = self._samples.get(id(ids), (ids, -1))[1] + 1
        self._samples[id(ids)] = (ids, place)
        return place

    def cancel(self) -> None:
        """Take back what runs. Idempotent."""
        for task in list(self.running.values()):
            task.cancel()


_current: ContextVar[PoolCall] = ContextVar("enginepool_http_call")


class PoolDetokenizer(_detokenizer.DetokenizerManager):
    """SGLang's detokenizer, in this process and with the tokenizer that is loaded already."""

    def __init__(self, server_args: Any, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        base: Any = super()
        base.__init__(server_args, None)

    def init_ipc_channels(self, port_args: Any, server_args: Any) -> None:
        """It is called, and has no sockets."""

    def init_tokenizer(self, server_args: Any) -> None:
        """It is loaded already."""
        self.tokenizer = self._tokenizer
        self.vocab_size = len(self.tokenizer)


class PoolTokenizerManager(_tokenizer.TokenizerManager):
    """SGLang's `TokenizerManager`, whose scheduler is a pool.

    Attributes:
        pool: generates; set before the first request.
    """

    pool: Generator

    def __init__(self, server_args: Any, port_args: Any, **options: Any) -> None:
        base: Any = super()
        base.__init__(server_args, port_args, **options)
        self._detokenizer = PoolDetokenizer(server_args, self.tokenizer)
        self._calls: dict[str, PoolCall] = {}

    def init_ipc_channels(self, port_args: Any) -> None:
        """There is no other process to talk to."""
        self.recv_from_detokenizer = self.send_to_scheduler = self.tokenizer_ipc_name = self.load_snapshot_reader = None

    def auto_create_handle_loop(self) -> None:
        """Answers are handed in by the calls of the pool; signals are the program's own."""
        self.event_loop = asyncio.get_running_loop()

    async def generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        """As SGLang's own. `request` may hold the `PoolCall` that answers it, as its `state.pool_call`.

        Raises:
            HTTPException: the pool refused it, or failed, before anything was answered.
        """
        call: PoolCall = getattr(getattr(request, "state", None), "pool_call", None) or PoolCall({})
        _current.set(call)
        begun = False
        base: Any = super()
        try:
            refuse_dangerous(obj)
            async for answer in base.generate_request(obj, request):
                if call.failure is not None and not begun:
                    raise call.failure
                begun = True
                _name_versions(answer, call)
                yield answer
                call.advanced.set()
        except EnginepoolError as error:
            call.failure = error
            raise _fastapi.HTTPException(status_of(error), str(error)) from error
        except (ValueError, _fastapi.HTTPException):
            if call.failure is None:
                raise
            raise _fastapi.HTTPException(status_of(call.failure), str(call.failure)) from call.failure
        finally:
            call.cancel()

    async def _wait_one_response(self, obj: Any, *args: Any, **options: Any) -> AsyncIterator[Any]:
        base: Any = super()
        if (call := self._calls.get(obj.rid)) is not None:
            call.awaited[obj.rid].set()
        async for answer in base._wait_one_response(obj, *args, **options):
            yield answer

    def _dispatch_to_scheduler(self, obj: Any) -> None:
        if isinstance(obj, _messages.AbortReq):
            self._abort(obj)
        elif isinstance(obj, _messages.TokenizedGenerateReqInput):
            self._start(obj)
        elif isinstance(obj, _messages.BatchTokenizedGenerateReqInput):
            for one in obj.batch:
                self._start(one)
        else:
            raise refused(type(obj).__name__, "it generates, and does nothing else")

    async def _async_dispatch_to_scheduler(self, obj: Any) -> None:
        self._dispatch_to_scheduler(obj)

    def _start(self, request: Any) -> None:
        call = _current.get()
        call.awaited[request.rid] = asyncio.Event()
        call.running[request.rid] = task = asyncio.create_task(self._run(call, request))
        self._calls[request.rid] = call
        task.add_done_callback(partial(self._ended, call, request.rid))

    def _ended(self, call: PoolCall, rid: str, task: "asyncio.Task[None]") -> None:
        del call.running[rid], self._calls[rid]
        if not task.cancelled():
            error = task.exception()
            if error is None:
                return
            log.error("a request of OpenAI's API failed: %r", error, exc_info=error)
            call.failure = call.failure or EnginepoolError(f"an error in this program: {error!r:.200}")
        # It has not said to SGLang that it has ended.
        self._handle_abort_req(_messages.AbortReq(rid=rid))

    def _abort(self, request: Any) -> None:
        """Of SGLang's ids, the one of the request or all."""
        for rid in list(self._calls) if request.abort_all else [request.rid]:
            if call := self._calls.get(rid):
                call.running[rid].cancel()

    async def _run(self, call: PoolCall, request: Any) -> None:
        """Answer one sequence, with its text or with the error of the pool."""
        sequence = PoolSequence(request, self.tokenizer)
        try:
            if request.sampling_params.max_new_tokens == 0:
                # SGLang computes a prompt ahead of its samples; the engine of the pool does so by itself.
                await self._hand_in(call, sequence, {"type": "length", "length": 0})
            elif request.stream:
                await self._stream(call, request, sequence)
            else:
                await self._generate(call, request, sequence)
        except EnginepoolError as error:
            call.failure = call.failure or error
            await self._hand_in(call, sequence, {"type": "abort", "message": str(error), "status_code": status_of(error)})

    def _options(self, call: PoolCall, request: Any) -> dict[str, Any]:
        sample = call.sample(request.input_ids)
        options = pool_options(request.sampling_params, len(request.input_ids), self.context_len, sample)
        return {**options, "logprobs": request.return_logprob, "priority": request.priority or 0, **call.options}

    async def _generate(self, call: PoolCall, request: Any, sequence: PoolSequence) -> None:
        whole = await self.pool.generate([np.asarray(request.input_ids)], **self._options(call, request))
        found, sequence.cached_tokens = whole[0][0], whole.usage.cached_tokens
        logprobs = None if found.logprobs is None else found.logprobs.tolist()
        ids, first = found.token_ids.tolist(), 0
        for version, count in found.spans:
            chances = None if logprobs is None else logprobs[first : first + count]
            sequence.add(ids[first : first + count], chances, version)
            first += count
        await self._hand_in(call, sequence, _finished(found.finish_reason, found.matched, len(ids)))

    async def _stream(self, call: PoolCall, request: Any, sequence: PoolSequence) -> None:
        async with self.pool.stream(np.asarray(request.input_ids), **self._options(call, request)) as stream:
            while (chunk := await stream.next_chunk()) is not None:
                logprobs = None if chunk.logprobs is None else chunk.logprobs.tolist()
                sequence.add(chunk.token_ids.tolist(), logprobs, chunk.version)
                if not chunk.finish_reason:
                    await self._hand_in(call, sequence, None)
                    await self._until_read(call, request.rid)
                    continue
                sequence.cached_tokens = (await stream.result()).usage.cached_tokens
                finished = _finished(chunk.finish_reason, chunk.matched, len(sequence.output_ids))
                await self._hand_in(call, sequence, finished)

    async def _hand_in(self, call: PoolCall, sequence: PoolSequence, finished: dict[str, Any] | None) -> None:
        if sequence.version is not None:
            call.versions[sequence.rid] = sequence.version
        await call.awaited[sequence.rid].wait()
        report = sequence.report(finished)
        if report is not None:
            await self._handle_batch_output(self._detokenizer.handle_batch_token_id_out(report))

    async def _until_read(self, call: PoolCall, rid: str) -> None:
        """Wait for the caller, so that the pool waits for it: what it leaves unread is bounded here and there."""
        while (state := self.rid_to_state.get(rid)) is not None and len(state.out_list) >= _MOST_UNREAD:
            call.advanced.clear()
            await call.advanced.wait()


def _finished(reason: str, matched: int | str | None, tokens: int) -> dict[str, Any]:
    """SGLang's form of a finish reason."""
    return {"type": "length", "length": tokens} if reason == "length" else {"type": "stop", "matched": matched}


def _name_versions(answer: Any, call: PoolCall) -> None:
    """SGLang's own name of a version is that of the weights that it has loaded itself."""
    for one in cast("list[Any]", answer if isinstance(answer, list) else [answer]):
        about: dict[str, Any] = one["meta_info"]
        if (version := call.versions.get(about["id"])) is not None:
            about["weight_version"] = str(version)
