"""Clients, their requests, and the batches that workers run. Pure.

The life of a request:

    TEXT     its text is with a worker's tokenizer, or waits for a worker that is ready
    QUEUED   some of its rows have not been given to a worker, or came back from one that was lost
    RUNNING  all its rows are with workers
    DONE     its one final answer exists

Each attribute that has an invariant says it in a `#:` comment. `tests/core/invariants.py` asserts it after events.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from enginepool.coordinator.core.events import Buffer, Link, Submit
from enginepool.coordinator.core.generation_state import GenerationState
from enginepool.coordinator.core.request_state import DONE, NAMES, QUEUED, RUNNING, TEXT
from enginepool.coordinator.operations.generate import GenerateWork
from enginepool.coordinator.scheduling.lanes import Holder
from enginepool.coordinator.scheduling.queue import Queue
from enginepool.coordinator.scheduling.version_queue import VersionQueue
from enginepool.protocol.messages import FrameSpec, TaskId
from enginepool.protocol.ragged import Offsets

if TYPE_CHECKING:
    from enginepool.coordinator.core.group import Group
    from enginepool.coordinator.core.worker import Worker


class Client:
    """A client object somewhere, over all its links."""

    __slots__ = ("away", "heard", "id", "incarnation", "link", "live", "max_message", "nbytes", "number", "rows", "token")

    def __init__(self, id: bytes, token: bytes, incarnation: int, link: Link, now: float, number: int) -> None:
        self.id = id
        #: how many clients this coordinator had met with it
        self.number = number
        self.token = token
        self.incarnation = incarnation
        #: the newest link; None once it is known to be gone
        self.link: Link | None = link
        #: its requests wait behind those of all clients that have a link
        self.away = False
        self.heard = now
        #: requests without an answer, by their id; their number and bytes are what the window bounds
        self.live: dict[int, Request] = {}
        #: equals the sum of `held` over `live`
        self.nbytes = 0
        #: items of all of `live`
        self.rows = 0
        #: bytes of the longest message that it takes
        self.max_message = 0

    def __repr__(self) -> str:
        return f"<Client {self.id.hex()[:8]}.{self.incarnation} live={len(self.live)}>"


#: bytes of rows that are text, the query counted in each and a chat as 1 KiB more, or ids to decode: a tokenizer takes a tenth
#: of a second or more for so many
LONG_TEXT = 256 << 10
#: never changed
_NONE: list[str] = []


class Request:
    """A request until its final answer."""

    __slots__ = (
        "answer", "arrival", "attempts", "back", "bystander", "client", "deadline", "evidence", "exact_version",
        "flying", "forwards", "generation", "group", "held", "id", "key", "lane", "left", "min_version", "next", "offsets",
        "packs", "pieces", "priority", "run_us", "seq", "started", "state", "suspect", "version", "work", "workers",
    )  # fmt: skip

    def __init__(self, client: Client, group: "Group", asked: Submit, answer: int, held: int, seq: int) -> None:
        self.client = client
        self.group = group
        self.id = asked.id
        self.work = work = asked.work
        self.priority = priority = asked.priority
        self.deadline = asked.deadline
        self.arrival = now = asked.now
        #: constant: arrival − priority × ageing_s, or −priority when the order is strict; smaller runs first
        ageing_s = group.config.ageing_s
        self.key = -float(priority) if ageing_s is None else now - priority * ageing_s
        #: arrival number; breaks ties, and survives a return to the queue
        self.seq = seq
        #: its rows may be packed; its lane in a queue follows from that
        self.packs = False
        #: bytes of its answer, and of the request and its answer together, as they are charged (`memory.py`)
        self.answer = answer
        self.held = held
        self.state = TEXT if work.text else QUEUED
        # What most requests leave empty is a tuple until something comes: a list each would be memory to fetch again when
        # the request leaves a long queue.
        #: rows from `next` on were never given to a worker; `back` are ranges that came back, in order, with rows between them
        self.next = 0
        self.back: Sequence[tuple[int, int]] = ()
        #: rows with workers now
        self.flying = 0
        #: rows without an outcome: left == flying + rows in back + rows from next on
        self.left = work.rows
        #: (first row, specs, frames) of finished parts, when the request was cut
        self.pieces: list[Piece] | tuple[Piece, ...] = ()
        #: where its rows begin in its frames, once it was cut
        self.offsets: Offsets | None = None
        #: weight version of the finished parts
        self.version: int | None = None
        self.forwards: list[int] | tuple[int, ...] = ()
        self.run_us = 0
        #: names of the workers that computed parts of its answer (`participants.py`)
        self.workers: list[str] = _NONE
        #: when the first part was dispatched
        self.started = 0.0
        #: it was with a worker that was lost: from now on it runs alone
        self.suspect = False
        #: its text waited for the tokenizer of a worker that was lost: the next time, it is a suspect
        self.bystander = False
        #: deaths of workers while it ran alone, and what was said of each
        self.attempts = 0
        self.evidence: Sequence[str] = ()
        #: the queue in which its entry counts; entries in another one are stale
        self.lane: Holder | None = None
        #: weights of this version alone answer it, or of any; it is in `group.exact` then
        self.exact_version = asked.exact_version
        #: it runs once this version, or a later one, is committed
        self.min_version = asked.exact_version or asked.min_version
        #: the sequences of a request to generate: its rows
        self.generation: GenerationState[RunningBatch] | None = None
        if isinstance(work, GenerateWork):
            self.generation = generation = GenerationState[RunningBatch](work)
            self.next, self.back = work.rows, generation.unfinished(0, work.rows)
            self.left = sum(end - start for start, end in self.back)

    @property
    def long_text(self) -> bool:
        """A tokenizer is busy with it for long, and does others at the same time."""
        work = self.work
        return work.tokens > LONG_TEXT and (work.of_text or work.operation.of_tokenizer)

    @property
    def queue(self) -> "Queue[Request] | VersionQueue[Request]":
        """Where it waits, when it does."""
        group = self.group
        if self.state == TEXT:
            if self.suspect:
                return group.suspects
            return group.long_texts if self.long_text else group.texts
        if self.min_version > group.version:
            return group.version_queue
        return group.suspects if self.suspect else group.queue

    @property
    def unmet(self) -> str:
        """What it waits for, where that is more than its turn: the end of an error."""
        group = self.group
        if self.state == RUNNING:
            return ""
        if self.min_version > group.version:
            name = "min_version" if self.exact_version is None else "version"
            return f"; {name} is {self.min_version}, but the committed weight version is {group.version}"
        if held := group.holds.waits_for:
            return f"; group {group.name} {held}"
        if not any(worker.able for worker in group.workers.values()):
            return f"; no worker of group {group.name} is ready"
        return ""

    def waiting_rows(self) -> int:
        return self.work.rows - self.next + sum(end - start for start, end in self.back)

    def rows_back(self, rows: int) -> bool:
        """A worker does not have so many of its rows any more. Returns whether it has its answer."""
        self.flying -= rows
        if self.state != DONE:
            return False
        if not self.flying:
            self.drop_payload()
        return True

    def drop_payload(self) -> None:
        """It has its answer, and no worker has rows of it: its entry may stay in a queue, and is not charged there."""
        self.work = self.work.without_payload()
        self.pieces, self.offsets, self.generation = (), None, None

    def __repr__(self) -> str:
        return f"<Request {self.client.id.hex()[:8]}/{self.id} {NAMES[self.state]} rows={self.work.rows} left={self.left}>"


#: a finished part of a request: its first row, its specs, its frames
Piece = tuple[int, Sequence[FrameSpec], Sequence[Buffer]]
#: rows `start` to `end` of a request, in a batch
Slice = tuple[Request, int, int]


class RunningBatch:
    """Rows that a worker runs as one forward."""

    __slots__ = (
        "adapter", "adapter_version", "at", "began", "cost", "counted", "deadline", "id", "late", "packed", "rows", "slices",
        "trial", "worker",
    )  # fmt: skip

    def __init__(
        self,
        id: TaskId,
        worker: "Worker",
        slices: list[Slice],
        cost: int,
        rows: int,
        *,
        trial: bool = False,
        packed: bool = False,
    ) -> None:
        self.id = id
        self.worker = worker
        self.slices = slices
        #: tokens that its worker computes, with lengths rounded up to the engine's page
        self.cost = cost
        self.rows = rows
        #: when it was sent; when the worker is lost if it has not answered; when half of that time is over
        self.began = self.deadline = self.late = 0.0
        #: a suspect runs alone in it
        self.trial = trial
        #: its rows are packed
        self.packed = packed
        #: a task to generate: how many tokens each of its sequences had when it began
        self.at = 0
        #: a task to generate: its worker has said how many tokens of its prompt were cached
        self.counted = False
        #: and the engine's name of the adapter that generates, or ""; the version of that, or 0
        self.adapter, self.adapter_version = "", 0

    def __repr__(self) -> str:
        return f"<Batch {self.id[1]} rows={self.rows} cost={self.cost}{' trial' if self.trial else ''}>"
