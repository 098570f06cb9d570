"""A machine under test, driven by hand: clients, workers and time in a few words."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np

from enginepool.config import GroupConfig, Limits, PoolConfig, RestartConfig, Timing
from enginepool.coordinator.core import effects as ef
from enginepool.coordinator.core import events as ev
from enginepool.coordinator.operations.base import Work
from enginepool.coordinator.operations.score import SCORE, ScoreWork
from enginepool.protocol.messages import (
    Accept,
    Batch,
    Capabilities,
    ErrorReply,
    FrameSpec,
    Idle,
    Message,
    Ready,
    Result,
    Score,
    Tokenize,
)
from tests.core.checked_machine import CheckedMachine
from tests.core.invariants import check_machine

CAN = Capabilities("causal", 1000, 100, batch_tokens=100, batch_rows=8, inflight_tokens=200, inflight_rows=16)
EPOCH = 7
#: columns of hidden states
HIDDEN = 4


def work(
    rows: int = 1,
    length: int = 10,
    *,
    first: int = 0,
    group: str = "",
    hidden: bool = False,
    labels: tuple[int, ...] = (1, 2),
    query: int = 0,
) -> ScoreWork:
    """`rows` items of `length` ids each, after a query of `query` zeros; the ids count up from `first`."""
    ids = (np.arange(rows * length, dtype=np.int32) + first) % 1000
    specs = [
        FrameSpec("query", "int32", (query,)),
        FrameSpec("items", "int32", (rows * length,)),
        FrameSpec("item_lengths", "uint32", (rows,)),
    ]
    score = Score(1, specs, group=group, hidden=hidden, labels=list(labels))
    return SCORE.open(score, [bytes(4 * query), ids.tobytes(), np.full(rows, length, np.uint32).tobytes()])


def text(query: str, items: list[str], *, hidden: bool = False) -> ScoreWork:
    """A text request."""
    data = [item.encode() for item in items]
    specs = [
        FrameSpec("query", "utf8", (len(query.encode()),)),
        FrameSpec("items", "utf8", (sum(map(len, data)),)),
        FrameSpec("item_lengths", "uint32", (len(items),)),
    ]
    lengths = np.array([len(d) for d in data], np.uint32).tobytes()
    return SCORE.open(Score(1, specs, labels=[1], hidden=hidden), [query.encode(), b"".join(data), lengths])


def config(
    *,
    workers: int = 0,
    ageing_s: float | None = None,
    groups: tuple[str, ...] = ("g",),
    limits: Limits | None = None,
    restart: RestartConfig | None = None,
    forwards_in_flight: int = 2,
    restart_updates: Literal["rolling", "at_once"] = "rolling",
) -> PoolConfig:
    group = GroupConfig(
        model="m", engine="sim", workers=workers, ageing_s=ageing_s, forwards_in_flight=forwards_in_flight,
        checkpoint_roots=["/models"], restart_updates=restart_updates,
    )  # fmt: skip
    return PoolConfig(
        groups=dict.fromkeys(groups, group),
        limits=limits or Limits(),
        timing=Timing(),
        restart=restart or RestartConfig(),
    )


@dataclass
class Sent:
    """A message that the machine sent, and to whom."""

    link: bytes
    message: Message
    frames: list[bytes] = field(default_factory=list[bytes])


class Pool:
    """A checked machine with what it sent, sorted by kind. `found`: what it finds when it starts, as `Started` has it."""

    found: ClassVar[dict[str, Any]] = {}

    def __init__(self, pool_config: PoolConfig | None = None, **kwargs: object) -> None:
        self.machine = CheckedMachine(pool_config or config(**kwargs))  # type: ignore[arg-type]
        self.now = 100.0
        self.sent: list[Sent] = []
        self.batches: list[Sent] = []
        self.started: list[ef.StartWorker] = []
        self.killed: list[str] = []
        #: lines of the log, and the kind of each
        self.logged: list[str] = []
        self.kinds: list[str] = []
        #: why, of each of them
        self.reasons: list[str] = []
        self.drained = self.kept = False
        #: what was to be journaled of what publishers have stopped
        self.holds: list[ef.KeepHolds] = []
        self.clients = 0
        #: the whole machine is checked on every so many events; what an event was about, on each
        self.check_every = 1
        self._events = 0
        self.do(ev.Started(self.now, EPOCH, {}, **self.found))

    def do(self, *events: ev.Event) -> list[Sent]:
        """Events that come together, at the present time; returns what was sent to clients and workers."""
        for event in events:
            event.now = self.now
        out: list[Sent] = []
        for effect in self.machine.handle(*events):
            if isinstance(effect, ef.ToClient | ef.ToWorker):
                sent = Sent(effect.link, effect.message, [bytes(f) for f in effect.frames])
                out.append(sent)
                if isinstance(effect.message, Batch):
                    self.batches.append(sent)
            elif isinstance(effect, ef.StartWorker):
                self.started.append(effect)
            elif isinstance(effect, ef.KillWorker):
                self.killed.append(effect.incarnation)
                self.reasons.append(effect.reason)
            elif isinstance(effect, ef.LogLine):
                self.logged.append(effect.text)
                self.kinds.append(effect.kind)
            elif isinstance(effect, ef.KeepHolds):
                self.holds.append(effect)
            elif isinstance(effect, ef.Drained):
                self.drained, self.kept = True, effect.keep_workers
            else:
                self.other(effect)
        self._events += 1
        if self._events % self.check_every == 0:
            check_machine(self.machine)
        self.sent += out
        return out

    def other(self, effect: ef.Effect) -> None:
        """An effect that is for a shell with a journal."""
        raise AssertionError(f"no code performs {effect}")

    def wait(self, seconds: float) -> list[Sent]:
        """Let time pass in ticks, as the shell does."""
        out: list[Sent] = []
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, max(self.machine.wake_at(), self.now + 0.001))
            out += self.do(ev.Tick(self.now))
        return out

    def client(self, link: bytes = b"", *, client: bytes = b"", incarnation: int = 0) -> bytes:
        self.clients += 1
        link = link or b"client%d" % self.clients
        self.do(ev.ClientHello(0, link, client or link.ljust(16, b"."), b"t" * 16, incarnation))
        return link

    def worker(
        self, name: str = "w", *, group: str = "g", can: Capabilities = CAN, version: int = 0, ready: bool = True
    ) -> bytes:
        """A worker that dials in; its link is its name."""
        link = name.encode()
        self.do(ev.WorkerRegistered(0, link, group, name, 1, "host"))
        if ready:
            self.do(ev.WorkerSaid(0, link, Idle(EPOCH)))
            self.do(ev.WorkerSaid(0, link, Ready(can, version)))
        return link

    def submit(self, link: bytes, id: int, content: Work, *, priority: int = 0, timeout: float | None = None) -> list[Sent]:
        return self.do(ev.Submit(0, link, id, content, priority, None if timeout is None else self.now + timeout))

    def finish(self, sent: Sent, *, version: int = 0, forwards: int = 1, error: str = "", run_s: float = 0.001) -> list[Sent]:
        """The worker answers a batch: each row's score is its first id, its second column its length."""
        assert isinstance(sent.message, Batch)
        if sent in self.batches:
            self.batches.remove(sent)
        outcomes: list[ev.Outcome] = []
        at = 0
        for part in sent.message.parts:
            frames = sent.frames[at : at + len(part.frames)]
            at += len(part.frames)
            if error:
                outcomes.append(ev.Outcome([], [], "engine_error", error))
                continue
            columns = len(part.labels) or 2
            if part.frames[-1].name == "labels":
                columns, frames = part.frames[-1].shape[1], frames[:-1]
            items = np.frombuffer(frames[-2], np.int32)
            lengths = np.frombuffer(frames[-1], np.uint32)
            starts = np.cumsum(lengths) - lengths
            scores = np.stack([items[starts], lengths], axis=1).astype(np.float32)
            scores = np.pad(scores, ((0, 0), (0, max(columns - 2, 0))))[:, :columns]
            specs, out = [FrameSpec("scores", "float32", scores.shape)], [scores.tobytes()]
            if part.hidden:
                specs.append(FrameSpec("hidden", "float32", (len(lengths), HIDDEN)))
                out.append(bytes(4 * HIDDEN * len(lengths)))
            outcomes.append(ev.Outcome(specs, out))
        return self.do(ev.BatchDone(0, sent.link, sent.message.batch, outcomes, version, forwards, int(run_s * 1e6)))

    def finish_all(self) -> list[Sent]:
        out: list[Sent] = []
        while self.batches:
            out += self.finish(self.batches[0])
        return out


def results(sent: list[Sent]) -> dict[int, Result]:
    return {s.message.id: s.message for s in sent if isinstance(s.message, Result)}


def failures(sent: list[Sent]) -> dict[int | None, ErrorReply]:
    return {s.message.id: s.message for s in sent if isinstance(s.message, ErrorReply)}


def codes(sent: list[Sent]) -> list[str]:
    return [s.message.code for s in sent if isinstance(s.message, ErrorReply)]


def texts(sent: list[Sent]) -> list[Sent]:
    return [s for s in sent if isinstance(s.message, Tokenize)]


def accepts(sent: list[Sent]) -> list[Sent]:
    return [s for s in sent if isinstance(s.message, Accept)]
