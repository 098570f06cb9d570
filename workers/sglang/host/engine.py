"""The real engine: the life of one `sglang.Engine` in this process, from its start to its end. No SGLang here.

One engine in a process, on the main thread's loop: stopping it kills every process that this one started in the meantime.
What it is built from, what it can do, how it scores and how it takes new weights have files of their own.
"""

import asyncio
import contextlib
import signal
from collections.abc import Callable
from typing import Any

from enginepool.protocol.capabilities import halved
from enginepool.protocol.messages import Capabilities
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
from enginepool.workers.prefix_report import PrefixReport
from enginepool.workers.sglang.generate.kv_events import read_kv_events, with_endpoint
from enginepool.workers.sglang.generate.pausing import pausing_of
from enginepool.workers.sglang.generate.sequences import EngineGeneration, Sequences
from enginepool.workers.sglang.host.build import PreparedEngine, prepare
from enginepool.workers.sglang.host.capabilities import adapters_of, capabilities_of, what_runs
from enginepool.workers.sglang.host.failed_start import failed_start
from enginepool.workers.sglang.host.host import EngineHost
from enginepool.workers.sglang.host.lifetime import EngineEnd, one_line
from enginepool.workers.sglang.host.memory import EngineMemory
from enginepool.workers.sglang.host.process import no_garbage_collection
from enginepool.workers.sglang.host.processes import Processes
from enginepool.workers.sglang.host.profiler import SglangProfiler
from enginepool.workers.sglang.host.settings import Running
from enginepool.workers.sglang.score.forward_counter import Entries
from enginepool.workers.sglang.score.scoring import EngineScoring
from enginepool.workers.sglang.score.token_types import send_token_types
from enginepool.workers.sglang.score.warmup import warm_up
from enginepool.workers.sglang.text.engine_tokenizer import EngineTokenizer
from enginepool.workers.sglang.weights.updates import SglangWeights
from enginepool.workers.texts import TextIds, TextTask

#: how long SGLang may take to become idle, of which a worker that has no batch inside needs nothing
FLUSH_S = 10.0
#: how long it may take until it is known which process of an engine was killed
KILLED_S = 1.0


class SglangEngine:
    """One SGLang engine behind the worker's engine interface."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._prepared: PreparedEngine | None = None
        self._host: EngineHost | None = None
        #: SGLang's tokenizer manager: the one way to ask the engine anything
        self._tm: Any = None
        #: None until they are warm; an engine has one of them, or both
        self._scoring: EngineScoring | None = None
        self._generation: EngineGeneration | None = None
        self._capabilities: Capabilities | None = None
        self._end = EngineEnd()
        self._weights: SglangWeights | None = None
        self._memory: EngineMemory | None = None
        self._profiler: SglangProfiler | None = None
        self._receiver: asyncio.Task[None] | None = None
        self._prefixes: PrefixReport | None = None
        self._events: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._tokenizer = EngineTokenizer()

    # --- start -----------------------------------------------------------------------------------------------------

    async def start(self, report: Report, halvings: int = 0) -> Capabilities:
        """Load the model, warm it up and say what it can do, with budgets that are halved so many times. Raises EngineDied with
        the reason when it cannot.

        EngineUnusable when no later start with the same settings could either.
        """
        loop = asyncio.get_running_loop()
        try:
            # A scheduler that fails tells its parent by SIGQUIT, whose default action is to die without a word.
            loop.add_signal_handler(signal.SIGQUIT, self._on_sigquit)
        except (ValueError, RuntimeError) as error:
            raise EngineDied("the engine must be started on the main thread: it learns of its end by a signal") from error
        report("loading", self._settings.model)

        def lost(reason: str) -> None:
            loop.call_soon_threadsafe(self._end.lose, reason)

        self._host = EngineHost(self._build, lost)
        try:
            self._settings, endpoint = with_endpoint(self._settings, self._host.folder)
            if endpoint and self._prefixes is not None:
                self._events = asyncio.create_task(read_kv_events(endpoint, self._prefixes))
            engine = await self._end.unless_over(asyncio.wrap_future(self._host.start()))
            prepared, self._tm = self._prepared, engine.tokenizer_manager
            assert prepared is not None
            settings = prepared.settings
            if not settings.generates:
                send_token_types(self._tm)
            self._receive()
            running = await self._end.unless_over(what_runs(engine))
            capabilities = capabilities_of(self._tm, self._settings.model, prepared.version, settings, running)
            capabilities = halved(capabilities, halvings)
            scoring, generation = self._works(prepared, capabilities, running)

            def forget() -> None:
                for work in filter(None, (scoring, generation)):
                    work.forget()

            self._weights = self._weights_of(prepared, running, forget)
            # Before the first forward: an incomplete model is refused with the reason, not with what its forward runs into.
            await self._weights.describe()
            report("compiling", "the first forward")
            capabilities = await self._end.unless_over(self._warm_up(scoring, generation, capabilities))
            if self._weights.plain:
                report("compiling", f"weight updates of this model are loaded plainly: {self._weights.plain}")
            await self._tm.freeze_gc()  # no collection in the engine's processes walks through what start-up left
        except EngineDied:
            await self.close()
            raise
        except Exception as error:
            failed = failed_start(self._settings.model, error, self._host.last_error())
            await self.close()
            raise failed from error
        return capabilities

    def _works(
        self, prepared: PreparedEngine, can: Capabilities, running: Running
    ) -> tuple[EngineScoring | None, EngineGeneration | None]:
        """What it is for."""
        scoring = generation = None
        if prepared.settings.generates:
            generation = EngineGeneration(self._tm, prepared.requests, can, running, prepared.processor, adapters_of(self._tm))
        if prepared.settings.mixed or not prepared.settings.generates:
            # After generation: what that reads of a message of SGLang, it hands on without the times of its rows.
            entries = Entries(self._tm, prepared.requests.unwrap_from_pickle)
            scoring = EngineScoring(self._tm, prepared.requests, entries, can, running)
        return scoring, generation

    async def _warm_up(
        self, scoring: EngineScoring | None, generation: EngineGeneration | None, can: Capabilities
    ) -> Capabilities:
        """Run its first forwards; from then on the engine serves. Returns `can`, completed."""
        if scoring is not None:
            can = await warm_up(scoring)
        if generation is not None:
            generation.capabilities = can
            await generation.warm_up()
            can = generation.capabilities
        if scoring is not None:
            scoring.capabilities = can
        self._capabilities, self._scoring, self._generation = can, scoring, generation
        return can

    def _weights_of(self, prepared: PreparedEngine, running: Running, forget: Callable[[], None]) -> SglangWeights:
        tm, requests, unless_over = self._tm, prepared.requests, self._end.unless_over
        weights = SglangWeights(tm, requests, Processes.of(running.settings), unless_over, forget)
        self._memory = EngineMemory(tm, requests, running, self._settings.device, weights, unless_over)
        self._profiler = SglangProfiler(tm, requests, self._settings.device, unless_over)
        return weights

    def _build(self) -> Any:
        """On the host's thread: the `sglang.Engine`."""
        with no_garbage_collection():
            self._prepared = prepare(self._settings)
        if self._host is None or self._host.stopping:
            raise EngineDied("closed before it was started")
        return self._prepared.build()

    def _receive(self) -> None:
        """Read SGLang's answers on this loop.

        In place of SGLang's own way to start this, which takes SIGTERM and SIGQUIT away from the worker and, should
        reading fail, kills the process before it can say why.
        """
        tm = self._tm

        async def receive() -> None:
            try:
                await tm.handle_loop()
            except Exception as error:
                self._end.lose(f"the engine's answers cannot be read: {one_line(error)}")

        tm.auto_create_handle_loop = lambda: None
        tm.event_loop = asyncio.get_running_loop()
        self._receiver = asyncio.create_task(receive())

    # --- work ------------------------------------------------------------------------------------------------------

    @property
    def weights(self) -> SglangWeights:
        """The weights in its schedulers. Raises EngineError before it is started."""
        if self._weights is None:
            raise EngineError("the engine is not started")
        return self._weights

    @property
    def profiler(self) -> SglangProfiler:
        """Traces of its schedulers. Raises EngineError before it is started."""
        self._serving()
        assert self._profiler is not None
        return self._profiler

    async def tokenize(self, task: TextTask) -> TextIds:
        """Token ids of each pair, with the special tokens of the model's tokenizer. Raises WireError, or EngineError."""
        return await self._tokenizer.ids(self._tm, task, self._serving())

    async def decode(self, rows: list[list[int]], *, skip_special_tokens: bool, long: bool = False) -> list[str]:
        """The text of each row of token ids; `long`: next to other texts. Raises EngineError."""
        self._serving()
        return await self._tokenizer.texts(self._tm, rows, skip_special_tokens=skip_special_tokens, long=long)

    async def score(self, batch: RowBatch) -> BatchOutcome:
        """Run one batch. A part that is wrong gets its own error; the others run.

        Raises EngineError when the whole batch is refused, EngineDied when the engine is lost.
        """
        self._serving()
        if self._scoring is None:
            raise EngineError(f"{batch.operation}: this engine only generates")
        parts, forwards, cached = await self._end.unless_over(self._scoring.score(batch))
        return BatchOutcome(parts, forwards, self.weights.version, cached)

    async def generate(self, task: GenerationTask, emit: Emit) -> None:
        """Continue a prompt until each of its sequences has ended. Cancelled, it ends once SGLang has dropped them.

        Raises EngineError when the task is refused or failed, EngineDied when the engine is lost.
        """
        work = asyncio.create_task(Sequences(self._generating(), task, emit).run())
        try:
            await self._end.unless_over(asyncio.shield(work))
        finally:
            if not work.done():
                work.cancel()
                try:
                    await self._end.unless_over(asyncio.wait({work}))
                finally:
                    work.cancel()  # nothing where it is done; else the engine is gone, or the caller waits no longer

    def check_pause(self, mode: PauseMode) -> None:
        """Raise EngineError where it cannot be paused so."""
        pausing_of(self._generation).check(mode)

    async def pause(self, mode: PauseMode, *, confirmed: bool = True) -> None:
        """Stop between two steps, as `Engine.pause` says. Raises EngineError, EngineDied."""
        await self._end.unless_over(pausing_of(self._generation).pause(mode))
        self.weights.goes_on = not confirmed
        if confirmed:
            await self.weights.confirm()  # the schedulers answer in order: what they sent before has been read

    async def resume(self) -> None:
        """Go on; nothing where it is not paused."""
        await self._end.unless_over(pausing_of(self._generation).resume())

    async def load_adapter(self, name: str, path: str) -> None:
        """Have SGLang load a LoRA adapter. Raises EngineError."""
        await self._end.unless_over(self._generating().load_adapter(name, path))

    async def unload_adapter(self, name: str) -> None:
        """Have SGLang unload a LoRA adapter once no sequence uses it. Raises EngineError."""
        await self._end.unless_over(self._generating().unload_adapter(name))

    def report_prefixes(self, report: PrefixReport) -> None:
        """Tell `report` what SGLang's radix cache has, where SGLang publishes KV events."""
        self._prefixes = report

    async def flush(self) -> None:
        """Have SGLang empty its prefix cache; no batch is inside. Raises EngineError: it refused."""
        self._serving()
        answer = await self._end.unless_over(self._tm.flush_cache(timeout_s=FLUSH_S))
        if not answer.success:
            raise EngineError(f"SGLang did not flush its cache within {FLUSH_S:g} s")
        for work in filter(None, (self._scoring, self._generation)):
            work.forget()

    async def sleep(self, tags: list[MemoryTag]) -> bool:
        """Have SGLang release parts of its memory; no batch is inside. Returns whether weights are lost. Raises EngineError."""
        self._serving()
        assert self._memory is not None
        self._memory.check()
        await self.flush()  # SGLang ends where it is asked to release memory and is not idle
        return await self._memory.release(tags)

    async def wake(self, tags: list[MemoryTag]) -> None:
        """Have SGLang take these parts of its memory back. Raises EngineDied."""
        self._serving()
        assert self._memory is not None
        await self._memory.take_back(tags)

    # --- end -------------------------------------------------------------------------------------------------------

    async def died(self) -> str:
        """Wait until the engine is lost; return the reason."""
        return await self._end.lost()

    async def close(self) -> None:
        """Stop the engine and every process that it started. Never hangs for longer than 20 s. Idempotent."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._end.close()
        if self._host is not None:
            await asyncio.to_thread(self._host.stop)
        if self._weights is not None:
            self._weights.close()
        for reader in (self._receiver, self._events):
            if reader is not None:
                reader.cancel()
                await asyncio.wait([reader])
        self._tokenizer.close()
        with contextlib.suppress(ValueError, RuntimeError):  # not on the main thread: then there is none to remove
            asyncio.get_running_loop().remove_signal_handler(signal.SIGQUIT)
            signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # a scheduler that was dying may still send one

    def _on_sigquit(self) -> None:
        if error := self._host.last_error() if self._host else "":
            self._end.lose(error)
            return
        # SGLang says it of a process that was killed, too. The host is about to tell which one, and how.
        unknown = "one of the engine's processes failed and said so by SIGQUIT"
        asyncio.get_running_loop().call_later(KILLED_S, self._end.lose, unknown)

    def _generating(self) -> EngineGeneration:
        """Its sequences. Raises EngineDied after the engine's end, EngineError before it started or where it only runs rows."""
        can = self._serving()
        if self._generation is None:
            raise EngineError(f"generate: this engine runs {', '.join(can.operations)}")
        return self._generation

    def _serving(self) -> Capabilities:
        """What it can do. Raises EngineDied after the engine's end, EngineError before it has started."""
        self._end.check()
        if self._capabilities is None:
            raise EngineError("the engine is not started")
        return self._capabilities
