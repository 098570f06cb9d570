"""The coordinator's entities: workers, places and groups; `request` has clients, requests and batches.

Everything that decisions depend on lives in these two, in `queue`, `routing` and `reply_cache`; the other pure files change it.
Each attribute that has an invariant says it in a `#:` comment, and `check()` of the entity asserts it: tests run `check()` on
whatever an event touched.

The life of a worker: registered (it may say stages) → ready → lost. A worker gets work while it is `open`: ready, idle in
this epoch, on the committed version, not late with a batch, and not kept for a trial. A lost worker never comes back: its
incarnation is refused. A ready worker that does not hold the committed weights is restored first; `weights` tells of updates.

The life of a place (a worker that this pool starts itself): backoff → up (its process exists) → ending (SIGKILL is on its way)
→ backoff …, or retired.
"""

from collections import OrderedDict, deque

from enginepool.config import GroupConfig
from enginepool.coordinator.core.events import GroupWeights, Link
from enginepool.coordinator.core.request import Batch, Request
from enginepool.coordinator.scheduling.cost_model import ForwardCostModel
from enginepool.coordinator.scheduling.queue import Queue, VersionQueue
from enginepool.coordinator.scheduling.routing import Routing
from enginepool.coordinator.scheduling.worker_kinds import PACKED, PLAIN, may_pack
from enginepool.coordinator.weights.process_group_info import ProcessGroupInfo
from enginepool.protocol.messages import MAX_PRIORITY, Capabilities, TaskId
from enginepool.protocol.updates import UpdateRecord

#: transactions of a group that its history remembers
HISTORY = 64
#: lost external workers of a group that the status shows, and for how many seconds
LOST, LOST_S = 64, 300.0


class Worker:
    """One incarnation of a worker process, on its newest link."""

    __slots__ = (
        "batches", "capabilities", "committed", "cost", "declared", "detail", "digest", "done", "group", "halvings", "heard",
        "host", "idle", "incarnation", "joined", "kept", "lacks", "late", "leaving", "link", "lost", "order", "pace", "pid",
        "place", "restore_until", "routing", "rows", "since", "stage", "stamp", "text_bytes", "texts", "version",
    )  # fmt: skip

    def __init__(
        self, incarnation: str, group: "Group", link: Link, place: "WorkerSlot | None", order: int, now: float
    ) -> None:
        self.incarnation = incarnation
        self.group = group
        self.link = link
        self.place = place
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
        #: what its forwards cost, as it said and as was learnt since; None: it does not matter
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
        return PACKED if self.place is not None and self.place.packed else PLAIN

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
        return self.version == group.version and self.digest == group.weights.digest and not group.behind

    @property
    def holds_lost(self) -> bool:
        """The weights in its engine are committed ones that the journal does not have."""
        heard = self.group.heard_committed
        return self.group.behind and (self.committed, self.version) == (heard, heard[1])

    @property
    def open(self) -> bool:
        """It may be given batches."""
        return not self.kept and not self.group.held and self.able

    @property
    def name(self) -> str:
        """As people know it."""
        return self.place.name if self.place is not None else self.incarnation

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
                assert all(may_pack(request.work, self.declared) for request, _, _ in batch.slices), batch

    def __repr__(self) -> str:
        return f"<Worker {self.incarnation} {self.stage} batches={len(self.batches)} cost={self.cost}>"


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


class Group:
    """A named set of workers of one model, identical within each class, and the queue before them."""

    __slots__ = (
        "answered", "batches", "blocked", "config", "cut", "down", "early", "expected", "failed", "first", "forwards", "gone",
        "halvings", "heard_committed", "held", "history", "kept_worker", "live", "lost", "lost_batches", "name", "needs",
        "needy", "only", "packed", "packed_routing", "peak", "peak_at", "places", "plain", "poisoned", "queue", "ring",
        "routing", "running", "running_tokens", "spent_s", "spent_tokens", "split_batches", "suspects", "texts", "tokens",
        "trial", "version", "waiting", "weights", "woken", "workers", "zeros",
    )  # fmt: skip

    def __init__(self, name: str, config: GroupConfig, weights: GroupWeights) -> None:
        self.name = name
        self.config = config
        #: the committed weights; workers that hold others get no work. version == weights.version
        self.weights = weights
        self.version = weights.version
        #: the highest run and version that a worker heard to be committed
        self.heard_committed: tuple[int, int] = (0, 0)
        #: no new work starts, because engines are about to take the weights of the open transaction
        self.held = False
        #: the process group of the last update that was committed; None when nobody can be in it any more
        self.ring: ProcessGroupInfo | None = None
        #: tensors of the committed weights that are all zero; None: not known
        self.zeros: frozenset[str] | None = None
        #: the head of the queue, which fitted no worker when work was dispatched last: until it leaves, or a worker changes,
        #: requests behind it change nothing
        self.blocked: Request | None = None
        #: why requests are answered with needs_weights, or ""; the classes of workers none of which can have the weights
        self.needs = ""
        self.needy = 0
        #: the latest transactions, oldest first
        self.history: deque[UpdateRecord] = deque(maxlen=HISTORY)
        #: the record that waits for the first answer of its weights, and when the engines had taken them
        self.first: tuple[UpdateRecord, float] | None = None
        #: how often budgets were halved; all workers' capabilities, and these, are halved as often
        self.halvings = 0
        #: of the first plain, and the first packed worker that was ready; None before that
        self.plain: Capabilities | None = None
        self.packed: Capabilities | None = None
        #: the classes of which there may ever be a worker; of one that only dials in, once one did
        self.expected = PLAIN | PACKED
        self.workers: dict[str, Worker] = {}
        self.places: list[WorkerSlot] = []
        #: external workers that were lost, oldest first: when, who and why
        self.lost: deque[tuple[float, Worker, str]] = deque(maxlen=LOST)
        #: requests without an answer, in the order of their arrival
        self.live: dict[Request, None] = {}
        #: of them, those of which a worker was given some rows and not all: what a hold lets finish is among them
        self.cut: dict[Request, None] = {}
        #: and those that one class alone can serve, where there may be workers of both
        self.only: dict[int, dict[Request, None]] = {PLAIN: {}, PACKED: {}}
        self.queue: Queue[Request] = Queue()
        #: suspects, which run alone, one at a time
        self.suspects: Queue[Request] = Queue()
        #: requests that wait for a later weight version
        self.early: VersionQueue[Request] = VersionQueue()
        self.trial: Batch | None = None
        #: kept free for the next trial until its batches are done
        self.kept_worker: Worker | None = None
        #: the open plain workers, and the open packed ones
        self.routing: Routing[Worker] = Routing()
        self.packed_routing: Routing[Worker] = Routing()
        #: the highest priority of late, and when a request last came with it
        self.peak = -MAX_PRIORITY
        self.peak_at = 0.0
        #: text requests that no worker tokenizes yet, suspects aside
        self.texts: Queue[Request] = Queue()
        #: it stands in `Core.woken`
        self.woken = False
        #: why nothing will ever run here, or ""
        self.down = ""
        #: why nothing will ever run on a class of workers again, by class
        self.gone: dict[int, str] = {}
        #: time and tokens of recent batches; decayed apart, so that many small batches do not foretell large ones
        self.spent_s = 0.0
        self.spent_tokens = 0.0
        #: requests in TEXT or QUEUED, requests in RUNNING, the tokens of all of them, and of those in RUNNING
        self.waiting = 0
        self.running = 0
        self.tokens = 0
        self.running_tokens = 0
        self.answered = self.failed = self.poisoned = 0
        self.batches = self.forwards = self.split_batches = self.lost_batches = 0

    @property
    def behind(self) -> bool:
        """Workers heard of a commit that the journal does not have: it was lost, or is an old one."""
        return self.heard_committed > (self.weights.run, self.weights.version)

    @property
    def no_worker(self) -> str:
        """Why nothing runs in a group that only external workers serve, when none of them is connected; or ""."""
        if self.workers or self.config.workers:
            return ""
        command = f"`enginepool worker --connect ADDRESS --group {self.name}`"
        return f"no worker is connected and the pool starts none (workers = 0); {command} starts one"

    @property
    def rate(self) -> float:
        """Seconds for each token of a batch; 0 before the first one."""
        return self.spent_s / self.spent_tokens if self.spent_tokens else 0.0

    def expect(self) -> None:
        """Call when places were made, or a worker was ready."""
        classes = 0
        for packed, bit, seen in ((False, PLAIN, self.plain), (True, PACKED, self.packed)):
            if seen is not None or any(place.packed == packed for place in self.places):
                classes |= bit
        self.expected = classes or PLAIN | PACKED

    def classify(self, request: Request, classes: int) -> None:
        """The classes of workers that can serve `request`, some or all of those that are expected."""
        if listed := self.only.get(request.classes):
            listed.pop(request, None)
        request.classes = classes
        if classes != self.expected:
            self.only[classes][request] = None

    def confined(self, classes: int) -> list[Request]:
        """The requests that no other than these classes of workers can serve."""
        if not self.expected & ~classes:
            return list(self.live)
        return [request for class_, requests in self.only.items() if not class_ & ~classes for request in requests]

    @property
    def sizes(self) -> Capabilities | None:
        """Of a worker, for the sizes of answers; None before one was ready."""
        return self.plain or self.packed

    @property
    def shut(self) -> int:
        """Classes of workers that run nothing: gone for good, or without the committed weights."""
        return self.needy | sum(self.gone)

    def why_down(self, classes: int) -> str:
        """Why none of `classes` will ever run anything here again, or ""."""
        if self.down:
            return self.down
        left = [bit for bit in (PLAIN, PACKED) if classes & bit and bit not in self.gone]
        return "" if left else next(why for bit, why in self.gone.items() if classes & bit)

    def check(self) -> None:
        self.queue.check()
        self.suspects.check()
        self.texts.check()
        self.early.check()
        assert self.cut.keys() <= self.live.keys(), self.cut
        for classes in (PLAIN, PACKED):
            mine = {request for request in self.live if request.classes == classes != self.expected}
            assert mine == self.only[classes].keys(), (self.name, classes, len(mine), len(self.only[classes]))
        arrivals = [request.seq for request in self.live]
        assert arrivals == sorted(arrivals), self.name
        assert self.version == self.weights.version, self.name
        assert bool(self.needs) == bool(self.needy), (self.needs, self.needy)
        if self.needs:
            assert not any(worker.able for worker in self.workers.values() if worker.class_ & self.needy), self.needs
        for worker in self.workers.values():
            head = self.queue.head(worker.class_) if worker.open and not worker.batches else None
            assert head is None, (self.name, worker, head)
        if self.kept_worker is not None:
            assert self.kept_worker.kept and self.trial is None, (self.name, self.kept_worker, self.trial)
        if self.trial is not None:
            assert self.trial.worker.kept, self.trial
            assert self.trial.id in self.trial.worker.batches or self.trial.id in self.trial.worker.texts, self.trial
        if self.down:
            assert self.queue.head() is None and self.suspects.head() is None and self.texts.head() is None, self.down
