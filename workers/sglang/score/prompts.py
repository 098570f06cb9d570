"""What SGLang computes for a batch: a prompt for each row, or for each sequence of packed rows. Pure.

A query that rows share is computed once in two ways: packed, as the beginning of a sequence (here); or ahead of the rows, each
of which then begins with what is cached (`prefix_cache.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any

from enginepool.protocol.packing import Runs, sequences
from enginepool.workers.engine import EngineError, RowPart
from enginepool.workers.packed import packable


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
                rows.append(entries[1:])  # the delimiter before the first item says nothing
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
    """`query <d> item <d> … <d>` or `<d> row <d> … <d>` for each sequence; no row sees `delimiter`, the token id that stands
    between items."""
    delimiters: list[list[int]] = []
    found = Prompts([], [], [], delimiters)
    items: dict[int, list[list[int]]] = {}
    for whole, runs in sequences(map(packable, parts), context):
        query: list[int] = [] if whole else parts[runs[0][0]].query.tolist()
        ids, places = [*query, delimiter], [len(query)]
        for part, first, end in runs:
            if part not in items:
                rows = parts[part]
                items[part] = (rows if whole else replace(rows, query=rows.query[:0])).prompts()
            for item in items[part][first:end]:
                ids += item
                places.append(len(ids))
                ids.append(delimiter)
        found.ids.append(ids)
        found.labels.append(list(dict.fromkeys(label for part, _, _ in runs for label in parts[part].asked.labels)))
        found.runs.append(runs)
        delimiters.append(places)
    return found
