"""How the sim engine generates: all its sequences get one token in each step, as in a running batch."""

import asyncio
import hashlib
import heapq
from array import array
from collections.abc import Awaitable, Callable, Sequence

from enginepool.protocol.prefix_blocks import BLOCK as KV_BLOCK
from enginepool.workers.engine import Emit, EngineError, GenerationTask, NewTokens, PauseMode, TaskMedium
from enginepool.workers.sim.faults import faults_of_step, faults_of_task
from enginepool.workers.sim.operation import Weights
from enginepool.workers.sim.options import Fault, SimOptions
from enginepool.workers.sim.prefix_cache import BLOCK, SimPrefixCache
from enginepool.workers.sim.tokens import SimSequence, prompt_logprobs, prompt_top_of, routed_experts, top_of
from enginepool.workers.sim.turns import ForwardTurns


def media_ids(media: Sequence[TaskMedium]) -> bytes:
    """What media are to the sim engine: ids ahead of their prompt, as bytes of int32. They are a digest of the media."""
    if not media:
        return b""
    digest = hashlib.sha256()
    for one in media:
        digest.update(f"{one.kind} {len(one.data)} ".encode() + one.data)
    return digest.digest()


class _Entry:
    """A task: its sequences wait for slots, or run."""

    def __init__(self, task: GenerationTask, emit: Emit, options: SimOptions, number: int) -> None:
        self.task, self.emit, self.number = task, emit, number
        self.prompt = prompt = media_ids(task.media) + task.prompt.astype("<i4").tobytes()
        #: the tokens of each sequence so far
        self.output = [array("i") for _ in range(task.n)]
        #: tokens of its prompt that were in the cache; None: not known, or told
        self.cached: int | None = None
        self.sequences = {i: SimSequence(prompt, task.sampling, i, options.vocab, options.end_every) for i in range(task.n)}
        #: its caller has gone
        self.dropped = False
        self.left: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def leave(self, error: Exception | asyncio.CancelledError | None = None) -> None:
        self.sequences.clear()
        if self.left.done():
            return
        if isinstance(error, asyncio.CancelledError):
            self.left.cancel()
        elif error is None or self.dropped:
            self.left.set_result(None)
        else:
            self.left.set_exception(error)


class SimGenerator:
    """The running batch.

    Args:
        slots: sequences that run at once; others wait, by priority.
        weights: those of now.
        suffer: has the engine suffer a fault, with so many rows.
        turns: each step is a forward.
    """

    def __init__(
        self,
        options: SimOptions,
        slots: int,
        weights: Callable[[], Weights],
        suffer: Callable[[Fault, int], Awaitable[None]],
        turns: ForwardTurns,
    ) -> None:
        self._turns = turns
        self._options, self._slots, self._weights, self._suffer = options, slots, weights, suffer
        self._given = self._steps = 0
        self.cache = SimPrefixCache(options.cache_tokens, KV_BLOCK if options.kv_events else BLOCK)
        #: (-priority, number, sequence, task)
        self._waiting: list[tuple[int, int, int, _Entry]] = []
        #: the sequences with a slot
        self._running: list[tuple[_Entry, int]] = []
        #: a caller has gone since the last step
        self._dropped = False
        self._loop: asyncio.Task[None] | None = None
        #: held for each step; clear while the engine is paused
        self._stepping = asyncio.Lock()
        self._unpaused = asyncio.Event()
        self._unpaused.set()

    @property
    def busy(self) -> bool:
        """Whether a task is inside."""
        return self._loop is not None

    async def generate(self, task: GenerationTask, emit: Emit) -> None:
        """As `Engine.generate`."""
        self._given += 1
        entry = _Entry(task, emit, self._options, self._given)
        for i in entry.sequences:
            heapq.heappush(self._waiting, (-task.priority, self._given, i, entry))
        if self._loop is None:
            self._loop = asyncio.create_task(self._run())
        try:
            await asyncio.shield(entry.left)
        except asyncio.CancelledError:
            if not entry.left.done():
                entry.dropped = self._dropped = True
                if not self._unpaused.is_set() and not self._running:
                    self._drop()
                await entry.left
            raise

    async def pause(self, mode: PauseMode) -> None:
        """As `Engine.pause`."""
        self._unpaused.clear()
        async with self._stepping:
            if mode == "retract":
                for entry, i in self._running:
                    heapq.heappush(self._waiting, (-entry.task.priority, entry.number, i, entry))
                self._running = []

    def resume(self) -> None:
        """As `Engine.resume`."""
        self._unpaused.set()

    async def _run(self) -> None:
        try:
            while self._waiting or self._running:
                await self._unpaused.wait()
                await self._turns.take(None)
                try:
                    async with self._stepping:
                        if self._unpaused.is_set() and self._entries():
                            await self._step()
                finally:
                    self._turns.pass_on()
        except (Exception, asyncio.CancelledError) as error:  # it died, or this process ends: all callers hear of it
            for entry in self._entries():
                entry.leave(error)
            self._waiting, self._running = [], []
        finally:
            self._loop = None

    async def _step(self) -> None:
        """One forward, and what it generated."""
        o = self._options
        tokens = await self._admit()
        self._steps += 1
        for fault in faults_of_step(o.faults, self._steps):
            try:
                await self._suffer(fault, len(self._running))
            except EngineError as error:
                for entry, _ in self._running:
                    entry.leave(EngineError(str(error)))
        rows = len(self._running)
        await asyncio.sleep(o.forward_s + rows * o.row_s + (rows + tokens) * o.token_s)
        weights = self._weights()
        if self._dropped:
            self._drop()
        for entry, i in self._running:
            if i in entry.sequences:
                self._next(entry, i, weights)
        self._running = [(entry, i) for entry, i in self._running if i in entry.sequences]

    async def leave(self, adapter: str) -> None:
        """Wait until the step is over in which tasks of this adapter leave. Raises EngineError: one is still wanted."""
        while users := [entry for entry in self._entries() if entry.task.adapter == adapter]:
            if any(not entry.dropped for entry in users):
                raise EngineError(f"adapter {adapter} was unloaded while a task used it")
            await asyncio.sleep(0.001)

    def _entries(self) -> list[_Entry]:
        """The tasks inside; a task with several sequences several times."""
        return [*(entry for *_, entry in self._waiting), *(entry for entry, _ in self._running)]

    def _drop(self) -> None:
        """Tasks without a caller leave."""
        self._dropped = False
        for entry in self._entries():
            if entry.dropped:
                entry.leave()
        self._waiting = [waiting for waiting in self._waiting if not waiting[3].dropped]
        heapq.heapify(self._waiting)

    async def _admit(self) -> int:
        """Fill free slots. Returns the tokens of the prompts that the next forward computes."""
        tokens = 0
        while self._waiting and len(self._running) < self._slots:
            *_, i, entry = heapq.heappop(self._waiting)
            if i not in entry.sequences:
                continue  # its task has failed
            self._running.append((entry, i))
            if entry.output[i]:
                tokens += len(entry.prompt) // 4 + len(entry.output[i])  # it was retracted
                continue
            if i:
                continue  # its prompt is computed once
            weights = self._weights()
            entry.cached = self.cache.found(entry.prompt, weights, entry.task.adapter)
            self.cache.add(entry.prompt, weights, entry.task.adapter)
            tokens += len(entry.prompt) // 4 - entry.cached
            for fault in faults_of_task(self._options.faults, entry.task.prompt, entry.number):
                try:
                    await self._suffer(fault, len(self._running) + len(entry.sequences) - 1)
                except EngineError as error:
                    entry.leave(EngineError(str(error)))
        return tokens

    def _next(self, entry: _Entry, i: int, weights: Weights) -> None:
        task, states = entry.task, None
        adapted = weights.with_adapter(task.adapter) if task.adapter else weights
        if task.hidden_states:
            states = entry.sequences[i].hidden_state(adapted, self._options.hidden)
        token, logprob, reason = drawn = entry.sequences[i].next(adapted)
        entry.output[i].append(token)
        if reason:
            del entry.sequences[i]
            self.cache.add(entry.prompt + entry.output[i].tobytes(), weights, task.adapter)
        matched = token if reason == "stop" else None
        new = NewTokens(i, (token,), (logprob,) if task.logprobs else (), reason, matched, entry.cached if not i else None)
        if states is not None:
            new = new._replace(hidden_states=states)
        if reason and task.routed_experts:
            whole = entry.prompt + entry.output[i].tobytes()
            new = new._replace(routed_experts=routed_experts(whole, self._options.experts, weights))
        if task.top_logprobs:
            ids, logprobs = top_of(drawn, task.top_logprobs, self._options.vocab)
            new = new._replace(top_ids=(ids,), top_logprobs=(logprobs,))
        if new.cached is not None and task.media:
            new = new._replace(prompt=len(entry.prompt) // 4)
        if new.cached is not None and task.prompt_logprobs:
            known = prompt_logprobs(entry.prompt, task.prompt_logprobs, adapted)
            ids, chances = prompt_top_of(entry.prompt, known, task.top_logprobs, self._options.vocab)
            new = new._replace(prompt_logprobs=known, prompt_top_ids=ids, prompt_top_logprobs=chances)
        entry.emit(new)
        if not i:
            entry.cached = None
        if not entry.sequences:
            entry.leave()
