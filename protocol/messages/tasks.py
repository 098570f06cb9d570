"""Messages of tasks: whether an engine is ready, and the batches and texts that it is given."""

from typing import Literal

import msgspec

from enginepool.protocol.basis import FrameSpec, Message, TaskId, Truncation
from enginepool.protocol.capabilities import Capabilities
from enginepool.protocol.chat import ChatTemplate
from enginepool.protocol.messages.control import MemoryTag


class Stage(Message, tag="stage"):
    """What the worker is doing: `starting`, `loading`, `compiling`, `ready`, `draining`; one line of detail. With `ready`,
    which the message of that name says first: why the committed weights have no snapshot, or "" when they have one after all.
    """

    stage: Literal["starting", "loading", "compiling", "ready", "draining"]
    detail: str = ""


class Ready(Message, tag="ready"):
    """The engine is loaded and warm, and holds `version` of the weights, with this `digest` ("": its checkpoint's own).
    `committed`: the run and the version of the weights that a coordinator called committed last; (0, 0): none.
    `asleep`: the parts of its engine's memory that are released. `adapters`: the LoRA adapters that `change_adapter` loaded,
    by the names there."""

    capabilities: Capabilities
    version: int = 0
    digest: str = ""
    committed: tuple[int, int] = (0, 0)
    asleep: list[MemoryTag] = []
    adapters: list[str] = []


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
    """Token ids of a text request: frames `items` int32 and `item_lengths` uint32, one row for each query + item; with `share`
    maybe a frame `query` int32 before them, which all rows begin with, and of each row what follows it. Of token ids
    that were decoded: frames `texts` utf8 and `text_lengths` uint32, one row for each row.

    `truncated`: how many rows were cut. `labels`: the tokens of the labels, as many as were asked for. Without frames in the
    task there are none here. `code`, `message`: why there are none; `field`, `limit`: of a `bad_request`."""

    task: TaskId
    frames: list[FrameSpec] = []
    code: str = ""
    message: str = ""
    field: str = ""
    limit: str = ""
    truncated: int = 0
    labels: list[int] = []


class Part(msgspec.Struct, omit_defaults=True, gc=False):
    """Rows of one request inside a batch; `frames` are the next frames of the message, as in the request, ids only.

    The last one may be `labels`, as in `score`. `operation`: what to do with the rows, the same in all parts of a batch; the
    other fields are those of its request.
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
    columns: int = 0
    temperature: float = 1.0
    top_logprobs: int = 0


class Batch(Message, tag="batch"):
    """Run these parts, which are all of one operation, as exactly one forward pass. `packed`: their rows are joined into
    sequences, as `packing.py` says."""

    batch: TaskId
    parts: list[Part]
    priority: int = 0
    packed: bool = False


class Tokenize(Message, tag="tokenize"):
    """Turn text into ids: frames as in the request of `operation`, utf8. Each row is tokenized as the concatenation of query
    and item; for a model with a separator, and without `raw`, as its tokenizer joins the two texts of a pair.
    `truncation`: of items in rows of more than `longest` tokens. `labels`: texts that are one token each. Rows of ids that have
    such labels are not sent: then there are no frames. `chat`: items are chats.
    Of `operation` `decode` the frames are token ids, whose texts are wanted; `skip_special_tokens`: without special tokens.
    `add_special_tokens`: of `operation` `tokenize`, rows have those that the tokenizer adds. `share`: the tokens that all rows
    begin with may be answered once, as a query. `long`: it is tokenized next to others."""

    task: TaskId
    frames: list[FrameSpec]
    item_first: bool = False
    raw: bool = False
    operation: str = "score"
    truncation: Truncation = ""
    longest: int = 0
    labels: list[str] = []
    chat: ChatTemplate | None = None
    skip_special_tokens: bool = True
    add_special_tokens: bool = True
    share: bool = False
    long: bool = False
