"""The thread of one update on a trainer rank: it reads the source and sends, so that the event loop lives.

The event loop gives orders (`Join`, transfer, the end) and hears notes. While the workers join, the thread fills the
first buckets. It ends after the end, whatever happens: what may block it for long, a broadcast, has a limit of its own and is
aborted from outside.
"""

import errno
import importlib
import os
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from enginepool.errors import BadRequest
from enginepool.protocol.messages import ErrorReply
from enginepool.protocol.updates import Join, MemoryRegion, Published
from enginepool.trainer import buffers
from enginepool.trainer.buffers import Buffers, stand_behind
from enginepool.trainer.heartbeats import Heartbeats, RankFailed
from enginepool.trainer.ipc_export import IpcExport
from enginepool.trainer.streaming import Sending, Stopped
from enginepool.trainer.tensors import SendPlan
from enginepool.trainer.trainer_ranks import RoundEnd, TrainerRanks, as_error, follow
from enginepool.transfer import threads
from enginepool.transfer.collective import Rendezvous
from enginepool.transfer.process_group import CollectiveError, ProcessGroup

torch: Any = importlib.import_module("torch")

Outcome = Published | ErrorReply


class Side:
    """Rank 0's side of the process group: what `peer` names. It serves many updates, and is thrown away after any trouble."""

    def __init__(self, host: str, device: Any) -> None:
        """Raises BadRequest: this machine cannot be reached at `host`."""
        self.peer = os.urandom(8).hex()
        self.backend: Any = "nccl" if device.type == "cuda" else "gloo"
        self._device = device
        try:
            self._rendezvous = Rendezvous(host)
        except OSError as error:
            # A name that nobody knows has an error of the resolver, below 0.
            if error.errno != errno.EADDRNOTAVAIL and (error.errno or 0) >= 0:
                raise
            text = f"host: {host!r} is no address of this machine: {error.strerror}"
            raise BadRequest(text, field="host") from None
        self.address = self._rendezvous.address
        self._group: ProcessGroup | None = None
        #: nobody may use it any more
        self.lost = False

    def join(self, join: Join, timeout_s: float) -> ProcessGroup:
        """The group that `join` describes: the one of last time, if it is that. Raises CollectiveError."""
        group = self._group
        if group is None or (group.name, group.world) != (join.rendezvous, join.world):
            if group is not None:
                group.abort()
            self._group = None
            group = self._rendezvous.join(
                join.rendezvous,
                join.world,
                backend=self.backend,
                device=self._device,
                timeout_s=timeout_s,
                copies=buffers.copied(self._device),
            )
            if self.lost:
                group.abort()
                raise CollectiveError(f"group {join.rendezvous} formed too late")
            self._group = group
        return group

    def abort(self) -> None:
        """Leave the group, whatever its other ranks do, and stop listening. Any thread; takes seconds at most."""
        self.lost = True
        if self._group is not None:
            self._group.abort()
        self._rendezvous.close()


class SenderNotes:
    """What a courier tells its update; each is called in the courier's thread."""

    def __init__(
        self,
        planned: Callable[[SendPlan], None],
        progress: Callable[[int], None],
        sent: Callable[[str, int, list[MemoryRegion]], None],
        failed: Callable[[Exception], None],
        ended: Callable[[], None],
    ) -> None:
        self.planned, self.progress, self.sent, self.failed, self.ended = planned, progress, sent, failed, ended


class UpdateSender:
    """One update's thread on rank 0.

    Args:
        plan: makes the plan; may gather.
        side: this rank's side of the process group, or the memory that is lent instead.
        lockstep: the other trainer ranks.
        notes: `planned` comes first, `sent` after the transfer, `failed` at most once, `ended` last, whatever happened.
    """

    def __init__(
        self,
        plan: Callable[[], SendPlan],
        side: Side | IpcExport,
        buffers: Buffers,
        lockstep: TrainerRanks,
        notes: SenderNotes,
        *,
        bucket_bytes: int,
        timeout_s: float,
    ) -> None:
        self._plan, self.side, self._buffers, self._lockstep, self._notes = plan, side, buffers, lockstep, notes
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

    @property
    def stuck_at(self) -> str:
        """As `TrainerRanks.stuck_at`."""
        return self._lockstep.stuck_at

    def start(self) -> None:
        threads.start(self._run, "weights")

    def join_group(self, join: Join) -> None:
        """All have agreed: form the group, or keep it, and read what is sent first. Told again, it is doing so.

        What is lent has no group.
        """
        if not self._forming and isinstance(self.side, Side):
            self._forming = True
            self._orders.put(join)
            threads.start(partial(self._form, self.side, join), "weights-join")

    def transfer(self) -> None:
        """All members have joined: send. What is lent is laid out now, once all have agreed."""
        self._orders.put(None)

    def end(self, end: RoundEnd) -> None:
        """The update ended so. What is not sent is not sent any more."""
        self._stopped.set()
        self._orders.put(end)

    def _run(self) -> None:
        try:
            if self._buffers.stream is not None:
                # A thread begins on device 0, and the source may mean the current one.
                torch.cuda.set_device(self._buffers.device)
            self._buffers.make_ready()
            with self._buffers.aside(self._after):
                # What a source computes now is read on that stream, which would not wait for another one.
                plan = self._plan()
        except BaseException as error:
            # Whatever it is, it is told: it is the caller's own code that raised, and the caller waits.
            self._notes.failed(as_error(error))
            plan = None
        else:
            self._notes.planned(plan)
        end = self._serve(plan)
        try:
            try:
                if isinstance(self.side, IpcExport):
                    self.side.end()
            finally:
                self._lockstep.end(end.outcome, end.again_s)
        finally:
            self._notes.ended()

    def _serve(self, plan: SendPlan | None) -> RoundEnd:
        group: ProcessGroup | None = None
        sending: Sending | None = None
        wanted = False
        while True:
            order = self._orders.get()
            if isinstance(order, RoundEnd):
                return order
            if isinstance(order, Exception):
                self._notes.failed(order)
            elif isinstance(order, Join):
                sending = self._prepared(plan) if plan is not None else None
            elif order is None:
                if isinstance(self.side, IpcExport) and plan is not None and not wanted:
                    self._went_well(partial(self._lend, self.side, plan))
                wanted = True
            else:
                group = order
            if wanted and group is not None and sending is not None:
                self._went_well(partial(self._send, sending, group))
                sending = None

    def _prepared(self, plan: SendPlan) -> Sending | None:
        """With its first buckets filled; None: it failed, which is told."""
        sending = Sending(plan, self._buffers, self._bucket_bytes, self._lockstep, self._stopped.is_set, self._after)
        return sending if self._went_well(sending.prepare) else None

    def _form(self, side: Side, join: Join) -> None:
        """On a thread of its own: the source is read meanwhile, and the update may end while the others are waited for."""
        try:
            if self._buffers.stream is not None:
                torch.cuda.set_device(self._buffers.device)
            self._orders.put(side.join(join, self._timeout_s))
        except Exception as error:
            self._orders.put(error)

    def _send(self, sending: Sending, group: ProcessGroup) -> None:
        self._notes.sent(*sending.send(group, self._timeout_s, self._notes.progress), [])

    def _lend(self, loan: IpcExport, plan: SendPlan) -> None:
        lent = loan.fill(
            plan,
            bucket_bytes=self._bucket_bytes,
            lockstep=self._lockstep,
            stopped=self._stopped.is_set,
            progress=self._notes.progress,
            after=self._after,
        )
        self._notes.sent(*lent)

    def _went_well(self, work: Callable[[], None]) -> bool:
        """Do it; unless the update was given up meanwhile, a failure is told."""
        try:
            work()
        except Stopped:
            return False
        except BaseException as error:  # as in `_run`
            if not self._stopped.is_set():
                self._notes.failed(as_error(error))
            return False
        return True


class Follower:
    """One update's thread on a trainer rank above 0."""

    def __init__(
        self,
        plan: Callable[[], SendPlan],
        version: int | None,
        group: Any,
        heartbeats: Heartbeats | None,
        device: Any,
        ended: Callable[[RoundEnd, Exception | None], None],
    ) -> None:
        self._plan, self._version, self._group, self._heartbeats = plan, version, group, heartbeats
        self._device, self._ended = device, ended
        # As in `UpdateSender`: a gather reads what this rank has.
        stand_behind(device)

    def start(self) -> None:
        threads.start(self._run, "weights")

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # as in `UpdateSender`
            plan: SendPlan | Exception = self._plan()
        except BaseException as error:  # as in `UpdateSender`
            plan = as_error(error)
        try:
            end, own = follow(self._group, plan, self._version, self._heartbeats)
        except RankFailed as error:
            # Rank 0, most likely.
            end, own = RoundEnd(ErrorReply("update_aborted", str(error))), error
        self._ended(end, own)
