"""Rows of two texts that are joined into one. No SGLang here."""

from collections.abc import Sequence
from typing import Any

from enginepool.protocol.messages import Tokenize
from enginepool.workers.engine import EngineError
from enginepool.workers.sglang.text.encoded_rows import encoded_rows
from enginepool.workers.truncated_rows import drop, refuse_nothing_left, too_long


def joined_rows(
    tokenizer: Any, pairs: Sequence[tuple[str, str]], asked: Tokenize, last: int | None = None
) -> tuple[list[list[int]], int]:
    """(token ids of each pair's concatenation, with the special tokens that the tokenizer adds; how many were truncated).

    Args:
        last: a special token with which each row ends, and which the tokenizer does not add.

    Raises:
        WireError: nothing would be left of an item.
        EngineError: the tokenizer does not say which tokens are of the item.
    """
    if not pairs:
        return [], 0
    plain = {} if asked.add_special_tokens else {"add_special_tokens": False}
    texts = [first + second for first, second in pairs]
    last = None if plain else last
    rows = [_ended(ids, last) for ids in encoded_rows(tokenizer, texts, long=asked.long, **plain)["input_ids"]]
    longer = too_long(rows, asked)
    for i in longer:
        rows[i] = _truncated(tokenizer, *pairs[i], asked, i, last)
    return rows, len(longer)


def _ended(ids: Sequence[int], last: int | None) -> list[int]:
    return [*ids] if last is None or (ids and ids[-1] == last) else [*ids, last]


def _truncated(tokenizer: Any, first: str, second: str, asked: Tokenize, row: int, last: int | None) -> list[int]:
    if not getattr(tokenizer, "is_fast", False):
        raise EngineError("truncation: this model's tokenizer does not say which tokens an item has; send token ids")
    encoded = tokenizer(first + second, return_offsets_mapping=True, return_special_tokens_mask=True, verbose=False)
    ids = _ended(encoded["input_ids"], last)
    edge, of_item = len(first), list[int]()
    for at, ((start, end), special) in enumerate(zip(encoded["offset_mapping"], encoded["special_tokens_mask"], strict=True)):
        # A token of both texts is of the query, which is kept.
        if not special and (end <= edge if asked.item_first else start >= edge):
            of_item.append(at)
    refuse_nothing_left(len(ids) - len(of_item), asked, row)
    return drop(ids, of_item, asked)
