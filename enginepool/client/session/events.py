"""What goes into a client's session, and what comes out: events and effects of `ClientSession.handle`.

Every event carries `now`, seconds on one monotonic clock. Effects are performed in order.
"""

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from enginepool.protocol.frames import Buffer
from enginepool.protocol.messages import (
    ErrorReply,
    Generate,
    Generated,
    Message,
    RestartWorker,
    Result,
    RowRequest,
    SequenceEnd,
    Status,
    StatusReport,
    ToClient,
)
from enginepool.protocol.messages.adapters import AdapterReport, LoadAdapter, UnloadAdapter
from enginepool.protocol.messages.control import Control, ControlReport
from enginepool.protocol.messages.weight_reports import InspectWeights, WeightsReport
from enginepool.protocol.messages.weights import Join, MemoryRegion, Phase, Publish, Published

#: asked until a report answers it
Question = Status | RestartWorker | InspectWeights | Control | LoadAdapter | UnloadAdapter


class SessionEvent(msgspec.Struct, frozen=True, gc=False):
    """Base of all events."""

    now: float


class Start(SessionEvent, frozen=True):
    """The first event: find the coordinator. Past `connect_by` without a Welcome the session ends; None: without a limit."""

    connect_by: float | None = None


class SubmitRequest(SessionEvent, frozen=True):
    """A request for the coordinator.

    `request` has a fresh id, larger than all before, and no `timeout_ms`: that is computed from `deadline`, on the clock of
    `now`, at each send. With `retry_busy` a `busy` is tried again while there is time; else it is the answer.
    """

    request: RowRequest | Generate
    frames: Sequence[Buffer]
    deadline: float | None = None
    retry_busy: bool = True


class AbandonRequest(SessionEvent, frozen=True):
    """The caller no longer wants request, or report, `id`."""

    id: int


class TokensTaken(SessionEvent, frozen=True):
    """The caller has taken so many tokens of stream `id`, in all. More than its credit are not sent ahead of that."""

    id: int
    taken: int


class Ask(SessionEvent, frozen=True):
    """A question for a report: on the pool's status, after the restart of a worker, on weights, on a command, or on an
    adapter, with the frames of that. Its id is of the same series as the ids of requests."""

    question: Question
    deadline: float | None = None
    frames: Sequence[Buffer] = ()


class UpdateBegin(SessionEvent, frozen=True):
    """New weights for a group: `publish` has a fresh id of the same series, `frames` its manifest, if it has one.

    Past `deadline` the transaction is aborted without an answer of the coordinator. The deadline ends when all is sent.
    """

    publish: Publish
    frames: Sequence[Buffer] = ()
    deadline: float | None = None


class UpdateProgress(SessionEvent, frozen=True):
    """So much of update `id` is broadcast; said to the coordinator with the next renewal of the lease."""

    id: int
    sent_bytes: int


class UpdateSent(SessionEvent, frozen=True):
    """Everything of update `id` is broadcast, or lies in `regions`."""

    id: int
    digest: str
    sent_bytes: int
    regions: list[MemoryRegion] = []


class UpdateCommit(SessionEvent, frozen=True):
    """Update `id` may be committed; past `deadline` its end is no longer waited for."""

    id: int
    deadline: float | None = None


class UpdateAbort(SessionEvent, frozen=True):
    """Give update `id` up, unless it is too late. Its final answer says which. `broken`: the process group broke."""

    id: int
    reason: str = ""
    broken: bool = False


class MessageReceived(SessionEvent, frozen=True):
    """A message from the coordinator, its payload already held to the header."""

    message: ToClient
    frames: Sequence[Buffer] = ()


class SessionTick(SessionEvent, frozen=True):
    """Time has passed. Due at `ClientSession.wake_at`; what the socket holds is handled before it."""


class Abort(SessionEvent, frozen=True):
    """There is no use in going on (an embedded coordinator stays down): everything ends with `failure`."""

    failure: ErrorReply


class Close(SessionEvent, frozen=True):
    """The owner is done. Everything that waits ends with the local code `closed`."""


class SessionEffect(msgspec.Struct, frozen=True, gc=False):
    """Base of all effects."""


class OpenLink(SessionEffect, frozen=True):
    """Close the socket, if there is one, with everything that is queued on it; open a new one to the same address."""


class SendMessage(SessionEffect, frozen=True):
    """Send a message to the coordinator."""

    message: Message
    frames: Sequence[Buffer] = ()


class Answer(SessionEffect, frozen=True):
    """The final answer of a request, a question or an update. An update that is not committed ends with Fail.

    That of a stream has all its tokens from where the caller's request ended, also those that other answers brought.
    """

    message: Result | Generated | StatusReport | WeightsReport | ControlReport | AdapterReport | Published
    frames: Sequence[Buffer] = ()

    @property
    def id(self) -> int:
        """Of the request, the question or the update."""
        return self.message.id


class Fail(SessionEffect, frozen=True):
    """The final answer of request, update or question `id`: why there is no result. The code may be a local one."""

    id: int
    failure: ErrorReply


class StreamPart(SessionEffect, frozen=True):
    """The next tokens of a sequence of stream `id`, as bytes of int32, which weights of `version` computed; as many `logprobs`,
    as bytes of float32, if asked for (with `top_logprobs`: their columns). `end`: the sequence has ended, after these tokens or
    without more. `hidden_states`: of these tokens, as bytes of float32, if asked for."""

    id: int
    sequence: int
    tokens: bytes = b""
    logprobs: bytes = b""
    version: int = 0
    end: SequenceEnd | None = None
    hidden_states: bytes = b""


class UpdateStep(SessionEffect, frozen=True):
    """An update goes on. Said again after a lost link.

    `join`: be rank 0 of the process group that it describes. `phase`: the phase of the update. In `transfer` its bytes are to
    be sent.
    """

    message: Join | Phase


#: what becomes of a request, a question or an update; last Answer or Fail
Heard: TypeAlias = Answer | StreamPart | UpdateStep | Fail


class CommittedWeightsLost(SessionEffect, frozen=True):
    """The committed `version` of `group` is held nowhere any more, and this client published it last."""

    group: str
    version: int


class Welcomed(SessionEffect, frozen=True):
    """A coordinator of `epoch` has granted a window: for the first time, or again after a lost link."""

    epoch: int
    groups: Sequence[str]


class Complaint(SessionEffect, frozen=True):
    """The coordinator refused a message that was no request: for the log."""

    failure: ErrorReply


class Ended(SessionEffect, frozen=True):
    """The last effect: nothing more will be sent, every request has had its final answer. Close the socket."""

    failure: ErrorReply
