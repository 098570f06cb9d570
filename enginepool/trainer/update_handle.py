"""`UpdateHandle`: one update on one trainer rank, between the caller, the coordinator and the thread that moves the bytes."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from enginepool.client.arguments import check_timeout
from enginepool.client.metadata_update import NAMES
from enginepool.client.session.events import (
    JoinProcessGroup,
    OpenUpdate,
    PhaseReached,
    UpdateAbort,
    UpdateCommit,
    UpdateDone,
    UpdateProgress,
    UpdateSent,
)
from enginepool.errors import EnginepoolError, Publishing, error_from
from enginepool.host import host_identity
from enginepool.protocol.manifest import encode_manifest
from enginepool.protocol.messages import ErrorReply, FrameSpec
from enginepool.protocol.updates import MemoryRegion, PhaseName, Publish, Published, UpdateRecord
from enginepool.trainer.heartbeats import RankFailed
from enginepool.trainer.ipc_export import IpcExport
from enginepool.trainer.publisher_context import PublisherContext
from enginepool.trainer.tensors import SendPlan
from enginepool.trainer.trainer_ranks import RoundEnd, TrainerRanks
from enginepool.trainer.update_sender import Follower, Outcome, SenderNotes, Side, UpdateSender
from enginepool.transfer import threads
from enginepool.transfer.process_group import CollectiveError

if TYPE_CHECKING:
    from enginepool.client.connection import UpdateEffect

log = logging.getLogger("enginepool")

#: After the end of an update its thread is waited for so long; it may still be in the caller's own `gather`.
_LEAVE_S = 10.0
#: the same, where a trainer rank failed: the threads of the others may be in a collective with it
_LEAVE_BROKEN_S = 2.0
_MAX_REASON = 200


class UpdateHandle:
    """An update under way.

    Attributes:
        version: of the weights that it brings; None as long as only rank 0 knows it.
        phase: `open`, `join`, `transfer`, `staged`, `hold`, `load`; at last `committed` or `failed`. On a trainer rank
            above 0 `open` until the end.
        members: workers that take part.
        done: those of them that have finished the phase.
        sent_bytes: broadcast so far.
        total_bytes: to be broadcast.
    """

    def __init__(
        self, desk: PublisherContext, version: int | None, again: Callable[[ErrorReply], float | None] | None = None
    ) -> None:
        """Not for callers: `WeightPublisher.start` makes it. `again`: in how many seconds to try again after a failure, if at
        all."""
        if asyncio.get_running_loop() is not desk.loop:
            raise RuntimeError("this WeightPublisher belongs to another event loop")
        if desk.open is not None:
            raise Publishing(f"this publisher's update to version {desk.open.version} is not over; {desk.open.blocks()}")
        self.version = version
        self.phase: PhaseName | Literal["committed", "failed"] = "open"
        self.members = self.done = self.sent_bytes = self.total_bytes = 0
        #: all trainer ranks try it again after so many seconds
        self.again_s: float | None = None
        self._again = again
        self._given_up = False
        self._desk = desk
        #: that the caller named
        self._asked_version = version
        self._heartbeats = desk.heartbeats(version, lambda error: desk.post(self._lost, error))
        self._courier: UpdateSender | None = None
        self._id: int | None = None
        #: the process group forms, or stands
        self._joining = False
        #: what this side met, which is a better reason than the coordinator can give
        self._cause: Exception | None = None
        self._opened: asyncio.Future[None] = desk.loop.create_future()
        self._sent: asyncio.Future[None] = desk.loop.create_future()
        self._final: asyncio.Future[UpdateRecord] = desk.loop.create_future()
        #: the thread has ended
        self._left: asyncio.Future[None] = desk.loop.create_future()
        for future in (self._opened, self._sent, self._final):
            future.add_done_callback(_looked_at)
        desk.open = self

    def __repr__(self) -> str:
        return f"<UpdateHandle version={self.version} {self.phase} {self.sent_bytes}/{self.total_bytes} bytes>"

    # --- the caller's side ---------------------------------------------------------------------------------------------

    async def sent(self) -> None:
        """Wait until the source is no longer read, so that training may go on. Raises what `finish` raises."""
        await asyncio.shield(self._sent)

    async def finish(self, timeout: float | None = None) -> UpdateRecord:  # noqa: ASYNC109 (the coordinator's answer counts)
        """Commit: wait for the transfer, hold the group, hand over. Every answer from then on is of this version.

        Args:
            timeout: seconds; None: the publisher's own `timeout`.

        Raises:
            UpdateAborted, WeightsRefused: the old weights serve on; the message says why.
            DeadlineExceeded: it took longer than `timeout`; the message says whether it may have been committed.
        """
        seconds = check_timeout(timeout) or self._desk.timeout
        if self._desk.connection is not None and self._id is not None:
            now = self._desk.loop.time()
            self._desk.connection.tell(UpdateCommit(now, self._id, now + seconds))
        try:
            return await asyncio.shield(self._final)
        except asyncio.CancelledError:
            await self.abort("the caller gave up")
            raise
        finally:
            await self._wait_left()

    async def abort(self, reason: str = "") -> None:
        """Give the update up, unless it is too late. Returns when it has ended, however it did.

        On a trainer rank above 0 it waits for rank 0 to say how it ended.
        """
        self._given_up = True
        if not self._final.done() and self._desk.connection is not None:
            self._give_up(reason or "the publisher gave it up")
        if not self._final.done():
            await asyncio.wait([self._final])
        await self._wait_left()

    # --- beginning: by the publisher -----------------------------------------------------------------------------------

    async def begin(self, publish: Publish, plan: Callable[[], SendPlan], next_version: Callable[[], Awaitable[int]]) -> None:
        """On rank 0: make the plan, open the transaction, and wait until it is agreed to."""
        desk = self._desk
        if self._heartbeats is not None:
            self._heartbeats.start()
        side: Side | IpcExport = IpcExport(desk.lender)
        try:
            if self.version is None:
                self.version = publish.version = await next_version()
            if publish.transfer == "ipc":
                publish.host, publish.gpu = host_identity(), desk.lender.gpu
            else:
                side = await desk.have_side()
                publish.backend, publish.address, publish.peer = side.backend, side.address, side.peer
        except BaseException as error:
            # Cancelled too: whoever waits for this update's end must see it. It is raised again.
            await self._call_off(f"rank 0 could not begin: {type(error).__name__}: {error}")
            raise
        if self._final.done():
            # It was given up while there was nobody yet to be told.
            await self._call_off("rank 0 gave it up before it began")
            self._final.result()
        notes = SenderNotes(
            planned=lambda plan: desk.post(self._planned, publish, plan),
            progress=lambda sent: desk.post(self._progress, sent),
            sent=lambda digest, sent, regions: desk.post(self._all_sent, digest, sent, regions),
            failed=lambda error: desk.post(self._failed, error),
            ended=lambda: desk.post(self._leave),
        )
        self._courier = UpdateSender(
            plan,
            side,
            desk.buffers,
            self._lockstep(),
            notes,
            bucket_bytes=desk.bucket_bytes,
            timeout_s=desk.collective_timeout,
        )
        self._courier.start()
        try:
            await asyncio.shield(self._opened)
        except BaseException:
            # Cancelled too: the transaction would hold its group until the lease ends. It is raised again.
            await self.abort("the caller gave up")
            raise

    async def _call_off(self, why: str) -> None:
        """There will be no courier: the other trainer ranks, who wait for its word, hear that the update is over."""
        failure = self._aborted(why)

        def tell() -> None:
            try:
                self._lockstep().end(failure)
            finally:
                self._desk.post(self._leave)

        threads.start(tell, "weights")
        await self._wait_left()

    def _lockstep(self) -> TrainerRanks:
        return TrainerRanks(self._desk.trainer_group, self._asked_version, self._heartbeats)

    def follow(self, plan: Callable[[], SendPlan]) -> None:
        """On the other ranks: take part in the gathering."""

        def ended(end: RoundEnd, own: Exception | None) -> None:
            self._desk.post(self._follower_ended, end, own)

        if self._heartbeats is not None:
            self._heartbeats.start()
        desk = self._desk
        Follower(plan, self._asked_version, desk.trainer_group, self._heartbeats, desk.buffers.device, ended).start()
        self._opened.set_result(None)

    # --- what the coordinator says -------------------------------------------------------------------------------------

    def _hear(self, effect: "UpdateEffect") -> None:
        assert self._courier is not None
        if isinstance(effect, JoinProcessGroup):
            self._joining = True
            self._courier.join_group(effect.join)
            self._agreed()
        elif isinstance(effect, PhaseReached):
            phase = effect.phase
            self.phase, self.members, self.done = phase.phase, phase.members, phase.done
            if phase.phase == "transfer":
                self._courier.transfer()
                self._agreed()
        elif isinstance(effect, UpdateDone):
            self._end(effect.published)
        else:
            self._end(effect.failure)

    def _agreed(self) -> None:
        if not self._opened.done():
            self._opened.set_result(None)

    def _end(self, outcome: Outcome) -> None:
        """The last word is spoken. After a failure the process group is of no more use, and who waits in it has to leave."""
        side = None if self._courier is None else self._courier.side
        if isinstance(outcome, ErrorReply) and self._joining and isinstance(side, Side):
            side.lost = True
            self._desk.loop.run_in_executor(None, side.abort)
        # What this trainer's own ranks met, they would meet again; a process group breaks when a worker is lost.
        pools = self._cause is None or isinstance(self._cause, CollectiveError)
        if isinstance(outcome, ErrorReply) and self._again is not None and pools and not (self._given_up or self._final.done()):
            self.again_s = self._again(outcome)
        if self._courier is not None:
            self._courier.end(RoundEnd(outcome, self.again_s))
        self._settle(outcome)

    def _settle(self, outcome: Outcome) -> None:
        if self._final.done():
            return
        waiting = [future for future in (self._opened, self._sent) if not future.done()]
        if isinstance(outcome, Published):
            self.phase, self.version = "committed", outcome.version
            self._desk.committed()
            self._final.set_result(outcome.record)
            for future in waiting:
                future.set_result(None)
        else:
            self.phase = "failed"
            error = self._error(outcome)
            if isinstance(self._cause, CollectiveError | RankFailed):
                error.__cause__ = self._cause
            elif self._cause is not None:
                error = self._cause
            self._final.set_exception(error)
            for future in waiting:
                future.set_exception(error)

    def _error(self, failure: ErrorReply) -> EnginepoolError:
        if self._cause is None and (stuck := self._stuck()):
            # The coordinator only knows that nothing comes.
            failure = msgspec.structs.replace(failure, message=failure.message + stuck)
        connection = self._desk.connection
        return error_from(failure, NAMES) if connection is None else connection.failed(failure, NAMES)

    def _stuck(self) -> str:
        """What the thread waits for in the caller's own code."""
        name = "" if self._courier is None else self._courier.stuck_at
        if not name:
            return ""
        ranks = "" if self._desk.trainer_group is None else ", perhaps for another trainer rank, whose log says why"
        return f"; this publisher waits for {name} from its source or gather{ranks}"

    def blocks(self) -> str:
        """Why the next update cannot begin."""
        return "finish or abort it first" if not self._final.done() else f"its thread is still busy{self._stuck()}"

    # --- what the threads say ------------------------------------------------------------------------------------------

    def _planned(self, publish: Publish, plan: SendPlan) -> None:
        """Tell the coordinator, unless the caller has given up meanwhile."""
        connection, now = self._desk.connection, self._desk.loop.time()
        if self._final.done() or connection is None:
            return
        text = encode_manifest(plan.manifest)
        publish.frames = [FrameSpec("manifest", "utf8", (len(text),))]
        self.total_bytes = plan.nbytes

        def opening(id_: int) -> OpenUpdate:
            publish.id = self._id = id_
            return OpenUpdate(now, publish, (text,), now + self._desk.timeout)

        connection.open_update(opening, self._hear)

    def _progress(self, sent: int) -> None:
        self.sent_bytes = sent
        if self._desk.connection is not None and self._id is not None:
            self._desk.connection.tell(UpdateProgress(self._desk.loop.time(), self._id, sent))

    def _all_sent(self, digest: str, sent: int, regions: list[MemoryRegion]) -> None:
        self.sent_bytes = sent
        if self._desk.connection is not None and self._id is not None:
            self._desk.connection.tell(UpdateSent(self._desk.loop.time(), self._id, digest, sent, regions))
        if not self._sent.done():
            self._sent.set_result(None)

    def _failed(self, error: Exception) -> None:
        """This side cannot go on. The caller hears why when the coordinator has let go."""
        if self._final.done():
            return
        reason = " ".join(str(error).split()) or type(error).__name__
        if self._cause is None:
            self._cause = error
        self._give_up(reason, broken=isinstance(error, CollectiveError))

    def _give_up(self, reason: str, *, broken: bool = False) -> None:
        # The name of a file in it may be no UTF-8, and nobody would be told.
        reason = reason.encode(errors="replace").decode()
        if self._id is None or self._desk.connection is None:
            self._end(self._aborted(reason))
        else:
            self._desk.connection.tell(UpdateAbort(self._desk.loop.time(), self._id, reason[:_MAX_REASON], broken))

    def _follower_ended(self, end: RoundEnd, own: Exception | None) -> None:
        self._cause = self._cause or own
        self.again_s = end.again_s if own is None and not self._final.done() else None
        self._settle(end.outcome)
        self._leave()

    def _lost(self, error: Exception) -> None:
        """The heartbeats say that a trainer rank keeps this update from going on."""
        if self._desk.connection is not None:
            self._failed(error)
        elif not self._final.done():
            self._cause = error
            self._settle(self._aborted(str(error)))

    def _aborted(self, why: str) -> ErrorReply:
        update = "the update" if self.version is None else f"the update to version {self.version}"
        return ErrorReply("update_aborted", f"{update} was aborted: {why}")

    # --- the end -------------------------------------------------------------------------------------------------------

    def _leave(self) -> None:
        if not self._left.done():
            self._left.set_result(None)
        if self._desk.open is self:
            self._desk.open = None

    async def _wait_left(self) -> None:
        """Until the thread has ended, or is stuck in the caller's own code. The next update has another one; but where trainer
        ranks go in step, it is refused until then: the collectives of both would meet."""
        if not self._left.done():
            broken = self._cause is not None and self._heartbeats is not None
            await asyncio.wait([self._left], timeout=_LEAVE_BROKEN_S if broken else _LEAVE_S)
        if not self._left.done():
            log.warning("the thread of the update to version %s is still busy%s", self.version, self._stuck())
            if self._desk.trainer_group is None:
                self._leave()


def _looked_at(future: "asyncio.Future[Any]") -> None:
    """An error that nobody waits for is none that Python should complain about."""
    if not future.cancelled():
        future.exception()
