"""The worker's loop: the machine decides, the link talks, the engine computes; events and effects are carried between them."""

import asyncio
import gc
import os
import platform
import signal
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, get_args

import msgspec

from enginepool.protocol.errors import WireError
from enginepool.protocol.messages import Batch, Done, Exiting, MediumKind, TaskId, Tokenize, Tokenized
from enginepool.protocol.messages.adapters import ChangeAdapter
from enginepool.workers.adapters import AdapterRunner
from enginepool.workers.between_batches import BetweenBatches
from enginepool.workers.codec import decode_batch, decode_ids, decode_texts, encode_ids, encode_outcome, encode_texts, failed
from enginepool.workers.commands import CommandRunner
from enginepool.workers.engine import Engine, EngineDied, EngineError, EngineUnusable
from enginepool.workers.engine_pauses import EnginePauses
from enginepool.workers.engine_weights import NewWeights
from enginepool.workers.events import (
    CancelGenerations,
    CommandDone,
    DrainWanted,
    EndProcess,
    EngineLost,
    EngineReady,
    EngineStage,
    Exit,
    Frame,
    FreeStopped,
    Note,
    PrefixesChanged,
    ReportPrefixes,
    ResumeEngine,
    RunBatch,
    RunCommand,
    RunGeneration,
    RunTokenize,
    RunWeights,
    SendToCoordinator,
    WorkDone,
    WorkerEffect,
    WorkerEvent,
    WorkerTick,
)
from enginepool.workers.failures import one_line, reason_of
from enginepool.workers.generation import GenerationRunner
from enginepool.workers.link import WorkerLink
from enginepool.workers.log import report, say
from enginepool.workers.machine import TICK_S, WorkerMachine
from enginepool.workers.media_reader import MediaReader
from enginepool.workers.prefix_report import PrefixReport
from enginepool.workers.profiling import Profiling
from enginepool.workers.saving import WeightSaving
from enginepool.workers.sglang.host.model_size import UnknownSize, model_bytes, model_config, quantized
from enginepool.workers.spec import WorkerSpec
from enginepool.workers.weights.checkpoint import CheckpointError, checkpoint_digest, checkpoint_under
from enginepool.workers.weights.executor import WeightExecutor

#: an engine may hold the main thread while it loads; a coordinator that is there has this long to be heard before
ACCEPT_FIRST_S = 3.0
#: the last message has this long to leave
LINGER_S = 1.0
#: an engine that is not closed by then is killed
CLOSE_S = 20.0


class WorkerProcess:
    """Performs what the machine decides. Everything runs on the loop of the main thread, except the link's thread."""

    def __init__(self, spec: WorkerSpec, engine: Engine) -> None:
        self.spec = spec
        self.engine = engine
        self.machine = WorkerMachine(
            spec.incarnation,
            spec.group,
            now=time.monotonic(),
            pid=os.getpid(),
            host=platform.node(),
            orphan_s=spec.orphan_s,
            external=spec.external,
            drain_s=spec.drain_s,
        )
        self.loop = asyncio.get_running_loop()
        self.link = WorkerLink(
            spec.endpoint, self.handle, self.after,
            lifeline_fd=spec.lifeline_fd, orphan_s=float("inf") if spec.external else spec.orphan_s, keys=spec.keys,
        )  # fmt: skip
        self.end: asyncio.Future[EndProcess] = self.loop.create_future()
        self.accepted = asyncio.Event()
        self.tasks: set[asyncio.Task[None]] = set()
        self.between, self.rows = BetweenBatches(), BetweenBatches()
        self.adapters = AdapterRunner(engine, spec.adapter_roots, spec.adapter_store)
        self.media = MediaReader(spec.media_root, spec.media_urls)
        self.generations = GenerationRunner(engine, self.feed, self._spawn, self.between, self.media)
        self.pauses = EnginePauses(engine)
        profiling = Profiling(engine, spec.profile_root, (spec.group, spec.incarnation), self._spawn)
        saving = WeightSaving(engine, spec.save_roots, spec.group, spec.model, spec.options.get("revision"))
        doors = self.between, self.generations, self.rows, self.pauses
        self.commands = CommandRunner(engine, self.feed, *doors, profiling, saving)
        self.prefixes = PrefixReport()
        engine.report_prefixes(self.prefixes)
        self.weights = WeightExecutor(spec.stager, engine, self.feed, self._spawn, spec.checkpoint_roots, self.pauses)

    async def run(self) -> Exit:
        """Serve until the machine says that it is over; return the exit code."""
        self.link.start()
        self._listen_to_signals()
        self.loop.call_later(TICK_S, self._tick)
        self._spawn(self._load())
        self._spawn(self._watch())
        end = await self.end
        say(f"the worker of {self.spec.group} ends: {end.reason}")
        for task in self.tasks:
            task.cancel()
        if end.code not in (Exit.OWNER_GONE, Exit.REFUSED):
            self.link.stop(LINGER_S)
        if end.close:
            try:
                async with asyncio.timeout(CLOSE_S):
                    await self.engine.close()
            except TimeoutError:
                say(f"the engine did not close within {CLOSE_S:g} s: killed")
            except Exception as error:
                # Engines raise what they like. The process ends now in any case, with the code it has; the log has the rest.
                report(error, "the engine did not close")
        return end.code

    def handle(self, event: WorkerEvent) -> None:
        """Let the machine handle one event and perform its effects."""
        try:
            for effect in self.machine.handle(event):
                self._perform(effect)
        except Exception as error:
            # An unforeseen state, so an error of any kind: no worker is better than one with wrong answers. The coordinator
            # is told, and the log has the traceback.
            report(error, f"at event {type(event).__name__}")
            reason = f"the worker failed at {type(event).__name__}: {one_line(error)}"
            self.link.send(Exiting(reason, failed=True))
            if not self.end.done():
                self.end.set_result(EndProcess(Exit.ENGINE_DIED, reason, False))
        self.link.stage = self.machine.stage

    def _perform(self, effect: WorkerEffect) -> None:
        if isinstance(effect, SendToCoordinator):
            self.link.send(effect.message, effect.frames)
        elif isinstance(effect, RunBatch | RunTokenize):
            self._spawn(self._work(effect))
        elif isinstance(effect, RunGeneration):
            self.generations.run(effect)
        elif isinstance(effect, CancelGenerations):
            self.generations.cancel(effect.tasks)
            self._spawn(self.commands.cancelled())
        elif isinstance(effect, FreeStopped):
            self._spawn(self.commands.free_stopped())
        elif isinstance(effect, RunCommand):
            command = effect.command
            self._spawn(self._change_adapter(command) if isinstance(command, ChangeAdapter) else self.commands.run(command))
        elif isinstance(effect, RunWeights):
            self.weights.run(effect)
        elif isinstance(effect, ResumeEngine):
            self.weights.resume()
        elif isinstance(effect, ReportPrefixes):
            # All of it goes ahead of `ready`: the first prompts that the worker is given find what its engine has.
            self.prefixes.again()
            while self._prefixes_told():
                pass
        elif isinstance(effect, Note):
            say(effect.line)
        elif isinstance(effect, EndProcess) and not self.end.done():
            self.end.set_result(effect)

    def after(self) -> None:
        """A run of events has been taken."""
        if self.machine.epoch and not self.accepted.is_set():
            self.accepted.set()
        self.link.flush()

    def feed(self, event: WorkerEvent) -> None:
        """An event from this side of the link."""
        self.handle(event)
        self.link.flush()

    def _prefixes_told(self) -> bool:
        """The coordinator hears of the next changes in the engine's prefix cache. False: there is none."""
        told = self.prefixes.take()
        if told is not None:
            self.handle(PrefixesChanged(time.monotonic(), *told))
        return told is not None

    # --- timers and signals ---------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self.loop.call_later(TICK_S, self._tick)
        self.link.deliver_all()
        self.feed(WorkerTick(time.monotonic()))
        self._prefixes_told()
        self.link.flush()

    def _listen_to_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self.loop.add_signal_handler(number, self._drain, signal.Signals(number).name)

    def _drain(self, reason: str) -> None:
        self.feed(DrainWanted(time.monotonic(), reason))

    # --- the engine -----------------------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def _load(self) -> None:
        try:
            async with asyncio.timeout(ACCEPT_FIRST_S):
                await self.accepted.wait()
        except TimeoutError:
            say(f"no coordinator at {self.spec.endpoint} yet; loading {self.spec.model}")
        if wants_room(self.spec, staged=self.machine.staged):
            making = self._make_room()
            if self.spec.device != "cpu" and _has_gpu():
                await making  # before the engine takes all memory that there is
            else:
                self._spawn(making)  # nothing to wait for, but the stager gets ready for its first update
        try:
            path = await asyncio.to_thread(self._checkpoint)
            capabilities = await self.engine.start(self._report, self.machine.halvings)
            if any(kind in capabilities.features for kind in get_args(MediumKind)):
                features = (*capabilities.features, *self.media.features)
                capabilities = msgspec.structs.replace(capabilities, features=features)
            if path:
                await self._verify(path)
                capabilities = msgspec.structs.replace(capabilities, model=self.spec.model)
        except CheckpointError as error:
            self.feed(EngineLost(time.monotonic(), str(error)))
            return
        except EngineDied as error:
            self.feed(EngineLost(time.monotonic(), str(error), unusable=isinstance(error, EngineUnusable)))
            return
        except Exception as error:
            # Engines raise what they like. The coordinator is told in one line, and the log has the traceback.
            report(error, "the engine did not start")
            self.feed(EngineLost(time.monotonic(), f"the engine did not start: {one_line(error)}"))
            return
        # Engines install handlers of their own while they start.
        self._listen_to_signals()
        gc.collect()
        gc.freeze()
        weights = self.engine.weights
        self.feed(EngineReady(time.monotonic(), capabilities, weights.version, weights.digest))

    def _checkpoint(self) -> str:
        """The directory that the engine starts on in place of its model, or "". Raises CheckpointError."""
        return checkpoint_under(self.spec.checkpoint, self.spec.checkpoint_roots) if self.spec.checkpoint else ""

    async def _verify(self, path: str) -> None:
        """Check that the engine loaded the published weights: their files may have changed since. Raises CheckpointError."""
        digest = await asyncio.to_thread(checkpoint_digest, path)
        if digest != self.spec.checkpoint_digest:
            raise CheckpointError(f"{path}: no longer holds version {self.spec.version}: its files have changed")
        await self.engine.weights.load_weights(NewWeights(), self.spec.version, digest)

    async def _make_room(self) -> None:
        revision = self.spec.options.get("revision")
        if quantized(self.spec.options, await asyncio.to_thread(model_config, self.spec.model, revision)):
            return  # its engine takes weights only at its start
        try:
            nbytes = await asyncio.to_thread(model_bytes, self.spec.model, revision)
        except UnknownSize as error:
            say(f"no memory is reserved for weight updates before it is known how large they are: {error}")
            return
        say(await self.weights.make_room(nbytes))

    def _report(self, stage: str, detail: str) -> None:
        if threading.current_thread() is threading.main_thread():
            self.feed(EngineStage(time.monotonic(), stage, detail))
        else:
            self.loop.call_soon_threadsafe(self._report, stage, detail)

    async def _watch(self) -> None:
        reason = await self.engine.died()
        self.feed(EngineLost(time.monotonic(), reason))

    async def _work(self, run: RunBatch | RunTokenize) -> None:
        key = run.batch.batch if isinstance(run, RunBatch) else run.task.task
        try:
            if run.unreadable:
                raise EngineError(run.unreadable)
            answer, frames = await (self._batch(run) if isinstance(run, RunBatch) else self._tokenize(run))
            event = WorkDone(time.monotonic(), key, answer, frames)
        except Exception as error:  # engines raise what they like, and all work has an answer: this one's is the error
            event = self._failure(key, run.batch if isinstance(run, RunBatch) else run.task, error)
        self.feed(event)

    def _failure(self, key: TaskId, work: Batch | Tokenize, error: Exception) -> WorkerEvent:
        now = time.monotonic()
        if isinstance(error, EngineDied):
            return EngineLost(now, str(error))
        reason, code = reason_of(error, f"work {key}")
        return WorkDone(now, key, failed(work, reason, code, self.engine.weights.version))

    async def _batch(self, run: RunBatch) -> tuple[Done, tuple[Frame, ...]]:
        batch = decode_batch(run.batch, run.frames)
        began = time.monotonic()
        async with self.between.batch(), self.rows.batch():
            outcome = await self.engine.score(batch)
        return encode_outcome(run.batch.batch, outcome, int((time.monotonic() - began) * 1e6))

    async def _tokenize(self, run: RunTokenize) -> tuple[Tokenized, tuple[Frame, ...]]:
        task = run.task.task
        if run.task.operation == "decode":
            asked, rows = run.task, decode_ids(run.task, run.frames)
            texts = await self.engine.decode(rows, skip_special_tokens=asked.skip_special_tokens, long=asked.long)
            return encode_texts(task, texts)
        try:
            found = await self.engine.tokenize(decode_texts(run.task, run.frames))
            # A model with a separator looks ahead, from the query into the item: it computes every row in full.
            can = self.machine.capabilities
            return encode_ids(task, found, share=run.task.share and can is not None and can.separator is None)
        except WireError as error:
            return Tokenized(task, code=error.code, message=error.message, field=error.field, limit=error.limit), ()

    async def _change_adapter(self, message: ChangeAdapter) -> None:
        if message.action == "unload":
            await self.commands.free_stopped()  # a sequence that was stopped in a paused engine uses its adapter
        try:
            answer = await self.adapters.run(message)
        except EngineDied as error:
            self.feed(EngineLost(time.monotonic(), str(error)))
            return
        self.feed(CommandDone(time.monotonic(), answer, adapters=tuple(self.adapters.loaded)))


def wants_room(spec: WorkerSpec, *, staged: bool) -> bool:
    """Whether memory is kept for staged updates before the engine starts. `staged`: the group has had one."""
    reserve = staged if spec.reserve_staging is None else spec.reserve_staging
    return bool(spec.stager) and spec.engine == "sglang" and reserve


def _has_gpu() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*"))
