"""Every message of the wire protocol, version 1: frame 0 of a multipart message, a msgpack map tagged by `type`.

The structs are the schema; PROTOCOL.md is the specification and `vectors/` holds golden messages of each. Evolution is
append-only: a new field has a default, unknown keys are ignored, an unknown `type` is answered `unsupported`.

Encoded messages omit fields that hold their default. Bulk data are not in frame 0: `frames` lists what follows, in order,
as [name, dtype, shape]; see `frames.py`.
"""

from enginepool.protocol.basis import *
from enginepool.protocol.capabilities import MAX_ADAPTER_NAME as MAX_ADAPTER_NAME
from enginepool.protocol.capabilities import MAX_ADAPTERS as MAX_ADAPTERS
from enginepool.protocol.capabilities import Capabilities as Capabilities
from enginepool.protocol.capabilities import Kind as Kind
from enginepool.protocol.chat import MAX_CHAT_BYTES as MAX_CHAT_BYTES
from enginepool.protocol.chat import MAX_MESSAGES as MAX_MESSAGES
from enginepool.protocol.chat import MAX_OPTION_NAME as MAX_OPTION_NAME
from enginepool.protocol.chat import MAX_OPTION_TEXT as MAX_OPTION_TEXT
from enginepool.protocol.chat import MAX_TEMPLATE_OPTIONS as MAX_TEMPLATE_OPTIONS
from enginepool.protocol.chat import MAX_TEMPLATE_TOKENS as MAX_TEMPLATE_TOKENS
from enginepool.protocol.chat import ChatTemplate as ChatTemplate
from enginepool.protocol.messages.adapters import *
from enginepool.protocol.messages.control import *
from enginepool.protocol.messages.decode import *
from enginepool.protocol.messages.embed import *
from enginepool.protocol.messages.generate import *
from enginepool.protocol.messages.link import *
from enginepool.protocol.messages.logprobs import *
from enginepool.protocol.messages.media import *
from enginepool.protocol.messages.requests import *
from enginepool.protocol.messages.status import *
from enginepool.protocol.messages.tasks import *
from enginepool.protocol.messages.tokenize_texts import *
from enginepool.protocol.messages.weight_reports import *
from enginepool.protocol.messages.weights import *

#: a request whose answer has a row for each of its rows
RowRequest = Score | Embed | Logprobs | Decode | TokenizeTexts

FromClient = (
    Hello | Score | Embed | Logprobs | Decode | TokenizeTexts | Generate | Credit | Cancel | Ack | Goodbye | Status
    | RestartWorker | Publish | Renew | Sent | Commit | AbortUpdate | InspectWeights | Control | LoadAdapter
    | UnloadAdapter | Ping | Pong
)  # fmt: skip

ToClient = (
    Welcome
    | Result
    | Tokens
    | Generated
    | ErrorReply
    | StatusReport
    | Join
    | Phase
    | Published
    | WeightsNeeded
    | WeightsReport
    | ControlReport
    | AdapterReport
    | Ping
    | Pong
)

FromWorker = (
    Register | GetSettings | Stage | Ready | Idle | Done | GenerationProgress | PrefixBlocks | Tokenized | Exiting
    | Prepared | Joined | Staged | WeightsLoaded | Restored | Inspected | Commanded | AdapterChanged | ErrorReply
    | Ping | Pong
)  # fmt: skip

ToWorker = (
    Accept
    | WorkerSettings
    | Expired
    | Batch
    | StartGeneration
    | StopGeneration
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
    | ChangeAdapter
    | ErrorReply
    | Ping
    | Pong
)
