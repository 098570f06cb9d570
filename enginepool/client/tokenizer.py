"""`Pool.tokenize` and `Pool.decode`: texts to token ids and back, by the tokenizer of a group."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np

from enginepool.client.arguments import Ids, bad, check_flag, check_group, check_priority, check_timeout, kind
from enginepool.client.payload import Ids32, encode_rows
from enginepool.client.row_calls import ROW_NAMES, RowCalls
from enginepool.errors import Malformed
from enginepool.protocol.basis import Dtype
from enginepool.protocol.frames import Buffer
from enginepool.protocol.messages import Decode, Result, TokenizeTexts

#: What the wire calls the arguments of `decode`.
_NAMES: Final = {**ROW_NAMES, "items": "rows"}


class TokenizerCalls(RowCalls):
    """The calls of a pool that its tokenizers answer."""

    async def tokenize(
        self, texts: Sequence[str], *, group: str = "", add_special_tokens: bool = True, priority: int = 0,
        timeout: float | None = None, retry_busy: bool = True,  # noqa: ASYNC109 (as in `score`)
    ) -> list[Ids32]:  # fmt: skip
        """The token ids of texts: what the tokenizer of the group's model makes of each, as int32 [tokens].

        A worker tokenizes all texts of a call, without its engine.

        Args:
            texts: none is empty.
            group: may be left out where the pool has one group.
            add_special_tokens: with the special tokens that the tokenizer adds, such as one for the beginning. Default: True.
            priority, timeout, retry_busy: as in `score`.

        Raises:
            BadRequest: the model has no tokenizer, or a text is empty; `field` names what.
            TooLarge: the ids could take more memory than a call may.
            EnginepoolError: as in `score`.
        """
        for i, text in enumerate(_checked("texts", texts)):
            if not isinstance(text, str):
                raise bad(f"texts[{i}]", f"texts[{i}]: {kind(text)}; a text")
        specs, frames = encode_rows("texts", texts)
        special = check_flag("add_special_tokens", add_special_tokens)
        request = TokenizeTexts(0, specs, check_group(group), special, check_priority(priority))
        within, again = check_timeout(timeout), check_flag("retry_busy", retry_busy)
        answer = await self._waited(request, frames, Result, {**_NAMES, "items": "texts"}, within, again)
        return [np.frombuffer(row, np.int32).copy() for row in _rows(*answer, "items", "int32", 4)]

    async def decode(
        self, rows: Sequence[Ids], *, group: str = "", skip_special_tokens: bool = True, priority: int = 0,
        timeout: float | None = None, retry_busy: bool = True,  # noqa: ASYNC109 (as in `score`)
    ) -> list[str]:  # fmt: skip
        """The texts of token ids: what the tokenizer of the group's model decodes them to.

        A worker decodes all rows of a call, without its engine. Many samples fit one call: each token counts with the longest
        text that a token of this model has, and the error of a call that is too large says how large that is.

        Args:
            rows: token ids of each text, such as `sample.token_ids` of several samples (also a two-dimensional array: a row
                each). A row without ids is an empty text.
            group: may be left out where the pool has one group.
            skip_special_tokens: special tokens, such as the end of a text, are left out. Default: True.
            priority, timeout, retry_busy: as in `score`.

        Raises:
            BadRequest: an id is outside the vocabulary, or the model has no tokenizer; `field` names what, `limit` the limit.
            TooLarge: the texts could take more memory than a call may.
            EnginepoolError: as in `score`.
        """
        for i, row in enumerate(_checked("rows", rows)):
            if isinstance(row, str) or not hasattr(row, "__len__"):
                raise bad(f"rows[{i}]", f"rows[{i}]: {kind(row)}; a sequence of token ids")
        filled = [i for i, row in enumerate(rows) if len(row)]
        texts = [""] * len(rows)
        if not filled:
            return texts
        specs, frames = encode_rows("rows", rows if len(filled) == len(rows) else [rows[i] for i in filled])
        request = Decode(
            0, specs, check_group(group), check_flag("skip_special_tokens", skip_special_tokens), check_priority(priority)
        )
        within, again = check_timeout(timeout), check_flag("retry_busy", retry_busy)
        answer = await self._waited(request, frames, Result, _NAMES, within, again)
        try:
            for i, row in zip(filled, _rows(*answer, "texts", "utf8", 1), strict=True):
                texts[i] = str(row, "utf-8")
        except UnicodeDecodeError as error:
            raise Malformed(f"the texts of the answer are no UTF-8: {error}", field="texts") from None
        return texts


def _checked(name: str, rows: Any) -> Any:
    """`rows`, which is a list."""
    if isinstance(rows, str) or not hasattr(rows, "__len__"):
        raise bad(name, f"{name}: {kind(rows)}; a list")
    return rows


def _rows(result: Result, frames: Sequence[Buffer], name: str, dtype: Dtype, unit: int) -> list[Buffer]:
    """The bytes of each row of a frame of elements of so many bytes; the next frame has their lengths.

    Raises:
        Malformed: there are none.
    """
    lengths = f"{name.removesuffix('s')}_lengths"
    if [(spec.name, spec.dtype) for spec in result.frames] != [(name, dtype), (lengths, "uint32")]:
        raise Malformed(f"the answer holds no {name} {dtype} and {lengths}", field=name)
    ends = np.cumsum(np.frombuffer(frames[1], np.uint32), dtype=np.int64) * unit
    if len(ends) != result.usage.items or ends[-1] != len(frames[0]):
        raise Malformed(f"the {name} of the answer do not fit their lengths", field=lengths)
    return [frames[0][start:end] for start, end in pairwise([0, *ends.tolist()])]
