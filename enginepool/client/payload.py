"""Query, items and labels to frames: texts and token ids of the Python API on one side, buffers on the other.

Buffers are always copies: the caller may change its arrays while a request waits.
"""

import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from enginepool.client.arguments import Ids, bad, kind, utf8
from enginepool.errors import BadRequest
from enginepool.protocol.frames import Buffer
from enginepool.protocol.messages import MAX_LABELS, FrameSpec
from enginepool.protocol.ragged import MAX_TOKENS, locate

if sys.byteorder != "little":
    raise ImportError("enginepool's Python client needs a little-endian machine: frames are sent as they lie in memory")

Ids32: TypeAlias = npt.NDArray[np.int32]
Payload: TypeAlias = tuple[list[FrameSpec], tuple[Buffer, ...]]

_MAX_TOKEN = MAX_TOKENS - 1
#: Below this a copy is cheaper than a view.
_LARGE = 1 << 16


def encode_shared(query: str | Ids, items: Sequence[str] | Sequence[Ids] | npt.NDArray[np.integer[Any]]) -> Payload:
    """Frames of one query for all items."""
    rows = _rows("items", items)
    if isinstance(query, str):
        head = utf8("query", query)
        lengths, body = _texts("items", rows, "the query is text")
        query_spec, items_spec = FrameSpec("query", "utf8", (len(head),)), FrameSpec("items", "utf8", (len(body),))
        shared = len(head)
        frames: tuple[Buffer, ...] = (head, body, lengths.tobytes())
    else:
        ids = _ids("query", query)
        _no_negative("query", ids, None)
        lengths, flat = _ragged("items", rows, "the query is token ids")
        query_spec, items_spec = FrameSpec("query", "int32", (len(ids),)), FrameSpec("items", "int32", (len(flat),))
        shared = len(ids)
        frames = (ids.tobytes(), _buffer(flat), lengths.tobytes())
    if not shared:
        _no_empty("items", lengths, "the query")
    return [query_spec, items_spec, FrameSpec("item_lengths", "uint32", (len(rows),))], frames


def encode_pairs(
    prompts: Sequence[str] | Sequence[Ids] | npt.NDArray[np.integer[Any]],
    responses: Sequence[str] | Sequence[Ids] | npt.NDArray[np.integer[Any]],
) -> Payload:
    """Frames of a query of its own for each item."""
    heads, rows = _rows("prompts", prompts), _rows("responses", responses)
    if len(heads) != len(rows):
        raise bad("responses", f"responses: expected {len(heads)} (one per prompt), got {len(rows)}", str(len(heads)))
    # Not by its index: that of a column of a table begins where it likes.
    if isinstance(next(iter(heads)), str):
        head_lengths, head = _texts("prompts", heads, "prompts[0] is text")
        lengths, body = _texts("responses", rows, "the prompts are text")
        dtype = "utf8"
        frames: tuple[Buffer, ...] = (head, head_lengths.tobytes(), body, lengths.tobytes())
    else:
        head_lengths, head = _ragged("prompts", heads, "prompts[0] is token ids")
        lengths, body = _ragged("responses", rows, "the prompts are token ids")
        dtype = "int32"
        frames = (_buffer(head), head_lengths.tobytes(), _buffer(body), lengths.tobytes())
    _no_empty("responses", head_lengths.astype(np.int64) + lengths, "its prompt")
    n = len(rows)
    specs = [
        FrameSpec("query", dtype, (len(head),)),
        FrameSpec("query_lengths", "uint32", (n,)),
        FrameSpec("items", dtype, (len(body),)),
        FrameSpec("item_lengths", "uint32", (n,)),
    ]
    return specs, frames


def encode_rows(name: str, rows: Sequence[str] | Sequence[Ids] | npt.NDArray[np.integer[Any]]) -> Payload:
    """Frames of items without a query."""
    rows = _rows(name, rows)
    if isinstance(next(iter(rows)), str):
        lengths, body = _texts(name, rows, f"{name}[0] is text")
        dtype, frame = "utf8", body
    else:
        lengths, body = _ragged(name, rows, f"{name}[0] is token ids")
        dtype, frame = "int32", _buffer(body)
    if not lengths.all():
        row = int((lengths == 0).argmax())
        raise bad(f"{name}[{row}]", f"{name}[{row}]: empty; it needs at least one token", "1")
    specs = [FrameSpec("items", dtype, (len(body),)), FrameSpec("item_lengths", "uint32", (len(rows),))]
    return specs, (frame, lengths.tobytes())


def _rows(name: str, rows: Any) -> Sequence[Any]:
    if isinstance(rows, str | bytes | bytearray) or not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
        raise bad(name, f"{name}: {kind(rows)}; a list of texts, or a list of token id sequences")
    if isinstance(rows, Mapping) and (chat := _chat(name, cast("object", rows))) is not None:
        raise chat
    if isinstance(rows, Mapping):  # also what tokenizers return: its keys are texts
        raise bad(name, f"{name}: {kind(cast('object', rows))}; a list of texts, or a list of token id sequences")
    if not len(rows):
        raise bad(name, f"{name}: empty; a request has at least one item", "1")
    return rows


def _texts(name: str, rows: Sequence[Any], because: str) -> tuple[npt.NDArray[np.uint32], bytes]:
    encoded: list[bytes] = []
    for i, row in enumerate(rows):
        if not isinstance(row, str):
            raise _chat(f"{name}[{i}]", row) or bad(
                f"{name}[{i}]", f"{name}[{i}]: {kind(row)}; {because}, so every item is text"
            )
        encoded.append(utf8(f"{name}[{i}]", row))
    return _lengths(encoded), b"".join(encoded)


def _ragged(name: str, rows: Sequence[Any], because: str) -> tuple[npt.NDArray[np.uint32], Ids32]:
    arrays: list[Ids32] = []
    for i, row in enumerate(rows):
        if isinstance(row, str):
            raise bad(f"{name}[{i}]", f"{name}[{i}]: text; {because}, so every item is token ids")
        arrays.append(_ids(name, row, i))
    lengths = _lengths(arrays)
    flat = np.concatenate(arrays)
    _no_negative(name, flat, lengths)
    return lengths, flat


def _lengths(rows: Sequence[Any]) -> npt.NDArray[np.uint32]:
    return np.fromiter(map(len, rows), np.uint32, len(rows))


def _ids(name: str, row: Any, index: int | None = None) -> Ids32:
    """One row as int32, not yet held to be positive. Fields are named only when something is wrong: this is the hot path."""
    if isinstance(row, np.ndarray):
        found = cast("npt.NDArray[Any]", row)
    elif isinstance(row, list | tuple) or (isinstance(row, Sequence) and not isinstance(row, str | bytes | bytearray)):
        values = cast("Sequence[Any]", row)
        try:
            if len(values) and isinstance(values[0], bool):
                raise TypeError
            return np.frombuffer(array("i", values), np.int32)
        except (TypeError, OverflowError):
            raise _bad_element(_at(name, index), values) from None
    elif hasattr(row, "__array__"):
        try:
            found = np.asarray(row)
        except (TypeError, ValueError, RuntimeError) as error:
            raise bad(_at(name, index), f"{_at(name, index)}: {error}") from None
    else:
        where = _at(name, index)
        raise _chat(where, row) or bad(where, f"{where}: {kind(row)}; a sequence of token ids")
    if found.dtype == np.int32 and found.ndim == 1:
        return cast("Ids32", found)
    where = _at(name, index)
    if found.ndim != 1:
        raise bad(where, f"{where}: an array of shape {list(found.shape)}; token ids have one dimension")
    if found.size and found.dtype.kind not in "iu":
        raise bad(where, f"{where}: an array of {found.dtype}; token ids are integers")
    if found.size and (int(found.max()) > _MAX_TOKEN or int(found.min()) < 0):
        raise _bad_element(where, found.tolist())
    return found.astype(np.int32)


def _chat(where: str, value: object) -> BadRequest | None:
    """The error for messages of a chat, one or several, where text or token ids belong; None for anything else."""
    inner: object = value
    if isinstance(value, list | tuple):
        inner = next(iter(cast("Sequence[object]", value)), None)
    if not isinstance(inner, Mapping) or not {"role", "content"} & set(cast("Mapping[Any, Any]", inner)):
        return None
    return bad(
        where,
        f"{where}: chat messages; apply the chat template first (tokenizer.apply_chat_template) and give its text or token ids",
    )


def _at(name: str, index: int | None) -> str:
    return name if index is None else f"{name}[{index}]"


def _bad_element(where: str, values: Iterable[Any]) -> BadRequest:
    """The first element that is no token id, named."""
    for i, value in enumerate(values):
        at = f"{where}[{i}]"
        if (chat := _chat(where if i == 0 else at, value)) is not None:
            return chat
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            return bad(at, f"{at}: {kind(cast('object', value))}; a token id is an int")
        number = int(cast("int", value))
        if number < 0:
            return bad(at, f"{at}: token id {number} is negative", "0")
        if number > _MAX_TOKEN:
            return bad(at, f"{at}: token id {number} does not fit in 31 bits", str(_MAX_TOKEN))
    return bad(where, f"{where}: these are no token ids")


def _no_negative(name: str, flat: Ids32, lengths: npt.NDArray[np.uint32] | None) -> None:
    if not flat.size or int(flat.min()) >= 0:
        return
    at = int((flat < 0).argmax())
    where = locate(name, at, lengths)
    raise bad(where, f"{where}: token id {int(flat[at])} is negative", "0")


def _no_empty(name: str, lengths: npt.NDArray[Any], head: str) -> None:
    if not lengths.all():
        row = int((lengths == 0).argmax())
        raise bad(f"{name}[{row}]", f"{name}[{row}]: empty, and so is {head}", "1")


def _buffer(flat: Ids32) -> Buffer:
    """`flat` is fresh from concatenate, so a large one needs no second copy."""
    return flat.tobytes() if flat.nbytes < _LARGE else flat.data.cast("B")


def check_labels(labels: Any) -> list[int]:
    """`label_token_ids` as the wire wants it; None is none."""
    if labels is None:
        return []
    found = _ids("label_token_ids", labels)
    if len(found) > MAX_LABELS:
        raise bad("label_token_ids", f"label_token_ids: {len(found)} ids; at most {MAX_LABELS}", str(MAX_LABELS))
    _no_negative("label_token_ids", found, None)
    return found.tolist()


def check_softmax(softmax: bool, labels: Sequence[int]) -> None:
    """Refuse `apply_softmax` where its outcome is known."""
    if softmax and len(labels) == 1:
        raise bad("apply_softmax", "apply_softmax: over one label it is always 1.0; name more labels, or leave it out", "2")
