"""Weight updates in the worker's process: carries out the machine's `RunWeights` effects with the stager and the engine.

Nothing is decided here and nothing is remembered of an update: its state is the machine's `WorkerUpdate`, which each effect
carries. Requests are carried out in the order in which they arrived, except for

- a release, which takes effect at once;
- inspections, for which nothing else waits;
- an engine that joins a process group: the other ranks may never come, and the next update must not wait for that.

While bytes flow into the stager's memory, the engine prepares to load them, so that little is left for the hold.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from enginepool.protocol.basis import MAX_CHUNK, FrameSpec
from enginepool.protocol.errors import WireError
from enginepool.protocol.layout import layout
from enginepool.protocol.manifest import worst
from enginepool.protocol.messages import Stage
from enginepool.protocol.messages.weight_reports import Inspect, Inspected
from enginepool.protocol.messages.weights import (
    Committed,
    Join,
    Joined,
    LoadWeights,
    Prepare,
    Prepared,
    ReleaseWeights,
    Restore,
    Staged,
    VerifyWeights,
    WeightsLoaded,
)
from enginepool.workers.engine import Engine, EngineDied, EngineError, NotComparable, OnlyAtStart, PauseMode
from enginepool.workers.engine_pauses import EnginePauses
from enginepool.workers.engine_weights import NewWeights
from enginepool.workers.events import (
    Answered,
    EngineLost,
    Frame,
    LoadPrepared,
    RunWeights,
    SnapshotReported,
    StagerLost,
    WeightsAnswered,
    WorkerEvent,
)
from enginepool.workers.log import report
from enginepool.workers.stager.link import StagerGone, StagerLink
from enginepool.workers.stager.messages import Reserve, Reserved, Room, SnapshotMissing
from enginepool.workers.weights.checkpoint import CheckpointError, checkpoint_under
from enginepool.workers.weights.ipc_import import LentMemoryError
from enginepool.workers.weights.offer import UpdateRefusal, check_generations, offered_weights
from enginepool.workers.weights.open_buffers import OpenBuffers
from enginepool.workers.weights.restoring import restore
from enginepool.workers.weights.worker_update import WorkerUpdate

#: the other ranks have this long to join
JOIN_S = 90.0
#: An engine that takes longer for a short step, for which no coordinator waits, hangs.
ASIDE_S = 60.0
#: the name under which the engine is paused
PAUSED_FOR = "new weights"


class WeightExecutor:
    """Carries out `RunWeights`.

    Args:
        feed: receives the events that follow.
        spawn: runs a coroutine at the same time as the loop's other work.
        roots: directories under which a published checkpoint may lie.
        pauses: those of the engine; none: nothing else pauses it.
    """

    def __init__(
        self,
        stager: str,
        engine: Engine,
        feed: Callable[[WorkerEvent], None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        roots: Sequence[str] = (),
        pauses: EnginePauses | None = None,
    ) -> None:
        self._engine = engine
        self._roots = roots
        self._feed = feed
        self._spawn = spawn
        self._stager = StagerLink(stager, self._heard, self._stager_lost)
        self._turn = asyncio.Lock()
        self._buffers = OpenBuffers(engine)
        self._pauses = pauses or EnginePauses(engine)

    async def make_room(self, nbytes: int) -> str:
        """Have the stager reserve so many bytes of device memory before the engine starts; a line to log."""
        try:
            reserved = await self._stager.ask(Room(nbytes), Reserved)
        except StagerGone as error:
            return f"no memory is reserved for weight updates: {error}"
        if reserved.staging == "device":
            most = reserved.most / (1 << 30)
            return f"{most:.2f} GiB of each GPU are kept for weight updates; that much less is left for the KV cache"
        return f"weight updates will be received in memory of the host{reserved.message and f': {reserved.message}'}"

    async def close(self) -> None:
        """Leave the stager to the next worker."""
        await self._stager.close()

    def run(self, effect: RunWeights) -> None:
        """Carry it out; its answer arrives through `feed`."""
        message = effect.message
        if isinstance(message, ReleaseWeights | Committed):
            if isinstance(message, Committed):
                self._in_turn("Committed", self._set_digest, message)
            self.resume()
            self._close_buffers(effect.update)
            self._stager.tell(message)
        elif isinstance(message, Inspect):
            self._spawn(self._inspect(message))
        else:
            self._in_turn(type(message).__name__, self._carry_out, effect)

    def resume(self) -> None:
        """The engine goes on, unless it was not paused for a load."""
        self._in_turn("resume", self._pauses.resume, PAUSED_FOR)

    def _in_turn(self, doing: str, do: Callable[..., Awaitable[object]], *args: object) -> None:
        async def run() -> None:
            async with self._turn:
                await self._unless_lost(doing, do, *args)

        self._spawn(run())

    async def _unless_lost(self, doing: str, do: Callable[..., Awaitable[object]], *args: object) -> None:
        """The engine is gone; or an unforeseen error leaves it in an unknown state."""
        try:
            await do(*args)
        except EngineDied as error:
            self._feed(EngineLost(time.monotonic(), str(error)))
        except Exception as error:
            report(error, doing)
            self._feed(EngineLost(time.monotonic(), f"{doing} failed: {error}"))

    async def _carry_out(self, effect: RunWeights) -> None:
        message, update = effect.message, effect.update
        if isinstance(message, Restore):
            if update is None:
                await self._buffers.close()  # of an update that another coordinator knows nothing of
            before = self._engine.weights.digest
            answer = await restore(self._engine.weights, self._stager, message, self._roots)
            now = self._engine.weights.digest
            self._feed(WeightsAnswered(time.monotonic(), answer, found=now if answer.code and now != before else None))
            return
        assert update is not None, "the machine answers requests of updates that are not open"
        if isinstance(message, Prepare):
            await self._prepare(update, effect.frames)
        elif isinstance(message, Join):
            await self._join(update, message)
        elif isinstance(message, VerifyWeights):
            await self._verify(update, message)
        elif isinstance(message, LoadWeights):
            self._answer(await self._load(update, message, effect.running))

    def _answer(self, answer: Answered, frames: tuple[Frame, ...] = (), weights: NewWeights | None = None) -> None:
        self._feed(WeightsAnswered(time.monotonic(), answer, frames, weights))

    async def _set_digest(self, message: Committed) -> None:
        """The same weights, by the digest that the coordinator knows."""
        weights = self._engine.weights
        if weights.version == message.version and weights.digest != message.digest:
            same = NewWeights()
            await _aside("set the digest of its weights", weights.load_weights, same, message.version, message.digest)

    def _close_buffers(self, update: WorkerUpdate | None) -> None:
        """The update is committed or aborted."""
        if update is not None and not update.keeps_buffers:
            self._in_turn("releasing memory", _aside, "release an update's memory", self._buffers.close)

    # --- prepare --------------------------------------------------------------------------------------------------------

    async def _prepare(self, update: WorkerUpdate, frames: tuple[Frame, ...]) -> None:
        prepare = update.prepare
        try:
            check_generations(self._engine, prepare)
            weights = await offered_weights(self._engine.weights, prepare, frames, self._roots)
            if prepare.transfer == "staged":
                answer, weights = await self._reserve(prepare, weights)
            elif prepare.transfer == "direct":
                answer = Prepared(prepare.update, peer=update.peer or secrets.token_hex(8), ranks=self._engine.weights.ranks)
            else:
                answer = Prepared(prepare.update)
            answer.generations = prepare.generations
        except UpdateRefusal as refusal:
            self._answer(refusal.answer)
        except OnlyAtStart as error:
            why = f"no {prepare.transfer} transfer: {error}; publish a checkpoint directory, on which it is started again"
            self._answer(Prepared(prepare.update, code="unsupported", message=why))
        except (WireError, CheckpointError, EngineError) as error:
            self._answer(Prepared(prepare.update, code="weights_refused", message=str(error)))
        else:
            self._answer(answer, weights=weights)

    async def _reserve(self, prepare: Prepare, weights: NewWeights) -> tuple[Prepared, NewWeights]:
        """Memory of the stager. Raises UpdateRefusal."""

        def refusal(code: str, why: str, *, no_staging: bool = False) -> UpdateRefusal:
            why = f"no staged transfer: {why}"
            return UpdateRefusal(Prepared(prepare.update, code=code, message=why, no_staging=no_staging))

        if not self._stager.exists:
            raise refusal("unsupported", "this worker has no stager", no_staging=True)
        await self._buffers.close_smaller(layout(weights.tensors).nbytes)
        targets = self._engine.weights.model_tensors().targets(weights.tensors)
        try:
            await self._stager.alive()
            request = Reserve(prepare.update, list(weights.tensors), prepare.bucket_bytes, targets)
            reserved = await self._stager.ask(request, Reserved)
        except StagerGone as error:
            # Nothing is wrong with the weights: the next stager may receive them.
            raise refusal("update_aborted", str(error)) from None
        if not reserved.staging:
            raise refusal("weights_refused", reserved.message, no_staging=True)
        prepared = Prepared(prepare.update, peer=reserved.peer, staging=reserved.staging, message=reserved.message)
        return prepared, replace(weights, regions=tuple(reserved.regions), sharded=reserved.sharded)

    # --- transfer -------------------------------------------------------------------------------------------------------

    async def _join(self, update: WorkerUpdate, message: Join) -> None:
        if update.prepare.transfer == "direct":
            self._spawn(self._unless_lost("joining", self._join_engine, message))
            return
        self._spawn(self._unless_lost("preparing a load", self._prepare_load, update))
        try:
            self._answer(await self._stager.ask(message, Joined, JOIN_S))
        except StagerGone as error:
            self._answer(Joined(message.update, "update_aborted", str(error)))

    async def _join_engine(self, message: Join) -> None:
        try:
            await self._engine.weights.join(message)
        except EngineError as error:
            self._answer(Joined(message.update, "update_aborted", str(error)))
        else:
            self._answer(Joined(message.update))

    async def _prepare_load(self, update: WorkerUpdate) -> None:
        seconds = await self._buffers.prepare_load(update.weights)
        self._feed(LoadPrepared(time.monotonic(), update.prepare.update, seconds))
        if update.closed:
            self._close_buffers(update)

    async def _verify(self, update: WorkerUpdate, message: VerifyWeights) -> None:
        try:
            weights = replace(update.weights, regions=self._buffers.pin(message.regions))
            digest, findings = await self._buffers.verify(weights)
        except LentMemoryError as error:
            self._answer(Staged(message.update, code="bad_request", message=str(error)))
        except OSError as error:
            text = f"regions: {error.filename} cannot be opened: {error.strerror}"
            self._answer(Staged(message.update, code="update_aborted", message=text))
        except EngineError as error:
            self._answer(Staged(message.update, code="update_aborted", message=str(error)))
        else:
            seconds = await self._buffers.prepare_load(weights)
            self._feed(LoadPrepared(time.monotonic(), message.update, seconds))
            self._answer(Staged(message.update, digest, worst(findings)), weights=weights)

    def _heard(self, message: Staged | SnapshotMissing) -> None:
        if isinstance(message, SnapshotMissing):
            self._feed(SnapshotReported(time.monotonic(), Stage("ready", message.why)))
        else:
            self._answer(message)

    def _stager_lost(self, reason: str) -> None:
        # The memory of the stager is useless now.
        self._in_turn("releasing memory", _aside, "release an update's memory", self._buffers.close)
        self._feed(StagerLost(time.monotonic(), reason))

    # --- load -----------------------------------------------------------------------------------------------------------

    async def _load(self, update: WorkerUpdate, message: LoadWeights, running: PauseMode | None) -> WeightsLoaded:
        weights = update.weights
        digest = self._engine.weights.digest if update.prepare.transfer == "set_version" else update.digest
        try:
            if weights.checkpoint:
                # Again, because a symbolic link in it may lead elsewhere now.
                path = await asyncio.to_thread(checkpoint_under, weights.checkpoint, self._roots)
                weights = replace(weights, checkpoint=path)
            if running is not None:
                # A load that asks the engine is answered after the tokens of the old weights.
                asks = bool(weights.regions or weights.checkpoint or weights.group)
                running = await self._pauses.pause(PAUSED_FOR, running, confirmed=not asks)
            times = await self._engine.weights.load_weights(weights, message.version, digest, running)
            await asyncio.sleep(0)  # the loop's next turn sends tokens of the old weights, which are called by their version
        except (CheckpointError, EngineError) as error:
            await self._pauses.resume(PAUSED_FOR)
            return WeightsLoaded(message.update, code="engine_error", message=str(error))
        load_us, flush_us, prepare_us = (int(each * 1e6) for each in (times.load_s, times.flush_s, update.prepared_s or 0.0))
        return WeightsLoaded(message.update, message.version, self._engine.weights.digest, load_us, flush_us, prepare_us)

    # --- inspections ----------------------------------------------------------------------------------------------------

    async def _inspect(self, message: Inspect) -> None:
        try:
            if message.what == "tensor":
                count = min(message.count or MAX_CHUNK, MAX_CHUNK)
                chunk = await self._engine.weights.tensor(message.name, message.offset, count)
                spec = FrameSpec("tensor", "float32", (chunk.values.size,))
                answer = Inspected(message.task, dtype=chunk.dtype, frames=[spec], shape=list(chunk.shape))
                self._answer(answer, (chunk.values.tobytes(),))
                return
            digest, findings = await self._engine.weights.inspect(message.what)
            self._answer(Inspected(message.task, digest=digest, findings=worst(findings)))
        except EngineError as error:
            code = "unsupported" if isinstance(error, NotComparable) else "engine_error"
            self._answer(Inspected(message.task, code=code, message=str(error)))
        except EngineDied as error:
            self._feed(EngineLost(time.monotonic(), str(error)))


async def _aside(what: str, do: Callable[..., Awaitable[object]], *args: object) -> None:
    """Raises EngineDied: it hangs, and everything after it would wait without a limit."""
    try:
        async with asyncio.timeout(ASIDE_S):
            await do(*args)
    except TimeoutError:
        raise EngineDied(f"the engine does not {what} within {ASIDE_S:g} s") from None
