"""Sequences through SGLang: each is one request to it, whose tokens are handed on as they come. No SGLang here."""

import asyncio
import contextlib
import math
import re
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import msgspec
import numpy as np

from enginepool.protocol.media import IMAGE_IDS, expected_tokens
from enginepool.protocol.messages import Capabilities, Sampling
from enginepool.protocol.sampling import GRAMMARS
from enginepool.workers.engine import Emit, EngineError, GenerationTask, NewTokens, TaskMedium
from enginepool.workers.room import Held, SharedRoom
from enginepool.workers.sglang.generate.adapter_loads import AdapterLoads
from enginepool.workers.sglang.generate.adapter_slots import AdapterSlots
from enginepool.workers.sglang.generate.media import (
    ROOM_BYTES,
    check_expanded,
    decoded_bytes,
    keeps_ids,
    longest_clip,
    media_error,
    plain,
    refuse_untaken,
)
from enginepool.workers.sglang.generate.new_tokens import SchedulerMessages
from enginepool.workers.sglang.generate.pausing import EnginePausing
from enginepool.workers.sglang.generate.prefill_admission import Prefill, PrefillAdmission
from enginepool.workers.sglang.generate.sampling import refuse_fatal, sampling_kwargs, unreadable, why_aborted
from enginepool.workers.sglang.generate.settings import prefill_tokens
from enginepool.workers.sglang.host.lifetime import one_line
from enginepool.workers.sglang.host.settings import Running

#: SGLang says this in place of a stop string.
_NOT_FINITE = "NaN happened"
_LOOK = "`enginepool weights validate` looks for NaN and infinity in the weights"
#: tokens of the first generations: a prefill, and decodes
_WARM_PROMPT, _WARM_TOKENS = 64, 4


class EngineGeneration:
    """Continues prompts on one engine. Its calls never return once the engine is gone: await them by `EngineEnd.unless_over`.

    Args:
        tokenizer_manager: SGLang's, which talks to the scheduler.
        requests: SGLang's module of request classes.
        capabilities: what the engine can do.
        running: what the engine runs with.
        processor: the logit processor of this package, as SGLang takes it.
        adapters: SGLang's records of LoRA adapters, by name.
    """

    def __init__(
        self, tokenizer_manager: Any, requests: Any, capabilities: Capabilities, running: Running, processor: str,
        adapters: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self._tm = tokenizer_manager
        self._requests = requests
        self._processor = processor
        #: for the media that are decoded now
        self.room = SharedRoom(ROOM_BYTES)
        self.longest_clip = longest_clip(self._tm) if "audio" in capabilities.features else 0.0
        if self._tm.mm_processor is not None:
            check_expanded(self._tm.mm_processor, capabilities.longest_sequence)
        settings = running.settings
        self.admission = PrefillAdmission(prefill_tokens(settings))
        self.messages = SchedulerMessages(tokenizer_manager, self.admission.forward_done)
        self.pausing = EnginePausing(tokenizer_manager, requests, settings, self.messages)
        pinned = [name for name, adapter in adapters.items() if adapter.pinned]
        self.adapters = AdapterSlots(settings.get("max_loras_per_batch") or 1, pinned)
        self.capabilities = capabilities
        self._loads = AdapterLoads(tokenizer_manager, requests, settings)
        self._deterministic = bool(settings.get("enable_deterministic_inference"))
        #: +1 when the engine runs larger priorities first, as the pool does; 0 when it knows none.
        self._priority_sign = -1 if settings.get("schedule_low_priority_values_first") else 1
        if not settings.get("enable_priority_scheduling"):
            self._priority_sign = 0

    async def warm_up(self) -> None:
        """Generate a few tokens, so that kernels are compiled. Raises EngineError.

        Twice: the second prompt is in the prefix cache. A prefill after cached tokens has kernels of its own, and so has each
        piece but the first of a prompt that is prefilled in pieces.
        """
        new = max(1, min(_WARM_TOKENS, self.capabilities.longest_sequence - 1))
        prompt = np.zeros(max(1, min(_WARM_PROMPT, self.capabilities.longest_sequence - new)), np.int32)
        task = GenerationTask(prompt, Sampling(max_new_tokens=new, ignore_eos=True), logprobs=True)
        for _ in range(2):
            await Sequences(self, task, lambda _: None).run()
        if "image" in self.capabilities.features and await keeps_ids(self._tm, self._requests):
            features = (*self.capabilities.features, IMAGE_IDS)
            self.capabilities = msgspec.structs.replace(self.capabilities, features=features)

    def forget(self) -> None:
        """The engine has dropped all prefixes. Nothing was noted of them here."""

    async def load_adapter(self, name: str, path: str) -> None:
        """Load an adapter. Raises EngineError."""
        await self._loads.load(name, path)
        self.capabilities = msgspec.structs.replace(self.capabilities, adapters=(*self.capabilities.adapters, name))

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter: no new task may name it. Raises EngineError."""
        left = tuple(one for one in self.capabilities.adapters if one != name)
        self.capabilities = msgspec.structs.replace(self.capabilities, adapters=left)
        await self._loads.unload(name)

    def check(self, task: GenerationTask) -> None:
        """Raise EngineError for a task that this engine cannot run."""
        refuse_fatal(task, self.capabilities, self._deterministic)
        refuse_untaken(task.media, self.capabilities)

    def ask(self, task: GenerationTask, prompt: list[int], given: Sequence[TaskMedium], sequence: int, rid: str) -> Any:
        """SGLang's stream of answers for one sequence of a task. `given`: its media, as SGLang takes them."""
        params = sampling_kwargs(task, self.capabilities.vocab, sequence, self._deterministic)
        media = {kind: [one.data for one in given if one.kind == kind] or None for kind in ("image", "video", "audio")}
        request = self._requests.GenerateReqInput(
            input_ids=prompt,
            image_data=media["image"],
            video_data=media["video"],
            audio_data=media["audio"],
            sampling_params=params,
            custom_logit_processor=self._processor if "custom_params" in params else None,
            rid=rid,
            stream=True,
            return_logprob=task.logprobs or bool(task.prompt_logprobs and not sequence),
            logprob_start_len=0 if task.prompt_logprobs and not sequence else -1,
            top_logprobs_num=task.top_logprobs,
            # Not `True`: each message would have those of all tokens so far, the prompt's among them.
            return_hidden_states="last" if task.hidden_states else False,
            return_routed_experts=task.routed_experts,
            require_reasoning=task.sampling.require_reasoning,
            lora_path=task.adapter or None,
            priority=task.priority * self._priority_sign if self._priority_sign else None,
        )
        return self._tm.generate_request(request, None)

    def abort(self, rid: str) -> bool:
        """Have the scheduler drop this request, which it answers once more then. False: it was not sent it, or has ended it."""
        state = self._tm.rid_to_state.get(rid)
        if state is None or not state.dispatched:
            return False
        self._tm.abort_request(rid)
        return True


class Sequences:
    """The sequences of one task. The first one computes the prompt; the others begin once it has, and find it in SGLang's
    cache."""

    def __init__(self, engine: EngineGeneration, task: GenerationTask, emit: Emit) -> None:
        engine.check(task)
        self._engine = engine
        self._task = task
        self._emit = emit
        self._prompt: list[int] = task.prompt.tolist()
        # Ids of one length: SGLang finds a request to abort by the beginning of its id.
        self._rids = [uuid.uuid4().hex for _ in range(task.n)]
        self._streams: list[asyncio.Task[None]] = []
        #: of the sequences that have not ended
        self._prefills: dict[int, Prefill] = {}
        self._prefilled = asyncio.Event()
        #: the task asks for more than tokens and their logprobs
        details = task.top_logprobs or task.prompt_logprobs or task.media or task.hidden_states or task.routed_experts
        self._detail = bool(details)
        self._prepared = bool(task.media) or any(getattr(task.sampling, name) for name in GRAMMARS)
        #: by sequence, where routed experts are asked for
        self._generated = [0] * task.n if task.routed_experts else []
        #: the first sequence has tokens
        self._began = False
        self._dropped = False
        #: what its prompt is expected to have in the engine
        self._tokens = len(self._prompt) + sum(expected_tokens(len(one.data)) for one in task.media)
        #: bytes of its decoded media, and what gives their room back: one for each sequence that has no tokens yet
        self._decoded = 0
        self._rooms: dict[int, Held] = {}
        #: sequences that were given up here, and why
        self._failed: dict[int, EngineError] = {}

    async def run(self) -> None:
        """Return once all have ended; cancelled, or when one failed, once the engine has dropped all. Raises EngineError."""
        self._decoded = await decoded_bytes(self._task.media, self._engine.longest_clip)
        self._streams = [asyncio.create_task(self._continue(0))]
        try:
            if self._task.n > 1:
                await self._prefilled.wait()
                if self._streams[0].done():
                    self._streams[0].result()
                self._streams += [asyncio.create_task(self._continue(one)) for one in range(1, self._task.n)]
            done, _ = await asyncio.wait(self._streams, return_when=asyncio.FIRST_EXCEPTION)
            for stream in done:
                stream.result()
        finally:
            await self._drop()

    async def _drop(self) -> None:
        """Abort what still runs, and wait until SGLang has answered that: an abandoned request would keep a lock that every
        weight update waits for."""
        self._dropped = True
        for rid, stream in zip(self._rids, self._streams, strict=False):
            if not stream.done() and not self._engine.abort(rid):
                stream.cancel()
        try:
            if running := [stream for stream in self._streams if not stream.done()]:
                await asyncio.wait(running)
        finally:
            for stream in self._streams:
                if stream.done() and not stream.cancelled():
                    stream.exception()  # looked at: the first one was raised
                stream.cancel()  # cancelled a second time, this waits for the engine no longer

    async def _continue(self, sequence: int) -> None:
        """Return at the end of a sequence, whose tokens are handed on meanwhile. Raises EngineError."""
        rid, takers = self._rids[sequence], self._engine.messages.takers
        # The prompt of a further sample is in SGLang's cache.
        tokens = 1 if sequence else self._tokens
        await self._engine.adapters.enter(self._task.adapter, self._task.priority)
        prefill = Prefill(self._engine.admission, tokens, self._task.priority, prepared=self._prepared)
        self._prefills[sequence] = prefill
        takers[rid] = partial(self._take, sequence)
        try:
            await prefill.turn
            if self._decoded:
                self._rooms[sequence] = await self._engine.room.take(self._decoded, self._task.priority)
            media = await plain(self._task.media)
            async with contextlib.aclosing(self._engine.ask(self._task, self._prompt, media, sequence, rid)) as answers:
                async for answer in answers:
                    if sequence not in self._failed:  # else it was aborted for that
                        _ending(answer["meta_info"]["finish_reason"], self._task.sampling)
        except EngineError:
            raise
        except re.error as error:
            raise unreadable(error, self._task.sampling.stop_regex) from None
        except Exception as error:
            raise EngineError(f"the engine refused the task: {media_error(one_line(error))}") from error
        finally:
            del takers[rid]
            prefill.over()
            self._give_back(sequence)
            self._engine.adapters.leave(self._task.adapter)
            self._prefilled.set()
        if sequence in self._failed:
            raise self._failed[sequence]

    def _give_back(self, sequence: int) -> None:
        """Its media are computed, or it has ended."""
        if (room := self._rooms.pop(sequence, None)) is not None:
            room.give_back()

    def _detailed(self, new: NewTokens, message: Any, place: int) -> NewTokens:
        """New tokens with the rest that the task asks for. Raises EngineError."""
        task = self._task
        if task.media and new.cached is not None:
            new = new._replace(prompt=message.prompt_tokens[place])
        if task.top_logprobs and new.tokens:
            ids, values = message.output_top_logprobs_idx[place], message.output_top_logprobs_val[place]
            if [*map(len, ids)] != [task.top_logprobs] * len(new.tokens) or [*map(len, values)] != [*map(len, ids)]:
                raise EngineError(f"top_logprobs: {len(ids)} rows for {len(new.tokens)} tokens; SGLang gave too few")
            new = new._replace(top_ids=ids, top_logprobs=values)
        if task.hidden_states and new.tokens:
            states = np.array([message.output_hidden_states[place]], np.float32)
            if states.shape != (len(new.tokens), self._engine.capabilities.hidden) or np.isnan(states).any():
                raise EngineError(f"hidden_states: {list(states.shape)} for {len(new.tokens)} tokens, or NaN; {_LOOK}")
            new = new._replace(hidden_states=states)
        if task.routed_experts:
            new = self._with_experts(new, message.routed_experts, place)
        if task.prompt_logprobs and new.cached is not None:
            new = self._with_prompt(new, message, place)
        return new

    def _with_experts(self, new: NewTokens, routed: list[Any], place: int) -> NewTokens:
        """New tokens with the routed experts of their sequence, if it has ended. Raises EngineError."""
        self._generated[new.sequence] += len(new.tokens)
        if not new.reason:
            return new
        # SGLang would write them as text for its own reader.
        tensor, routed[place] = routed[place], None
        expected = (len(self._prompt) + self._generated[new.sequence] - 1, *self._engine.capabilities.experts)
        if tensor is None or tuple(tensor.shape) != expected:
            shape = None if tensor is None else list(tensor.shape)
            raise EngineError(f"routed_experts: SGLang gave {shape}; expected {list(expected)}")
        return new._replace(routed_experts=tensor.numpy().astype(np.int16))

    def _with_prompt(self, new: NewTokens, message: Any, place: int) -> NewTokens:
        """New tokens with the log-probabilities of the prompt. Its first token has none. Raises EngineError."""
        count, top = self._task.prompt_logprobs, self._task.top_logprobs
        values = list(message.input_token_logprobs_val[place])[1:count]
        if len(values) + 1 != count or any(map(math.isnan, values)):
            raise EngineError(f"prompt_logprobs: {len(values) + 1} of {count} values, or NaN; {_LOOK}")
        new = new._replace(prompt_logprobs=[math.nan, *values])
        if not top:
            return new
        ids, chances = message.input_top_logprobs_idx[place][1:count], message.input_top_logprobs_val[place][1:count]
        if [*map(len, ids)] != [top] * (count - 1) or [*map(len, chances)] != [top] * (count - 1):
            raise EngineError(f"top_logprobs: {len(ids) + 1} rows for {count} tokens of the prompt; SGLang gave too few")
        return new._replace(prompt_top_ids=[[-1] * top, *ids], prompt_top_logprobs=[[math.nan] * top, *chances])

    def _take(
        self, sequence: int, tokens: list[int], logprobs: Sequence[float], reason: dict[str, Any] | None, cached: int,
        message: Any, place: int,
    ) -> None:  # fmt: skip
        """The next tokens of a sequence. Nothing is raised here: the engine's answers are read for all sequences at once."""
        found = None
        if tokens:
            self._prefills[sequence].began()
        if self._rooms:
            self._give_back(sequence)
        if not self._began and tokens:
            whole = message.prompt_tokens[place] if self._task.media else len(self._prompt)
            self._began, found = True, max(0, min(cached, whole))
            self._prefilled.set()
        if self._dropped or sequence in self._failed:
            return
        try:
            why, matched = _ending(reason, self._task.sampling)
            if any(map(math.isnan, logprobs)):
                raise EngineError(f"logprobs: NaN; {_LOOK}")
            if tokens or why:
                new = NewTokens(sequence, tokens, logprobs if self._task.logprobs else (), why, matched, found)
                self._emit(self._detailed(new, message, place) if self._detail else new)
        except Exception as error:
            self._failed[sequence] = error if isinstance(error, EngineError) else EngineError(one_line(error))
            if reason is None:
                self._engine.abort(self._rids[sequence])


def _ending(reason: dict[str, Any] | None, asked: Sampling) -> tuple[Literal["", "stop", "length"], int | str | None]:
    """(reason, what it stopped at) of `NewTokens`, from SGLang's reason. Raises EngineError: it gave the sequence up."""
    if reason is None:
        return "", None
    if reason["type"] == "length":
        return "length", None
    if reason["type"] != "stop":
        raise why_aborted(reason)
    matched = reason.get("matched")
    if matched == _NOT_FINITE:
        grammar = next((f"perhaps no token fits {name}; " for name in GRAMMARS if getattr(asked, name)), "")
        raise EngineError(f"the engine computed NaN; {grammar}{_LOOK}")
    return "stop", matched
