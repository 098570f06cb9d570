"""Texts that an engine's tokenizer makes token ids of, and how long the text of a token is."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from enginepool.protocol.messages import Tokenize


@dataclass(frozen=True, slots=True)
class TextTask:
    """Texts of one request. pairs: the two texts of each row, in the order in which they are joined.
    asked: what the operation is to do with them, as the coordinator says it; it has no frames that matter."""

    pairs: list[tuple[str, str]]
    asked: Tokenize


@dataclass(frozen=True, slots=True)
class TextIds:
    """Token ids of each row of a `TextTask`; how many rows were truncated; the token of each label."""

    rows: list[list[int]]
    truncated: int = 0
    labels: list[int] = field(default_factory=list[int])


def common_prefix(rows: Sequence[list[int]]) -> int:
    """How many tokens all rows begin with, so that at least one token of each row is left: what is left is its item."""
    first, last = min(rows), max(rows)  # all other rows are between these two, and begin as both do
    most = min(map(len, rows)) - 1
    return next((i for i in range(most) if first[i] != last[i]), max(most, 0))
