"""What SGLang computes for a batch: a prompt for each row, or for each sequence of rows that share a query. Pure.

A query that rows share is computed once in two ways: packed, as the beginning of a sequence (here); or ahead of the rows, each
of which then begins with what is cached (`prefix_cache.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from enginepool.protocol.packing import sequences
from enginepool.workers.engine import EngineError, Ids, RowPart
from enginepool.workers.packed import described

Runs = list[tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class Prompts:
    """What SGLang is sent for a batch.

    ids: token ids of each prompt. labels: of each prompt, those of its rows, each once.
    responses: where in each prompt its item begins; [] where that is not known: of sequences, and of queries alone.
    tops: how many of the most probable tokens are wanted at each place of each prompt; None: of no prompt.
    runs: (part, first row, end) in order, of the rows of all prompts; packed, of each prompt.
    delimiters: packed, where in each prompt the delimiters stand, one more than it has rows; None where a prompt is a row.
    """

    ids: list[list[int]]
    labels: list[list[int]]
    runs: list[Runs]
    delimiters: list[list[int]] | None = None
    responses: list[int] = field(default_factory=list[int])
    tops: list[int] | None = None

    @property
    def packed(self) -> bool:
        """Whether its prompts are sequences."""
        return self.delimiters is not None

    def take_apart(self, answers: Sequence[Sequence[Any]], parts: int) -> list[list[Any]]:
        """Each part's entries in row order, from those of each prompt: one for a row, or one for each delimiter."""
        rows: list[Sequence[Any]] = []
        if self.delimiters is None:
            rows.append([entry for entries in answers for entry in entries])
        else:
            for entries, delimiters in zip(answers, self.delimiters, strict=True):
                if len(entries) != len(delimiters):
                    raise EngineError(f"the engine answered {len(entries)} of {len(delimiters)} delimiters")
                rows.append(entries[1:])  # the first delimiter, after the query, says nothing
        found: list[list[Any]] = [[] for _ in range(parts)]
        for runs, entries in zip(self.runs, rows, strict=True):
            at = 0
            for part, first, end in runs:
                found[part] += entries[at : at + end - first]
                at += end - first
        return found


def plain_prompts(parts: Sequence[RowPart]) -> Prompts:
    """A prompt for each row."""
    ids: list[list[int]] = []
    labels: list[list[int]] = []
    responses: list[int] = []
    runs: Runs = []
    for i, part in enumerate(parts):
        rows = part.prompts()
        ids += rows
        # Each label once: SGLang 0.5.23 refuses duplicates.
        if part.labels is None:
            labels += repeat(list(dict.fromkeys(part.asked.labels)), len(rows))
        else:
            labels += [list(dict.fromkeys(own)) for own in part.labels.tolist()]
        responses += [length - item for length, item in zip(part.lengths, part.item_lengths.tolist(), strict=True)]
        runs.append((i, 0, len(rows)))
    tops = [part.asked.top_logprobs for part in parts for _ in range(part.item_lengths.size)]
    return Prompts(ids, labels, [runs], responses=responses, tops=tops if any(tops) else None)


def packed_prompts(parts: Sequence[RowPart], context: int, delimiter: int) -> Prompts:
    """`query <d> item <d> … <d>` for each sequence; no row sees `delimiter`, the token id that stands between items."""
    starts = [np.concatenate(([0], np.cumsum(part.item_lengths, dtype=np.int64))) for part in parts]
    made = sequences(map(described, parts), context)
    joined = [_joined([(parts[part], starts[part], first, end) for part, first, end in runs], delimiter) for runs in made]
    labels = [list(dict.fromkeys(label for part, _, _ in runs for label in parts[part].asked.labels)) for runs in made]
    return Prompts([ids for ids, _ in joined], labels, made, [places for _, places in joined])


def _joined(pieces: list[tuple[RowPart, npt.NDArray[np.int64], int, int]], delimiter: int) -> tuple[list[int], list[int]]:
    """(token ids, places of the delimiters) of a sequence."""
    query = pieces[0][0].query
    lengths = np.concatenate([part.item_lengths[first:end] for part, _, first, end in pieces]).astype(np.int64)
    delimiters = query.size + np.concatenate(([0], np.cumsum(lengths + 1)))
    ids: Ids = np.full(int(delimiters[-1]) + 1, delimiter, np.int32)
    ids[: query.size] = query
    of_items = np.ones(ids.size, np.bool_)
    of_items[: query.size] = False
    of_items[delimiters] = False
    ids[of_items] = np.concatenate([part.items[starts[first] : starts[end]] for part, starts, first, end in pieces])
    return ids.tolist(), delimiters.tolist()
