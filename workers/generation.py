"""Generations inside the engine: each is a task of the loop, and what all of them generate in one turn is one message."""

import asyncio
import math
import time
from array import array
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from enginepool.protocol.generated import column_specs, prompt_specs
from enginepool.protocol.messages import MAX_MATCHED, MAX_SEQUENCES, MAX_TOP_LOGPROBS, FrameSpec, Step, TaskId
from enginepool.workers.between_batches import BetweenBatches
from enginepool.workers.codec import decode_generation
from enginepool.workers.engine import Engine, EngineDied, EngineError, Floats, GenerationTask, NewTokens
from enginepool.workers.events import EngineLost, Frame, GenerationLeft, RunGeneration, StepsDone, WorkerEvent
from enginepool.workers.failures import reason_of
from enginepool.workers.media_reader import MediaReader

_ENDED = -1
#: Bytes of hidden states and routed experts of one message, so that tokens of others are not behind a long one. A single step
#: may have more.
MOST_DETAILS = 1 << 20


class OutgoingSteps:
    """The new tokens of all generations, until the loop's next turn. This is the hot path: once for each token.

    Args:
        feed: takes a `StepsDone` with all of them.
        top: `top_logprobs` of all of them. All of them have hidden states, or none has.
    """

    def __init__(self, feed: Callable[[WorkerEvent], None], top: int = 0) -> None:
        self._feed = feed
        self._top = top
        self._epoch = 0
        self._clear()
        self._due = False

    def _clear(self) -> None:
        self._steps: list[Step] = []
        self._tokens = array("i")
        #: as many as tokens, NaN where none were asked for; None: none were asked for yet
        self._logprobs: array[float] | None = None
        self._cached: list[tuple[int, int]] = []
        self._top_ids, self._top_logprobs = array("i"), array("f")
        self._prompts: list[tuple[int, int]] = []
        self._lengths: list[tuple[int, int]] = []
        self._prompt_logprobs, self._prompt_top_ids, self._prompt_top_logprobs = array("f"), array("i"), array("f")
        self._states: list[Floats] = []
        self._experts: list[tuple[int, int, int]] = []
        self._routes: list[npt.NDArray[np.int16]] = []
        self._details_bytes = 0

    def add(self, epoch: int, step: Step, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """The next tokens of a sequence."""
        if epoch != self._epoch:
            self._clear()  # work of an earlier epoch was dropped
            self._epoch = epoch
        self._steps.append(step)
        if logprobs and self._logprobs is None:
            self._logprobs = array("f", [math.nan]) * len(self._tokens)
        self._tokens.extend(tokens)
        if self._logprobs is not None:
            self._logprobs.extend(logprobs or [math.nan] * len(tokens))
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self.flush)

    def add_cached(self, counter: int, tokens: int, prompt: int | None) -> None:
        """The task whose first tokens were just added had so many tokens of its prompt in the engine's prefix cache. `prompt`:
        of how many, where its ids do not tell."""
        self._cached.append((counter, tokens))
        if prompt is not None:
            self._lengths.append((counter, prompt))

    def add_prompt(self, counter: int, new: NewTokens) -> None:
        """The log-probabilities of the prompt of that task."""
        self._prompts.append((counter, len(new.prompt_logprobs)))
        self._prompt_logprobs.extend(new.prompt_logprobs)
        self._prompt_top_ids.extend(chain.from_iterable(new.prompt_top_ids))
        self._prompt_top_logprobs.extend(chain.from_iterable(new.prompt_top_logprobs))

    def add_details(self, counter: int, new: NewTokens) -> None:
        """What there is of the tokens that were just added besides their logprobs."""
        self._top_ids.extend(chain.from_iterable(new.top_ids))
        self._top_logprobs.extend(chain.from_iterable(new.top_logprobs))
        if new.hidden_states is not None:
            self._states.append(new.hidden_states)
            self._details_bytes += new.hidden_states.nbytes
        if new.routed_experts is not None:
            self._experts.append((counter, new.sequence, len(new.routed_experts)))
            self._routes.append(new.routed_experts)
            self._details_bytes += new.routed_experts.nbytes
        if self._details_bytes > MOST_DETAILS:
            self.flush()

    def flush(self) -> None:
        """Hand over what is there now."""
        self._due = False
        if not self._steps:
            return
        shape = (len(self._tokens),)
        specs = [FrameSpec("tokens", "int32", shape)]
        frames: list[Frame] = [self._tokens.tobytes()]
        if self._logprobs is not None:
            specs.append(FrameSpec("logprobs", "float32", shape))
            frames.append(self._logprobs.tobytes())
        if self._top and self._logprobs is not None:
            specs += column_specs(len(self._tokens), False, self._top)
            frames += (self._top_ids.tobytes(), self._top_logprobs.tobytes())
        if self._states:
            states = np.concatenate(self._states, dtype=np.float32)
            specs += column_specs(len(self._tokens), False, 0, states.shape[1])
            frames.append(states.data.cast("B"))
        if self._routes:
            routes = np.concatenate(self._routes, dtype=np.int16)
            rows, layers, k = routes.shape
            specs.append(FrameSpec("routed_experts", "int16", (rows * layers, k)))
            frames.append(routes.data.cast("B"))
        if self._prompts:
            specs += prompt_specs(self._prompts, self._top)
            frames.append(self._prompt_logprobs.tobytes())
            if self._top:
                frames += (self._prompt_top_ids.tobytes(), self._prompt_top_logprobs.tobytes())
        told = self._cached, self._prompts, self._lengths, self._experts
        event = StepsDone(time.monotonic(), self._epoch, self._steps, specs, tuple(frames), *told)
        self._clear()
        self._feed(event)


class RunningGeneration:
    """One task: at which positions its sequences are."""

    __slots__ = ("_at", "_out", "stopped", "task", "work")

    def __init__(self, run: RunGeneration, out: OutgoingSteps) -> None:
        self.task = run.message.task
        #: cancelled: what it still generates is dropped
        self.stopped = False
        self.work: asyncio.Task[None] | None = None
        self._out = out
        # What is out of bounds is refused with the rest of the message.
        self._at = [max(0, run.message.at)] * min(max(1, run.message.n), MAX_SEQUENCES)

    def emit(self, new: NewTokens) -> None:
        """The engine has generated tokens."""
        if self.stopped:
            return
        sequence, tokens = new.sequence, new.tokens
        at, count, matched = self._at[sequence], len(tokens), new.matched
        self._at[sequence] = _ENDED if new.reason else at + count
        if isinstance(matched, str):
            matched = _cut(matched)
        epoch, counter = self.task
        self._out.add(epoch, Step(counter, sequence, at, count, new.reason, matched), tokens, new.logprobs)
        if new.cached is not None:
            self._out.add_cached(counter, new.cached, new.prompt)
        if new.prompt_logprobs:
            self._out.add_prompt(counter, new)

    def emit_details(self, new: NewTokens) -> None:
        """As `emit`, for a task with `top_logprobs`, `hidden_states` or `routed_experts`."""
        if not self.stopped:
            self.emit(new)
            self._out.add_details(self.task[1], new)

    def fail(self, why: str, code: str = "engine_error") -> None:
        """The engine is done with it. Its first sequence that has not ended, if there is one, says why."""
        reason: Literal["error", "refused"] = "refused" if code == "bad_request" else "error"
        for sequence, at in enumerate(self._at):
            if at != _ENDED:
                epoch, counter = self.task
                self._out.add(epoch, Step(counter, sequence, at, 0, reason, _cut(" ".join(why.split()))), (), ())
                break
        self._out.flush()


def _cut(text: str) -> str:
    """As many of its characters as `matched` has room for."""
    return text.encode(errors="replace")[:MAX_MATCHED].decode(errors="ignore")


class GenerationRunner:
    """Performs `RunGeneration` and `CancelGenerations`.

    Args:
        feed: takes what happens.
        spawn: runs a coroutine at the same time as the loop's other work.
        between: the door of the engine.
        media: reads what tasks name by URL and path; none: nothing is read.
    """

    def __init__(
        self,
        engine: Engine,
        feed: Callable[[WorkerEvent], None],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        between: BetweenBatches,
        media: MediaReader | None = None,
    ) -> None:
        self._engine, self._feed, self._spawn, self._between = engine, feed, spawn, between
        self._media = media or MediaReader("", ())
        #: by `top_logprobs` and `hidden_states`
        self._out = {(0, False): OutgoingSteps(feed)}
        self._running: dict[TaskId, RunningGeneration] = {}
        #: the engine hears later that these were cancelled; None: at once
        self._deferred: list[RunningGeneration] | None = None
        #: runs when one has left, and none is wanted any more
        self.none_wanted: Callable[[], Coroutine[Any, Any, None]] | None = None

    @property
    def wanted(self) -> int:
        """Generations inside that were not cancelled."""
        return sum(not one.stopped for one in self._running.values())

    @property
    def defers(self) -> bool:
        """Generations inside were cancelled, and the engine has not heard of that."""
        return bool(self._deferred)

    def run(self, run: RunGeneration) -> None:
        """Give a generation to the engine."""
        top = min(max(0, run.message.top_logprobs), MAX_TOP_LOGPROBS)
        kind = top, run.message.hidden_states
        if kind not in self._out:
            self._out[kind] = OutgoingSteps(self._feed, top)
        one = RunningGeneration(run, self._out[kind])
        self._running[one.task] = one
        one.work = self._spawn(self._generate(run, one))
        # Not in the coroutine: one that is cancelled before its first step does not run at all.
        one.work.add_done_callback(partial(self._left, one))

    def cancel(self, tasks: Sequence[TaskId]) -> None:
        """The engine drops these."""
        for task in tasks:
            one = self._running[task]
            one.stopped = True
            assert one.work is not None
            if self._deferred is not None:
                self._deferred.append(one)
            else:
                one.work.cancel()

    async def defer_cancels(self) -> None:
        """The engine is about to be paused between two steps: it would drop a sequence only with its next one, also if it takes
        it back into its queue meanwhile. From now on it hears of no `cancel`. Waits until those have left that it heard of."""
        self._deferred = [] if self._deferred is None else self._deferred
        await self.cancelled_left()

    async def cancelled_left(self) -> None:
        """Wait until those have left of whose `cancel` the engine has heard."""
        while leaving := [one.work for one in self._running.values() if one.work is not None and one.work.cancelling()]:
            await asyncio.wait(leaving)

    def cancel_deferred(self) -> None:
        """The engine hears of each `cancel` again, and of those that it did not hear of."""
        deferred, self._deferred = self._deferred, None
        for one in deferred or ():
            assert one.work is not None
            one.work.cancel()

    async def _generate(self, run: RunGeneration, one: RunningGeneration) -> None:
        if run.unreadable:
            raise EngineError(run.unreadable)
        task = decode_generation(run.message, run.frames)
        if all(medium.source == "bytes" for medium in task.media):
            await self._run_in_engine(task, one)
            return
        async with self._media.reading(task.media) as media:
            await self._run_in_engine(replace(task, media=media), one)

    async def _run_in_engine(self, task: GenerationTask, one: RunningGeneration) -> None:
        async with self._between.batch():
            details = task.top_logprobs or task.hidden_states or task.routed_experts
            await self._engine.generate(task, one.emit_details if details else one.emit)

    def _left(self, one: RunningGeneration, work: asyncio.Task[None]) -> None:
        del self._running[one.task]
        error = None if work.cancelled() else work.exception()
        if isinstance(error, EngineDied):
            self._feed(EngineLost(time.monotonic(), str(error)))
            return
        if work.cancelling() and not one.stopped:
            return  # this process ends
        why, code = "the engine returned before the sequence had ended", "engine_error"
        if isinstance(error, Exception):
            why, code = reason_of(error, f"generation {one.task}")
        if not one.stopped:
            one.fail(why, code)
        self._feed(GenerationLeft(time.monotonic(), one.task))
        if self.none_wanted is not None and all(other.stopped for other in self._running.values()):
            self._spawn(self.none_wanted())
