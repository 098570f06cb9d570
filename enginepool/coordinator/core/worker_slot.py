"""A slot for a worker that this pool starts itself. Pure.

`states` tells its life. `transitions` alone changes its state.
"""

from typing import TYPE_CHECKING

from enginepool.coordinator.core.group_weights import GroupWeights
from enginepool.coordinator.core.states import SlotState

if TYPE_CHECKING:
    from enginepool.coordinator.core.group import Group
    from enginepool.coordinator.core.worker import Worker


class WorkerSlot:
    """A worker that this pool starts itself: the succession of its incarnations."""

    __slots__ = (
        "adopted", "due", "end_reason", "failure_signature", "group", "incarnation", "index", "loss_excused", "loss_times",
        "on_uncommitted", "planned_restart", "previous_end", "restarts", "retired_reason", "same_failures",
        "short_runs", "start_failure", "started_at", "state", "uncommitted_weights", "unstartable", "was_ready",
    )  # fmt: skip

    def __init__(self, group: "Group", index: int) -> None:
        self.group = group
        self.index = index
        self.state = SlotState.BACKOFF
        #: the process that is up or ending; "" otherwise
        self.incarnation = ""
        #: an earlier coordinator started it, and may have given it work
        self.adopted = False
        #: backoff: when to start; up: when the process must have registered
        self.due = 0.0
        self.started_at = 0.0
        #: times of losses within the restart window
        self.loss_times: list[float] = []
        #: the latest of them in a row of processes that were not up for long: as often the backoff doubles
        self.short_runs = 0
        self.restarts = 0
        #: why the present one ends, or the last one ended
        self.end_reason = ""
        #: why the one before the present one ended; "" once the present one has been ready
        self.previous_end = ""
        #: why it will not be started again; "" unless its state is "retired" for another reason than a drain
        self.retired_reason = ""
        #: one of its processes has been ready
        self.was_ready = False
        #: how the present one failed by itself before it was ready, or ""
        self.start_failure = ""
        #: of the last such failure, and how many in a row were the same; none since one was ready
        self.failure_signature = ""
        self.same_failures = 0
        #: the pool ends the present one for no fault of its own: its loss does not count
        self.loss_excused = False
        #: the present one said that starting it again cannot help
        self.unstartable = False
        #: An operator restarts it: "draining", its worker finishes its work by `until`; "ending", its process is to end,
        #: and the next one starts at once. "" otherwise.
        self.planned_restart = ""
        #: not committed: what the next process starts on, of an update by restart; whether the present one has
        self.uncommitted_weights: GroupWeights | None = None
        self.on_uncommitted = False

    @property
    def worker(self) -> "Worker | None":
        """The worker that its process has registered as; None before that, and when it is lost."""
        return self.group.workers.get(self.incarnation)

    @property
    def name(self) -> str:
        """As people know it."""
        return f"{self.group.name}-{self.index}"
