"""Every message of the wire protocol, version 1: frame 0 of a multipart message, a msgpack map tagged by `type`.

The structs are the schema; PROTOCOL.md is the specification and `vectors/` holds golden messages of each. Evolution is
append-only: a new field has a default, unknown keys are ignored, an unknown `type` is answered `unsupported`.

Encoded messages omit fields that hold their default. Bulk data are not in frame 0: `frames` lists what follows, in order,
as [name, dtype, shape]; see `frames.py`.
"""

from enginepool.protocol.basis import MAX_ACKS as MAX_ACKS
from enginepool.protocol.basis import MAX_CAPABILITIES as MAX_CAPABILITIES
from enginepool.protocol.basis import MAX_CHUNK as MAX_CHUNK
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
from enginepool.protocol.basis import PROTOCOL_VERSION as PROTOCOL_VERSION
from enginepool.protocol.basis import Dtype as Dtype
from enginepool.protocol.basis import FrameSpec as FrameSpec
from enginepool.protocol.basis import Message as Message
from enginepool.protocol.basis import TaskId as TaskId
from enginepool.protocol.messages.control import Command as Command
from enginepool.protocol.messages.control import Commanded as Commanded
from enginepool.protocol.messages.control import Control as Control
from enginepool.protocol.messages.control import ControlReport as ControlReport
from enginepool.protocol.messages.control import WorkerOutcome as WorkerOutcome
from enginepool.protocol.messages.embed import MAX_DIMENSIONS as MAX_DIMENSIONS
from enginepool.protocol.messages.embed import Embed as Embed
from enginepool.protocol.messages.link import Accept as Accept
from enginepool.protocol.messages.link import Drain as Drain
from enginepool.protocol.messages.link import ErrorReply as ErrorReply
from enginepool.protocol.messages.link import Exiting as Exiting
from enginepool.protocol.messages.link import Expired as Expired
from enginepool.protocol.messages.link import GetSettings as GetSettings
from enginepool.protocol.messages.link import Goodbye as Goodbye
from enginepool.protocol.messages.link import Hello as Hello
from enginepool.protocol.messages.link import Ping as Ping
from enginepool.protocol.messages.link import Pong as Pong
from enginepool.protocol.messages.link import Register as Register
from enginepool.protocol.messages.link import Welcome as Welcome
from enginepool.protocol.messages.link import WorkerSettings as WorkerSettings
from enginepool.protocol.messages.requests import Ack as Ack
from enginepool.protocol.messages.requests import Cancel as Cancel
from enginepool.protocol.messages.requests import Result as Result
from enginepool.protocol.messages.requests import Score as Score
from enginepool.protocol.messages.requests import Timings as Timings
from enginepool.protocol.messages.requests import Usage as Usage
from enginepool.protocol.messages.status import GroupLimits as GroupLimits
from enginepool.protocol.messages.status import GroupStatus as GroupStatus
from enginepool.protocol.messages.status import RestartWorker as RestartWorker
from enginepool.protocol.messages.status import Status as Status
from enginepool.protocol.messages.status import StatusReport as StatusReport
from enginepool.protocol.messages.status import WorkerStatus as WorkerStatus
from enginepool.protocol.messages.tasks import Batch as Batch
from enginepool.protocol.messages.tasks import Capabilities as Capabilities
from enginepool.protocol.messages.tasks import Done as Done
from enginepool.protocol.messages.tasks import Idle as Idle
from enginepool.protocol.messages.tasks import Part as Part
from enginepool.protocol.messages.tasks import PartDone as PartDone
from enginepool.protocol.messages.tasks import Ready as Ready
from enginepool.protocol.messages.tasks import Stage as Stage
from enginepool.protocol.messages.tasks import Tokenize as Tokenize
from enginepool.protocol.messages.tasks import Tokenized as Tokenized
from enginepool.protocol.messages.weight_reports import Finding as Finding
from enginepool.protocol.messages.weight_reports import Inspect as Inspect
from enginepool.protocol.messages.weight_reports import Inspected as Inspected
from enginepool.protocol.messages.weight_reports import InspectWeights as InspectWeights
from enginepool.protocol.messages.weight_reports import UpdateRecord as UpdateRecord
from enginepool.protocol.messages.weight_reports import WeightsReport as WeightsReport
from enginepool.protocol.messages.weight_reports import WorkerWeights as WorkerWeights
from enginepool.protocol.messages.weights import AbortUpdate as AbortUpdate
from enginepool.protocol.messages.weights import Commit as Commit
from enginepool.protocol.messages.weights import Committed as Committed
from enginepool.protocol.messages.weights import Join as Join
from enginepool.protocol.messages.weights import Joined as Joined
from enginepool.protocol.messages.weights import LoadWeights as LoadWeights
from enginepool.protocol.messages.weights import MemoryRegion as MemoryRegion
from enginepool.protocol.messages.weights import Phase as Phase
from enginepool.protocol.messages.weights import Prepare as Prepare
from enginepool.protocol.messages.weights import Prepared as Prepared
from enginepool.protocol.messages.weights import Publish as Publish
from enginepool.protocol.messages.weights import Published as Published
from enginepool.protocol.messages.weights import ReleaseWeights as ReleaseWeights
from enginepool.protocol.messages.weights import Renew as Renew
from enginepool.protocol.messages.weights import Restore as Restore
from enginepool.protocol.messages.weights import Restored as Restored
from enginepool.protocol.messages.weights import Sent as Sent
from enginepool.protocol.messages.weights import Staged as Staged
from enginepool.protocol.messages.weights import VerifyWeights as VerifyWeights
from enginepool.protocol.messages.weights import WeightsLoaded as WeightsLoaded
from enginepool.protocol.messages.weights import WeightsNeeded as WeightsNeeded

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
