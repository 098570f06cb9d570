"""What goes into a client's session, and what comes out: events and effects of `ClientSession.handle`.

Every event carries `now`, seconds on one monotonic clock. Effects are performed in order.
"""

from collections.abc import Sequence

import msgspec

from enginepool.protocol.frames import Buffer
from enginepool.protocol.messages import Failure, Message, Result, Score, StatusReport, ToClient


class Event(msgspec.Struct, frozen=True, gc=False):
    """Base of all events."""

    now: float


class Start(Event, frozen=True):
    """The first event: find the coordinator. Past `connect_by` without a Welcome the session ends; None waits for ever."""

    connect_by: float | None = None


class Submit(Event, frozen=True):
    """A request for the coordinator.

    `score` has a fresh id, larger than all before, and no `timeout_ms`: that is computed from `deadline`, on the clock of
    `now`, at each send. With `retry_busy` a `busy` is tried again while there is time; else it is the answer.
    """

    score: Score
    frames: Sequence[Buffer]
    deadline: float | None = None
    retry_busy: bool = True


class Abandon(Event, frozen=True):
    """The caller no longer wants request, or status report, `id`."""

    id: int


class AskStatus(Event, frozen=True):
    """A status report is wanted. `id` is of the same series as the ids of requests."""

    id: int
    deadline: float | None = None


class Received(Event, frozen=True):
    """A message from the coordinator, its payload already held to the header."""

    message: ToClient
    frames: Sequence[Buffer] = ()


class Tick(Event, frozen=True):
    """Time has passed. Due at `ClientSession.wake_at`; what the socket holds is handled before it."""


class Abort(Event, frozen=True):
    """There is no use in going on (an embedded coordinator stays down): everything ends with `failure`."""

    failure: Failure


class Close(Event, frozen=True):
    """The owner is done. Everything that waits ends with the local code `closed`."""


class Effect(msgspec.Struct, frozen=True, gc=False):
    """Base of all effects."""


class OpenLink(Effect, frozen=True):
    """Close the socket, if there is one, with everything that is queued on it; open a new one to the same address."""


class Send(Effect, frozen=True):
    """Send a message to the coordinator."""

    message: Message
    frames: Sequence[Buffer] = ()


class Answer(Effect, frozen=True):
    """The final answer of request `id`: its result."""

    id: int
    result: Result
    frames: Sequence[Buffer]


class Fail(Effect, frozen=True):
    """The final answer of request, or status report, `id`: why there is no result. The code may be a local one."""

    id: int
    failure: Failure


class Report(Effect, frozen=True):
    """A status report that was asked for."""

    id: int
    report: StatusReport


class Welcomed(Effect, frozen=True):
    """A coordinator of `epoch` has granted a window: for the first time, or again after a lost link."""

    epoch: int
    groups: Sequence[str]


class Complaint(Effect, frozen=True):
    """The coordinator refused a message that was no request: for the log."""

    failure: Failure


class Ended(Effect, frozen=True):
    """The last effect: nothing more will be sent, every request has had its final answer. Close the socket."""

    failure: Failure
