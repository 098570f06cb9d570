"""What can happen to the coordinator: the inputs of `Machine.handle`. Every event carries `now`, seconds on one monotonic
clock.

The shell makes them from sockets, timers and processes; the simulator makes them from a seed. `link` is the opaque address of a
socket peer: it names a connection, never a client or a worker, and changes with each reconnect.
"""

from collections.abc import Mapping, Sequence

import msgspec

from enginepool.coordinator.core.group_holds import GroupHolds
from enginepool.coordinator.core.group_weights import AdapterVersion, EarlierWorker, GroupWeights
from enginepool.coordinator.operations.base import Work
from enginepool.protocol.frames import Buffer as Buffer
from enginepool.protocol.manifest import Tensor
from enginepool.protocol.messages import AdapterChanged, ErrorReply, Exiting, FrameSpec, Idle, Ready, Stage, Step
from enginepool.protocol.messages.control import Commanded, Control
from enginepool.protocol.messages.weight_reports import Inspected, InspectWeights, UpdateRecord
from enginepool.protocol.messages.weights import (
    AbortUpdate,
    Commit,
    Joined,
    Prepared,
    Publish,
    Renew,
    Restored,
    Sent,
    Staged,
    WeightsLoaded,
)

Link = bytes


class Event(msgspec.Struct, gc=False):
    """Base of all events."""

    now: float


class Started(Event):
    """The first event. By group: `weights`, the committed ones of the journal, and `history`, the latest updates. `found`: the
    workers of an earlier coordinator. `snapshots`: the folders of snapshots, by the group option `snapshot`."""

    epoch: int
    weights: dict[str, GroupWeights]
    found: Sequence[EarlierWorker] = ()
    snapshots: dict[str, str] = {}
    #: how often peers have raised the epoch of this journal
    raises: int = 0
    history: Mapping[str, Sequence[UpdateRecord]] = {}
    #: by group, from the journal: what publishers have stopped, and the committed adapters
    holds: Mapping[str, GroupHolds] = {}
    adapters: Mapping[str, Sequence[AdapterVersion]] = {}


class JournalChecked(Event):
    """Whether the journal could be written when the update opened; `error` names the file and says why it could not."""

    update: tuple[int, int]
    error: str = ""


class JournalWritten(Event):
    """The journal has taken what `WriteJournal` said, and would survive a crash; or why it could not."""

    update: tuple[int, int]
    error: str = ""


class HoldsKept(Event):
    """The journal has taken what `KeepHolds` said; or could not, of which the shell tells the operator."""

    number: int


class Tick(Event):
    """Time has passed. Sent when `Machine.wake_at` is due; all sockets were drained before it."""


class DrainAsked(Event):
    """Take nothing new, finish what is queued within `within` seconds, then stop the workers.

    With `keep_workers` this coordinator ends alone: it starts no work and finishes only the batches in flight. Clients send the
    other requests again to the next coordinator, which adopts the workers.
    """

    within: float
    keep_workers: bool = False


# --- clients -----------------------------------------------------------------------------------------------------------


class ClientHello(Event):
    """A client opened a link. `incarnation` grows with each link of the same client; `epoch` is the highest one it heard."""

    link: Link
    client: bytes
    token: bytes
    incarnation: int
    max_message_bytes: int = 0
    epoch: int = 0


class Submit(Event):
    """A request, checked for all that needs no knowledge of the model. `deadline` is on the clock of `now`.

    `unread`: bytes that were sent on its link and that the client has not read; `outboxes`: the same of all links.
    """

    link: Link
    id: int
    work: Work
    priority: int
    deadline: float | None
    min_version: int = 0
    unread: int = 0
    outboxes: int = 0
    exact_version: int | None = None


class CancelAsked(Event):
    """A client takes request `id` back."""

    link: Link
    id: int


class CreditGiven(Event):
    """A client has taken so many tokens of stream `id` since it last sent the request."""

    link: Link
    id: int
    taken: int


class Acked(Event):
    """A client has the answers of these requests."""

    link: Link
    ids: list[int]


class Heard(Event):
    """A ping with its `at`, or (None) a message that was refused at the door: the client on `link` is alive."""

    link: Link
    at: int | None = None
    #: the `at` of a pong
    proof: int = 0


class ClientLeft(Event):
    """A client said goodbye."""

    link: Link


class LinkCut(Event):
    """The link of a client is gone, or was cut for a `reason`. The client may come back on another one."""

    link: Link
    reason: str = ""


class StatusAsked(Event):
    """A peer asks for a status report; the other fields are figures of the shell that the report repeats."""

    link: Link
    id: int
    client_unread_bytes: int = 0
    worker_unread_bytes: int = 0
    pauses: tuple[int, int] = (0, 0)


class RestartAsked(StatusAsked):
    """An operator restarts worker `worker` of `group`, if its process still is `incarnation` ("": it has none)."""

    group: str = ""
    worker: str = ""
    incarnation: str = ""


class PublishAsked(Event):
    """A client offers weights; the offer is checked for all that needs no knowledge of the group."""

    link: Link
    message: Publish
    manifest: list[Tensor]
    frames: Sequence[Buffer]
    digest: int


class PublisherSaid(Event):
    """The publisher of a transaction says something about it."""

    link: Link
    message: Renew | Sent | Commit | AbortUpdate


class WeightsAsked(Event):
    """A peer asks about weights."""

    link: Link
    message: InspectWeights


class ControlAsked(Event):
    """All workers of a group are given a command."""

    link: Link
    message: Control


# --- workers -----------------------------------------------------------------------------------------------------------


class WorkerRegistered(Event):
    """A worker opened a link. `epoch` is the last one it heard."""

    link: Link
    group: str
    incarnation: str
    pid: int
    host: str
    epoch: int = 0


class SettingsAsked(Event):
    """A program that starts workers asks for the settings of a group."""

    link: Link
    group: str


class WorkerSaid(Event):
    """A registered worker says something about itself, its task or its weights. What has frames is an event of its own."""

    link: Link
    message: (Stage | Ready | Idle | Exiting | ErrorReply | Prepared | Joined | Staged | WeightsLoaded | Restored
        | Commanded | AdapterChanged)  # fmt: skip


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """One part of a finished batch: its frames, already held to their specs, or an error code and line."""

    specs: Sequence[FrameSpec]
    frames: Sequence[Buffer]
    code: str = ""
    message: str = ""


class BatchDone(Event):
    """A worker finished a batch."""

    link: Link
    batch: tuple[int, int]
    outcomes: Sequence[Outcome]
    version: int
    forwards: int
    run_us: int


class TokensGenerated(Event):
    """A worker generated tokens: those of the steps one after the other, as bytes of int32, and of float32 (or none).
    `largest`: of the tokens, as uint32, so that a negative one is larger than any vocabulary; -1: there are none. `cached`,
    `lengths`: as in `GenerationProgress`. `top`: `top_logprobs` of all of them; then `logprobs` are their columns.
    `prompt_columns`: likewise of the tokens of `prompts`. `hidden_states`: of these tokens, as bytes of float32, or none;
    `hidden`: their size. `routed_experts`: of `experts`, one after the other; `expert_shape`: (layers, k) of them."""

    link: Link
    epoch: int
    version: int
    steps: Sequence[Step]
    tokens: memoryview
    logprobs: memoryview
    largest: int = -1
    cached: Sequence[tuple[int, int]] = ()
    top: int = 0
    prompts: Sequence[tuple[int, int]] = ()
    prompt_columns: Buffer = b""
    lengths: Sequence[tuple[int, int]] = ()
    hidden_states: Buffer = b""
    hidden: int = 0
    experts: Sequence[tuple[int, int, int]] = ()
    routed_experts: Buffer = b""
    expert_shape: tuple[int, int] = (0, 0)


class PrefixesReported(Event):
    """What changed in the prefix cache of a worker's engine, as in `PrefixBlocks`; `stored`: (the block before it, block)."""

    link: Link
    cleared: bool
    removed: Sequence[int]
    stored: Sequence[tuple[int, int]]


class TextTokenized(Event):
    """A worker tokenized a text request: frames `items` and `item_lengths`, held to their specs, or an error line."""

    link: Link
    task: tuple[int, int]
    specs: Sequence[FrameSpec]
    frames: Sequence[Buffer]
    message: str = ""
    code: str = ""
    field: str = ""
    limit: str = ""
    truncated: int = 0
    labels: Sequence[int] = ()


class WorkerHeard(Event):
    """A pong of a worker, or a ping with its `at`. `unread`: bytes that were sent on its link and that it has not read."""

    link: Link
    at: int | None = None
    proof: int = 0
    unread: int = 0


class WorkerBroken(Event):
    """A worker sent what no worker sends; `reason` is one line. `silent`: it does not read what it is sent."""

    link: Link
    reason: str
    silent: bool = False


class WorkerExited(Event):
    """A worker's process and all its children have ended. `failed`: by itself, with an error. `unstarted`: the host could not
    start the process. `permanent` and `out_of_memory`: as in `Exiting`, which may arrive later or never."""

    incarnation: str
    reason: str
    permanent: bool = False
    failed: bool = False
    unstarted: bool = False
    out_of_memory: bool = False


class WorkerInspected(Event):
    """A worker answers a question about its weights; its frames are held to their specs."""

    link: Link
    message: Inspected
    frames: Sequence[Buffer] = ()
