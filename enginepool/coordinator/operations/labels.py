"""Labels that are named by their texts: a worker's tokenizer says which token each of them is. Pure.

A request whose rows are token ids waits for a worker's tokenizer too, until its group knows all of its labels.
"""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from msgspec.structs import replace

from enginepool.coordinator.operations.base import Work
from enginepool.coordinator.operations.score import ScoreWork
from enginepool.protocol.errors import WireError
from enginepool.protocol.messages import MAX_LABELS
from enginepool.protocol.ragged import MAX_TOKENS

W = TypeVar("W", bound=Work)


def named(work: Work) -> tuple[str, ...]:
    """The texts of labels whose tokens are not known yet."""
    return work.label_texts if isinstance(work, ScoreWork) else ()


def with_labels(work: W, labels: Sequence[int]) -> W:
    """`work` with these tokens for the texts of its labels.

    Raises:
        WireError: they are not one token for each.
    """
    texts = named(work)
    if len(labels) != len(texts) or not all(0 <= label < MAX_TOKENS for label in labels):
        got = f"{len(labels)} labels, {min(labels, default=0)} to {max(labels, default=0)}"
        raise WireError("malformed", f"tokenized: {got}; expected {len(texts)} token ids", field="labels")
    if not texts:
        return work
    assert isinstance(work, ScoreWork)
    part = replace(work.part, labels=list(labels))
    return replace(work, part=part, max_label=max(labels), label_texts=(), text=work.of_text)


def with_known_labels(work: W, known: Mapping[str, int]) -> W:
    """`work` with the tokens of its labels, if all of them are known."""
    texts = named(work)
    labels = [known[text] for text in texts if text in known]
    return with_labels(work, labels) if texts and len(labels) == len(texts) else work


def remember(known: dict[str, int], work: Work, labels: Sequence[int]) -> None:
    """Keep the tokens of labels for requests to come: of at most MAX_LABELS texts."""
    texts = named(work)
    if len(known) + len(texts) > MAX_LABELS:
        known.clear()
    known.update(zip(texts, labels, strict=True))
