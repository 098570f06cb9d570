"""The message that asks for log-probabilities of responses."""

from collections.abc import Sequence
from typing import Annotated

import msgspec

from enginepool.protocol.basis import MAX_FRAMES, MAX_LABELS, FrameSpec, Message, Truncation

#: Labels of one request. An engine answers each of them at each token of a response, in objects of Python.
MAX_PLACE_LABELS = 64


class Logprobs(Message, tag="logprobs"):
    """The log-probability of each token of each response. Frames, in this order: `query`, (`query_lengths`), `items`,
    `item_lengths`: the prompts and the responses, int32 token ids; each has at least one.

    `labels`: token ids whose log-probabilities are wanted at each token of a response as well. `truncation`: of prompts, on
    the left. `top_logprobs`: so many of the most probable tokens are wanted at each token of a response.
    Frames of the answer: `logprobs` float32 [responses, longest], then, if asked for, `labels` float32
    [responses, longest * labels], `top_ids` int32 and `top_logprobs` float32 [responses, longest * top_logprobs]. A row has its
    values first; the rest is 0.
    """

    id: int
    frames: Annotated[list[FrameSpec], msgspec.Meta(max_length=MAX_FRAMES)]
    group: str = ""
    labels: Annotated[list[int], msgspec.Meta(max_length=MAX_LABELS)] = []
    priority: int = 0
    timeout_ms: int | None = None
    min_version: int = 0
    version: int | None = None
    truncation: Truncation = ""
    top_logprobs: int = 0

    @property
    def values(self) -> int:
        """Numbers in its header that can be many."""
        return len(self.labels)

    def columns(self, frames: Sequence[bytes | memoryview]) -> int:
        """Columns of its answer, as far as the request tells."""
        return max(memoryview(frames[-1]).cast("I"), default=0) * (1 + len(self.labels) + 2 * self.top_logprobs)
