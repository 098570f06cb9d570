"""How rows are packed, that is, joined into sequences: one rule, by which the coordinator counts and the worker builds.

A sequence is `query <d> item <d> item <d> … <d>`: the query once, a delimiter before the first item and after each. The rows of
a batch are placed in order. A row joins the last sequence of the batch that has its query, while that has room in `context`;
else it opens a new one. Only rows of a shared query can be placed: neither query nor item is empty.
"""

from collections.abc import Hashable, Iterable, Sequence
from math import inf


class Packing:
    """The sequences of one batch.

    Args:
        context: the longest sequence, in tokens, delimiters included.
        page: a sequence weighs its tokens rounded up to it; here up to page − 1 more.
    """

    __slots__ = ("_context", "_open", "cost", "page")

    def __init__(self, context: int, page: int = 1) -> None:
        self._context = context
        self.page = page
        #: query -> tokens of the last sequence that has it
        self._open: dict[Hashable, int] = {}
        #: what all sequences weigh
        self.cost = 0

    def weigh(
        self, query: Hashable, query_tokens: int, items: Sequence[int], limit: int, each: float = 0.0, most: float = inf
    ) -> tuple[int, int, int]:
        """(rows, cost, length): how many rows, with items of these lengths, add no more than `limit`, and what they add.

        Where each row counts as `each` tokens more, that is no more than `most`. `length` is the last sequence's, for `place`.
        Nothing is changed.
        """
        length = self._open.get(query, 0)
        context, start = self._context, query_tokens + self.page
        cost = sum(items) + len(items)
        grown = (length or query_tokens + 1) + cost
        if grown <= context and items:
            if not length:
                cost += start
            if cost <= limit and cost + len(items) * each <= most:
                return len(items), cost, grown
        cost = rows = 0
        for item in items:
            more = item + 1
            grown = length + more
            if not length or grown > context:
                grown = query_tokens + 1 + more
                more += start
            if cost + more > limit or cost + more + (rows + 1) * each > most:
                break
            cost += more
            length = grown
            rows += 1
        return rows, cost, length

    def place(self, query: Hashable, cost: int, length: int) -> None:
        """Take what `weigh` found."""
        self._open[query] = length
        self.cost += cost


def sequences(parts: Iterable[tuple[Hashable, int, Sequence[int]]], context: int) -> list[list[tuple[int, int, int]]]:
    """The sequences of a batch, each as runs (part, first row, end): `parts` are (query, its tokens, lengths of the items)."""
    made: list[list[tuple[int, int, int]]] = []
    open_: dict[Hashable, tuple[int, int]] = {}
    for part, (query, query_tokens, items) in enumerate(parts):
        at, length = open_.get(query, (0, 0))
        first = 0
        for row, item in enumerate(items):
            if not length or length + item + 1 > context:
                if row > first:
                    made[at].append((part, first, row))
                made.append([])
                at, length, first = len(made) - 1, query_tokens + 1, row
            length += item + 1
        if len(items) > first:
            made[at].append((part, first, len(items)))
        open_[query] = (at, length)
    return made
