"""A worker process as the coordinator sees it. Pure.

The life of a worker: registered (it may say stages) → ready → lost. A worker gets work while it is `open`: ready, idle in
this epoch, on the committed version, not late with a batch, and not kept for a trial. A lost worker never comes back: its
incarnation is refused. A ready worker that does not hold the committed weights is restored first; `weights` tells of updates.
"""

from collections import OrderedDict
from typing import TYPE_CHECKING

from enginepool.coordinator.core.events import Link
from enginepool.coordinator.core.request import Batch, Request
from enginepool.coordinator.scheduling.cost_model import ForwardCostModel
from enginepool.coordinator.scheduling.worker_kinds import PACKED, PLAIN
from enginepool.protocol.messages import Capabilities, TaskId

if TYPE_CHECKING:
    from enginepool.coordinator.core.group import Group
    from enginepool.coordinator.core.worker_slot import WorkerSlot


class Worker:
    """One incarnation of a worker process, on its newest link."""

    __slots__ = (
        "batches", "capabilities", "committed", "cost", "declared", "detail", "digest", "done", "group", "halvings", "heard",
        "host", "idle", "incarnation", "joined", "kept", "lacks", "late", "leaving", "link", "lost", "order", "pace", "pid",
        "slot", "restore_until", "routing", "rows", "since", "stage", "stamp", "text_bytes", "texts", "version",
    )  # fmt: skip

    def __init__(self, incarnation: str, group: "Group", link: Link, slot: "WorkerSlot | None", order: int, now: float) -> None:
        self.incarnation = incarnation
        self.group = group
        self.link = link
        self.slot = slot
        self.pid = 0
        self.host = ""
        #: creation number: iteration over workers is in this order
        self.order = order
        #: when it registered first
        self.joined = now
        self.stage = "starting"
        self.detail = ""
        #: when the stage began
        self.since = now
        self.heard = now
        #: what it said it can do, and how much of that it is given; None before it was ready
        self.declared: Capabilities | None = None
        self.capabilities: Capabilities | None = None
        #: what its forwards cost, as it said and as was learned since; None: it does not matter
        self.pace: ForwardCostModel | None = None
        #: what it was told to start with
        self.halvings = group.halvings
        #: of its class; it is told what changes here
        self.routing = group.routing
        #: of the weights in its engine, as it says; run and version of those that a coordinator called committed last
        self.version = 0
        self.digest = ""
        self.committed: tuple[int, int] = (0, 0)
        #: while it restores the committed weights: when it must have done so
        self.restore_until: float | None = None
        #: why it could not, and when it tries again; None: it could, or never had to
        self.lacks: tuple[str, float] | None = None
        #: it said Idle in this epoch
        self.idle = False
        #: kept free for a trial, or in one
        self.kept = False
        self.lost = False
        #: it is to end for an update by restart, or because an operator restarts it, and finishes what it has
        self.leaving = False
        #: Its oldest batch is late. It gets nothing more until that one is done: newer work of a higher priority could keep
        #: its engine from the old one until the deadline, which would cost a healthy worker its life.
        self.late = False
        self.batches: dict[TaskId, Batch] = {}
        #: sums over `batches`; never over the declared inflight_tokens and inflight_rows
        self.cost = 0
        self.rows = 0
        #: text requests that it has, in the order in which it got them and tokenizes them, and when each must be done: that of
        #: the first one counts
        self.texts: OrderedDict[TaskId, tuple[Request, float]] = OrderedDict()
        #: bytes of `texts`
        self.text_bytes = 0
        self.done = 0
        #: number of its newest entry in the routing; 0: none is valid
        self.stamp = 0

    @property
    def class_(self) -> int:
        """PLAIN or PACKED; of one that dialled in and was never ready, PLAIN until it says otherwise."""
        if self.capabilities is not None:
            return PACKED if self.capabilities.packed else PLAIN
        return PACKED if self.slot is not None and self.slot.packed else PLAIN

    @property
    def able(self) -> bool:
        """It can run batches now."""
        return (
            self.capabilities is not None
            and self.idle
            and not self.late
            and not self.lost
            and not self.leaving
            and self.stage == "ready"
            and self.holds
            # Else it was told to take other weights before these were committed again.
            and self.restore_until is None
            and self.lacks is None
        )

    @property
    def holds(self) -> bool:
        """The weights in its engine are the committed ones, as far as the journal can say."""
        group = self.group
        return self.version == group.version and self.digest == group.weights.digest and not group.journal_behind

    @property
    def holds_lost(self) -> bool:
        """The weights in its engine are committed ones that the journal does not have."""
        heard = self.group.heard_committed
        return self.group.journal_behind and (self.committed, self.version) == (heard, heard[1])

    @property
    def open(self) -> bool:
        """It may be given batches."""
        return not self.kept and not self.group.held and self.able

    @property
    def name(self) -> str:
        """As people know it."""
        return self.slot.name if self.slot is not None else self.incarnation

    def check(self) -> None:
        assert self.cost == sum(b.cost for b in self.batches.values()), self
        assert self.rows == sum(b.rows for b in self.batches.values()), self
        assert (self.stamp != 0) == self.open, (self, self.stamp)
        if self.pace is not None:
            self.pace.check()
        assert self.text_bytes == sum(request.work.nbytes for request, _ in self.texts.values()), self
        if self.lost:
            assert not self.batches and not self.texts, self
        if self.batches:
            assert self.declared is not None and self.idle, self
            can = self.declared
            assert self.cost <= can.inflight_tokens and self.rows <= can.inflight_rows, self
            assert self.routing is (self.group.packed_routing if can.packed else self.group.routing), self
        for batch in self.batches.values():
            assert batch.worker is self and batch.slices, batch
            if batch.trial:
                assert len(self.batches) == 1 and len(batch.slices) == 1 and self.group.trial is batch, batch
            if len(batch.slices) > 1 or batch.rows > 1:
                assert self.declared is not None, batch
                [(request, _, _), *more] = batch.slices
                cached = not more and 0 < self.declared.cached_query <= request.work.shared
                most = self.declared.cached_tokens if cached else self.declared.batch_tokens
                assert batch.cost <= most, batch
            assert self.declared is not None and batch.rows <= self.declared.batch_rows, batch
            if self.declared.packed:
                assert all(request.work.operation.packs(request.work, self.declared) for request, _, _ in batch.slices), batch

    def __repr__(self) -> str:
        return f"<Worker {self.incarnation} {self.stage} batches={len(self.batches)} cost={self.cost}>"
