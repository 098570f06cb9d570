"""SGLang's tokenizer manager over a pool: the pool takes the place of SGLang's scheduler.

Everything that SGLang does with a request in its main process stays as it is: templates, tokenizing, validation, `n`,
detokenizing, log-probabilities, finish reasons. What it would send to its scheduler becomes a call of the pool. The tokens of
the pool go through SGLang's detokenizer as those of a scheduler do.
"""

import asyncio
import importlib
import logging
from collections.abc import AsyncIterator
from contextvars import ContextVar
from functools import partial
from typing import Any, cast

from enginepool.client.arguments import bad
from enginepool.errors import EnginepoolError
from enginepool.http.adapters import take_adapter
from enginepool.http.failures import status_of
from enginepool.http.media import take_media
from enginepool.http.options import read_options
from enginepool.http.refusals import refuse_dangerous, refused
from enginepool.http.samples import Generator, PoolCall, Samples
from enginepool.http.sequence import PoolSequence

_fastapi: Any = importlib.import_module("fastapi")
_messages: Any = importlib.import_module("sglang.srt.managers.io_struct")
_tokenizer: Any = importlib.import_module("sglang.srt.managers.tokenizer_manager")
_detokenizer: Any = importlib.import_module("sglang.srt.managers.detokenizer_manager")

log = logging.getLogger("enginepool")

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
        pool: generates; set before the first request, as is the group that it asks.
        think_end: the token ids that end the thoughts of the model; empty: it has none.
    """

    pool: Generator
    group = ""

    def __init__(self, server_args: Any, port_args: Any, **options: Any) -> None:
        base: Any = super()
        base.__init__(server_args, port_args, **options)
        self._detokenizer = PoolDetokenizer(server_args, self.tokenizer)
        self.think_end: list[int] = []
        #: those that run, by SGLang's id of each
        self._samples: dict[str, Samples] = {}

    def init_ipc_channels(self, port_args: Any) -> None:
        """There is no other process to talk to."""
        self.recv_from_detokenizer = self.send_to_scheduler = self.tokenizer_ipc_name = self.load_snapshot_reader = None

    def auto_create_handle_loop(self) -> None:
        """Answers are handed in by the calls of the pool; signals are the program's own."""
        self.event_loop = asyncio.get_running_loop()

    async def generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        """As SGLang's own. `request` may have the `PoolCall` that answers it, as its `state.pool_call`; else `read_options`
        reads its headers.

        Raises:
            HTTPException: the pool refused it, or failed, before anything was answered.
        """
        call: PoolCall = getattr(getattr(request, "state", None), "pool_call", None) or PoolCall({"group": self.group})
        _current.set(call)
        begun, lengths = False, dict[str, int]()
        base: Any = super()
        try:
            if request is not None and "timeout" not in call.options:
                call.options = {**call.options, **read_options(request.headers)}
            refuse_dangerous(obj)
            call.options = {**call.options, **take_adapter(obj)}
            call.media = take_media(obj)
            async for answer in base.generate_request(obj, request):
                if call.failure is not None and not begun:
                    raise call.failure
                # SGLang sends no piece without text, and its log-probabilities in no other: those of the next answer have them.
                if not obj.return_logprob or _has_news(answer, lengths):
                    begun = True
                    _complete(answer, call)
                    yield answer
                call.advanced.set()
        except (EnginepoolError, OverflowError) as error:
            call.failure = error if isinstance(error, EnginepoolError) else bad("prompt", f"prompt: a token id: {error}")
            raise _fastapi.HTTPException(status_of(call.failure), str(call.failure)) from error
        except (ValueError, _fastapi.HTTPException):
            if call.failure is None:
                raise
            raise _fastapi.HTTPException(status_of(call.failure), str(call.failure)) from call.failure
        finally:
            call.cancel()

    async def _wait_one_response(self, obj: Any, *args: Any, **options: Any) -> AsyncIterator[Any]:
        base: Any = super()
        if (samples := self._samples.get(obj.rid)) is not None:
            samples.call.sequences[obj.rid].awaited.set()
        async for answer in base._wait_one_response(obj, *args, **options):
            yield answer

    def _dispatch_to_scheduler(self, obj: Any) -> None:
        if isinstance(obj, _messages.AbortReq):
            for rid in list(self._samples) if obj.abort_all else [obj.rid]:
                self._abort(rid)
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
        """Take a sequence as SGLang's scheduler would."""
        call = _current.get()
        if not call.prompts or not call.prompts[-1].takes(request):
            call.prompts.append(Samples(self, call, request))
            call.prompts[-1].task.add_done_callback(partial(self._ended, call.prompts[-1]))
        self._samples[request.rid] = call.prompts[-1]
        call.prompts[-1].add(PoolSequence(request, self.tokenizer, self.think_end))

    def _abort(self, rid: str) -> None:
        if (samples := self._samples.pop(rid, None)) is not None:
            samples.drop(rid)
            self._detokenizer.decode_status.pop(rid, None)  # it forgets by itself only what has finished
            self._handle_abort_req(_messages.AbortReq(rid=rid))

    def _ended(self, samples: Samples, task: "asyncio.Task[None]") -> None:
        """Say to SGLang that what it waits for has ended, too; forget the samples."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a request of OpenAI's API failed: %r", error, exc_info=error)
            samples.call.failure = samples.call.failure or EnginepoolError(f"an error in this program: {error!r:.200}")
        for rid in samples.unfinished:
            self._abort(rid)
            self._detokenizer.decode_status.pop(rid, None)  # of one that was dropped while others went on
        for rid in [rid for rid in samples.call.sequences if self._samples.get(rid) is samples]:
            del self._samples[rid]

    async def hand_in(self, sequence: PoolSequence, finished: dict[str, Any] | None) -> None:
        """Report the new tokens of a sequence to SGLang, and that it has finished."""
        report = sequence.report(finished)
        if report is not None:
            await self._handle_batch_output(self._detokenizer.handle_batch_token_id_out(report))

    def unread(self, rid: str) -> int:
        """Answers that wait for the caller."""
        state = self.rid_to_state.get(rid)
        return 0 if state is None else len(state.out_list)


def _has_news(answer: Any, lengths: dict[str, int]) -> bool:
    """Whether an answer has text that the one before it had not, or ends its sequence. `lengths`: of the texts before, by
    SGLang's id."""
    if isinstance(answer, list) or answer["meta_info"].get("finish_reason"):
        return True
    id_, length = answer["meta_info"]["id"], len(answer["text"])
    before, lengths[id_] = lengths.get(id_, 0), length
    return length != before


def _complete(answer: Any, call: PoolCall) -> None:
    """SGLang's own name of a version is that of the weights that it has loaded itself. Its oldest versions read an entry about
    an echoed prompt that they do not write where no more than its text is asked for."""
    for one in cast("list[Any]", answer if isinstance(answer, list) else [answer]):
        about: dict[str, Any] = one["meta_info"]
        about.setdefault("input_top_logprobs", None)
        sequence = call.sequences.get(about["id"])
        if sequence is not None and sequence.version is not None:
            about["weight_version"] = str(sequence.version)
