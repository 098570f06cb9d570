"""Messages of requests: a client asks, cancels and acknowledges, and the coordinator answers."""

from collections.abc import Sequence
from typing import Annotated

import msgspec

from enginepool.protocol.basis import MAX_ACKS, MAX_FRAMES, MAX_LABELS, FrameSpec, Message, Truncation
from enginepool.protocol.chat import ChatTemplate as ChatTemplate

#: Bounds of a score's `temperature`. Below the first, float32 gives the best label all of the probability.
LEAST_TEMPERATURE, MAX_TEMPERATURE = 0.001, 1000

#: Characters of a label that is named by its text.
MAX_LABEL_TEXT = 64

_LabelText = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_LABEL_TEXT)]


class Score(Message, tag="score"):
    """Score items. Frames, in this order: `query`, (`query_lengths`), `items`, `item_lengths`, (`labels`).

    Without `query_lengths` the query frame is one query for all items; with it, row i of `query` belongs to item i. `query`
    and `items` are both int32 token ids or both utf8 text; lengths are uint32 and count ids or bytes.
    `raw`: a cross-encoder takes rows of ids without a separator, and text joined without one. `temperature`: what `softmax`
    divides the logits by. `truncation`: of items; the query is kept.
    `label_texts`: in place of `labels`, texts that are one token each. `chat`: items are chats (`chat.py`); there is no query.
    The frame `labels` int32 [items, labels] has labels of each row, in place of those of the header.
    Frames of the answer: `scores` float32 [items, labels], then `hidden` float32 [items, size] if asked.
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
    version: int | None = None
    logprobs: bool = False
    raw: bool = False
    temperature: float = 1.0
    truncation: Truncation = ""
    label_texts: Annotated[list[_LabelText], msgspec.Meta(max_length=MAX_LABELS)] = []
    chat: ChatTemplate | None = None

    @property
    def values(self) -> int:
        """What its header holds that can be much, in numbers: a text counts by its length."""
        texts = [*self.label_texts]
        if self.chat is not None:
            texts += [*self.chat.kwargs, *(text for text in self.chat.kwargs.values() if isinstance(text, str))]
        return len(self.labels) + sum(2 + len(text) // 10 for text in texts)

    def columns(self, frames: Sequence[bytes | memoryview]) -> int:
        """Columns of its answer, as far as the request tells."""
        if self.frames[-1].name == "labels":
            return self.frames[-1].shape[1]
        return len(self.labels) or len(self.label_texts)


class Cancel(Message, tag="cancel"):
    """Take back request `id`. Answered by its final answer: `cancelled`, or the result if that came first."""

    id: int


class Ack(Message, tag="ack"):
    """The final answers of these requests have arrived; the coordinator may forget them."""

    ids: Annotated[list[int], msgspec.Meta(max_length=MAX_ACKS)]


class Usage(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """[items, tokens]: rows scored and prompt tokens computed, over all parts of a request."""

    items: int
    tokens: int


class Timings(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """[queued_us, run_us]: arrival to first dispatch on the coordinator's clock; longest time of a part in an engine."""

    queued_us: int
    run_us: int


class Result(Message, tag="result"):
    """The answer of a request. The message of its operation says which frames it has.

    `forwards` holds, for each batch that the request was part of, how many forward passes that batch took: 1 is whole.
    `truncated`: how many of its rows were cut. `workers`: the names of those that computed it.
    """

    id: int
    version: int
    forwards: list[int]
    usage: Usage
    timings: Timings
    frames: list[FrameSpec]
    seq: int = 0
    final: bool = True
    truncated: int = 0
    workers: list[str] = []
