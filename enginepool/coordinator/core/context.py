"""What the parts of the machine share: the clock of the present event, the effects so far, the entities, the counters."""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from math import inf

from enginepool.config import PoolConfig
from enginepool.coordinator.core.effects import Effect, LogLine, ToClient
from enginepool.coordinator.core.events import Event, Link
from enginepool.coordinator.core.group import Group
from enginepool.coordinator.core.request import Client, Request
from enginepool.coordinator.core.secondary import SecondaryEvent
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.core.worker_slot import WorkerSlot
from enginepool.coordinator.requests.reply_cache import ReplyCache
from enginepool.coordinator.requests.shedding import AdmissionLevels
from enginepool.coordinator.weights.update import Update
from enginepool.protocol.messages import MAX_HEADER_BYTES, ClientStatus, ErrorReply, TaskId

#: what the parts of a batch may add to its header
HEADER_BYTES = MAX_HEADER_BYTES - 1024
#: At most so many requests end because of one event; an end costs about 10 µs, and no other peer is heard meanwhile.
ENDS = 4096
#: after so many seconds without a refusal the queue counts as no longer full
ROOM_S = 1.0


class RequestDeadlines:
    """Requests by deadline; entries of finished ones are dropped at the top, and swept once they are half. An entry names its
    request, and does not hold it: the payload of a finished one is not charged any more."""

    __slots__ = ("_heap", "_stale")

    def __init__(self) -> None:
        #: deadline, arrival number, client and id
        self._heap: list[tuple[float, int, Client, int]] = []
        self._stale = 0

    def add(self, request: Request, deadline: float) -> None:
        heappush(self._heap, (deadline, request.seq, request.client, request.id))

    @staticmethod
    def _live(entry: tuple[float, int, Client, int]) -> Request | None:
        """The request of an entry; None: it is finished."""
        _, seq, client, id_ = entry
        request = client.live.get(id_)
        return request if request is not None and request.seq == seq else None

    def next(self) -> float:
        """When the next one is due."""
        heap = self._heap
        while heap and self._live(heap[0]) is None:
            heappop(heap)
            self._stale -= 1
        return heap[0][0] if heap else float("inf")

    def forget(self) -> None:
        """A request with a deadline is done."""
        self._stale += 1
        if self._stale > 64 and self._stale * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if self._live(entry) is not None]
            heapify(self._heap)
            self._stale = 0

    def due(self, now: float) -> list[Request]:
        """Take out what is due: at most ENDS, and the rest when it is asked again."""
        out: list[Request] = []
        while len(out) < ENDS and self.next() <= now:
            request = self._live(heappop(self._heap))
            assert request is not None
            # Its finish() will call forget() for the entry taken out here.
            self._stale -= 1
            out.append(request)
        return out

    def __len__(self) -> int:
        return len(self._heap)


class QueueFullEpisode:
    """An episode in which the queue is full: how many requests were refused, and since when."""

    __slots__ = ("last", "refused", "since")

    def __init__(self) -> None:
        #: of this episode; 0: the queue is not full
        self.refused = 0
        self.since = self.last = 0.0


class Context:
    """The shared state of one coordinator."""

    __slots__ = (
        "again", "answers", "busiest", "clients", "config", "counter", "deadlines", "delayed", "dispatch_at", "draining",
        "effects", "epoch", "event", "full", "groups", "header_bytes", "keep_workers", "levels", "links", "live_bytes",
        "live_rows", "now", "outboxes", "raises", "secondary", "seq", "started", "updates", "woken", "worker_links",
    )  # fmt: skip

    def __init__(self, config: PoolConfig) -> None:
        self.config = config
        self.epoch = 0
        #: how often peers have raised the epoch of this journal
        self.raises = 0
        self.now = 0.0
        self.started = 0.0
        #: what is handled now; None once all events in hand were, and work is dispatched
        self.event: Event | None = None
        #: of the events in hand
        self.effects: list[Effect] = []
        #: the busiest clients, as a report on the events in hand lists them; None: there was no report
        self.busiest: list[ClientStatus] | None = None
        self.groups: dict[str, Group] = {}
        #: streams that their clients sent again in this turn
        self.again: dict[Request, None] = {}
        #: transactions that have no end yet, by group: at most one each
        self.updates: dict[str, Update] = {}
        self.clients: dict[bytes, Client] = {}
        #: newest links only
        self.links: dict[Link, Client] = {}
        self.worker_links: dict[Link, Worker] = {}
        self.answers = ReplyCache(config.limits.answers_s, config.limits.answers_bytes)
        self.full = QueueFullEpisode()
        self.deadlines = RequestDeadlines()
        #: what the parts of a batch may add to its header
        self.header_bytes = HEADER_BYTES
        #: rows of all live requests, and the sum of their `held`
        self.live_rows = 0
        self.live_bytes = 0
        #: the same by priority, and what a full queue gives up
        self.levels = AdmissionLevels()
        #: bytes that were sent and that no peer has read yet, as the shell said last
        self.outboxes = 0
        #: arrival numbers of requests
        self.seq = 0
        #: numbers of batches, tokenizing tasks and incarnations
        self.counter = 0
        self.draining = False
        #: while draining: no work is started, and the workers stay for the next coordinator
        self.keep_workers = False
        #: groups where work and a worker may have met since the last pump
        self.woken: list[Group] = []
        #: groups of which a batch is delayed until its worker needs it, and when the first one does
        self.delayed: dict[Group, None] = {}
        self.dispatch_at = inf
        #: what the events in hand caused and the machine has not handled yet, in order
        self.secondary: list[SecondaryEvent] = []

    def update_of(self, group: Group) -> Update | None:
        """The open transaction of `group`."""
        return self.updates.get(group.name)

    @property
    def slots(self) -> Iterator[WorkerSlot]:
        """The worker slots of all groups."""
        return (slot for group in self.groups.values() for slot in group.slots)

    def log(self, text: str, kind: str = "") -> None:
        """A line for the operator."""
        self.effects.append(LogLine(text, kind))

    def wake(self, group: Group) -> None:
        """Something happened in `group` for which work may have to be dispatched."""
        if not group.woken:
            group.woken = True
            self.woken.append(group)

    def delay(self, group: Group, at: float) -> None:
        """Work of `group` is to be dispatched at that time, if nothing causes it before."""
        self.delayed[group] = None
        self.dispatch_at = min(self.dispatch_at, at)

    def dispatch_due(self) -> None:
        """Dispatch what was delayed until now."""
        if self.now >= self.dispatch_at:
            for group in self.delayed:
                self.wake(group)
            self.delayed.clear()
            self.dispatch_at = inf

    def refuse(self, link: Link, id: int | None, code: str, message: str, *, field: str = "", limit: str = "") -> None:
        """Answer a client's message that was not accepted."""
        self.effects.append(ToClient(link, ErrorReply(code, message, id, field=field, limit=limit)))

    def client_of(self, link: Link, id: int | None) -> Client | None:
        """The client on `link`, heard just now; a link without a hello is told so."""
        client = self.links.get(link)
        if client is None:
            self.refuse(link, id, "hello_required", "this link has not said hello to this coordinator")
            return None
        client.heard = self.now
        return client

    def group_of(self, name: str) -> Group | None:
        """The group that a client means by `name`; a pool of one group needs no name."""
        if not name and len(self.groups) == 1:
            return next(iter(self.groups.values()))
        return self.groups.get(name)

    def open_group(self, link: Link, id: int, name: str) -> Group | None:
        """The group that a client means, if anything new may begin there; else the client is told why not."""
        if self.draining:
            self.refuse(link, id, "shutting_down", "the coordinator is draining")
            return None
        group = self.group_of(name)
        if group is None:
            self.unknown_group(link, id, name)
            return None
        if group.down:
            self.refuse(link, id, "pool_down", group.down)
            return None
        return group

    def refuse_for_room(self, field: str, limit: int) -> None:
        """A request was refused, because bound `field` of all clients together is reached."""
        full = self.full
        if not full.refused:
            full.since = self.now
            self.log(f"the queue is full: limits.{field} = {limit} is reached; requests are refused with busy", "queue")
        full.refused += 1
        full.last = self.now

    def watch_room(self) -> None:
        """The episode is over once nothing was refused for a while."""
        full = self.full
        if full.refused and self.now - full.last > ROOM_S:
            count = f"{full.refused} request{'s were' if full.refused > 1 else ' was'}"
            seconds = full.last - full.since
            self.log(f"the queue has room again: {count} refused with busy in {seconds:.1f} s", "queue")
            full.refused = 0

    def unknown_group(self, link: Link, id: int, name: str) -> None:
        """Refuse a name that means no group."""
        self.refuse(link, id, "unknown_group", self.no_group(name), field="group", limit=", ".join(self.groups))

    def no_group(self, name: str) -> str:
        """Why `name` means no group."""
        names = ", ".join(self.groups)
        return f"group: {name[:80]!r} is none of: {names}" if name else f"group: name one of: {names}"

    def make_room(self, nbytes: int, outboxes: int) -> bool:
        """Whether so many more bytes fit below `limits.buffer_bytes`. Kept answers make room for them."""
        self.outboxes = outboxes
        room = self.config.limits.buffer_bytes - self.live_bytes - outboxes - nbytes
        if room < 0:
            return False
        if self.answers.nbytes > room:
            self.answers.shrink(room)
        return True

    def task_id(self) -> TaskId:
        """Fresh for every attempt."""
        self.counter += 1
        return (self.epoch, self.counter)
