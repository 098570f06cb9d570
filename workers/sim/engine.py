"""A deterministic engine without a model: answers from `scores`, latency from a cost model, faults on demand.

Users dry-run a pool with it, and the tests of the pool check every answer against `scores.expected_scores`. It runs one
forward at a time, the waiting batch of the highest priority first and a step of the sequences after each. It counts more than
one forward for a batch that is over its budget, as a real engine would. Of a packed batch it counts the sequences, and it dies
of a part that does not belong there. When nothing costs anything, a batch is answered at once.
"""

import asyncio
import random
from typing import Any, get_args

import msgspec

from enginepool.protocol.adapters import LOADS_ADAPTERS
from enginepool.protocol.capabilities import halved
from enginepool.protocol.errors import WireError
from enginepool.protocol.media import IMAGE_IDS
from enginepool.protocol.messages import Capabilities, MediumKind
from enginepool.protocol.messages.control import MemoryTag
from enginepool.workers.engine import (
    BatchOutcome,
    Emit,
    EngineDied,
    EngineError,
    GenerationTask,
    PauseMode,
    Report,
    RowBatch,
)
from enginepool.workers.engine_settings import EngineSettings
from enginepool.workers.engine_weights import LOST_WEIGHTS
from enginepool.workers.forward_time import forward_ms, pace
from enginepool.workers.packed import MAX_ITEM, packed_cost, refuse_unpackable
from enginepool.workers.prefix_report import PrefixReport
from enginepool.workers.sglang.host.settings import CACHED_ROOM
from enginepool.workers.sim.faults import faults_of, faults_of_first_batch, faults_on_load, spoil, suffer
from enginepool.workers.sim.generation import SimGenerator
from enginepool.workers.sim.operation import Weights
from enginepool.workers.sim.options import Fault, SimOptions, read_options
from enginepool.workers.sim.profiler import SimProfiler
from enginepool.workers.sim.table import OPERATIONS
from enginepool.workers.sim.text import BYTE_OFFSET, TOKEN_BYTES, decoded, text_ids
from enginepool.workers.sim.turns import ForwardTurns
from enginepool.workers.sim.weights import SimWeights
from enginepool.workers.texts import TextIds, TextTask

#: tokens of the rows by which its pace is measured
PACE_LENGTH = 64


class SimEngine:
    """An `Engine`.

    Raises:
        ValueError: `options` has an unknown key or an impossible value; one line that names it.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self.options = o = read_options(settings.options)
        try:
            self.weights = SimWeights(o, self._must_live, self._suffer)
        except WireError as error:
            raise ValueError(f"options of engine sim: tensors: {error.message}") from None
        self.flushes = 0
        self.profiler = SimProfiler()
        #: released parts of its memory
        self._asleep: set[str] = set()
        #: LoRA adapters that were loaded since it started
        self._adapters = set[str]()
        tokens = min(o.batch_tokens, settings.max_batch_tokens or o.batch_tokens)
        rows = min(o.batch_rows, settings.max_batch_rows or o.batch_rows)
        self._operations = {one.name: one for one in OPERATIONS if one.serves(o)}
        sizes: dict[str, Any] = {}
        for operation in self._operations.values():
            sizes |= operation.sizes(o)
        cached = settings.cached_query_tokens or 0
        inflight_tokens = o.inflight_tokens or tokens * settings.forwards_in_flight * (CACHED_ROOM if cached else 1)
        packs = settings.packing != "off" and not cached and o.separator is None and "score" in self._operations
        if settings.packing == "on" and not packs:
            raise ValueError(f"packing = 'on': auto or off with kind = {o.kind!r} and separator = {o.separator} of engine sim")
        self._capabilities = Capabilities(
            kind=o.kind,
            vocab=o.vocab,
            context=min(o.context, inflight_tokens),
            batch_tokens=tokens,
            batch_rows=rows,
            inflight_tokens=inflight_tokens,
            inflight_rows=o.inflight_rows or rows * settings.forwards_in_flight,
            operations=tuple(self._operations),
            model=settings.model,
            engine="sim",
            device="none",
            text=o.vocab >= BYTE_OFFSET + 256,
            token_bytes=TOKEN_BYTES if o.vocab >= BYTE_OFFSET + 256 else 0,
            features=("chat_template",) if o.chat_template and o.vocab >= BYTE_OFFSET + 256 else (),
            max_item=MAX_ITEM if packs else 0,
            cached_query=cached,
            separator=o.separator,
            cached_tokens=max(tokens, inflight_tokens // settings.forwards_in_flight) if cached else 0,
            **sizes,
        )
        self._generator: SimGenerator | None = None
        self._turns = ForwardTurns()
        if settings.generates:
            if o.kind != "causal":
                raise ValueError(f"options of engine sim: kind = {o.kind!r}: must be 'causal' where operations has 'generate'")
            self._capabilities = can = self._generating(o, self._capabilities, settings)
            self._generator = SimGenerator(o, can.most_sequences, self._weights_now, self._suffer, self._turns)
        if (settings.mixed or not settings.generates) and any((o.forward_s, o.row_s, o.token_s)):
            self._capabilities = self._paced(o, self._capabilities)
        self._costs = any((o.forward_s, o.row_s, o.token_s))
        self._random = random.Random(o.seed)
        self._given = 0
        self._reason = ""
        self._dead = asyncio.Event()

    @staticmethod
    def _paced(o: SimOptions, can: Capabilities) -> Capabilities:
        """`can` with the pace that a warm-up would measure: by the smallest batch, and by a full one."""
        rows = max(1, min(can.batch_rows, can.batch_tokens // PACE_LENGTH))
        tokens = min(rows * PACE_LENGTH, can.batch_tokens)
        wanted_ms = forward_ms(o.forward_s + o.row_s + o.token_s)
        seconds = o.forward_s + rows * o.row_s + tokens * o.token_s
        measured = pace(tokens, seconds, wanted_ms, can.batch_tokens)
        return msgspec.structs.replace(can, pace=measured, packed_pace=measured if can.packs else 0, forward_ms=wanted_ms)

    @staticmethod
    def _generating(o: SimOptions, can: Capabilities, settings: EngineSettings) -> Capabilities:
        """`can` of an engine that generates, and maybe runs rows."""
        features = ("logit_processors", *((*get_args(MediumKind), IMAGE_IDS) if o.multimodal else ()))
        can = msgspec.structs.replace(can, adapters=tuple(sorted(o.adapters)), experts=o.experts, embedding=0)
        if settings.mixed:
            return msgspec.structs.replace(
                can, operations=settings.operations, features=features + can.features, hidden=0, max_item=0,
                sequences=o.sequences, sequence_tokens=o.sequence_tokens, sequence_context=min(o.context, o.sequence_tokens),
            )  # fmt: skip
        return msgspec.structs.replace(
            can, operations=("generate",), batch_rows=can.inflight_rows, batch_tokens=can.inflight_tokens, labels=0,
            max_item=0, cached_query=0, cached_tokens=0, features=(features[0], LOADS_ADAPTERS, *features[1:]),
        )  # fmt: skip

    async def start(self, report: Report, halvings: int = 0) -> Capabilities:
        """Take `load_s` and say what the options say."""
        self._capabilities = halved(self._capabilities, halvings)
        report("loading", self._capabilities.model)
        for fault in faults_on_load(self.options.faults):
            await suffer(fault)
        if self.options.load_s:
            await asyncio.sleep(self.options.load_s)
        report("compiling", "nothing to compile")
        for fault in faults_of_first_batch(self.options.faults):
            await suffer(fault, self._capabilities.inflight_rows)
        return self._capabilities

    def report_prefixes(self, report: PrefixReport) -> None:
        """Report the blocks of its prefix cache, if the options say so."""
        if self._generator is not None and self.options.kv_events:
            self._generator.cache.report = report

    async def load_adapter(self, name: str, path: str) -> None:
        """Take `adapter_s`, and know an adapter of that name. What is in its folder does not matter."""
        self._must_live()
        if self.options.adapter_s:
            await asyncio.sleep(self.options.adapter_s)
        self._adapters.add(name)

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter. Raises EngineError: a task uses it."""
        self._must_live()
        if self._generator is not None:
            await self._generator.leave(name)
        self._adapters.discard(name)

    async def flush(self) -> None:
        """Forget all prefixes, and count. Raises EngineError: a batch is inside."""
        self._must_live()
        if self._turns.busy or (self._generator is not None and self._generator.busy):
            raise EngineError("the sim engine was flushed while it ran a batch")
        if self._generator is not None:
            self._generator.cache.clear()
        self.flushes += 1

    async def sleep(self, tags: list[MemoryTag]) -> bool:
        """Take no work before it is woken. Raises EngineError: a batch is inside."""
        self._must_live()
        if self._turns.busy or (self._generator is not None and self._generator.busy):
            raise EngineError("the sim engine was put to sleep while it ran a batch")
        if again := self._asleep.intersection(tags):
            self._die(f"sim engine: released again: {', '.join(sorted(again))}")
        self._must_live()
        self._asleep.update(tags)
        if self._generator is not None and "kv_cache" in tags:
            self._generator.cache.clear()
        lost = "weights" in tags and self.options.sleep_loses_weights
        if lost:
            self.weights.version, self.weights.digest = 0, LOST_WEIGHTS
        return lost

    async def wake(self, tags: list[MemoryTag]) -> None:
        """Take back what it released."""
        self._must_live()
        if awake := set(tags) - self._asleep:
            self._die(f"sim engine: taken back, and was not released: {', '.join(sorted(awake))}")
        self._must_live()
        self._asleep.difference_update(tags)

    async def died(self) -> str:
        """Wait until a `crash` fault has happened; return its reason."""
        await self._dead.wait()
        return self._reason

    async def close(self) -> None:
        """Nothing is held; returns at once."""

    async def tokenize(self, task: TextTask) -> TextIds:
        """As `text.text_ids` says. Raises WireError `bad_request`, or EngineError."""
        if not self._capabilities.text:
            raise EngineError(f"a vocabulary of {self.options.vocab} has no room for the bytes of text")
        return text_ids(task, self.options.separator)

    async def decode(self, rows: list[list[int]], *, skip_special_tokens: bool, long: bool = False) -> list[str]:
        """As `text.decoded` says."""
        return [decoded(row, skip_special_tokens=skip_special_tokens) for row in rows]

    async def score(self, batch: RowBatch) -> BatchOutcome:
        """Run one batch, after the running one and those of higher priority."""
        self._given += 1
        self._must_be_awake()
        if batch.operation not in self._capabilities.operations:
            raise EngineError(f"{batch.operation}: this engine runs {', '.join(self._capabilities.operations)}")
        if batch.packed:
            self._must_pack(batch)
        faults = faults_of(self.options.faults, batch, self._given) if self.options.faults else []
        if not faults and not self._costs and not self._turns.busy:
            return self._answer(batch)
        await self._turns.take(batch.priority)
        try:
            self._must_live()
            for fault in faults:
                await self._suffer(fault, sum(len(part.item_lengths) for part in batch.parts))
            if self._costs:
                await asyncio.sleep(self._seconds(batch))
            return spoil(self._answer(batch), batch, faults)
        finally:
            self._turns.pass_on()

    async def generate(self, task: GenerationTask, emit: Emit) -> None:
        """Continue a prompt, together with all others."""
        self._must_be_awake()
        if self._generator is None:
            raise EngineError(f"generate: this engine runs {', '.join(self._capabilities.operations)}")
        if task.adapter and task.adapter not in {*self._capabilities.adapters, *self._adapters}:
            raise EngineError(f"adapter: this engine has no {task.adapter!r}")
        if task.hidden_states and not self._capabilities.hidden:
            raise EngineError("hidden_states: options.hidden is 0")
        if task.routed_experts and not self.options.experts[0]:
            raise EngineError("routed_experts: options.experts is [0, 0]")
        await self._generator.generate(task, emit)

    def check_pause(self, mode: PauseMode) -> None:
        """Raise EngineError where it does not generate."""
        if self._generator is None:
            raise EngineError(f"pause {mode}: this engine runs {', '.join(self._capabilities.operations)}")

    async def pause(self, mode: PauseMode, *, confirmed: bool = True) -> None:
        """Stop after the running step. Raises EngineError: it does not generate."""
        self._must_live()
        self.check_pause(mode)
        assert self._generator is not None
        await self._generator.pause(mode)

    async def resume(self) -> None:
        """Go on."""
        self._must_live()
        if self._generator is not None:
            self._generator.resume()

    def _weights_now(self) -> Weights:
        return Weights(self.options.seed, self.weights.version, self.weights.digest)

    def _must_live(self) -> None:
        if self._reason:
            raise EngineDied(self._reason)

    def _must_be_awake(self) -> None:
        self._must_live()
        if self._asleep:
            self._die(f"sim engine: given work while it sleeps: {', '.join(sorted(self._asleep))}")
            raise EngineDied(self._reason)

    def _die(self, reason: str) -> None:
        self._reason = reason
        self._dead.set()

    def _must_pack(self, batch: RowBatch) -> None:
        try:
            for part in batch.parts:
                refuse_unpackable(part, self._capabilities)
        except EngineError as error:
            self._die(f"sim engine: {error}")
            raise EngineDied(self._reason) from None

    async def _suffer(self, fault: Fault, rows: int = 0) -> None:
        try:
            await suffer(fault, rows)
        except EngineDied as error:
            self._die(str(error))
            raise

    # --- costs and answers ----------------------------------------------------------------------------------------------

    def _seconds(self, batch: RowBatch) -> float:
        o = self.options
        rows = sum(len(part.item_lengths) for part in batch.parts)
        seconds = o.forward_s + rows * o.row_s + self._tokens(batch) * o.token_s
        return seconds * (1 + o.jitter * (2 * self._random.random() - 1)) if o.jitter else seconds

    def _tokens(self, batch: RowBatch) -> int:
        if batch.packed:
            return packed_cost(batch.parts, self._capabilities)
        return sum(part.tokens for part in batch.parts)

    def _answer(self, batch: RowBatch) -> BatchOutcome:
        o, operation = self.options, self._operations[batch.operation]
        if batch.hidden and not o.hidden:
            raise EngineError("hidden states are not available: options.hidden is 0")
        weights = self._weights_now()
        parts = tuple(operation.outputs(part, o, weights, hidden=batch.hidden) for part in batch.parts)
        return BatchOutcome(parts, self._forwards(batch), self.weights.version)

    def _forwards(self, batch: RowBatch) -> int:
        """Greedy admission of rows: how many forwards the batch takes under the budget."""
        rows = sum(len(part.item_lengths) for part in batch.parts)
        tokens = self._tokens(batch)
        budget = self._capabilities
        most = budget.batch_tokens
        if len(batch.parts) == 1 and 0 < budget.cached_query <= batch.parts[0].shared:
            most = budget.cached_tokens
        if rows <= 1 or (tokens <= most and rows <= budget.batch_rows):
            return 1
        if batch.packed:
            return max(-(-tokens // budget.batch_tokens), -(-rows // budget.batch_rows))
        forwards, rows, tokens = 1, 0, 0
        for part in batch.parts:
            for prompt in part.prompts():
                if rows and (rows == budget.batch_rows or tokens + len(prompt) > most):
                    forwards, rows, tokens = forwards + 1, 0, 0
                rows, tokens = rows + 1, tokens + len(prompt)
        return forwards
