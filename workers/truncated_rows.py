"""Truncation of tokenized rows: which rows are too long, and which of their tokens go. The query of a row is kept. Pure."""

from collections.abc import Sequence

from enginepool.protocol.errors import WireError
from enginepool.protocol.messages import Tokenize


def too_long(rows: Sequence[Sequence[int]], asked: Tokenize) -> list[int]:
    """The rows that are to be truncated."""
    if asked.truncation not in ("left", "right"):
        return []
    return [i for i, row in enumerate(rows) if len(row) > asked.longest]


def refuse_nothing_left(kept: int, asked: Tokenize, row: int) -> None:
    """Raise WireError where the `kept` tokens of a row, which are never truncated, leave no place for one of its item."""
    if kept < asked.longest:
        return
    most = asked.longest - 1
    text = f"items[{row}]: {kept} tokens of its query, which is not truncated; at most {most}, so that one of the item is left"
    raise WireError("bad_request", text, field=f"items[{row}]", limit=str(most))


def drop(ids: list[int], of_item: Sequence[int], asked: Tokenize) -> list[int]:
    """`ids` without the first, or last, of the tokens at these places, so that `asked.longest` are left."""
    excess = len(ids) - asked.longest
    gone = set(of_item[:excess] if asked.truncation == "left" else of_item[-excess:])
    return [token for at, token in enumerate(ids) if at not in gone]
