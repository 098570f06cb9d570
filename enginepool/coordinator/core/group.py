"""A group: workers of one model, and the requests that wait for them. Pure.

Everything that decisions depend on is in `group`, `worker`, `worker_slot` and `request`, and in the queue, the routing and the
reply cache. Each attribute that has an invariant says it in a `#:` comment. `tests/core/invariants.py` asserts it.
"""

from collections import deque

from enginepool.config import GroupConfig
from enginepool.coordinator.core.group_adapters import GroupAdapters
from enginepool.coordinator.core.group_counts import GroupCounts, RecentSpeed
from enginepool.coordinator.core.group_holds import GroupHolds
from enginepool.coordinator.core.group_weights import GroupWeights
from enginepool.coordinator.core.request import Request, RunningBatch
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.core.worker_slot import WorkerSlot
from enginepool.coordinator.scheduling.cost_model import ForwardCostModel
from enginepool.coordinator.scheduling.prefix_affinity import PrefixIndex
from enginepool.coordinator.scheduling.queue import Queue
from enginepool.coordinator.scheduling.routing import Routing
from enginepool.coordinator.scheduling.version_queue import ExactVersions, VersionQueue
from enginepool.coordinator.weights.process_group_info import ProcessGroupInfo
from enginepool.protocol.messages import MAX_PRIORITY, Capabilities
from enginepool.protocol.messages.weight_reports import UpdateRecord

#: transactions of a group that its history remembers
HISTORY = 64
#: lost external workers of a group that the status shows, and for how many seconds
LOST, LOST_S = 64, 300.0


class Group:
    """A named set of identical workers of one model, and the queue before them."""

    __slots__ = (
        "adapters", "blocked", "capabilities", "config", "counts", "cut", "down", "exact", "first_answer", "halvings",
        "heard_committed", "history", "holds", "label_ids", "learned", "live", "long_texts", "lost_external", "name", "on_hold",
        "peak", "peak_at", "prefixes", "process_group", "queue", "reserved_worker", "resume_at", "routing", "running",
        "running_tokens", "slots", "speed", "suspects", "texts", "tokens", "trial", "version", "version_queue", "waiting",
        "weights", "weights_lost", "woken", "workers", "zeros",
    )  # fmt: skip

    def __init__(self, name: str, config: GroupConfig, weights: GroupWeights, holds: GroupHolds | None = None) -> None:
        self.name = name
        self.config = config
        #: the committed weights; workers that hold others get no work. version == weights.version
        self.weights = weights
        self.version = weights.version
        #: the highest run and version that a worker heard to be committed
        self.heard_committed: tuple[int, int] = (0, 0)
        #: what publishers have stopped until they say otherwise
        self.holds = holds or GroupHolds()
        #: no new work starts: engines are about to take the weights of the open transaction, or all engines sleep
        self.on_hold = self.holds.whole
        #: the process group of the last update that was committed; None when no peer is left in it
        self.process_group: ProcessGroupInfo | None = None
        #: tensors of the committed weights that are all zero; None: not known
        self.zeros: frozenset[str] | None = None
        #: the head of the queue, which fitted no worker when work was dispatched last: until it leaves, or a worker changes,
        #: requests behind it change nothing
        self.blocked: Request | None = None
        #: why requests are answered with needs_weights, or ""
        self.weights_lost = ""
        #: the latest transactions, oldest first
        self.history: deque[UpdateRecord] = deque(maxlen=HISTORY)
        #: the record that waits for the first answer of its weights, and when the engines had taken them
        self.first_answer: tuple[UpdateRecord, float] | None = None
        #: how often budgets were halved; all workers' capabilities, and these, are halved as often
        self.halvings = 0
        #: it starts no work before, because an engine of it ran out of memory; 0: it does
        self.resume_at = 0.0
        #: of the first worker that was ready; None before that
        self.capabilities: Capabilities | None = None
        self.workers: dict[str, Worker] = {}
        self.slots: list[WorkerSlot] = []
        #: external workers that were lost, oldest first: when, which one and why
        self.lost_external: deque[tuple[float, Worker, str]] = deque(maxlen=LOST)
        self._open_queues()
        self.trial: RunningBatch | None = None
        #: kept free for the next trial until its batches are done
        self.reserved_worker: Worker | None = None
        #: the open workers
        self.routing: Routing[Worker] = Routing()
        #: what plain and packed forwards cost the worker that was lost last; None: not known
        self.learned: tuple[ForwardCostModel | None, ForwardCostModel | None] = (None, None)
        #: the tokens of labels that requests named by their texts: of at most MAX_LABELS
        self.label_ids: dict[str, int] = {}
        #: which worker was given the beginning of a prompt to generate from
        self.prefixes: PrefixIndex[Worker] = PrefixIndex()
        #: the highest priority of late, and when a request last came with it
        self.peak = -MAX_PRIORITY
        self.peak_at = 0.0
        #: it is in `Context.woken`
        self.woken = False
        #: why nothing will ever run here, or ""
        self.down = ""
        self.speed, self.counts = RecentSpeed(), GroupCounts()

    def _open_queues(self) -> None:
        #: LoRA adapters that were loaded while engines run, and the requests that name one
        self.adapters: GroupAdapters[Request] = GroupAdapters()
        #: requests without an answer, in the order of their arrival
        self.live: dict[Request, None] = {}
        #: of them, those of which a worker was given some rows and not all: what a hold lets finish is among them
        self.cut: dict[Request, None] = {}
        self.queue: Queue[Request] = Queue()
        #: suspects, which run alone, one at a time
        self.suspects: Queue[Request] = Queue()
        #: requests that wait for a later weight version
        self.version_queue: VersionQueue[Request] = VersionQueue()
        #: live requests that name one exact version
        self.exact: ExactVersions[Request] = ExactVersions()
        #: text requests that no worker tokenizes yet, suspects aside: short ones and long ones
        self.texts: Queue[Request] = Queue()
        self.long_texts: Queue[Request] = Queue()
        #: requests in TEXT or QUEUED, requests in RUNNING, the tokens of all of them, and of those in RUNNING
        self.waiting = 0
        self.running = 0
        self.tokens = 0
        self.running_tokens = 0

    @property
    def queues(self) -> tuple[Queue[Request], ...]:
        """All in which a request may wait for a worker, except for a later weight version."""
        return self.queue, self.suspects, self.texts, self.long_texts

    @property
    def committed_version(self) -> int:
        """The latest that is known to be committed: workers may know of a later one than a journal that was lost."""
        return self.heard_committed[1] if self.journal_behind else self.version

    @property
    def journal_behind(self) -> bool:
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
    def waiting_for_workers(self) -> int:
        """Requests that wait, but for those that wait for a later weight version."""
        return self.waiting - len(self.version_queue)

    @property
    def mixed(self) -> bool:
        """Its workers generate and run rows."""
        return self.capabilities is not None and self.capabilities.mixed
