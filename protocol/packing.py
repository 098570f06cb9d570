"""How rows are packed, that is, joined into sequences: one rule, by which the coordinator counts and the worker builds.

A sequence is `query <d> item <d> item <d> … <d>`: the query once, a delimiter before the first item and after each. An item
sees the query and itself. Without a query it is `<d> row <d> row <d> … <d>`: its items are whole rows, which see themselves
alone.

The rows of a batch are placed in order. The rows of a part are placed whole in two cases:

- They have no query in common: each has its own, or the item comes first.
- Their query is short, and no part before has it: no more than WHOLE_QUERY tokens, and REPEATED tokens in all rows but one. To
  compute it in each row then costs less than one more sequence, which is one more request for the host of an engine. The next
  part with that query is placed behind it: so many parts that share a short query compute it twice.

All other rows are placed behind their query. They join the last sequence of the batch that has it, while that has room in
`context`. A whole row joins the last sequence without a query that has the same labels, while that has room in JOINED tokens. A
row that joins none opens a sequence.

An engine computes all labels of a sequence for each of its rows: so whole rows share them. Its attention goes over all tokens
of a sequence that are before a token, also over those that the token does not see: so sequences of whole rows are short.

No row is empty, and no item behind a query is.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

#: The longest query of rows that are placed whole, in tokens. A small model computes so many in the time that the host of an
#: engine needs for one more sequence.
WHOLE_QUERY = 256
#: The most tokens of a query that whole rows of a part compute again. A model of some billion parameters needs about as long.
REPEATED = 32
#: The longest sequence without a query, in tokens, but for one of a single row.
JOINED = 1024


class Packable(NamedTuple):
    """Rows of a part, as the rule sees them.

    query: stands for their common query, and equals that of other parts with the same. tokens: its length; 0: they have none.
    items: the length of each item behind the common query; without one, of each row. labels: as `query`, of their labels.
    """

    query: Hashable
    tokens: int
    items: Sequence[int]
    labels: Hashable = ()


class Fit(NamedTuple):
    """How many rows fit, what they add, the length of the last sequence, and whether they are placed whole."""

    rows: int
    cost: int
    length: int
    whole: bool


def cheap_to_repeat(tokens: int, rows: int) -> bool:
    """Whether a query of so many tokens may be computed in each of so many rows of a part."""
    return tokens <= WHOLE_QUERY and tokens * (rows - 1) <= REPEATED


def _whole(rows: Packable, count: int, known: Mapping[Hashable, Any]) -> bool:
    """Whether so many of these rows are placed whole, in a batch with these queries."""
    return not rows.tokens or (cheap_to_repeat(rows.tokens, count) and rows.query not in known)


class Packing:
    """The sequences of one batch.

    Args:
        context: the longest sequence, in tokens, delimiters included.
        page: a sequence weighs its tokens rounded up to it; here up to page − 1 more.
    """

    __slots__ = ("_behind", "_context", "_without", "cost", "page")

    def __init__(self, context: int, page: int = 1) -> None:
        self._context = context
        self.page = page
        #: query -> tokens of the last sequence that has it; 0: it was placed in whole rows
        self._behind: dict[Hashable, int] = {}
        #: labels -> tokens of the last sequence without a query that has them
        self._without: dict[Hashable, int] = {}
        #: what all sequences weigh
        self.cost = 0

    def weigh(self, rows: Packable, limit: int, each: float = 0.0, most: float = inf) -> Fit:
        """How many of these rows add no more than `limit`, and what they add.

        Where each row counts as `each` tokens more, that is no more than `most`. Nothing is changed.
        """
        count = len(rows.items)
        fit = self._weigh(rows, _whole(rows, count, self._behind), limit, each, most)
        if 0 < fit.rows < count and not fit.whole and _whole(rows, fit.rows, self._behind):
            # So few of them are placed in another way.
            fit = self._weigh(rows._replace(items=rows.items[: fit.rows]), True, limit, each, most)
        return fit

    def _weigh(self, placed: Packable, whole: bool, limit: int, each: float, most: float) -> Fit:
        query, items = placed.tokens, placed.items
        if whole:
            length, longest, start, behind = self._without.get(placed.labels, 0), min(self._context, JOINED), 0, query + 1
        else:
            length, longest, start, behind = self._behind.get(placed.query, 0), self._context, query, 1
        cost = sum(items) + len(items) * behind
        grown = (length or start + 1) + cost
        if grown <= longest and items:
            if not length:
                cost += start + self.page
            if cost <= limit and cost + len(items) * each <= most:
                return Fit(len(items), cost, grown, whole)
        cost = rows = 0
        for item in items:
            more = item + behind
            grown = length + more
            if not length or grown > longest:
                grown = start + 1 + more
                more += start + self.page
            if cost + more > limit or cost + more + (rows + 1) * each > most:
                break
            cost += more
            length = grown
            rows += 1
        return Fit(rows, cost, length, whole)

    def place(self, rows: Packable, fit: Fit) -> None:
        """Take what `weigh` found of these rows."""
        if fit.whole:
            self._without[rows.labels] = fit.length
            if rows.tokens:
                self._behind[rows.query] = 0
        else:
            self._behind[rows.query] = fit.length
        self.cost += fit.cost


#: rows of a batch in their order: (part, first row, end)
Runs = list[tuple[int, int, int]]


def sequences(parts: Iterable[Packable], context: int) -> list[tuple[bool, Runs]]:
    """The sequences of a batch: whether the items of each are whole rows, and which rows it has."""
    made: list[tuple[bool, Runs]] = []
    behind: dict[Hashable, tuple[int, int]] = {}
    without: dict[Hashable, tuple[int, int]] = {}
    for part, rows in enumerate(parts):
        whole = _whole(rows, len(rows.items), behind)
        if whole:
            known, key, longest, start, more = without, rows.labels, min(context, JOINED), 1, rows.tokens + 1
        else:
            known, key, longest, start, more = behind, rows.query, context, rows.tokens + 1, 1
        at, length = known.get(key, (0, 0))
        first = 0
        for row, item in enumerate(rows.items):
            if not length or length + item + more > longest:
                if row > first:
                    made[at][1].append((part, first, row))
                made.append((whole, []))
                at, length, first = len(made) - 1, start, row
            length += item + more
        if len(rows.items) > first:
            made[at][1].append((part, first, len(rows.items)))
        known[key] = (at, length)
        if whole and rows.tokens:
            behind[rows.query] = (0, 0)
    return made
