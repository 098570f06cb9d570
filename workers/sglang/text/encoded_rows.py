"""Rows that a tokenizer is called with. No SGLang here."""

from collections.abc import Mapping, Sequence
from typing import Any


def encoded_rows(tokenizer: Any, *sides: Sequence[str], one_by_one: bool, **options: Any) -> Mapping[str, Sequence[list[int]]]:
    """What the tokenizer makes of all rows, by name. `sides`: the text of each row, or the first and the second texts.

    `one_by_one`: in a call for each row. The rows of one call go through threads that all tokenizers of a process share, and
    those of other calls would wait for the last one.
    """
    if not one_by_one:
        return tokenizer(*map(list, sides), verbose=False, **options)
    found: dict[str, list[list[int]]] = {}
    for texts in zip(*sides, strict=True):
        for name, [row] in tokenizer(*([text] for text in texts), verbose=False, **options).items():
            found.setdefault(name, []).append(row)
    return found
