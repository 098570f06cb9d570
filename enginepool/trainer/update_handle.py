"""`UpdateHandle`: one update on one trainer rank, from its opening to its end.

| step     | rank 0                                                              | the other ranks            |
|----------|---------------------------------------------------------------------|----------------------------|
| open     | the sender reads the source, `publish` goes to the coordinator      | read the source            |
| join     | the sender forms the process group and fills the first buckets      | gather when rank 0 says so |
| transfer | the sender broadcasts, and reports the digest: `sent`               | gather when rank 0 says so |
| finish   | `commit` goes to the coordinator; its final answer ends the update  | wait for rank 0            |

This object lives on the event loop. The bytes move in the thread of `UpdateSender`. `PublishedUpdate` of the session holds what
the coordinator must know, the lease and the deadlines. `Heartbeats` watches the other ranks. `PublisherContext` holds what
outlives an update.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from enginepool.client.arguments import check_timeout
from enginepool.client.metadata_update import NAMES
from enginepool.client.session.events import (
    Fail,
    Heard,
    SessionEvent,
    StreamPart,
    UpdateAbort,
    UpdateCommit,
    UpdateProgress,
    UpdateSent,
)
from enginepool.errors import DeadlineExceeded, EnginepoolError, Publishing, error_from
from enginepool.host import host_identity
from enginepool.protocol.manifest import encode_manifest
from enginepool.protocol.messages import ErrorReply, FrameSpec
from enginepool.protocol.messages.weight_reports import UpdateRecord
from enginepool.protocol.messages.weights import Join, MemoryRegion, Phase, PhaseName, Publish, Published
from enginepool.trainer.heartbeats import BELIEVE_S, RankFailed
from enginepool.trainer.publisher_context import PublisherContext
from enginepool.trainer.rank0_endpoint import Rank0Endpoint
from enginepool.trainer.tensors import SendPlan
from enginepool.trainer.trainer_ranks import RoundEnd
from enginepool.trainer.update_sender import UpdateSender, start_thread
from enginepool.transfer.process_group import CollectiveError

log = logging.getLogger("enginepool")

#: Seconds to wait for the thread after the end of its update; it may still be in the caller's own `gather`.
_LEAVE_S = 10.0
#: The same after a trainer rank failed: the threads of the other ranks may be in a collective with it.
_LEAVE_BROKEN_S = 2.0
_MAX_REASON = 200


class UpdateHandle:
    """An update under way.

    Attributes:
        version: of the weights that it brings; None as long as only rank 0 knows it.
        phase: `open`, `join`, `transfer`, `staged`, `hold`, `load`; finally `committed` or `failed`. On a trainer rank above 0
            `open` until the end.
        members: number of workers that take part.
        done: number of members that have finished the phase.
        sent_bytes: bytes sent so far.
        total_bytes: bytes of all tensors.
    """

    def __init__(
        self, context: PublisherContext, version: int | None, again: Callable[[ErrorReply], float | None] | None = None
    ) -> None:
        """Not for callers: `WeightPublisher.start` makes it. `again`: seconds until the next attempt after a failure, or
        None: there is none."""
        if asyncio.get_running_loop() is not context.loop:
            raise RuntimeError("this WeightPublisher belongs to another event loop")
        current = context.current
        if current is not None:
            to = "" if current.version is None else f" to version {current.version}"
            raise Publishing(f"this publisher's update{to} is not over; {current.blocks()}")
        self.version: int | None = version
        self.phase: PhaseName | Literal["committed", "failed"] = "open"
        self.members = self.done = self.sent_bytes = self.total_bytes = 0
        #: all trainer ranks try it again after so many seconds
        self.again_s: float | None = None
        self._again = again
        self._context = context
        #: the version that the caller gave
        self._asked_version = version
        self._heartbeats = context.heartbeats(version, lambda error: context.post(self.failed, error))
        self._sender: UpdateSender | None = None
        #: the session's id of it, once the session knows it
        self._id: int | None = None
        #: the caller aborted it
        self._aborted = False
        #: what failed on this rank, which is a better reason than the coordinator can give
        self._cause: Exception | None = None
        self._planned: asyncio.Future[tuple[SendPlan, Rank0Endpoint | None]] = context.loop.create_future()
        self._opened: asyncio.Future[None] = context.loop.create_future()
        self._sent: asyncio.Future[None] = context.loop.create_future()
        self._final: asyncio.Future[UpdateRecord] = context.loop.create_future()
        #: the thread has ended
        self._left: asyncio.Future[None] = context.loop.create_future()
        for future in (self._planned, self._opened, self._sent, self._final):
            # Python warns of exceptions that no code retrieves; here the caller need not wait for each future.
            future.add_done_callback(lambda done: done.cancelled() or done.exception())

    def __repr__(self) -> str:
        return f"<UpdateHandle version={self.version} {self.phase} {self.sent_bytes}/{self.total_bytes} bytes>"

    # --- the caller's side ---------------------------------------------------------------------------------------------

    async def sent(self) -> None:
        """Wait until the source is no longer read, so that training may go on. Raises what `finish` raises.

        With `direct` the source is read once the group is held, so only after `finish` was called.
        """
        await asyncio.shield(self._sent)

    async def finish(self, timeout: float | None = None) -> UpdateRecord:  # noqa: ASYNC109 (the coordinator's answer counts)
        """Commit: wait for the transfer, then the group is held and loads. Every later answer is computed by this version.

        Args:
            timeout: seconds; None: the publisher's own, or above rank 0 the time that rank 0 has for the whole update.

        Raises:
            UpdateAborted, WeightsRefused: the old weights serve on; the message says why.
            DeadlineExceeded: it took longer than `timeout`; the message says whether it may have been committed.
        """
        seconds = check_timeout(timeout) or self._context.finish_s
        self._tell(UpdateCommit, self._context.loop.time() + seconds)
        try:
            await asyncio.wait([self._final], timeout=seconds if self._context.connection is None else None)
            if not self._final.done():
                self._cause = DeadlineExceeded(f"the update did not end in {seconds:g} s; whether it was committed is unknown")
                await self.abort()
            return self._final.result()
        except asyncio.CancelledError:
            await self.abort("the caller gave up")
            raise
        finally:
            await self._wait_left()

    async def abort(self, reason: str = "") -> None:
        """Abort the update, unless it is too late. Returns when it has ended, committed or not.

        On a trainer rank above 0 it tells rank 0, and waits a few seconds at most to hear how it ended.
        """
        self._aborted, reason = True, reason or "the publisher gave it up"
        if not self._final.done() and self._context.connection is not None:
            self._request_abort(reason)
            await asyncio.wait([self._final])
        elif not self._final.done() and self._heartbeats is not None:
            error = self._cause = self._error(self._failure(reason))
            self._heartbeats.fail(error)
            # After BELIEVE_S the heartbeats end it here, unless the store of the ranks stands still.
            await asyncio.wait([self._final], timeout=2 * BELIEVE_S)
            self.failed(error)
        await self._wait_left()

    # --- the beginning -------------------------------------------------------------------------------------------------

    async def begin(self, publish: Publish, plan: Callable[[], SendPlan]) -> None:
        """For the publisher: start the thread, and on rank 0 wait until all members have agreed to the update."""
        ipc = publish.transfer == "ipc"
        self._sender = start_thread(self, self._context, plan, self._asked_version, self._heartbeats, ipc=ipc)
        self._context.current = self
        if self._sender is None:
            self._opened.set_result(None)
            return
        try:
            await self._open(publish)
        except BaseException as error:
            # Also when cancelled: the other ranks wait, and so does the group, until the lease ends. It is raised again.
            if isinstance(error, Exception):
                self.failed(error)
            await self.abort("the caller gave up")
            raise

    async def _open(self, publish: Publish) -> None:
        """Complete `publish`, send it, and wait until all members have agreed."""
        context = self._context
        if self.version is None:
            self.version = publish.version = await context.next_version()
        plan, endpoint = await asyncio.shield(self._planned)
        if self._final.done():
            self._final.result()  # it was aborted meanwhile: this raises
        if endpoint is None:
            publish.host, publish.gpu = host_identity(), context.exporter.gpu
        else:
            publish.backend, publish.address, publish.peer = endpoint.backend, endpoint.address, endpoint.peer
        text = encode_manifest(plan.manifest)
        publish.frames = [FrameSpec("manifest", "utf8", (len(text),))]
        self.total_bytes = plan.nbytes
        assert context.connection is not None
        self._id = context.connection.open_update(publish, (text,), context.loop.time() + context.timeout, self._hear)
        await asyncio.shield(self._opened)

    def _hear(self, effect: Heard) -> None:
        assert self._sender is not None and not isinstance(effect, StreamPart)
        message = effect.failure if isinstance(effect, Fail) else effect.message
        if isinstance(message, Join):
            self._sender.join_group(message)
            _resolve(self._opened)
        elif isinstance(message, Phase):
            self.phase, self.members, self.done = message.phase, message.members, message.done
            if message.phase == "transfer":
                self._sender.transfer()
                _resolve(self._opened)
        else:
            assert isinstance(message, Published | ErrorReply)
            self._end(message)

    # --- what the threads report ---------------------------------------------------------------------------------------

    def planned(self, plan: SendPlan, endpoint: Rank0Endpoint | None) -> None:
        """See `CurrentUpdate`."""
        _resolve(self._planned, (plan, endpoint))

    def progress(self, sent_bytes: int) -> None:
        """See `CurrentUpdate`."""
        self.sent_bytes = sent_bytes
        self._tell(UpdateProgress, sent_bytes)

    def all_sent(self, digest: str, sent_bytes: int, regions: list[MemoryRegion]) -> None:
        """See `CurrentUpdate`."""
        self.sent_bytes = sent_bytes
        self._tell(UpdateSent, digest, sent_bytes, regions)
        _resolve(self._sent)

    def failed(self, error: Exception) -> None:
        """A trainer rank prevents the update. On rank 0 the caller gets `error` when the coordinator has ended the update."""
        if self._final.done():
            return
        reason = " ".join(str(error).split()) or type(error).__name__
        self._cause = self._cause or error
        if self._context.connection is None:
            self._settle(self._failure(reason))
        else:
            self._request_abort(reason, broken=isinstance(error, CollectiveError))

    def left(self) -> None:
        """The thread has ended: the next update may begin."""
        _resolve(self._left)
        if self._context.current is self:
            self._context.current = None

    def follower_sent(self) -> None:
        """See `CurrentUpdate`."""
        _resolve(self._sent)

    def follower_ended(self, end: RoundEnd, own: Exception | None) -> None:
        """On a rank above 0: rank 0 has said how the update ended. `own`: what failed on this rank."""
        self._cause = self._cause or own
        self.again_s = end.again_s if own is None and not self._final.done() else None
        self._settle(end.outcome)
        self.left()

    # --- the end -------------------------------------------------------------------------------------------------------

    def _request_abort(self, reason: str, *, broken: bool = False) -> None:
        # A file name in the reason may not be UTF-8, and the message could not be sent.
        reason = reason.encode(errors="replace").decode()
        if not self._tell(UpdateAbort, reason[:_MAX_REASON], broken):
            self._end(self._failure(reason))

    def _tell(self, event: Callable[..., SessionEvent], *fields: object) -> bool:
        """Tell the session `event(now, id, *fields)`; False: the session does not know this update."""
        connection = self._context.connection
        if self._id is None or connection is None:
            return False
        connection.handle(event(self._context.loop.time(), self._id, *fields))
        return True

    def _end(self, outcome: Published | ErrorReply) -> None:
        """The final answer."""
        # What failed on this trainer's own ranks would fail again. A process group breaks when a worker is lost.
        of_pool = self._cause is None or isinstance(self._cause, CollectiveError)
        if self._again is not None and of_pool and not (self._aborted or self._final.done()):
            self.again_s = None if isinstance(outcome, Published) else self._again(outcome)
        if self._sender is not None:
            self._sender.end(RoundEnd(outcome, self.again_s))
        self._settle(outcome)

    def _settle(self, outcome: Published | ErrorReply) -> None:
        if self._final.done():
            return
        if isinstance(outcome, Published):
            self.phase, self.version = "committed", outcome.version
            self._context.committed()
            self._final.set_result(outcome.record)
            _resolve(self._opened)
            _resolve(self._sent)
        else:
            self.phase = "failed"
            error = self._error(outcome)
            for future in (self._final, self._planned, self._opened, self._sent):
                if not future.done():
                    future.set_exception(error)

    def _error(self, failure: ErrorReply) -> Exception:
        cause, connection = self._cause, self._context.connection
        if cause is not None and not isinstance(cause, CollectiveError | RankFailed):
            return cause
        if cause is None:
            # The coordinator only knows that no bytes arrive.
            failure = msgspec.structs.replace(failure, message=failure.message + self._stuck())
        error: EnginepoolError = error_from(failure, NAMES) if connection is None else connection.error(failure, NAMES)
        error.__cause__ = cause
        return error

    def _failure(self, why: str) -> ErrorReply:
        update = "the update" if self.version is None else f"the update to version {self.version}"
        return ErrorReply("update_aborted", f"{update} was aborted: {why}")

    def _stuck(self) -> str:
        return "" if self._sender is None else self._sender.stuck

    def blocks(self) -> str:
        """Why the next update cannot begin."""
        return "finish or abort it first" if not self._final.done() else f"its thread is still busy{self._stuck()}"

    async def _wait_left(self) -> None:
        """Wait until the thread has ended, or is stuck in the caller's own code.

        The next update has a thread of its own. With several trainer ranks it is refused until this thread has ended: the
        collectives of both updates would meet.
        """
        if not self._left.done():
            broken = self._cause is not None and self._heartbeats is not None
            await asyncio.wait([self._left], timeout=_LEAVE_BROKEN_S if broken else _LEAVE_S)
        if not self._left.done():
            log.warning("the thread of the update to version %s is still busy%s", self.version, self._stuck())
            if self._context.trainer_group is None:
                self.left()


def _resolve(future: "asyncio.Future[Any]", result: object = None) -> None:
    if not future.done():
        future.set_result(result)
