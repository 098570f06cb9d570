"""A worker process as the coordinator sees it. Pure.

`states` tells its life. `transitions` alone changes its state, its tasks, and the facts that its state follows from.
"""

from typing import TYPE_CHECKING

from enginepool.coordinator.core.events import Link
from enginepool.coordinator.core.group_adapters import WorkerAdapters
from enginepool.coordinator.core.participants import with_worker
from enginepool.coordinator.core.request import RunningBatch
from enginepool.coordinator.core.states import WorkerState
from enginepool.coordinator.core.text_lanes import TextLanes
from enginepool.coordinator.scheduling.cost_model import ForwardCostModel
from enginepool.protocol.messages import Capabilities, TaskId
from enginepool.protocol.messages.control import MemoryTag

if TYPE_CHECKING:
    from enginepool.coordinator.core.group import Group
    from enginepool.coordinator.core.worker_slot import WorkerSlot

#: of `timing.forward_s`: a task that generated nothing for so long, and was stopped, says something about its engine
TELLING = 1 / 6


class Worker:
    """One incarnation of a worker process, on its newest link."""

    __slots__ = (
        "adapters", "asleep", "batches", "busy_until", "cached_tokens", "capabilities", "committed", "cost", "declared",
        "detail", "digest", "done", "epoch_confirmed", "followed", "generations", "group", "halvings", "heard", "host",
        "incarnation", "joined", "link", "missing_snapshot", "missing_weights", "name", "named", "order", "pace",
        "packed_in_a_row", "packed_pace", "pid", "priorities", "prompt_tokens", "restore_due", "rows", "sequence_tokens",
        "sequences", "since", "slot", "stage", "stamp", "state", "texts", "time_left", "unread_media", "version",
    )  # fmt: skip

    def __init__(self, incarnation: str, group: "Group", link: Link, slot: "WorkerSlot | None", order: int, now: float) -> None:
        self.incarnation = incarnation
        self.group = group
        self.link = link
        self.slot = slot
        #: constant: as people know it; and what an answer that it computed alone names (`participants.py`)
        self.name = incarnation if slot is None else slot.name
        self.named = with_worker([], self.name)
        self.pid, self.host = 0, ""
        #: creation number: iteration over workers is in this order
        self.order = order
        #: when it registered first
        self.joined = now
        self.state = WorkerState.NOT_READY
        #: what its process does, in its own words
        self.stage, self.detail = "starting", ""
        #: when the stage began, and when it was heard last
        self.since = self.heard = now
        #: what it said it can do, and how much of that it is given; None before it was ready
        self.declared: Capabilities | None = None
        self.capabilities: Capabilities | None = None
        #: what plain and packed forwards cost, as it said and as was learned since; None: it does not matter
        self.pace: ForwardCostModel | None = None
        self.packed_pace: ForwardCostModel | None = None
        #: of the latest batches that could be either: so many in a row were packed, or (negative) plain; the share that
        #: followed another one in the engine; when its batches of rows are done, by the learned costs
        self.packed_in_a_row, self.followed, self.busy_until = 0, 0.0, 0.0
        #: what it was told to start with
        self.halvings = group.halvings
        #: of the weights in its engine, as it says; run and version of those that a coordinator called committed last
        self.version = 0
        self.digest = ""
        self.committed: tuple[int, int] = (0, 0)
        #: the parts of its engine's memory that are released, as it says
        self.asleep: frozenset[MemoryTag] = frozenset()
        #: RESTORING: when it must have the committed weights; MISSING_WEIGHTS: when it is asked for them again
        self.restore_due = 0.0
        #: why it could not load the committed weights, until it does; why they have no snapshot; its engine's LoRA adapters
        self.missing_weights, self.missing_snapshot, self.adapters = "", "", WorkerAdapters()
        #: it said in this epoch that it dropped the work of earlier ones
        self.epoch_confirmed = False
        self.batches: dict[TaskId, RunningBatch] = {}
        #: sums over `batches`
        self.cost = self.rows = 0
        #: bytes of media that were sent on its link, at most so many of which it has not read
        self.unread_media = 0
        #: of `batches`, the tasks that generate: how many, and the sums of their cost and rows. These, and those of the
        #: rest, are never over what the worker declared.
        self.generations = self.sequence_tokens = self.sequences = 0
        #: tasks of these were stopped before the engine had generated anything for long: seconds that it has for the next one
        self.time_left: float | None = None
        #: by priority: how many of `batches` are tasks that generate
        self.priorities: dict[int, int] = {}
        #: its text requests
        self.texts = TextLanes()
        self.done = 0
        #: tokens of the prompts that it began with, and of them, those that its engine had in its prefix cache
        self.prompt_tokens = self.cached_tokens = 0
        #: number of its newest entry in the routing, which is told what changes here; 0: none is valid
        self.stamp = 0

    @property
    def lost(self) -> bool:
        """It was given up."""
        return self.state is WorkerState.LOST

    @property
    def able(self) -> bool:
        """It can run batches now."""
        return self.state is WorkerState.READY or self.state is WorkerState.RESERVED

    @property
    def busy(self) -> bool:
        """It has something in hand."""
        return bool(self.batches or self.texts)

    @property
    def sleeps(self) -> bool:
        """Parts of its engine's memory are released, or are to be."""
        return bool(self.asleep or self.group.holds.wanted(self.name))

    @property
    def weights_asleep(self) -> bool:
        """There are no weights in its engine, or are about to be none: the engine cannot load any or be asked about them."""
        return "weights" in self.asleep or "weights" in self.group.holds.wanted(self.name)

    @property
    def row_tokens(self) -> int:
        """Tokens of its batches of rows."""
        return self.cost - self.sequence_tokens

    @property
    def row_batches(self) -> int:
        """How many batches of rows it has."""
        return len(self.batches) - self.generations

    def within(self, can: Capabilities) -> bool:
        """Whether what it has is within these budgets."""
        rows = self.row_tokens <= can.inflight_tokens and self.rows - self.sequences <= can.inflight_rows
        return rows and self.sequence_tokens <= can.most_sequence_tokens and self.sequences <= can.most_sequences

    def oldest(self) -> list[RunningBatch]:
        """The oldest of its batches of rows and the oldest of its tasks that generate, which must be done next."""
        batches = self.batches.values()
        if not 0 < self.generations < len(batches):
            return [next(iter(batches))] if batches else []
        rows = next(batch for batch in batches if batch.slices[0][0].generation is None)
        return [rows, next(batch for batch in batches if batch.slices[0][0].generation is not None)]

    def pass_time_on(self, ended: RunningBatch, now: float, forward_s: float) -> None:
        """The oldest of its tasks that generate has ended. Tokens of any of them give time to the oldest alone, whose deadline
        says when the worker is lost. So the next task takes that deadline over: always if it is later, and if it is earlier
        only where this task was stopped after `TELLING`. A busy engine may not have begun with one that was stopped sooner.
        Where there is no next task, `time_left` keeps the seconds that were left.

        The first task that was stopped so shortens no other one: it may have been long, or have waited for its grammar."""
        telling = forward_s * TELLING
        long = now - ended.began >= telling
        if self.generations:
            following = self.oldest()[-1]
            if following.deadline < ended.deadline or (long and self.time_left is not None):
                following.deadline, following.late = ended.deadline, ended.late
            elif long and following.deadline > ended.deadline:
                self.time_left = forward_s
        elif long and now > ended.late:
            self.time_left = forward_s if self.time_left is None else max(telling, ended.deadline - now)

    def owed(self) -> list[RunningBatch]:
        """Those of the oldest that may be late: generations that stand still in a paused group are not."""
        return [batch for batch in self.oldest() if batch.slices[0][0].generation is None or not self.group.holds.keeps]

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
        return self.state is WorkerState.READY and not self.group.on_hold

    def __repr__(self) -> str:
        return f"<Worker {self.incarnation} {self.state} batches={len(self.batches)} cost={self.cost}>"
