"""Rows that a tokenizer is called with. No SGLang here."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

#: characters of the rows of one call for a long text, each row counted with some more for what a row costs: a few milliseconds
PIECE, ROW = 16 << 10, 64


def encoded_rows(tokenizer: Any, *sides: Sequence[str], long: bool, **options: Any) -> Mapping[str, Sequence[list[int]]]:
    """What the tokenizer makes of all rows, by name. `sides`: the text of each row, or the first and the second texts.

    Of a `long` text in calls for a few rows each. The rows of a call go through threads that all tokenizers of a process share,
    and those of other calls wait for the last one.
    """
    rows = list(zip(*sides, strict=True))
    found: dict[str, list[list[int]]] = {}
    for piece in _pieces(rows) if long else [rows]:
        for name, some in tokenizer(*map(list, zip(*piece, strict=True)), verbose=False, **options).items():
            found.setdefault(name, []).extend(some)
    return found


def _pieces(rows: Iterable[tuple[str, ...]]) -> Iterator[list[tuple[str, ...]]]:
    """The rows of each call: one, or as many as fit into `PIECE`."""
    piece: list[tuple[str, ...]] = []
    room = PIECE
    for row in rows:
        taken = ROW + sum(map(len, row))
        if piece and taken > room:
            yield piece
            piece, room = [], PIECE
        piece.append(row)
        room -= taken
    yield piece
