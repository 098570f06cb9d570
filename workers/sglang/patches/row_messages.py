"""Rows on their way to SGLang's scheduler: what those of a batch share is sent once. No SGLang here: its classes are arguments.

SGLang pickles a batch as requests of fifty fields each. Rows of a batch differ in a few of them: the id, the tokens, perhaps
the labels. To read all of them is a tenth of what its scheduler does for a row.
"""

import copy
from collections.abc import Callable, Sequence
from itertools import repeat
from operator import attrgetter, eq, is_
from typing import Any


def send_shared_fields_once(batch: Any) -> None:
    """Have the rows of a message pickled as the first of them and the fields in which others differ. `batch` is SGLang's class
    of a message with several requests, whose other forms of transport stay as they are."""
    pickled: Callable[[Any], Any] = batch.__reduce__

    def reduce(self: Any) -> Any:
        rows: list[Any] = self.batch
        if len(rows) < 2 or not _are_rows(rows[0]):
            return pickled(self)
        names, columns = _differences(rows)
        message = copy.copy(self)
        message.batch = []
        return with_rows, (message, rows[0], names, columns)

    batch.__reduce__ = reduce


def with_rows(message: Any, first: Any, names: Sequence[str], columns: Sequence[Sequence[Any]]) -> Any:
    """`message` with as many copies of `first` as the columns are long, each with its own values of the fields `names`."""
    for values in zip(*columns, strict=True):
        row = copy.copy(first)
        for name, value in zip(names, values, strict=True):
            setattr(row, name, value)
        message.batch.append(row)
    return message


def _are_rows(first: Any) -> bool:
    """Whether a request generates nothing: of one that does, the scheduler changes the sampling parameters by its length. With
    tracing, each request has times of its own."""
    return first.sampling_params.max_new_tokens == 0 and not first.time_stats.trace_ctx.tracing_enable


def _differences(rows: Sequence[Any]) -> tuple[list[str], list[tuple[Any, ...]]]:
    """The fields in which these requests differ, the id among them, and the values of all requests in each.

    Each request has sampling parameters of its own, which are equal, and times of its own, of which nothing is sent without
    tracing.
    """
    fields: tuple[str, ...] = rows[0].__struct_fields__
    names, columns = list[str](), list[tuple[Any, ...]]()
    for name, column in zip(fields, zip(*map(attrgetter(*fields), rows), strict=True), strict=True):
        same = eq if name == "sampling_params" else is_
        if name == "rid" or (name != "time_stats" and not all(map(same, column, repeat(column[0])))):
            names.append(name)
            columns.append(column)
    return names, columns
