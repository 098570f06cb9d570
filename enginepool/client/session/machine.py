"""The client's side of the protocol as a pure machine: `handle(event) -> list[Effect]`; every request gets one final answer.

Time is in events, randomness comes through `jitter`; no sockets, clocks or tasks here. How it thinks:

The *link* (`link_state.py`) stands or does not. When it is lost, a new Hello is sent, after a silence on a new socket. What
needs a standing link waits for the next Welcome.

*Requests* (`pending_requests.py`) are sent while the link is welcomed and the window has room: the largest priority first, then
the oldest. When the link is lost they are sent again after the next Welcome, under the same ids; the coordinator attaches them
to the requests that it has, or runs them again. Later copies of an answer are dropped here. After `shutting_down` the requests
wait for the Welcome of a higher epoch. The coordinator enforces deadlines. A sent request fails here `grace_s` after its
deadline, so that no call hangs without a coordinator.

*Streams* (`streams.py`) are requests whose tokens arrive before their answer. They are sent again with the tokens that
arrived. The caller's pace gives the coordinator credit for more.

*Questions* (`questions.py`) are asked again until they are answered. *Updates* (`updates.py`) are sent again after a lost link,
and looked up in the journal of a new coordinator.

*Acknowledgements* (`acknowledgements.py`) go out in batches, except for `busy`: that leaves the id free, and an
acknowledgement that arrives after the second attempt would make the coordinator forget the request.
"""

from collections.abc import Callable
from math import inf
from typing import Any

from enginepool.client.session.acknowledgements import Acknowledgements
from enginepool.client.session.events import (
    AbandonRequest,
    Abort,
    Answer,
    Ask,
    Close,
    CommittedWeightsLost,
    Complaint,
    Ended,
    Fail,
    MessageReceived,
    SendMessage,
    SessionEffect,
    SessionEvent,
    SessionTick,
    Start,
    SubmitRequest,
    TokensTaken,
    UpdateAbort,
    UpdateBegin,
    UpdateCommit,
    UpdateProgress,
    UpdateSent,
    Welcomed,
)
from enginepool.client.session.link_state import LinkState
from enginepool.client.session.pending_requests import PendingRequests
from enginepool.client.session.questions import PendingQuestions
from enginepool.client.session.settings import DEFAULTS, SessionSettings
from enginepool.client.session.streams import Streams
from enginepool.client.session.updates import Updates
from enginepool.protocol.errors import CODES
from enginepool.protocol.messages import (
    PROTOCOL_VERSION,
    ErrorReply,
    Generated,
    Goodbye,
    Ping,
    Pong,
    Result,
    Tokens,
    Welcome,
)
from enginepool.protocol.messages.weight_reports import WeightsReport
from enginepool.protocol.messages.weights import Join, Phase, Published, WeightsNeeded

_CLOSED = ErrorReply("closed", "the pool is closed")


class ClientSession:
    """One client of one coordinator, for the client object's whole life.

    Args:
        client: 16 random bytes: who this is.
        token: 16 secret random bytes.
        jitter: a source of floats in [0, 1), for backing off.
        settings: times and sizes.
        agent: name and version of the software, for the operator.
    """

    def __init__(
        self, client: bytes, token: bytes, jitter: Callable[[], float], settings: SessionSettings = DEFAULTS, agent: str = ""
    ) -> None:
        self.settings = settings
        self.link = LinkState(client, token, settings, agent)
        self.calls = PendingRequests(settings, jitter)
        self.streams = Streams(self.calls)
        self.questions = PendingQuestions(settings, self.link)
        self.updates = Updates(settings, client)
        #: why it ended
        self.end: ErrorReply | None = None
        #: why the last hello that may be repeated was refused
        self._refused = ""
        self._now = -inf
        self._out: list[SessionEffect] = []
        self._last_id = 0
        self._acks = Acknowledgements(settings, self.link)
        #: when unanswered requests are looked through; inf: the link is lost
        self._sweep_at = inf
        self._on: dict[type[SessionEvent], Callable[[Any], None]] = {
            Start: self._on_start,
            SubmitRequest: lambda event: self._begin(event.request.id, self.calls.submit, event),
            AbandonRequest: self._on_abort,
            TokensTaken: lambda event: self.streams.taken(event, self._out),
            Ask: lambda event: self._begin(event.question.id, self.questions.ask, event),
            UpdateBegin: lambda event: self._begin(event.publish.id, self.updates.open, event),
            UpdateProgress: lambda event: self.updates.progress(event.id, event.sent_bytes),
            UpdateSent: lambda event: self.updates.all_sent(event.id, event.digest, event.sent_bytes, event.regions, self._out),
            UpdateCommit: lambda event: self.updates.allow(event.id, event.deadline, self._out),
            UpdateAbort: lambda event: self.updates.abort(event, self._now, self._out),
            MessageReceived: self._on_received,
            SessionTick: self._on_tick,
            Abort: lambda event: self._finish(event.failure),
            Close: self._on_close,
        }

    def handle(self, event: SessionEvent) -> list[SessionEffect]:
        """Take one event, and say what is to be done, in order."""
        self._out = []
        self._now = max(self._now, event.now)
        self._on[type(event)](event)
        return self._out

    @property
    def wake_at(self) -> float:
        """When the next Tick is due; inf: nothing waits for time."""
        calls, questions, updates = self.calls.wake_at, self.questions.wake_at, self.updates.wake_at
        return min(self._sweep_at, self.link.wake_at, calls, questions, updates, self._acks.wake_at)

    # --- the caller's side ---------------------------------------------------------------------------------------------

    def _on_start(self, event: Start) -> None:
        if self.link.state != "new":
            raise ValueError("a session starts once")
        self.link.connect_by(event.connect_by)
        self._greet(open_link=True)

    def _on_abort(self, event: AbandonRequest) -> None:
        if not self.questions.abort(event.id):
            self.calls.abort(event.id, self._now, self._out)

    def _on_close(self, event: Close) -> None:
        if self.link.stands:
            self._acks.flush(self._out)
            self.updates.end(_CLOSED, self._out)
            self._out.append(SendMessage(Goodbye()))
        self._finish(_CLOSED)

    def _begin(self, id_: int, begin: Callable[[Any, float, list[SessionEffect]], None], event: SessionEvent) -> None:
        """Let a part take the event that brings a fresh id."""
        if id_ <= self._last_id:
            raise ValueError(f"id {id_} after {self._last_id}: the ids of a client only grow")
        self._last_id = id_
        if self.end is not None:
            self._out.append(Fail(id_, self.end))
        else:
            begin(event, self._now, self._out)

    # --- the coordinator's side ----------------------------------------------------------------------------------------

    def _on_received(self, event: MessageReceived) -> None:
        if self.link.state in ("new", "ended"):
            return
        message = event.message
        if isinstance(message, Welcome):
            self._on_welcome(message)
            return
        if isinstance(message, Pong) and 0 < message.epoch < self.link.epoch:
            return
        self.link.heard()
        if isinstance(message, Tokens):
            self.streams.received(message, event.frames, self._now, self._out)
        elif isinstance(message, Generated):
            if message.final:
                self._answered(message.id, self.streams.finished(message, event.frames, self._now, self._out))
        elif isinstance(message, Result):
            if message.final:
                self._answered(message.id, Answer(message, event.frames))
        elif isinstance(message, ErrorReply):
            self._on_failure(message)
        elif isinstance(message, Ping):
            self._out.append(SendMessage(Pong(at=message.at)))
        elif isinstance(message, Pong):
            if message.epoch > self.link.epoch:
                self._greet_again()
        elif isinstance(message, Join | Phase):
            self.updates.heard(message, self._now, self._out)
        elif isinstance(message, Published):
            self.updates.published(message, self._out)
            self._acknowledge(message.id)
        elif isinstance(message, WeightsNeeded):
            self._out.append(CommittedWeightsLost(message.group, message.version))
        elif not (isinstance(message, WeightsReport) and self.updates.reported(message, self._out)):
            self.questions.answered(message, event.frames, self._out)

    def _on_welcome(self, message: Welcome) -> None:
        if message.protocol != PROTOCOL_VERSION:
            text = f"the coordinator answers in protocol {message.protocol}; this client speaks {PROTOCOL_VERSION}"
            self._finish(ErrorReply("protocol_version", text, limit=str(PROTOCOL_VERSION)))
            return
        before = self.link.epoch
        if message.epoch < before or message.incarnation != self.link.incarnation:
            return
        new_epoch = message.epoch > before
        again = self.link.stands and not new_epoch
        self.link.welcomed(message, self._now)
        if not again:
            self._sweep_at = self._now + self.settings.resend_s
            self._out.append(Welcomed(message.epoch, tuple(message.groups)))
            if new_epoch:
                self._acks.clear()
            self._acks.flush(self._out)
            self.questions.welcome(self._out)
            self.updates.welcome(new_epoch, self._now, self._out)
        self.calls.welcome(message, new_epoch, self._now, self._out)

    def _on_failure(self, failure: ErrorReply) -> None:
        code = failure.code
        if failure.incarnation is not None:
            self._on_hello_refused(failure)
        elif code == "hello_required":
            self._greet_again()
        elif failure.id is None and code == "shutting_down":
            self._coordinator_ends(failure)
        elif failure.id is None:
            self._out.append(Complaint(failure))
        elif self.updates.refused(failure.id, failure, self._now, self._out):
            self._acknowledge(failure.id)
        elif self.questions.refused(failure.id, failure, self._out):
            return  # the coordinator keeps no question, so nothing is acknowledged
        elif code == "shutting_down":
            self._coordinator_ends(failure)
            self.calls.put_back(failure.id, self._now, self._out)
        elif code == "busy":
            self.calls.busy(failure, failure.id, self._now, self._out)
        elif failure.final:
            self._answered(failure.id, Fail(failure.id, failure))

    def _coordinator_ends(self, failure: ErrorReply) -> None:
        """It is stopped on purpose. What it has begun may still be answered; the rest is for the next coordinator."""
        if not self.calls.paused:
            self.calls.paused = True
            self.link.seek(self._now)
            self._out.append(Complaint(failure))

    def _on_hello_refused(self, failure: ErrorReply) -> None:
        """What was said of an earlier Hello does not count."""
        if failure.incarnation != self.link.incarnation:
            return
        code = failure.code
        if code != "superseded":
            if code in CODES and CODES[code].retry:
                self._refused = f": {failure.message}"
                self._out.append(Complaint(failure))
            else:
                self._finish(failure)
            return
        found = self.link.superseded(self._now)
        if found == "end":
            self._finish(failure)
        elif found == "greet":
            self._greet(open_link=False)

    def _answered(self, id_: int, effect: Answer | Fail) -> None:
        # A duplicate is acknowledged too: the first acknowledgement may be lost.
        self._acknowledge(id_)
        self.calls.answered(id_, effect, self._now, self._out)

    def _acknowledge(self, id_: int) -> None:
        self._acks.add(id_, self._now, self._out)

    # --- time ----------------------------------------------------------------------------------------------------------

    def _on_tick(self, event: SessionTick) -> None:
        now, settings = self._now, self.settings
        if now - self.wake_at > settings.stall_s:
            self.link.forgive(now)
        self.calls.tick(now, self._out)
        due = self.link.due(now)
        if due == "never_answered":
            self._finish(ErrorReply("connect", f"no coordinator answered{self._refused}"))
        elif due:
            self._greet(open_link=due == "silent")
        self.link.ping(now, self._out)
        if now >= self._acks.wake_at:
            self._acks.flush(self._out)
        if now >= self._sweep_at:
            self._sweep_at = now + settings.resend_s
            self.calls.sweep(now, self._out)
        self.questions.tick(now, self._out)
        self.updates.tick(now, self._out)

    # --- all parts -----------------------------------------------------------------------------------------------------

    def _greet_again(self) -> None:
        if self.link.forgotten(self._now):
            self._greet(open_link=False)

    def _greet(self, open_link: bool) -> None:
        self.calls.shelve()
        self.updates.shelve()
        self._acks.shelve()
        self._sweep_at = inf
        self.link.greet(self._now, self._out, open_link=open_link)

    def _finish(self, failure: ErrorReply) -> None:
        if self.end is not None:
            return
        self.end = failure
        self.calls.end(failure, self._out)
        self.questions.end(failure, self._out)
        self.updates.end(failure, self._out)
        self._acks.clear()
        self._sweep_at = inf
        self.link.end()
        self._out.append(Ended(failure))

    def describe(self) -> str:
        """State, epoch and counts, in a few words: for `repr` and for logs."""
        epoch = self.link.epoch
        words = {"new": "new", "greeting": "reconnecting" if epoch else "connecting", "welcomed": "connected"}
        said = words.get(self.link.state, "closed")
        if self.end is not None and self.end.code != "closed":
            said = f"failed ({self.end.code})"
        known = f" epoch={epoch}" if epoch else ""
        return f"{said}{known} pending={len(self.calls.by_id)} sent={self.calls.used} resends={self.calls.resends}"
