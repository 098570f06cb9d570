"""The thread of one update on a trainer rank: it reads the source and sends the bytes, so that the event loop stays free.

The event loop gives orders: `join_group`, `transfer`, `end`. The thread reports to its update, as `CurrentUpdate` says.

- While the workers join the process group, the thread fills the first two buckets: see `bucket_stream.py`.
- A broadcast, which may block the thread for long, has a time limit, and is aborted from outside.
"""

import importlib
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from enginepool.protocol.messages import ErrorReply
from enginepool.protocol.messages.weights import Join, MemoryRegion
from enginepool.trainer.bucket_stream import BucketStream
from enginepool.trainer.buffers import stand_behind
from enginepool.trainer.heartbeats import Heartbeats, RankFailed
from enginepool.trainer.ipc_export import IpcExport
from enginepool.trainer.publisher_context import CurrentUpdate, PublisherContext
from enginepool.trainer.rank0_endpoint import Rank0Endpoint
from enginepool.trainer.tensor_feed import Stopped
from enginepool.trainer.tensors import SendPlan
from enginepool.trainer.trainer_ranks import RoundEnd, TrainerRanks, as_error, follow
from enginepool.transfer import threads
from enginepool.transfer.process_group import ProcessGroup

torch: Any = importlib.import_module("torch")

T = TypeVar("T")


class UpdateSender:
    """The thread of one update on rank 0.

    Args:
        update: whose methods are called on the event loop, by way of `PublisherContext.post`.
        plan: makes the plan; may gather.
        ranks: the other trainer ranks.
        ipc: memory is shared; else the bytes are broadcast.
    """

    def __init__(
        self,
        update: CurrentUpdate,
        context: PublisherContext,
        plan: Callable[[], SendPlan],
        ranks: TrainerRanks,
        *,
        ipc: bool,
    ) -> None:
        self._update, self._context, self._plan, self._ranks = update, context, plan, ranks
        self._buffers, self._bucket_bytes = context.buffers, context.bucket_bytes
        self._post, self._timeout_s = context.post, context.collective_timeout
        self._export = IpcExport(context.exporter) if ipc else None
        self._endpoint: Rank0Endpoint | None = None
        #: orders, and the process group once it has formed
        self._join: Future[None] = Future()
        self._group: Future[ProcessGroup] = Future()
        self._transfer: Future[None] = Future()
        self._end: Future[RoundEnd] = Future()
        self._after: Any = None
        if self._buffers.stream is not None:
            # The caller's stream may still have to compute what is sent.
            self._after = torch.cuda.current_stream(self._buffers.device).record_event()
        else:
            # Tensors may lie on a GPU nevertheless.
            stand_behind()

    # --- the event loop's side -----------------------------------------------------------------------------------------

    @property
    def stuck(self) -> str:
        """What the thread waits for in the caller's own code, as the end of a sentence; "" if it does not."""
        name = self._ranks.stuck_at
        if not name:
            return ""
        ranks = "" if self._ranks.alone else ", perhaps for another trainer rank, whose error says why"
        return f"; this publisher waits for {name} from its source or gather{ranks}"

    def start(self) -> None:
        """Start the thread."""
        threads.start(self._run, "weights")

    def join_group(self, join: Join) -> None:
        """All members have agreed: form the group, or keep it, and fill the first buckets. Idempotent; ignored with `ipc`."""
        if self._endpoint is not None and not self._join.done():
            self._join.set_result(None)
            try:
                threads.start(partial(self._form, self._endpoint, join), "weights-join")
            except RuntimeError as error:  # there is no room for another thread
                self._group.set_exception(error)

    def transfer(self) -> None:
        """All members have joined: send. With `ipc` the tensors are laid out in memory now. Idempotent."""
        if not self._transfer.done():
            self._transfer.set_result(None)

    def end(self, end: RoundEnd) -> None:
        """The update ended so. No further bytes are sent. After a failure no update uses the group again, and other ranks that
        wait in it leave it."""
        if self._end.done():
            return
        self._end.set_result(end)
        if isinstance(end.outcome, ErrorReply) and self._endpoint is not None and self._join.done():
            self._endpoint.lost = True
            with suppress(RuntimeError):  # there is no room for another thread; each broadcast of this one has a time limit
                threads.start(self._endpoint.abort, "weights-abort")

    # --- the threads ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._send()
        except BaseException as error:
            # The caller's own code raised, and the caller waits: every kind of error is reported, unless the update has ended.
            if not self._end.done():
                self._post(self._update.failed, as_error(error))
        end = self._end.result()
        try:
            try:
                if self._export is not None:
                    self._export.end()
            finally:
                self._ranks.end(end.outcome, end.again_s)
        finally:
            self._post(self._update.left)

    def _send(self) -> None:
        """The straight way of an update. Raises Stopped: the update ended meanwhile."""
        if self._buffers.stream is not None:
            # A thread begins on device 0, and the source may use the current device.
            torch.cuda.set_device(self._buffers.device)
        if self._export is None:
            self._endpoint = self._context.open_endpoint()
        self._buffers.make_ready()
        with self._buffers.aside(self._after):
            # The buckets are filled on that stream, which waits for no other stream.
            plan = self._plan()
        self._post(self._update.planned, plan, self._endpoint)
        progress = partial(self._post, self._update.progress)
        if self._export is not None:
            self._ordered(self._transfer)
            sent = self._export.fill(
                plan,
                bucket_bytes=self._bucket_bytes,
                ranks=self._ranks,
                stopped=self._end.done,
                progress=progress,
                after=self._after,
            )
        else:
            self._ordered(self._join)
            stream = BucketStream(
                plan, self._buffers, self._bucket_bytes, self._ranks, stopped=self._end.done, after=self._after
            )
            stream.prepare()
            group = self._ordered(self._group)
            self._ordered(self._transfer)
            sent = (*stream.send(group, self._timeout_s, progress), list[MemoryRegion]())
        self._post(self._update.all_sent, *sent)
        if not self._end.done():
            self._ranks.sent()

    def _ordered(self, order: "Future[T]") -> T:
        """Wait for an order, and return what it brings. Raises Stopped: the update ended first."""
        either: list[Future[Any]] = [order, self._end]
        wait(either, return_when=FIRST_COMPLETED)
        if self._end.done():
            raise Stopped
        return order.result()

    def _form(self, endpoint: Rank0Endpoint, join: Join) -> None:
        """In a thread of its own: the source is read meanwhile, and the update may end while the group forms."""
        try:
            if self._buffers.stream is not None:
                torch.cuda.set_device(self._buffers.device)
            self._group.set_result(endpoint.join(join, self._timeout_s))
        except Exception as error:
            self._group.set_exception(error)


def start_thread(
    update: CurrentUpdate,
    context: PublisherContext,
    plan: Callable[[], SendPlan],
    version: int | None,
    heartbeats: Heartbeats | None,
    *,
    ipc: bool,
) -> UpdateSender | None:
    """Begin an update on this trainer rank. None: its thread follows rank 0. What it raises, as where there is no room for a
    thread, leaves nothing of the update."""
    if heartbeats is not None:
        heartbeats.start()
    try:
        if context.connection is None:
            # A gather reads what this rank's stream computes.
            stand_behind(context.buffers.device)
            threads.start(partial(follow_rank0, update, context, plan, version, heartbeats), "weights")
            return None
        sender = UpdateSender(update, context, plan, TrainerRanks(context.trainer_group, version, heartbeats), ipc=ipc)
        sender.start()
        return sender
    except BaseException as error:
        # The other ranks hear of it, and this rank's next update has heartbeats of its own. It is raised again.
        if heartbeats is not None:
            heartbeats.end(str(as_error(error)))
        raise


def follow_rank0(
    update: CurrentUpdate,
    context: PublisherContext,
    plan: Callable[[], SendPlan],
    version: int | None,
    heartbeats: Heartbeats | None,
) -> None:
    """The thread of one update on a trainer rank above 0, which calls `follower_sent` and `follower_ended` of its update."""
    assert heartbeats is not None, "rank 0 is another rank"
    try:
        if context.buffers.stream is not None:
            torch.cuda.set_device(context.buffers.device)  # as in `UpdateSender`
        made: SendPlan | Exception = plan()
    except BaseException as error:  # as in `UpdateSender`
        made = as_error(error)
    try:
        end, own = follow(context.trainer_group, made, version, heartbeats, partial(context.post, update.follower_sent))
    except RankFailed as error:
        # Rank 0, most likely.
        end, own = RoundEnd(ErrorReply("update_aborted", str(error))), error
    context.post(update.follower_ended, end, own)
