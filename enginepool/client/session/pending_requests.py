"""The requests of a client's session: where each one is, the window that it occupies, and what its time brings.

Part of the pure machine in `machine.py`, which describes the whole. A request is in one place:

    waiting ──window──► sent ──result, error──► gone
       ▲  ▲              │ │
       │  └─ link lost ──┘ ├─ busy ──► backoff ──time──► waiting
       └───────────────────┘
    sent ──shutting_down──► waiting, until a coordinator of a higher epoch welcomes
    cancelling: taken back while a coordinator may hold it ──answer, or cancel_wait_s──► gone

Every method appends to `out` what is to be done.
"""

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from math import ceil, inf
from typing import Literal

import msgspec

from enginepool.client.session.charges import charge_of, message_bytes
from enginepool.client.session.events import Answer, Fail, SendMessage, SessionEffect, SubmitRequest
from enginepool.client.session.received_tokens import ReceivedTokens
from enginepool.client.session.settings import SessionSettings
from enginepool.protocol.frames import Buffer
from enginepool.protocol.messages import Cancel, ErrorReply, Generate, RowRequest, Welcome

Place = Literal["waiting", "sent", "backoff", "cancelling"]

#: Lazily deleted heap entries that are tolerated before a heap is rebuilt.
_SLACK = 1024


class Call:
    """A request that has no final answer yet."""

    __slots__ = (
        "charge", "counted", "deadline", "due", "frames", "held", "id", "nbytes", "place", "refusals", "request", "retry_busy",
        "sends", "sent_at", "stream", "sweeps",
    )  # fmt: skip

    def __init__(
        self, request: RowRequest | Generate, frames: Sequence[Buffer], deadline: float | None, retry_busy: bool
    ) -> None:
        self.id = request.id
        #: as it is sent, the next time
        self.request = request
        self.frames = frames
        #: at least the bytes of its message
        self.nbytes = message_bytes(request, frames)
        #: what the coordinator counts against the window, without what only a model knows: hidden states, a classifier's labels
        self.charge = charge_of(request, frames)
        #: what arrived of it, if it is a stream
        self.stream = ReceivedTokens(request, frames) if isinstance(request, Generate) and request.stream else None
        self.deadline = deadline
        self.retry_busy = retry_busy
        self.place: Place = "waiting"
        #: it occupies the window
        self.counted = False
        #: a coordinator of this epoch may hold it
        self.held = False
        self.sends = 0
        self.sent_at = -inf
        #: times that it was sent again on the link that stands
        self.sweeps = 0
        self.refusals = 0
        #: when a tick has to look at it: the time of its one valid entry among the timers
        self.due = inf

    def renew(self) -> None:
        """It will be sent again: a stream with the tokens that arrived."""
        if self.stream is not None:
            self.request, self.frames = self.stream.message()
            if not self.counted:
                self.nbytes, self.charge = message_bytes(self.request, self.frames), charge_of(self.request, self.frames)


class PendingRequests:
    """All requests of one client without a final answer, under the window that the last Welcome granted."""

    def __init__(self, settings: SessionSettings, jitter: Callable[[], float]) -> None:
        self.settings = settings
        self.by_id: dict[int, Call] = {}
        #: the link stands: requests may be sent
        self.open = False
        #: this coordinator has said that it ends: nothing is sent before one of a higher epoch welcomes
        self.paused = False
        #: requests, and their bytes, that occupy the window: those with `counted`
        self.used = 0
        self.used_bytes = 0
        #: times that a request was sent again
        self.resends = 0
        self._limit_requests = inf
        self._limit_bytes = inf
        self._limit_message = inf
        self._jitter = jitter
        #: Ids that were taken back and dropped without an answer: a coordinator of this epoch may have missed the Cancel, and
        #: compute them still.
        self._left: set[int] = set()
        #: (-priority, id), at least one for each waiting call; stale ones are dropped when met
        self._waiting: list[tuple[int, int]] = []
        #: (due, id); valid while it is the call's own `due`
        self._timers: list[tuple[float, int]] = []

    @property
    def wake_at(self) -> float:
        """When `tick` has something to do."""
        return self._timers[0][0] if self._timers else inf

    # --- the caller's side ---------------------------------------------------------------------------------------------

    def submit(self, event: SubmitRequest, now: float, out: list[SessionEffect]) -> None:
        call = Call(event.request, event.frames, event.deadline, event.retry_busy)
        self.by_id[call.id] = call
        self._wait(call)
        self.pump(now, out)
        if call.place == "waiting" and call.id in self.by_id:
            self._set_due(call)

    def abort(self, id_: int, now: float, out: list[SessionEffect]) -> None:
        call = self.by_id.get(id_)
        if call is None or call.place == "cancelling":
            return
        if not call.held:
            self._drop(call, _cancelled(call), out)
            self.pump(now, out)
            return
        call.place = "cancelling"
        self._push_timer(call, now + self.settings.cancel_wait_s)
        if self.open:
            out.append(SendMessage(Cancel(call.id)))

    # --- the coordinator's side ----------------------------------------------------------------------------------------

    def welcome(self, limits: Welcome, new_epoch: bool, now: float, out: list[SessionEffect]) -> None:
        """The link stands. A coordinator of a new epoch holds nothing; of the same, it may have missed a Cancel."""
        self._limit_requests = limits.window_requests or inf
        self._limit_bytes = limits.window_bytes or inf
        self._limit_message = min(limits.max_message_bytes or inf, self._limit_bytes)
        self.paused = self.paused and not new_epoch
        if not self.open or new_epoch:
            self.shelve()
            self.open = True
            for call in list(self.by_id.values()):
                call.held = call.held and not new_epoch
                if call.place == "cancelling" and new_epoch:
                    self._drop(call, _cancelled(call), out)
                elif call.place == "cancelling":
                    out.append(SendMessage(Cancel(call.id)))
            if new_epoch:
                self._left.clear()
            out += [SendMessage(Cancel(id_)) for id_ in sorted(self._left)]
        self.pump(now, out)

    def shelve(self) -> None:
        """The link is lost: what was sent waits for the next Welcome."""
        self.open = False
        for call in self.by_id.values():
            self._uncount(call)
            call.renew()
            if call.place == "sent":
                self._wait(call)
                self._set_due(call)

    def answered(self, id_: int, effect: Answer | Fail, now: float, out: list[SessionEffect]) -> None:
        """A final answer arrived: the first one is passed on."""
        call = self.by_id.pop(id_, None)
        self._left.discard(id_)
        if call is not None:
            self._uncount(call)
            out.append(effect)
            if self._waiting:
                self.pump(now, out)

    def busy(self, failure: ErrorReply, id_: int, now: float, out: list[SessionEffect]) -> None:
        call = self.by_id.get(id_)
        if call is None or call.place == "backoff":
            return
        self._uncount(call)
        call.held = False
        after = (failure.retry_after_ms or 0) / 1000
        step = max(after, self.settings.busy_s) * 2 ** min(call.refusals, 16)
        again = now + after + self._jitter() * min(step, max(after, self.settings.busy_cap_s))
        call.refusals += 1
        if call.place == "cancelling":
            self._drop(call, _cancelled(call), out)
        elif not call.retry_busy or (call.deadline is not None and again >= call.deadline):
            self._drop(call, failure, out)
        else:
            call.place = "backoff"
            self._push_timer(call, again)
        self.pump(now, out)

    def put_back(self, id_: int, now: float, out: list[SessionEffect]) -> None:
        """The coordinator ends without an answer to this request: the next one gets it."""
        call = self.by_id.get(id_)
        if call is None:
            return
        self._uncount(call)
        call.held = False
        if call.place == "cancelling":
            self._drop(call, _cancelled(call), out)
        elif call.place == "sent":
            self._wait(call)
            self._set_due(call)

    # --- time ----------------------------------------------------------------------------------------------------------

    def tick(self, now: float, out: list[SessionEffect]) -> None:
        timers = self._timers
        while timers and timers[0][0] <= now:
            due, id_ = heappop(timers)
            call = self.by_id.get(id_)
            if call is None or call.due != due:
                continue
            call.due = inf
            if call.place == "backoff":
                self._wait(call)
                self._set_due(call)
            elif call.place == "cancelling":
                self._left.add(id_)
                self._drop(call, _cancelled(call), out)
            else:
                self._drop(call, _too_late(call), out)
        self.pump(now, out)

    def sweep(self, now: float, out: list[SessionEffect]) -> None:
        """Send again what has had no answer for long, although the link seems well: a message may be lost on its own."""
        if self.paused:
            return
        for call in self.by_id.values():
            # A caller that is slow to take its tokens is no sign of a lost message.
            slow = call.stream is not None and call.stream.waits
            if call.place == "sent" and not slow and now - call.sent_at >= self.settings.resend_s * 2**call.sweeps:
                call.sweeps = min(call.sweeps + 1, 4)
                call.renew()
                self._send(call, now, out)

    def pump(self, now: float, out: list[SessionEffect]) -> None:
        """Send what waits, in order, while the window has room. A request that does not fit holds up those behind it: small
        ones must not overtake it without end."""
        waiting = self._waiting
        while waiting and self.open and not self.paused:
            call = self.by_id.get(waiting[0][1])
            if call is None or call.place != "waiting":
                heappop(waiting)
            elif call.nbytes > self._limit_message:
                heappop(waiting)
                self._drop(call, _too_large(call, call.nbytes, int(self._limit_message)), out)
            elif call.charge > self._limit_bytes:
                heappop(waiting)
                self._drop(call, _too_large(call, call.charge, int(self._limit_bytes)), out)
            elif call.deadline is not None and now >= call.deadline and not call.held:
                heappop(waiting)
                self._drop(call, _too_late(call), out)
            elif self.used >= self._limit_requests or self.used_bytes + call.charge > self._limit_bytes:
                return
            else:
                heappop(waiting)
                call.place = "sent"
                call.sweeps = 0
                call.counted = True
                self.used += 1
                self.used_bytes += call.charge
                self._send(call, now, out)
                self._set_due(call)

    def end(self, failure: ErrorReply, out: list[SessionEffect]) -> None:
        """`failure` is the final answer of everything."""
        for call in list(self.by_id.values()):
            self._drop(call, failure, out)
        self.open = False
        self._waiting.clear()
        self._timers.clear()

    # --- the parts -----------------------------------------------------------------------------------------------------

    def _send(self, call: Call, now: float, out: list[SessionEffect]) -> None:
        request = call.request
        if call.deadline is not None:
            # Past the deadline, but within the grace: the coordinator may have kept the answer for a resend.
            request = msgspec.structs.replace(request, timeout_ms=max(ceil(round((call.deadline - now) * 1000, 3)), 1))
        call.held = True
        call.sent_at = now
        self.resends += call.sends > 0
        call.sends += 1
        out.append(SendMessage(request, call.frames))

    def _uncount(self, call: Call) -> None:
        if call.counted:
            call.counted = False
            self.used -= 1
            self.used_bytes -= call.charge

    def _drop(self, call: Call, failure: ErrorReply, out: list[SessionEffect]) -> None:
        self._uncount(call)
        del self.by_id[call.id]
        out.append(Fail(call.id, failure))

    def _wait(self, call: Call) -> None:
        call.place = "waiting"
        heappush(self._waiting, (-call.request.priority, call.id))
        if len(self._waiting) > 2 * len(self.by_id) + _SLACK:
            self._waiting[:] = [(-c.request.priority, c.id) for c in self.by_id.values() if c.place == "waiting"]
            heapify(self._waiting)

    def _set_due(self, call: Call) -> None:
        """When a waiting or sent call is out of time: at its deadline, or `grace_s` later if a coordinator may hold it."""
        if call.deadline is None:
            call.due = inf
            return
        due = call.deadline + self.settings.grace_s if call.held else call.deadline
        if due != call.due:
            self._push_timer(call, due)

    def _push_timer(self, call: Call, due: float) -> None:
        call.due = due
        heappush(self._timers, (due, call.id))
        if len(self._timers) > 2 * len(self.by_id) + _SLACK:
            self._timers[:] = [(c.due, c.id) for c in self.by_id.values() if c.due < inf]
            heapify(self._timers)


def _cancelled(call: Call) -> ErrorReply:
    return ErrorReply("cancelled", "the request was taken back", id=call.id)


def _too_late(call: Call) -> ErrorReply:
    where = "without an answer" if call.sends else "before the request could be sent"
    return ErrorReply("deadline_exceeded", f"the timeout ran out {where}", id=call.id)


def _too_large(call: Call, nbytes: int, limit: int) -> ErrorReply:
    what = "the request has about" if nbytes == call.nbytes else "the request and its answer take"
    text = f"{what} {nbytes} bytes; this coordinator takes at most {limit}"
    return ErrorReply("too_large", text, id=call.id, limit=str(limit))
