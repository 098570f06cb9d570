"""Every message of the wire protocol, version 1: frame 0 of a multipart message, a msgpack map tagged by `type`.

The structs are the schema; PROTOCOL.md is the specification and `vectors/` holds golden messages of each. Evolution is
append-only: a new field has a default, unknown keys are ignored, an unknown `type` is answered `unsupported`.

Encoded messages omit fields that hold their default. Bulk data are not in frame 0: `frames` lists what follows, in order,
as [name, dtype, shape]; see `frames.py`.
"""

from typing import Annotated, Literal

import msgspec

from enginepool.protocol.basis import MAX_ACKS as MAX_ACKS
from enginepool.protocol.basis import MAX_CAPABILITIES as MAX_CAPABILITIES
from enginepool.protocol.basis import MAX_CHUNK as MAX_CHUNK
from enginepool.protocol.basis import MAX_DIMENSIONS as MAX_DIMENSIONS
from enginepool.protocol.basis import MAX_EPOCH as MAX_EPOCH
from enginepool.protocol.basis import MAX_FINDINGS as MAX_FINDINGS
from enginepool.protocol.basis import MAX_FRAMES as MAX_FRAMES
from enginepool.protocol.basis import MAX_HEADER_BYTES as MAX_HEADER_BYTES
from enginepool.protocol.basis import MAX_ID as MAX_ID
from enginepool.protocol.basis import MAX_LABELS as MAX_LABELS
from enginepool.protocol.basis import MAX_NAME_BYTES as MAX_NAME_BYTES
from enginepool.protocol.basis import MAX_NESTING as MAX_NESTING
from enginepool.protocol.basis import MAX_PRIORITY as MAX_PRIORITY
from enginepool.protocol.basis import MAX_SIDES as MAX_SIDES
from enginepool.protocol.basis import MAX_TEXT as MAX_TEXT
from enginepool.protocol.basis import MAX_VALUES as MAX_VALUES
from enginepool.protocol.basis import PROTOCOL_VERSION, FrameSpec, Message, TaskId
from enginepool.protocol.basis import Dtype as Dtype
from enginepool.protocol.control import Command, Commanded, Control, ControlReport
from enginepool.protocol.control import WorkerOutcome as WorkerOutcome
from enginepool.protocol.updates import (
    AbortUpdate,
    Commit,
    Committed,
    Inspect,
    Inspected,
    InspectWeights,
    Join,
    Joined,
    LoadWeights,
    Phase,
    Prepare,
    Prepared,
    Publish,
    Published,
    ReleaseWeights,
    Renew,
    Restore,
    Restored,
    Sent,
    Staged,
    VerifyWeights,
    WeightsLoaded,
    WeightsNeeded,
    WeightsReport,
)

# --- both ways ---------------------------------------------------------------------------------------------------------


class Ping(Message, tag="ping"):
    """Are you there? Answered by `pong` with the same `at` (sender's clock, any unit)."""

    at: int = 0


class Pong(Message, tag="pong"):
    """The answer to `ping`. `epoch` is the coordinator's (0 from a worker); workers say their `stage`."""

    at: int = 0
    epoch: int = 0
    stage: str = ""


class ErrorReply(Message, tag="error"):
    """A request, or a message, that was refused or failed. `id` is absent when the message had no readable id. `incarnation`:
    of the `hello` that was refused; absent in every other error."""

    code: str
    message: str
    id: int | None = None
    seq: int = 0
    final: bool = True
    field: str = ""
    limit: str = ""
    retry_after_ms: int | None = None
    evidence: list[str] = []
    incarnation: int | None = None


# --- client to coordinator ---------------------------------------------------------------------------------------------


class Hello(Message, tag="hello"):
    """First message on every link.

    `client` is 16 random bytes made once per client object; `token` 16 secret bytes made with it, which prove on a later
    link that it is the same client; `incarnation` grows with each new link, and the highest wins. `max_message_bytes`: the
    longest message, all frames together, that the client takes (0: as `welcome` says). `epoch`: the highest one that the
    client has heard (0: none).
    """

    client: bytes
    token: bytes
    protocol: int = PROTOCOL_VERSION
    incarnation: int = 0
    agent: str = ""
    capabilities: Annotated[list[str], msgspec.Meta(max_length=MAX_CAPABILITIES)] = []
    max_message_bytes: int = 0
    epoch: int = 0


class Score(Message, tag="score"):
    """Score items. Frames, in this order: `query`, (`query_lengths`), `items`, `item_lengths`.

    Without `query_lengths` the query frame is one query for all items; with it, row i of `query` belongs to item i. `query`
    and `items` are both int32 token ids or both utf8 text; lengths are uint32 and count ids or bytes.
    `raw`: a cross-encoder takes rows of ids without a separator, and text joined without one.
    """

    id: int
    frames: Annotated[list[FrameSpec], msgspec.Meta(max_length=MAX_FRAMES)]
    group: str = ""
    labels: Annotated[list[int], msgspec.Meta(max_length=MAX_LABELS)] = []
    softmax: bool = False
    item_first: bool = False
    hidden: bool = False
    priority: int = 0
    timeout_ms: int | None = None
    min_version: int = 0
    logprobs: bool = False
    raw: bool = False


class Embed(Message, tag="embed"):
    """Embed items. Frames: `items`, int32 token ids or utf8 text, then `item_lengths` uint32, which count ids or bytes.

    `dimensions`: the first so many of each embedding; 0: all. `normalize`: each row, as it is answered, has length 1.
    """

    id: int
    frames: Annotated[list[FrameSpec], msgspec.Meta(max_length=MAX_FRAMES)]
    group: str = ""
    dimensions: int = 0
    normalize: bool = True
    priority: int = 0
    timeout_ms: int | None = None
    min_version: int = 0


class Cancel(Message, tag="cancel"):
    """Take back request `id`. Answered by its final answer: `cancelled`, or the result if that came first."""

    id: int


class Ack(Message, tag="ack"):
    """The final answers of these requests have arrived; the coordinator may forget them."""

    ids: Annotated[list[int], msgspec.Meta(max_length=MAX_ACKS)]


class Goodbye(Message, tag="goodbye"):
    """This client leaves for good: its requests are cancelled and nothing is kept for it."""


class Status(Message, tag="status"):
    """Ask for a `status_report`."""

    id: int = 0


class RestartWorker(Status, tag="restart"):
    """Restart worker `worker` of `group`, a name of the status report, if its process still is `incarnation` ("": it has none).

    Answered with a `status_report`, when the restart has begun.
    """

    group: str = ""
    worker: str = ""
    incarnation: str = ""


# --- coordinator to client ---------------------------------------------------------------------------------------------


class Welcome(Message, tag="welcome"):
    """Answer to the `hello` of this `incarnation`: the coordinator's epoch, what it can do, and the window that it grants."""

    epoch: int
    protocol: int = PROTOCOL_VERSION
    capabilities: list[str] = []
    groups: list[str] = []
    window_requests: int = 0
    window_bytes: int = 0
    max_message_bytes: int = 0
    ping_ms: int = 1000
    incarnation: int = 0


class Usage(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """[items, tokens]: rows scored and prompt tokens computed, over all parts of a request."""

    items: int
    tokens: int


class Timings(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """[queued_us, run_us]: arrival to first dispatch on the coordinator's clock; longest time of a part in an engine."""

    queued_us: int
    run_us: int


class Result(Message, tag="result"):
    """The answer of a request. Frames of `score`: `scores` float32 [items, labels], then `hidden` float32 [items, size] if
    asked. Frames of `embed`: `embeddings` float32 [items, dimensions].

    `forwards` holds, for each batch that the request was part of, how many forward passes that batch took: 1 is whole.
    """

    id: int
    version: int
    forwards: list[int]
    usage: Usage
    timings: Timings
    frames: list[FrameSpec]
    seq: int = 0
    final: bool = True


class WorkerStatus(msgspec.Struct, omit_defaults=True):
    """One worker in a status report. Times in seconds. `pace`: its pace in tokens, as learned from its batches (0: no matter);
    each row counts there as `forward_row_tokens` tokens more.
    """

    name: str
    incarnation: str
    stage: str
    pid: int = 0
    host: str = ""
    version: int | None = None
    batches: int = 0
    tokens: int = 0
    done: int = 0
    silent_s: float = 0.0
    detail: str = ""
    restarts: int = 0
    packed: bool = False
    pace: int = 0
    forward_row_tokens: int = 0


class GroupLimits(msgspec.Struct, omit_defaults=True, frozen=True):
    """What a request to a group may ask for: anything else is refused with `bad_request`. `context`: the longest row, query and
    item together, in tokens. `max_item` more than 0: all rows have to share a query, and no item may be longer. `operations`,
    `embedding`, `dimensions`: as in `capabilities`.
    """

    kind: Literal["causal", "classifier", "embedding"]
    vocab: int
    context: int
    items: int
    labels: int = 0
    hidden: int = 0
    text: bool = True
    max_item: int = 0
    operations: tuple[str, ...] = ("score",)
    embedding: int = 0
    dimensions: list[int] = []


class GroupStatus(msgspec.Struct, omit_defaults=True):
    """One group in a status report. `queued` and `running` count requests, `split_batches` batches of more than one forward;
    `early` of the queued wait for a later weight version. `update`: phase and version of the open transaction. `halvings`: how
    often its workers' budgets were halved, because engines ran out of memory. `limits`: None while not known. `no_worker`: only
    external workers serve it, and none is connected. `workers` has lost external workers too, for five minutes (`lost`).
    """

    name: str
    queued: int = 0
    running: int = 0
    queued_tokens: int = 0
    oldest_s: float = 0.0
    version: int | None = None
    answered: int = 0
    failed: int = 0
    batches: int = 0
    forwards: int = 0
    split_batches: int = 0
    lost_batches: int = 0
    poisoned: int = 0
    model: str = ""
    down: str = ""
    digest: str = ""
    early: int = 0
    update: str = ""
    needs_weights: str = ""
    halvings: int = 0
    workers: list[WorkerStatus] = []
    limits: GroupLimits | None = None
    no_worker: str = ""


class StatusReport(Message, tag="status_report"):
    """What the pool is doing. `pauses` counts garbage collections of the coordinator and their total time in µs."""

    epoch: int
    id: int = 0
    uptime_s: float = 0.0
    clients: int = 0
    answers_kept: int = 0
    answers_bytes: int = 0
    client_unread_bytes: int = 0
    worker_unread_bytes: int = 0
    pauses: tuple[int, int] = (0, 0)
    draining: bool = False
    groups: list[GroupStatus] = []


# --- worker to coordinator ---------------------------------------------------------------------------------------------


class Capabilities(msgspec.Struct, omit_defaults=True, frozen=True):
    """What a loaded engine can do, and the budgets inside which a batch is one forward pass.

    `kind`: `causal` scores label tokens, `classifier` returns the head's logits, `embedding` pools each row into one vector.
    `operations`: the requests of rows that it runs. `embedding`: size of an embedding (0: it does not embed); `dimensions`: the
    sizes that a request may ask for, from 1 to `embedding`; []: each of them. `context`: the longest query + item, in
    tokens, that is accepted. `labels`: columns of a classifier's scores (0 for causal). `hidden`: size of pooled hidden
    states (0: not available). `page`: lengths count rounded up to it. `batch_*`: budget of one batch; `inflight_*`: bound on
    the sum of all batches at this worker. A single row may exceed `batch_tokens`, never `inflight_tokens`. `max_item` is 0, or
    the worker is packed: it joins rows of one query into sequences (`packing.py`), takes nothing else, and no longer item.
    `pace`: tokens that the engine computes in `forward_ms` milliseconds, the time for which a request of high priority may be
    kept waiting by one forward of others (0: no matter); batches are filled and put in flight accordingly. Both are measured
    and may differ between workers of a class. The coordinator begins with this pace, and learns from the batches.
    `cached_query`: a query of so many tokens or more, shared by several rows, is computed once (0: none is); a batch of one
    request that has one may weigh `cached_tokens` instead of `batch_tokens`, every row counted in full. `halvings`: how often
    these budgets were halved (`halving.py`), because engines of the group ran out of memory. `separator`: the token that stands
    between query and item in every row of a cross-encoder; None for other models. `activation`: what is applied to the head's
    outputs. `reserved`: where the model's context length bounds `context`, how many of its tokens the engine keeps for itself.
    `operations`: what the worker can be asked for.
    """

    kind: Literal["causal", "classifier", "embedding"]
    vocab: int
    context: int
    batch_tokens: int
    batch_rows: int
    inflight_tokens: int
    inflight_rows: int
    page: int = 1
    labels: int = 0
    hidden: int = 0
    model: str = ""
    engine: str = ""
    device: str = ""
    text: bool = True
    max_item: int = 0
    pace: int = 0
    cached_query: int = 0
    cached_tokens: int = 0
    halvings: int = 0
    separator: int | None = None
    activation: Literal["", "sigmoid"] = ""
    reserved: int = 0
    forward_ms: int = 25
    operations: tuple[str, ...] = ("score",)
    embedding: int = 0
    dimensions: list[int] = []

    @property
    def packed(self) -> bool:
        """Whether it is a packed worker."""
        return self.max_item > 0


class Register(Message, tag="register"):
    """First message of a worker on every link. `incarnation` names this process alone; `epoch`: the last one it heard."""

    group: str
    incarnation: str
    protocol: int = PROTOCOL_VERSION
    pid: int = 0
    host: str = ""
    epoch: int = 0
    capabilities: list[str] = []


class GetSettings(Message, tag="get_settings"):
    """What are the settings of the workers of `group`? Asked before there is a worker, on a link that registers none. ""  means
    the group of a pool that has one. Answered by `settings`."""

    group: str = ""


class Stage(Message, tag="stage"):
    """What the worker is doing: `starting`, `loading`, `compiling`, `ready`, `draining`; one line of detail."""

    stage: Literal["starting", "loading", "compiling", "ready", "draining"]
    detail: str = ""


class Ready(Message, tag="ready"):
    """The engine is loaded and warm, and holds `version` of the weights; `digest` is theirs ("": its checkpoint's own).
    `committed`: the run and the version of the weights that a coordinator called committed last; (0, 0): none."""

    capabilities: Capabilities
    version: int = 0
    digest: str = ""
    committed: tuple[int, int] = (0, 0)


class Idle(Message, tag="idle"):
    """This worker has heard `epoch`, and holds no batch of an earlier one."""

    epoch: int


class PartDone(msgspec.Struct, omit_defaults=True, gc=False):
    """The rows of one part, or its error: `frames` lists the frames of its rows, as in `done`, else `code` and `message` say
    why not."""

    frames: list[FrameSpec] = []
    code: str = ""
    message: str = ""


class Done(Message, tag="done"):
    """A batch is finished; parts in the batch's order. `forwards`: forward passes it took, as measured in the engine."""

    batch: TaskId
    parts: list[PartDone]
    version: int = 0
    forwards: int = 1
    run_us: int = 0


class Tokenized(Message, tag="tokenized"):
    """Token ids of a text request: frames `items` int32 and `item_lengths` uint32, one row for each query + item."""

    task: TaskId
    frames: list[FrameSpec] = []
    code: str = ""
    message: str = ""


class Exiting(Message, tag="exiting"):
    """The worker ends; `reason` is one line for the operator. `permanent`: starting it again cannot help. `out_of_memory`: its
    engine died of a batch for which there was not enough."""

    reason: str
    failed: bool = False
    permanent: bool = False
    out_of_memory: bool = False


# --- coordinator to worker ---------------------------------------------------------------------------------------------


class Accept(Message, tag="accept"):
    """Answer to `register`. After `orphan_s` seconds without a word from a coordinator the worker ends itself. `halvings`: how
    often an engine that is started now should halve its budgets."""

    epoch: int
    protocol: int = PROTOCOL_VERSION
    orphan_s: float = 60.0
    halvings: int = 0


class WorkerSettings(Message, tag="settings"):
    """With what the workers of `group` are started. `settings`: JSON with the keys of the pool's file. `path`: the checkpoint
    directory that an engine starts on in place of the model, where the committed weights can be had in no other way; they are
    `version`, and `digest` is theirs. `drain_s`: seconds that begun work has to finish when a worker drains."""

    group: str
    settings: str
    drain_s: float = 10.0
    path: str = ""
    digest: str = ""
    version: int = 0


class Expired(Message, tag="expired"):
    """The coordinator gave up `incarnation` because its link was silent. The worker is not to blame: it drops all work, takes a
    new incarnation and registers again, with its engine as it is."""

    incarnation: str
    reason: str = ""


class Part(msgspec.Struct, omit_defaults=True, gc=False):
    """Rows of one request inside a batch; `frames` are the next frames of the message, as in the request, ids only.

    `operation`: what to do with the rows, the same in all parts of a batch; the other fields are those of its request.
    """

    frames: list[FrameSpec]
    labels: list[int] = []
    softmax: bool = False
    item_first: bool = False
    logprobs: bool = False
    hidden: bool = False
    operation: str = "score"
    dimensions: int = 0
    normalize: bool = True


class Batch(Message, tag="batch"):
    """Run these parts, which are all of one operation, as exactly one forward pass."""

    batch: TaskId
    parts: list[Part]
    priority: int = 0


class Tokenize(Message, tag="tokenize"):
    """Turn text into ids: frames as in the request of `operation`, utf8. Each row is tokenized as the concatenation of query
    and item; for a model with a separator, and without `raw`, as its tokenizer joins the two texts of a pair."""

    task: TaskId
    frames: list[FrameSpec]
    item_first: bool = False
    raw: bool = False
    operation: str = "score"


class Drain(Message, tag="drain"):
    """Finish what is running, then end."""


#: a request whose answer has a row for each of its rows
RowRequest = Score | Embed
FromClient = (
    Hello | Score | Embed | Cancel | Ack | Goodbye | Status | RestartWorker | Publish | Renew | Sent | Commit | AbortUpdate
    | InspectWeights | Control | Ping | Pong
)  # fmt: skip
ToClient = (
    Welcome
    | Result
    | ErrorReply
    | StatusReport
    | Join
    | Phase
    | Published
    | WeightsNeeded
    | WeightsReport
    | ControlReport
    | Ping
    | Pong
)
FromWorker = (
    Register | GetSettings | Stage | Ready | Idle | Done | Tokenized | Exiting
    | Prepared | Joined | Staged | WeightsLoaded | Restored | Inspected | Commanded | ErrorReply | Ping | Pong
)  # fmt: skip
ToWorker = (
    Accept
    | WorkerSettings
    | Expired
    | Batch
    | Tokenize
    | Drain
    | Prepare
    | Join
    | VerifyWeights
    | LoadWeights
    | Committed
    | ReleaseWeights
    | Restore
    | Inspect
    | Command
    | ErrorReply
    | Ping
    | Pong
)
