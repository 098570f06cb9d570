"""An update on rank 0 of the trainer: it opens the transaction, orders its sender, and hears the coordinator."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from enginepool.client.metadata_update import NAMES
from enginepool.client.session.events import (
    Answer,
    Fail,
    SessionEvent,
    UpdateAbort,
    UpdateBegin,
    UpdateCommit,
    UpdateProgress,
    UpdateSent,
    UpdateStep,
)
from enginepool.errors import EnginepoolError
from enginepool.host import host_identity
from enginepool.protocol.manifest import encode_manifest
from enginepool.protocol.messages import ErrorReply, FrameSpec
from enginepool.protocol.messages.weights import Join, MemoryRegion, Phase, Publish, Published
from enginepool.trainer.ipc_export import IpcExport
from enginepool.trainer.publisher_context import PublisherContext
from enginepool.trainer.rank0_endpoint import Rank0Endpoint
from enginepool.trainer.tensors import SendPlan
from enginepool.trainer.trainer_ranks import RoundEnd, TrainerRanks
from enginepool.trainer.update_handle import UpdateHandle
from enginepool.trainer.update_sender import UpdateSender
from enginepool.transfer import threads
from enginepool.transfer.process_group import CollectiveError

if TYPE_CHECKING:
    from enginepool.client.connection import Connection

_MAX_REASON = 200


class Rank0Update(UpdateHandle):
    """An update under way, on the rank that has the pool.

    Args:
        connection: to the coordinator.
    """

    def __init__(
        self,
        context: PublisherContext,
        connection: "Connection",
        version: int | None,
        again: Callable[[ErrorReply], float | None] | None = None,
    ) -> None:
        super().__init__(context, version, again)
        self._connection = connection
        self._publish = Publish(0, 0)
        self._sender: UpdateSender | None = None
        self._id: int | None = None
        #: the process group forms, or has formed
        self._joining = False

    async def begin(self, publish: Publish, plan: Callable[[], SendPlan], next_version: Callable[[], Awaitable[int]]) -> None:
        """See `UpdateHandle`."""
        context = self._context
        if self._heartbeats is not None:
            self._heartbeats.start()
        transport: Rank0Endpoint | IpcExport = IpcExport(context.exporter)
        try:
            if self.version is None:
                self.version = publish.version = await next_version()
            if publish.transfer == "ipc":
                publish.host, publish.gpu = host_identity(), context.exporter.gpu
            else:
                transport = await context.open_endpoint()
                publish.backend, publish.address, publish.peer = transport.backend, transport.address, transport.peer
        except BaseException as error:
            # Also when cancelled: other calls wait for the end of this update. It is raised again.
            await self._call_off(f"rank 0 could not begin: {type(error).__name__}: {error}")
            raise
        if self._final.done():
            # It was aborted before there was a thread.
            await self._call_off("rank 0 gave it up before it began")
            self._final.result()
        self._publish = publish
        self._sender = UpdateSender(
            self,
            context.post,
            plan,
            transport,
            context.buffers,
            self._ranks(),
            bucket_bytes=context.bucket_bytes,
            timeout_s=context.collective_timeout,
        )
        self._sender.start()
        try:
            await asyncio.shield(self._opened)
        except BaseException:
            # Also when cancelled: the transaction would hold its group until the lease ends. It is raised again.
            await self.abort("the caller gave up")
            raise

    async def _call_off(self, why: str) -> None:
        """No sender starts. The other trainer ranks, which wait for rank 0, are told that the update is over."""
        failure = self._failure(why)

        def tell() -> None:
            try:
                self._ranks().end(failure)
            finally:
                self._context.post(self.left)

        threads.start(tell, "weights")
        await self._wait_left()

    def _ranks(self) -> TrainerRanks:
        return TrainerRanks(self._context.trainer_group, self._asked_version, self._heartbeats)

    # --- what the coordinator says -------------------------------------------------------------------------------------

    def _hear(self, effect: Answer | UpdateStep | Fail) -> None:
        assert self._sender is not None
        outcome = effect.failure if isinstance(effect, Fail) else effect.message
        if isinstance(outcome, Join):
            self._joining = True
            self._sender.join_group(outcome)
            self._agreed()
        elif isinstance(outcome, Phase):
            self.phase, self.members, self.done = outcome.phase, outcome.members, outcome.done
            if outcome.phase == "transfer":
                self._sender.transfer()
                self._agreed()
        else:
            assert isinstance(outcome, Published | ErrorReply)
            self._end(outcome)

    def _agreed(self) -> None:
        if not self._opened.done():
            self._opened.set_result(None)

    def _end(self, outcome: Published | ErrorReply) -> None:
        """The final answer. After a failure the process group cannot be used again, and ranks that wait in it must leave."""
        failed = isinstance(outcome, ErrorReply)
        endpoint = None if self._sender is None else self._sender.transport
        if failed and self._joining and isinstance(endpoint, Rank0Endpoint):
            endpoint.lost = True
            self._context.loop.run_in_executor(None, endpoint.abort)
        # What failed on this trainer's own ranks would fail again. A process group breaks when a worker is lost.
        of_pool = self._cause is None or isinstance(self._cause, CollectiveError)
        if failed and self._again is not None and of_pool and not (self._aborted or self._final.done()):
            self.again_s = self._again(outcome)
        if self._sender is not None:
            self._sender.end(RoundEnd(outcome, self.again_s))
        self._settle(outcome)

    # --- what the sender reports ---------------------------------------------------------------------------------------

    def planned(self, plan: SendPlan) -> None:
        """See `SenderReports`. Tells the coordinator, unless the update was aborted meanwhile."""
        publish = self._publish
        if self._final.done():
            return
        now = self._context.loop.time()
        text = encode_manifest(plan.manifest)
        publish.frames = [FrameSpec("manifest", "utf8", (len(text),))]
        self.total_bytes = plan.nbytes

        def opening(id_: int) -> UpdateBegin:
            publish.id = self._id = id_
            return UpdateBegin(now, publish, (text,), now + self._context.timeout)

        self._connection.open_update(opening, self._hear)

    def progress(self, sent_bytes: int) -> None:
        """See `SenderReports`."""
        self.sent_bytes = sent_bytes
        self._tell(lambda now, id_: UpdateProgress(now, id_, sent_bytes))

    def all_sent(self, digest: str, sent_bytes: int, regions: list[MemoryRegion]) -> None:
        """See `SenderReports`."""
        self.sent_bytes = sent_bytes
        self._tell(lambda now, id_: UpdateSent(now, id_, digest, sent_bytes, regions))
        if not self._sent.done():
            self._sent.set_result(None)

    def failed(self, error: Exception) -> None:
        """See `SenderReports`. The caller gets the error when the coordinator has ended the update."""
        if self._final.done():
            return
        reason = " ".join(str(error).split()) or type(error).__name__
        self._cause = self._cause or error
        self._request_abort(reason, broken=isinstance(error, CollectiveError))

    # --- the parts -----------------------------------------------------------------------------------------------------

    def _commit(self, seconds: float) -> None:
        self._tell(lambda now, id_: UpdateCommit(now, id_, now + seconds))

    def _request_abort(self, reason: str, *, broken: bool = False) -> None:
        # A file name in the reason may not be UTF-8, and the message could not be sent.
        reason = reason.encode(errors="replace").decode()
        if not self._tell(lambda now, id_: UpdateAbort(now, id_, reason[:_MAX_REASON], broken)):
            self._end(self._failure(reason))

    def _ranks_failed(self, error: Exception) -> None:
        self.failed(error)

    def _tell(self, event: Callable[[float, int], SessionEvent]) -> bool:
        """Tell the session `event(now, id)`; False: the session does not know this update."""
        if self._id is None:
            return False
        self._connection.handle(event(self._context.loop.time(), self._id))
        return True

    def _stuck(self) -> str:
        """What the thread waits for in the caller's own code."""
        name = "" if self._sender is None else self._sender.stuck_at
        if not name:
            return ""
        ranks = "" if self._context.trainer_group is None else ", perhaps for another trainer rank, whose log says why"
        return f"; this publisher waits for {name} from its source or gather{ranks}"

    def _exception(self, failure: ErrorReply) -> EnginepoolError:
        return self._connection.error(failure, NAMES)
