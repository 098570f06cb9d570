"""`Pool.decode`: token ids to texts, by the tokenizer of a group."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from enginepool.client.arguments import Ids, bad, check_flag, check_group, check_priority, check_timeout
from enginepool.client.payload import encode_rows
from enginepool.client.results import frame_of
from enginepool.client.row_calls import ROW_NAMES, RowCalls
from enginepool.errors import Malformed
from enginepool.protocol.frames import Buffer
from enginepool.protocol.messages import Decode, Result

#: What the wire calls the arguments of `decode`.
_NAMES: Final = {**ROW_NAMES, "items": "rows"}


class DecodeCalls(RowCalls):
    """The call of a pool that decodes."""

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
        filled = [i for i, row in enumerate(_checked(rows)) if len(row)]
        texts = [""] * len(rows)
        if not filled:
            return texts
        specs, frames = encode_rows("rows", rows if len(filled) == len(rows) else [rows[i] for i in filled])
        request = Decode(
            0, specs, check_group(group), check_flag("skip_special_tokens", skip_special_tokens), check_priority(priority)
        )
        within, again = check_timeout(timeout), check_flag("retry_busy", retry_busy)
        for i, text in zip(filled, _texts(*await self._waited(request, frames, Result, _NAMES, within, again)), strict=True):
            texts[i] = text
        return texts


def _checked(rows: Any) -> Any:
    """`rows`, each of which has a length."""
    if isinstance(rows, str) or not hasattr(rows, "__len__"):
        raise bad("rows", f"rows: {type(rows).__name__}; a list of token id sequences")
    for i, row in enumerate(rows):
        if isinstance(row, str) or not hasattr(row, "__len__"):
            at = f"rows[{i}]"
            raise bad(at, f"{at}: {type(row).__name__}; a sequence of token ids")
    return rows


def _texts(result: Result, frames: Sequence[Buffer]) -> list[str]:
    """The texts in an answer whose frames are of the announced lengths.

    Raises:
        Malformed: there are none.
    """
    lengths = frame_of(result, frames, "text_lengths", "uint32", writable=False)
    if lengths is None or [spec.name for spec in result.frames] != ["texts", "text_lengths"]:
        raise Malformed("the answer holds no texts", field="texts")
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    if len(ends) != result.usage.items or ends[-1] != len(frames[0]):
        raise Malformed("the texts of the answer do not fit their lengths", field="text_lengths")
    starts = [0, *ends[:-1]]
    try:
        return [str(frames[0][start:end], "utf-8") for start, end in zip(starts, ends, strict=True)]
    except UnicodeDecodeError as error:
        raise Malformed(f"the texts of the answer are no UTF-8: {error}", field="texts") from None
