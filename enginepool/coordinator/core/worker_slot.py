"""A slot for a worker that this pool starts itself. Pure.

The life of a slot: backoff → up (its process exists) → ending (SIGKILL is on its way) → backoff …, or retired.
"""

from typing import TYPE_CHECKING

from enginepool.coordinator.core.events import GroupWeights

if TYPE_CHECKING:
    from enginepool.coordinator.core.group import Group


class WorkerSlot:
    """A worker that this pool starts itself: the succession of its incarnations."""

    __slots__ = (
        "before", "begun", "blameless", "failure", "group", "hasty", "hopeless", "incarnation", "index", "last_words",
        "losses", "packed", "proven", "renewal", "repeats", "restarts", "retired", "signature", "state", "until",
        "trial", "tried",
    )  # fmt: skip

    def __init__(self, group: "Group", index: int) -> None:
        self.group = group
        self.index = index
        #: the class of its workers
        self.packed = index >= group.config.workers - group.config.packed_workers
        #: "backoff" | "up" | "ending" | "retired"
        self.state = "backoff"
        #: the process that is up or ending; "" otherwise
        self.incarnation = ""
        #: backoff: when to start; up: when the process must have registered
        self.until = 0.0
        self.begun = 0.0
        #: times of losses within the restart window
        self.losses: list[float] = []
        #: the latest of them in a row of processes that were not up for long: as often the backoff doubles
        self.hasty = 0
        self.restarts = 0
        #: why the present one ends, or the last one ended
        self.last_words = ""
        #: why the one before the present one ended; "" once the present one has been ready
        self.before = ""
        #: why it will not be started again; "" unless its state is "retired" for another reason than a drain
        self.retired = ""
        #: one of its processes has been ready
        self.proven = False
        #: how the present one failed by itself before it was ready, or ""
        self.failure = ""
        #: of the last such failure, and how many in a row were the same; none since one was ready
        self.signature = ""
        self.repeats = 0
        #: the pool ends the present one for no fault of its own: its loss does not count
        self.blameless = False
        #: the last one said that starting it again cannot help
        self.hopeless = False
        #: An operator restarts it: "draining", its worker finishes what it has until `until`; "ending", its process is to end,
        #: and the next one starts at once. "" otherwise.
        self.renewal = ""
        #: not committed: what the next process starts on, of an update by restart; whether the present one has
        self.trial: GroupWeights | None = None
        self.tried = False

    @property
    def name(self) -> str:
        """As people know it."""
        return f"{self.group.name}-{self.index}"

    def check(self) -> None:
        assert self.state in ("backoff", "up", "ending", "retired"), self.state
        assert not self.retired or self.state == "retired", (self.state, self.retired)
        assert self.renewal in ("", "draining", "ending"), self.renewal
        assert not self.renewal or self.incarnation, (self.renewal, self.state)
        assert not self.proven or not self.repeats, (self.proven, self.repeats)
        assert (self.incarnation != "") == (self.state in ("up", "ending")), (self.state, self.incarnation)
