"""The thread of one update on a trainer rank: it reads the source and sends, so that the event loop lives.

The event loop gives orders (`Join`, transfer, the end) and hears notes. The thread ends after the end, whatever happens: what
may block it for long, forming a group or a broadcast, has limits of its own and is aborted from outside.
"""

import importlib
import os
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from enginepool import threads
from enginepool.client.lending import Loan
from enginepool.client.lockstep import Lockstep, follow
from enginepool.client.streaming import Buffers, Stopped, stream
from enginepool.client.tensors import Plan
from enginepool.collective import CollectiveError, Group, Rendezvous
from enginepool.protocol.messages import Failure
from enginepool.protocol.updates import Join, Published, Space

torch: Any = importlib.import_module("torch")

Outcome = Published | Failure


class Side:
    """Rank 0's side of the process group: what `peer` names. It serves many updates, and is thrown away after any trouble."""

    def __init__(self, host: str, device: Any) -> None:
        self.peer = os.urandom(8).hex()
        self.backend: Any = "nccl" if device.type == "cuda" else "gloo"
        self._device = device
        self._rendezvous = Rendezvous(host)
        self.address = self._rendezvous.address
        self._group: Group | None = None
        #: nobody may use it any more
        self.lost = False

    def join(self, join: Join, timeout_s: float) -> Group:
        """The group that `join` describes: the one of last time, if it is that. Raises CollectiveError."""
        group = self._group
        if group is None or (group.name, group.world) != (join.rendezvous, join.world):
            if group is not None:
                group.abort()
            self._group = None
            group = self._rendezvous.join(
                join.rendezvous, join.world, backend=self.backend, device=self._device, timeout_s=timeout_s
            )
            if self.lost:
                group.abort()
                raise CollectiveError(f"group {join.rendezvous} formed too late")
            self._group = group
        return group

    def abandon(self) -> None:
        """Leave the group, whatever its other ranks do, and stop listening. Any thread; takes seconds at most."""
        self.lost = True
        if self._group is not None:
            self._group.abort()
        self._rendezvous.close()


class Notes:
    """What a courier tells its update; each is called in the courier's thread."""

    def __init__(
        self,
        planned: Callable[[Plan], None],
        progress: Callable[[int], None],
        sent: Callable[[str, int, list[Space]], None],
        failed: Callable[[Exception], None],
        ended: Callable[[], None],
    ) -> None:
        self.planned, self.progress, self.sent, self.failed, self.ended = planned, progress, sent, failed, ended


class Courier:
    """One update's thread on rank 0.

    Args:
        plan: makes the plan; may gather.
        side: this rank's side of the process group, or the memory that is lent instead.
        lockstep: the other trainer ranks.
        notes: `planned` comes first, `sent` after the transfer, `failed` at most once, `ended` last, whatever happened.
    """

    def __init__(
        self,
        plan: Callable[[], Plan],
        side: Side | Loan,
        buffers: Buffers,
        lockstep: Lockstep,
        notes: Notes,
        *,
        bucket_bytes: int,
        timeout_s: float,
    ) -> None:
        self._plan, self.side, self._buffers, self._lockstep, self._notes = plan, side, buffers, lockstep, notes
        self._bucket_bytes, self._timeout_s = bucket_bytes, timeout_s
        self._orders: queue.SimpleQueue[Join | Group | Exception | Outcome | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._after: Any = None
        if buffers.stream is not None:
            # The caller's stream may still have to compute what is sent.
            self._after = torch.cuda.current_stream(buffers.device).record_event()

    def start(self) -> None:
        threads.start(self._run, "weights")

    def join_group(self, join: Join) -> None:
        """Form the group, or keep it."""
        self._orders.put(join)

    def transfer(self) -> None:
        """All members have joined: send."""
        self._orders.put(None)

    def end(self, outcome: Outcome) -> None:
        """The update ended so. What is not sent is not sent any more."""
        self._stopped.set()
        self._orders.put(outcome)

    def _run(self) -> None:
        try:
            plan = self._plan()
        except Exception as error:
            self._notes.failed(error)
            plan = None
        else:
            self._notes.planned(plan)
        outcome = self._serve(plan)
        try:
            if isinstance(self.side, Loan):
                self.side.end()
            self._lockstep.end(outcome)
        finally:
            self._notes.ended()

    def _serve(self, plan: Plan | None) -> Outcome:
        group: Group | Loan | None = self.side if isinstance(self.side, Loan) else None
        forming = wanted = done = False
        while True:
            order = self._orders.get()
            if isinstance(order, Published | Failure):
                return order
            if isinstance(order, Join):
                if not forming and isinstance(self.side, Side):
                    forming = True
                    threads.start(partial(self._form, self.side, order), "weights-join")
            elif isinstance(order, Exception):
                self._notes.failed(order)
            elif order is None:
                wanted = True
            else:
                group = order
            if wanted and group is not None and plan is not None and not done:
                done = True
                self._send(plan, group)

    def _form(self, side: Side, join: Join) -> None:
        """On a thread of its own: the update may end while the others are waited for."""
        try:
            if self._buffers.stream is not None:
                torch.cuda.set_device(self._buffers.device)
            self._orders.put(side.join(join, self._timeout_s))
        except Exception as error:
            self._orders.put(error)

    def _send(self, plan: Plan, group: Group | Loan) -> None:
        how: dict[str, Any] = {
            "bucket_bytes": self._bucket_bytes,
            "lockstep": self._lockstep,
            "stopped": self._stopped.is_set,
            "progress": self._notes.progress,
            "after": self._after,
        }
        spaces: list[Space] = []
        try:
            if isinstance(group, Loan):
                digest, nbytes, spaces = group.fill(plan, **how)
            else:
                digest, nbytes = stream(plan, group, self._buffers, timeout_s=self._timeout_s, **how)
        except Stopped:
            return
        except Exception as error:
            if not self._stopped.is_set():
                self._notes.failed(error)
        else:
            self._notes.sent(digest, nbytes, spaces)


class Follower:
    """One update's thread on a trainer rank above 0."""

    def __init__(self, plan: Callable[[], Plan], group: Any, ended: Callable[[Outcome, Exception | None], None]) -> None:
        self._plan, self._group, self._ended = plan, group, ended

    def start(self) -> None:
        threads.start(self._run, "weights")

    def _run(self) -> None:
        plan, failure = None, None
        try:
            plan = self._plan()
        except Exception as error:
            failure = error

        def tensors() -> Any:
            if failure is not None:
                raise failure
            assert plan is not None
            return plan.tensors()

        try:
            outcome, own = follow(self._group, tensors)
        except Exception as error:
            # The trainer's group is broken: rank 0 is gone, most likely.
            outcome, own = Failure("update_aborted", f"rank 0 of the trainer is gone: {error}"), None
        self._ended(outcome, own)
