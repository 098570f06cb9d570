"""The thread of one update on a trainer rank: it reads the source and sends the bytes, so that the event loop stays free.

The event loop gives orders: join, transfer, end. The thread reports to its update: planned, progress, sent, failed, left.

- While the workers join the process group, the thread fills the first two buckets: see `bucket_stream.py`.
- A broadcast, which may block the thread for long, has a time limit, and is aborted from outside.
"""

import importlib
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from enginepool.protocol.messages import ErrorReply
from enginepool.protocol.messages.weights import Join, MemoryRegion
from enginepool.trainer.bucket_stream import BucketStream
from enginepool.trainer.buffers import Buffers, stand_behind
from enginepool.trainer.heartbeats import Heartbeats, RankFailed
from enginepool.trainer.ipc_export import IpcExport
from enginepool.trainer.rank0_endpoint import Rank0Endpoint
from enginepool.trainer.tensor_feed import Stopped
from enginepool.trainer.tensors import SendPlan
from enginepool.trainer.trainer_ranks import RoundEnd, TrainerRanks, as_error, follow
from enginepool.transfer import threads
from enginepool.transfer.process_group import ProcessGroup

torch: Any = importlib.import_module("torch")


class SenderReports(Protocol):
    """What a sender reports, in this order; `failed` at most once, `left` always."""

    def planned(self, plan: SendPlan) -> None:
        """The source can be read."""

    def progress(self, sent_bytes: int) -> None:
        """So many bytes are sent."""

    def all_sent(self, digest: str, sent_bytes: int, regions: list[MemoryRegion]) -> None:
        """All bytes are sent, or lie in `regions`."""

    def failed(self, error: Exception) -> None:
        """This rank cannot go on."""

    def left(self) -> None:
        """The thread ends."""


class UpdateSender:
    """The thread of one update on rank 0.

    Args:
        update: whose methods are called by way of `post`, which moves a call from the thread to the event loop.
        plan: makes the plan; may gather.
        transport: rank 0 of the process group, or the memory that is shared instead (`ipc`).
        ranks: the other trainer ranks.
        timeout_s: seconds for the group to form, and for each broadcast.
    """

    def __init__(
        self,
        update: SenderReports,
        post: Callable[..., None],
        plan: Callable[[], SendPlan],
        transport: Rank0Endpoint | IpcExport,
        buffers: Buffers,
        ranks: TrainerRanks,
        *,
        bucket_bytes: int,
        timeout_s: float,
    ) -> None:
        self._update, self._post, self._plan, self.transport = update, post, plan, transport
        self._buffers, self._ranks = buffers, ranks
        self._bucket_bytes, self._timeout_s = bucket_bytes, timeout_s
        self._orders: queue.SimpleQueue[Join | ProcessGroup | Exception | RoundEnd | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._forming = False
        self._after: Any = None
        if buffers.stream is not None:
            # The caller's stream may still have to compute what is sent.
            self._after = torch.cuda.current_stream(buffers.device).record_event()
        else:
            # Tensors may lie on a GPU nevertheless.
            stand_behind()

    # --- the event loop's side -----------------------------------------------------------------------------------------

    @property
    def stuck_at(self) -> str:
        """As `TrainerRanks.stuck_at`."""
        return self._ranks.stuck_at

    def start(self) -> None:
        """Start the thread."""
        threads.start(self._run, "weights")

    def join_group(self, join: Join) -> None:
        """All members have agreed: form the group, or keep it, and fill the first buckets. Idempotent; ignored with `ipc`."""
        if not self._forming and isinstance(self.transport, Rank0Endpoint):
            self._forming = True
            self._orders.put(join)
            threads.start(partial(self._form, self.transport, join), "weights-join")

    def transfer(self) -> None:
        """All members have joined: send. With `ipc` the tensors are laid out in memory now."""
        self._orders.put(None)

    def end(self, end: RoundEnd) -> None:
        """The update ended so. No further bytes are sent."""
        self._stopped.set()
        self._orders.put(end)

    # --- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self._buffers.stream is not None:
                # A thread begins on device 0, and the source may use the current device.
                torch.cuda.set_device(self._buffers.device)
            self._buffers.make_ready()
            with self._buffers.aside(self._after):
                # The buckets are filled on that stream, which waits for no other stream.
                plan = self._plan()
        except BaseException as error:
            # The caller's own code raised, and the caller waits: every kind of error is reported.
            self._post(self._update.failed, as_error(error))
            plan = None
        else:
            self._post(self._update.planned, plan)
        end = self._serve(plan)
        try:
            try:
                if isinstance(self.transport, IpcExport):
                    self.transport.end()
            finally:
                self._ranks.end(end.outcome, end.again_s)
        finally:
            self._post(self._update.left)

    def _serve(self, plan: SendPlan | None) -> RoundEnd:
        """Follow orders until the end of the update."""
        group: ProcessGroup | None = None
        prepared: BucketStream | None = None
        transfer = False
        while True:
            order = self._orders.get()
            if isinstance(order, RoundEnd):
                return order
            if isinstance(order, Exception):
                self._post(self._update.failed, order)
            elif isinstance(order, Join):
                prepared = self._attempt(partial(self._prepare, plan)) if plan is not None else None
            elif order is None:
                if isinstance(self.transport, IpcExport) and plan is not None and not transfer:
                    self._attempt(partial(self._export, self.transport, plan))
                transfer = True
            else:
                group = order
            if transfer and group is not None and prepared is not None:
                self._attempt(partial(self._send, prepared, group))
                prepared = None

    def _attempt(self, work: Callable[[], Any]) -> Any:
        """The result of `work`; None: it failed, which is reported, or the update was aborted meanwhile."""
        try:
            return work()
        except Stopped:
            return None
        except BaseException as error:  # as in `_run`
            if not self._stopped.is_set():
                self._post(self._update.failed, as_error(error))
            return None

    def _form(self, endpoint: Rank0Endpoint, join: Join) -> None:
        """In a thread of its own: the source is read meanwhile, and the update may end while the group forms."""
        try:
            if self._buffers.stream is not None:
                torch.cuda.set_device(self._buffers.device)
            self._orders.put(endpoint.join(join, self._timeout_s))
        except Exception as error:
            self._orders.put(error)

    def _export(self, export: IpcExport, plan: SendPlan) -> None:
        exported = export.fill(
            plan,
            bucket_bytes=self._bucket_bytes,
            ranks=self._ranks,
            stopped=self._stopped.is_set,
            progress=partial(self._post, self._update.progress),
            after=self._after,
        )
        self._post(self._update.all_sent, *exported)

    def _prepare(self, plan: SendPlan) -> BucketStream:
        """Fill the buffers before the group has formed."""
        stream = BucketStream(
            plan, self._buffers, self._bucket_bytes, self._ranks, stopped=self._stopped.is_set, after=self._after
        )
        stream.prepare()
        return stream

    def _send(self, stream: BucketStream, group: ProcessGroup) -> None:
        digest, sent = stream.send(group, self._timeout_s, partial(self._post, self._update.progress))
        self._post(self._update.all_sent, digest, sent, [])


def follow_rank0(
    plan: Callable[[], SendPlan], version: int | None, group: Any, heartbeats: Heartbeats | None, device: Any
) -> tuple[RoundEnd, Exception | None]:
    """The thread of one update on a trainer rank above 0. Returns how the update ended, and what failed on this rank."""
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # as in `UpdateSender`
        made: SendPlan | Exception = plan()
    except BaseException as error:  # as in `UpdateSender`
        made = as_error(error)
    try:
        return follow(group, made, version, heartbeats)
    except RankFailed as error:
        # Rank 0, most likely.
        return RoundEnd(ErrorReply("update_aborted", str(error))), error
