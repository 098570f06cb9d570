"""Messages of tasks: what an engine can do, and the batches and texts that it is given."""

from typing import Literal

import msgspec

from enginepool.protocol.basis import FrameSpec, Message, TaskId


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
