"""Packed scoring in the worker: the sequences of a batch, built and taken apart again. Pure; the rule is the protocol's."""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from enginepool.protocol.messages import Capabilities
from enginepool.protocol.packing import Packing, sequences
from enginepool.workers.engine import EngineError, Ids, ScorePart

#: the longest item whose positions fit the attention kernel's uint16
MAX_ITEM = 65_535
Runs = list[tuple[int, int, int]]


def refuse_unpackable(part: ScorePart, can: Capabilities) -> None:
    """Raise EngineError when the rows of `part` cannot be packed: the engine would die of them, or be wrong."""
    if part.item_first or part.query_lengths is not None:
        raise EngineError("a packed worker takes one query for all rows, before the items")
    lengths = part.item_lengths
    if not part.query.size or not lengths.size or not lengths.min():
        raise EngineError("a packed worker takes neither an empty query nor an empty item")
    longest = int(lengths.max())
    if longest > can.max_item or part.query.size + longest + 2 > can.context:
        raise EngineError(
            f"an item has {longest} tokens after a query of {part.query.size}; packed, this engine takes items of"
            f" {can.max_item} and {can.context} tokens for both and two delimiters"
        )


def packed_cost(parts: list[ScorePart], can: Capabilities) -> int:
    """What the sequences of these parts weigh."""
    packing = Packing(can.context, can.page)
    for query, size, lengths in map(_described, parts):
        _, cost, length = packing.weigh(query, size, lengths, 1 << 62)
        packing.place(query, cost, length)
    return packing.cost


def _described(part: ScorePart) -> tuple[bytes, int, list[int]]:
    return part.query.tobytes(), part.query.size, part.item_lengths.tolist()


@dataclass(frozen=True, slots=True)
class Sequence:
    """`query <d> item <d> … <d>`.

    ids: token ids; delimiters: where in them the delimiters stand, one more than there are rows; runs: (part, first row, end)
    in order; labels: of all these parts, each once.
    """

    ids: list[int]
    delimiters: list[int]
    runs: Runs
    labels: list[int]


def join(parts: list[ScorePart], context: int, delimiter: int) -> list[Sequence]:
    """The sequences of a batch; `delimiter` is the token id that stands between items, which no row sees."""
    starts = [np.concatenate(([0], np.cumsum(part.item_lengths, dtype=np.int64))) for part in parts]
    return [
        _sequence([(parts[part], starts[part], first, end) for part, first, end in runs], runs, delimiter)
        for runs in sequences(map(_described, parts), context)
    ]


def _sequence(pieces: list[tuple[ScorePart, npt.NDArray[np.int64], int, int]], runs: Runs, delimiter: int) -> Sequence:
    query = pieces[0][0].query
    lengths = np.concatenate([part.item_lengths[first:end] for part, _, first, end in pieces]).astype(np.int64)
    delimiters = query.size + np.concatenate(([0], np.cumsum(lengths + 1)))
    ids: Ids = np.full(int(delimiters[-1]) + 1, delimiter, np.int32)
    ids[: query.size] = query
    of_items = np.ones(ids.size, np.bool_)
    of_items[: query.size] = False
    of_items[delimiters] = False
    ids[of_items] = np.concatenate([part.items[starts[first] : starts[end]] for part, starts, first, end in pieces])
    labels = dict.fromkeys(label for part, _, _, _ in pieces for label in part.labels)
    return Sequence(ids.tolist(), delimiters.tolist(), runs, list(labels))


def take_apart(joined: list[Sequence], answers: list[list[Any]], parts: int) -> list[list[Any]]:
    """Each part's entries in row order, from what each sequence's delimiters gave; the first, after the query, says nothing."""
    found: list[list[Any]] = [[] for _ in range(parts)]
    for sequence, entries in zip(joined, answers, strict=True):
        if len(entries) != len(sequence.delimiters):
            raise EngineError(f"the engine answered {len(entries)} of {len(sequence.delimiters)} delimiters")
        ends = accumulate((end - first for _, first, end in sequence.runs), initial=1)
        for (part, first, end), at in zip(sequence.runs, ends, strict=False):
            found[part] += entries[at : at + end - first]
    return found
