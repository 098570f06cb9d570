"""Weight updates in the worker's process: drives the stager and the engine as the machine's `RunWeights` effects say.

Nothing is decided here that the coordinator should decide: every message is carried out and answered, in the order in which
they came. Out of turn are a release, which is carried out at once, questions, and an engine's way into a process group, for
which nothing else waits. While bytes flow into a stager's space, the engine gets ready to take them; `staged` is said when both
are done, so that the hold finds as little to do as can be.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from enginepool.host import host_identity
from enginepool.protocol.basis import MAX_CHUNK, FrameSpec, TaskId
from enginepool.protocol.errors import WireError
from enginepool.protocol.layout import layout
from enginepool.protocol.manifest import Tensor, decode_manifest, difference, worst
from enginepool.protocol.updates import (
    Committed,
    Inspect,
    Inspected,
    Join,
    Joined,
    LoadWeights,
    Prepare,
    Prepared,
    ReleaseWeights,
    Restore,
    Restored,
    Staged,
    VerifyWeights,
    WeightsLoaded,
)
from enginepool.workers.engine import Engine, EngineDied, EngineError, NewWeights, NotComparable, OnlyAtStart
from enginepool.workers.events import EngineLost, Frame, RunWeights, WeightsAnswered, WorkerEvent
from enginepool.workers.log import report
from enginepool.workers.stager.link import StagerGone, StagerLink
from enginepool.workers.stager.messages import BytesReceived, Forget, InGroup, JoinGroup, Keep, Reserve, Reserved, Room
from enginepool.workers.weights.checkpoint import CheckpointError, checkpoint_digest, checkpoint_tensors, checkpoint_under
from enginepool.workers.weights.ipc_import import LentError
from enginepool.workers.weights.open_buffers import OpenBuffers
from enginepool.workers.weights.pending import Pending
from enginepool.workers.weights.restoring import restore

#: the other ranks have a minute to come
JOIN_S = 90.0
#: an engine that takes longer for what is a moment's work, and what no coordinator waits for, hangs
ASIDE_S = 60.0


class WeightExecutor:
    """Performs `RunWeights`.

    Args:
        feed: takes the events that come of it.
        spawn: runs a coroutine beside the loop's other work.
        roots: directories under which a published checkpoint may lie.
    """

    def __init__(
        self,
        stager: str,
        incarnation: str,
        engine: Engine,
        feed: Callable[[WorkerEvent], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        roots: Sequence[str] = (),
    ) -> None:
        self._engine = engine
        self._roots = roots
        self._feed = feed
        self._spawn = spawn
        self._stager = StagerLink(stager, incarnation, self._received, self._stager_lost)
        self._pending: Pending | None = None
        self._turn = asyncio.Lock()
        #: names the engine's side of a process group in direct transfer
        self._peer = ""
        self._opened = OpenBuffers(engine)

    async def make_room(self, nbytes: int) -> str:
        """Have the stager take device memory for so many bytes before the engine takes what there is; a line to say, or ""."""
        try:
            reserved = await self._stager.ask(Room(nbytes), Reserved)
        except StagerGone as error:
            return f"no memory is reserved for weight updates: {error}"
        if reserved.staging == "device":
            most = reserved.most / (1 << 30)
            return f"{most:.2f} GiB of each GPU are kept for weight updates; that much less is left for the KV cache"
        return f"weight updates will be received in memory of the host: {reserved.message}" if reserved.message else ""

    async def close(self) -> None:
        """Leave the stager to the next worker."""
        self._pending = None
        await self._stager.close()

    def run(self, effect: RunWeights) -> None:
        """Do it; its answer comes through `feed`."""
        message = effect.message
        if isinstance(message, ReleaseWeights):
            self._release(message)
        elif isinstance(message, Committed):
            self._committed(message)
        elif isinstance(message, Inspect):
            self._spawn(self._inspect(message))
        else:
            self._spawn(self._in_turn(message, effect.frames))

    async def _in_turn(
        self, message: Prepare | Join | VerifyWeights | LoadWeights | Committed | Restore, frames: tuple[Frame, ...]
    ) -> None:
        async with self._turn:
            try:
                if isinstance(message, Prepare):
                    self._answer(await self._prepare(message, frames))
                elif isinstance(message, Join):
                    await self._join(message)
                elif isinstance(message, VerifyWeights):
                    self._answer(await self._verify(message))
                elif isinstance(message, LoadWeights):
                    self._answer(await self._load(message))
                elif isinstance(message, Committed):
                    # The same weights, by the name that all know them by.
                    renamed = self._engine.take(NewWeights(), message.version, message.digest)
                    await _aside("take the name of its weights", renamed)
                else:
                    await self._opened.close()  # whatever was staged, another coordinator knows nothing of it
                    self._feed(await restore(self._engine, self._stager, message, self._roots))
            except Exception as error:  # as `_lost` says
                self._lost(type(message).__name__, error)

    def _answer(
        self, answer: Prepared | Joined | Staged | WeightsLoaded | Restored | Inspected, frames: tuple[Frame, ...] = ()
    ) -> None:
        self._feed(WeightsAnswered(time.monotonic(), answer, frames))

    def _committed(self, message: Committed) -> None:
        self._over(message.update)
        self._stager.tell(Keep(message.update, message.version, message.digest, message.snapshot))
        if self._engine.version == message.version and self._engine.digest != message.digest:
            self._spawn(self._in_turn(message, ()))

    def _release(self, message: ReleaseWeights) -> None:
        self._over(message.update)
        self._stager.tell(Forget(message.update))

    def _over(self, update: TaskId) -> None:
        """It is committed or aborted."""
        pending = self._known(update)
        self._pending = None if pending is not None else self._pending
        if pending is not None and pending.joining:
            self._peer = ""  # nobody knows which group the engine will be in
        if pending is not None and not pending.stays:
            self._spawn(self._let_go())

    # --- prepare --------------------------------------------------------------------------------------------------------

    async def _prepare(self, message: Prepare, frames: tuple[Frame, ...]) -> Prepared:
        def refused(why: str, *, no_staging: bool = False) -> Prepared:
            return Prepared(message.update, code="weights_refused", message=why, no_staging=no_staging)

        tensors: tuple[Tensor, ...] = ()
        try:
            if message.transfer == "checkpoint":
                path = await asyncio.to_thread(checkpoint_under, message.path, self._roots)
                if self._only_at_start():
                    digest = await asyncio.to_thread(checkpoint_digest, path)
                    return Prepared(message.update, restart=True, digest=digest)
                tensors = tuple(await asyncio.to_thread(checkpoint_tensors, path))
            elif message.transfer != "set_version":
                tensors = tuple(decode_manifest(frames[0] if frames else b""))
            if message.transfer != "set_version":
                model = self._engine.model_tensors()
                hints = message.transfer != "checkpoint"  # who publishes one has no such arguments
                if why := difference(tensors, model.tensors, model.optional, partial=message.partial, hints=hints):
                    return refused(why)
        except OnlyAtStart as error:
            why = f"no {message.transfer} transfer: {error}; publish a checkpoint directory, on which it is started again"
            return Prepared(message.update, code="unsupported", message=why)
        except (WireError, CheckpointError, EngineError) as error:
            return refused(str(error))
        prepared = Prepared(message.update)
        if message.transfer == "ipc":
            if why := self._out_of_reach(message):
                return Prepared(message.update, code="unsupported", message=f"no transfer by handles: {why}")
        elif message.transfer == "direct":
            self._peer = self._peer or secrets.token_hex(8)
            prepared = Prepared(message.update, peer=self._peer, ranks=self._engine.ranks)
        pending = Pending(message, tensors)
        if message.transfer == "staged":
            if not self._stager.exists:
                why = "no staged transfer: this worker has no stager"
                return Prepared(message.update, code="unsupported", message=why, no_staging=True)
            await self._opened.close_smaller(layout(tensors).nbytes)
            try:
                await self._stager.alive()
                reserved = await self._stager.ask(
                    Reserve(message.update, list(tensors), message.bucket_bytes, self._engine.model_tensors().targets(tensors)),
                    Reserved,
                )
            except StagerGone as error:
                # Nothing is wrong with the weights: the next stager may take them.
                return Prepared(message.update, code="update_aborted", message=f"no staged transfer: {error}")
            if not reserved.staging:
                return refused(f"no staged transfer: {reserved.message}", no_staging=True)
            prepared = Prepared(message.update, peer=reserved.peer, staging=reserved.staging)
            pending.regions, pending.sharded = tuple(reserved.regions), reserved.sharded
            pending.stays = reserved.staging == "device"
        self._pending = pending
        return prepared

    def _only_at_start(self) -> bool:
        try:
            self._engine.model_tensors()
        except OnlyAtStart:
            return True
        return False

    def _out_of_reach(self, message: Prepare) -> str:
        """Why the engine cannot open the publisher's memory, or ""."""
        if message.host != host_identity():
            return "the publisher is on another host than this worker, or in another container"
        gpus = self._engine.model_tensors().gpus
        if message.gpu and message.gpu not in gpus:
            return f"the engine sees {' and '.join(gpus) or 'no GPU'}, and the publisher's memory is on {message.gpu}"
        return ""

    # --- transfer -------------------------------------------------------------------------------------------------------

    async def _join(self, message: Join) -> None:
        pending = self._known(message.update)
        failed = ""
        if pending is None:
            failed = "this update is not known here"
        elif pending.prepare.transfer == "direct":
            # Not in its turn: where the others do not come, the next update need not wait for that.
            pending.joining = True
            self._spawn(self._join_engine(pending, message))
            return
        else:
            self._spawn(self._get_ready(pending))
            ask = JoinGroup(message.update, message.rendezvous, message.address, message.world, message.rank, message.backend)
            try:
                failed = (await self._stager.ask(ask, InGroup, JOIN_S)).message
            except StagerGone as error:
                failed = str(error)
        self._answer(Joined(message.update, "update_aborted" if failed else "", failed))
        if pending is not None and not failed and pending.prepare.transfer == "staged":
            pending.joined = True
            self._say_staged(pending)

    async def _join_engine(self, pending: Pending, message: Join) -> None:
        failed = ""
        try:
            await self._engine.join(message.rendezvous, message.address, message.world, message.rank, message.backend)
            pending.group = message.rendezvous
        except EngineError as error:
            failed = str(error)
        except Exception as error:  # as `_lost` says
            self._lost("joining", error)
            return
        pending.joining = False
        if self._pending is pending:
            self._peer = "" if failed else self._peer
            self._answer(Joined(message.update, "update_aborted" if failed else "", failed))

    def _received(self, message: BytesReceived) -> None:
        pending = self._known(message.update)
        if pending is not None:
            pending.received = message
            self._say_staged(pending)

    async def _verify(self, message: VerifyWeights) -> Staged:
        pending = self._known(message.update)
        if pending is None:
            return Staged(message.update, code="update_aborted", message="this update is not known here")
        try:
            weights = NewWeights(pending.tensors, self._opened.hold(message.regions))
            digest, findings = await self._opened.verify(weights)
        except LentError as error:
            return Staged(message.update, code="bad_request", message=str(error))
        except OSError as error:
            text = f"regions: {error.filename} cannot be opened: {error.strerror}"
            return Staged(message.update, code="update_aborted", message=text)
        except EngineError as error:
            return Staged(message.update, code="update_aborted", message=str(error))
        pending.ready_s = await self._opened.get_ready(weights)
        pending.received = BytesReceived(message.update, digest, findings, list(weights.regions))
        return Staged(message.update, digest, worst(findings))

    def _say_staged(self, pending: Pending) -> None:
        """Say it if it is so."""
        received = pending.received
        if received is None or not pending.joined or not (pending.readied or received.message):
            return
        pending.joined = not received.message
        code = "update_aborted" if received.message else ""
        findings = worst(received.findings)
        self._answer(Staged(received.update, received.digest, findings, code, received.message, received.broken))

    def _stager_lost(self, reason: str) -> None:
        # What it had for the engine to open, nobody else has.
        self._spawn(self._let_go())
        pending = self._pending
        if pending is not None and pending.joined and not pending.taken:
            # Also when all was received: it is lost again.
            pending.joined, pending.received = False, None
            self._answer(Staged(pending.prepare.update, code="update_aborted", message=reason))

    def _known(self, update: TaskId) -> Pending | None:
        pending = self._pending
        return pending if pending is not None and pending.prepare.update == update else None

    # --- beside the engine's work ---------------------------------------------------------------------------------------

    async def _get_ready(self, pending: Pending) -> None:
        try:
            pending.ready_s = await self._opened.get_ready(NewWeights(pending.tensors, pending.regions, pending.sharded))
        except Exception as error:  # as `_lost` says
            self._lost("getting ready", error)
            return
        pending.readied = True
        if self._pending is pending:
            self._say_staged(pending)
        elif not pending.stays:
            await self._let_go()

    async def _let_go(self) -> None:
        async with self._turn:
            try:
                await _aside("let go of an update's memory", self._opened.close())
            except Exception as error:  # as `_lost` says
                self._lost("letting go", error)

    def _lost(self, doing: str, error: Exception) -> None:
        """The engine is gone; or something failed in a way that nobody foresaw, and nobody knows what state it is in."""
        if isinstance(error, EngineDied):
            self._feed(EngineLost(time.monotonic(), str(error)))
            return
        report(error, doing)
        self._feed(EngineLost(time.monotonic(), f"{doing} failed: {error}"))

    # --- into the engine ------------------------------------------------------------------------------------------------

    async def _load(self, message: LoadWeights) -> WeightsLoaded:
        pending = self._known(message.update)
        if pending is None:
            return WeightsLoaded(message.update, code="update_aborted", message="this update is not known here")
        pending.taken = True
        prepare, digest = pending.prepare, self._engine.digest
        weights = NewWeights()
        if prepare.transfer in ("staged", "ipc"):
            received = pending.received
            if received is None or received.message:
                return WeightsLoaded(message.update, code="update_aborted", message="nothing is staged here")
            weights = NewWeights(pending.tensors, tuple(received.regions), received.sharded)
            digest = received.digest
        elif prepare.transfer == "direct":
            weights, digest = NewWeights(pending.tensors, group=pending.group, bucket_bytes=prepare.bucket_bytes), ""
        elif prepare.transfer == "checkpoint":
            weights, digest = NewWeights(pending.tensors, checkpoint=prepare.path), ""
        try:
            if weights.checkpoint:
                # Again: a link in it may lead elsewhere by now.
                path = await asyncio.to_thread(checkpoint_under, prepare.path, self._roots)
                weights = replace(weights, checkpoint=path)
            times = await self._engine.take(weights, message.version, digest)
        except (CheckpointError, EngineError) as error:
            return WeightsLoaded(message.update, code="engine_error", message=str(error))
        return WeightsLoaded(
            message.update,
            message.version,
            self._engine.digest,
            int(times.load_s * 1e6),
            int(times.flush_s * 1e6),
            int(pending.ready_s * 1e6),
        )

    # --- questions ------------------------------------------------------------------------------------------------------

    async def _inspect(self, message: Inspect) -> None:
        try:
            if message.what == "tensor":
                count = min(message.count or MAX_CHUNK, MAX_CHUNK)
                chunk = await self._engine.tensor(message.name, message.offset, count)
                spec = FrameSpec("tensor", "float32", (chunk.values.size,))
                answer = Inspected(message.task, dtype=chunk.dtype, frames=[spec], shape=list(chunk.shape))
                self._answer(answer, (chunk.values.tobytes(),))
                return
            digest, findings = await self._engine.inspect(message.what)
            self._answer(Inspected(message.task, digest=digest, findings=worst(findings)))
        except EngineError as error:
            code = "unsupported" if isinstance(error, NotComparable) else "engine_error"
            self._answer(Inspected(message.task, code=code, message=str(error)))
        except EngineDied as error:
            self._feed(EngineLost(time.monotonic(), str(error)))


async def _aside(what: str, work: Awaitable[object]) -> None:
    """Raises EngineDied: it hangs, and all that comes after it would wait for ever."""
    try:
        async with asyncio.timeout(ASIDE_S):
            await work
    except TimeoutError:
        raise EngineDied(f"the engine does not {what} within {ASIDE_S:g} s") from None
