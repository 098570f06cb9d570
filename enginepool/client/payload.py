"""Query, items and labels to frames: texts and token ids of the Python API on one side, buffers on the other.

Buffers are always copies: the caller may change its arrays while a request waits.
"""

import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from enginepool.client.arguments import Ids, bad, kind, utf8
from enginepool.errors import BadRequest
from enginepool.protocol.frames import Buffer
from enginepool.protocol.messages import LEAST_TEMPERATURE, MAX_LABEL_TEXT, MAX_LABELS, MAX_TEMPERATURE, FrameSpec
from enginepool.protocol.ragged import MAX_TOKENS, locate

if sys.byteorder != "little":
    raise ImportError("enginepool's Python client needs a little-endian machine: frames are sent as they lie in memory")

Ids32: TypeAlias = npt.NDArray[np.int32]
Payload: TypeAlias = tuple[list[FrameSpec], tuple[Buffer, ...]]

_MAX_TOKEN = MAX_TOKENS - 1
#: Below this a copy is cheaper than a view.
_LARGE = 1 << 16
_IDS = "a sequence of token ids"
_TEXT_OR_IDS = f"a text, or {_IDS}"


def encode_shared(
    query: str | Ids,
    items: Sequence[str] | Sequence[Ids] | npt.NDArray[np.integer[Any]],
    names: tuple[str, str] = ("query", "items"),
) -> Payload:
    """Frames of one query for all items. `names`: what the caller calls the two."""
    name, of_rows = names
    rows = check_rows(of_rows, items)
    if isinstance(query, str):
        head = utf8(name, query)
        spec = FrameSpec("query", "utf8", (len(head),))
        body = _encode("items", of_rows, rows, True, f"the {name.removesuffix('s')} is text")
    else:
        ids = _ids(name, query, allowed=_TEXT_OR_IDS)
        _no_negative(name, ids, None)
        head = ids.tobytes()
        spec = FrameSpec("query", "int32", (len(ids),))
        body = _encode("items", of_rows, rows, False, f"the {name.removesuffix('s')} is token ids")
    if not head:
        _no_empty(of_rows, body.lengths, f"empty, and so is the {name.removesuffix('s')}")
    return [spec, *body.specs()], (head, *body.frames())


def encode_pairs(
    prompts: Sequence[str] | Sequence[Ids] | npt.NDArray[np.integer[Any]],
    responses: Sequence[str] | Sequence[Ids] | npt.NDArray[np.integer[Any]],
) -> Payload:
    """Frames of a query of its own for each item."""
    queries, rows = check_rows("prompts", prompts), check_rows("responses", responses)
    if len(queries) != len(rows):
        raise bad("responses", f"responses: expected {len(queries)} (one per prompt), got {len(rows)}", str(len(queries)))
    text = _is_text("prompts", queries)
    what = "text" if text else "token ids"
    heads = _encode("query", "prompts", queries, text, f"prompts[0] is {what}")
    body = _encode("items", "responses", rows, text, f"the prompts are {what}")
    _no_empty("responses", heads.lengths.astype(np.int64) + body.lengths, "empty, and so is its prompt")
    return [*heads.specs(), *body.specs()], (*heads.frames(), *body.frames())


def encode_rows(name: str, rows: Sequence[str] | Sequence[Ids] | npt.NDArray[np.integer[Any]]) -> Payload:
    """Frames of items without a query."""
    rows = check_rows(name, rows)
    text = _is_text(name, rows)
    body = _encode("items", name, rows, text, f"{name}[0] is {'text' if text else 'token ids'}")
    _no_empty(name, body.lengths, "empty; it needs at least one token")
    return body.specs(), body.frames()


def token_ids(name: str, ids: Ids) -> Ids32:
    """Token ids, perhaps none, as int32 [tokens]: a copy."""
    if isinstance(ids, str):
        raise bad(name, f"{name}: text; token ids, which the tokenizer of the model makes of it")
    found = np.array(_ids(name, ids))
    _no_negative(name, found, None)
    return found


class _Encoded(NamedTuple):
    """Rows as two frames: all values one after the other, and the length of each row."""

    values: FrameSpec
    frame: Buffer
    lengths: npt.NDArray[np.uint32]

    def specs(self) -> list[FrameSpec]:
        name = "query_lengths" if self.values.name == "query" else "item_lengths"
        return [self.values, FrameSpec(name, "uint32", (len(self.lengths),))]

    def frames(self) -> tuple[Buffer, Buffer]:
        return self.frame, self.lengths.tobytes()


def _encode(frame: str, name: str, rows: Sequence[Any], text: bool, because: str) -> _Encoded:
    """The rows of the argument `name`, which are text or token ids for the reason `because`, for the frame of this name."""
    if text:
        lengths, body = _texts(name, rows, because)
        return _Encoded(FrameSpec(frame, "utf8", (len(body),)), body, lengths)
    lengths, flat = _ragged(name, rows, because)
    return _Encoded(FrameSpec(frame, "int32", (len(flat),)), _buffer(flat), lengths)


def _is_text(name: str, rows: Sequence[Any]) -> bool:
    """Whether the first row is text, as all others must be then."""
    first = next(iter(rows))  # not by its index: that of a column of a table begins where it likes
    if not (hasattr(first, "__len__") or hasattr(first, "__array__")):
        raise bad(f"{name}[0]", f"{name}[0]: {kind(first)}; {_TEXT_OR_IDS}")
    return isinstance(first, str)


def check_rows(name: str, rows: Any) -> Sequence[Any]:
    """`rows`, if they are rows, and at least one; what each row is comes later."""
    # A mapping is also what tokenizers return: its keys are texts.
    rowless = isinstance(rows, str | bytes | bytearray | Mapping)
    if rowless or not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
        value = cast("object", rows)
        chat = _chat(name, value) if isinstance(rows, Mapping) else None
        raise chat or bad(name, f"{name}: {kind(value)}; a list of texts, or a list of token id sequences")
    if getattr(rows, "ndim", 1) == 0:  # it has no length
        raise bad(name, f"{name}: an array of shape []; a list of texts, or a list of token id sequences")
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


def _ids(name: str, row: Any, index: int | None = None, allowed: str = _IDS) -> Ids32:
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
        raise _chat(where, row) or bad(where, f"{where}: {kind(row)}; {allowed}")
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


def _no_empty(name: str, lengths: npt.NDArray[Any], why: str) -> None:
    if not lengths.all():
        where = f"{name}[{int((lengths == 0).argmax())}]"
        raise bad(where, f"{where}: {why}", "1")


def _buffer(flat: Ids32) -> Buffer:
    """`flat` is fresh from concatenate, so a large one needs no second copy."""
    return flat.tobytes() if flat.nbytes < _LARGE else flat.data.cast("B")


def check_labels(labels: Any, most: int = MAX_LABELS) -> list[int]:
    """`label_token_ids` as the wire wants it, at most so many; None is none."""
    if labels is None:
        return []
    found = _ids("label_token_ids", labels)
    if len(found) > most:
        raise bad("label_token_ids", f"label_token_ids: {len(found)} ids; at most {most}", str(most))
    _no_negative("label_token_ids", found, None)
    return found.tolist()


def encode_row_labels(labels: Any, rows: int) -> Payload | None:
    """Labels of each row as a further frame, where `label_token_ids` is a list for each of so many rows; else None."""
    name = "label_token_ids"
    nested = getattr(labels, "ndim", 1) == 2
    if not nested and isinstance(labels, list | tuple):
        first = next(iter(cast("Sequence[object]", labels)), None)
        nested = isinstance(first, list | tuple | np.ndarray)
    if not nested:
        return None
    own = [_ids(name, row, i) for i, row in enumerate(cast("Sequence[object]", labels))]
    if len(own) != rows:
        raise bad(name, f"{name}: {len(own)} lists; {rows}, one for each item", str(rows))
    for i, row in enumerate(own):
        if len(row) != len(own[0]):
            at = f"{name}[{i}]"
            raise bad(at, f"{at}: {len(row)} ids; {len(own[0])}, as many as the first item has", str(len(own[0])))
    if not 0 < len(own[0]) <= MAX_LABELS:
        raise bad(name, f"{name}: {len(own[0])} ids for each item; 1 to {MAX_LABELS}", str(MAX_LABELS))
    flat = np.concatenate(own)
    _no_negative(name, flat, _lengths(own))
    return [FrameSpec("labels", "int32", (rows, len(own[0])))], (_buffer(flat),)


def check_label_texts(labels: Any, ids: Any = None) -> list[str]:
    """`labels` as the wire wants it; None is none. `ids`: what `label_token_ids` is."""
    if labels is None:
        return []
    name = "labels"
    if isinstance(labels, str | bytes | Mapping) or not isinstance(labels, Sequence):
        raise bad(name, f"{name}: {kind(cast('object', labels))}; a list of texts, such as ['yes', 'no']")
    if ids is not None:
        raise bad(name, f"{name}: label_token_ids is given, too; name either texts or token ids")
    found = cast("Sequence[object]", labels)
    if not 0 < len(found) <= MAX_LABELS:
        raise bad(name, f"{name}: {len(found)} texts; 1 to {MAX_LABELS}", str(MAX_LABELS))
    for i, label in enumerate(found):
        at = f"{name}[{i}]"
        if not isinstance(label, str):
            raise bad(at, f"{at}: {kind(label)}; labels are texts, and token ids go into label_token_ids")
        if not 0 < len(label) <= MAX_LABEL_TEXT:
            raise bad(at, f"{at}: {len(label)} characters; 1 to {MAX_LABEL_TEXT}", str(MAX_LABEL_TEXT))
        utf8(at, label)
    return cast("list[str]", [*found])


def check_softmax(softmax: bool, labels: int) -> None:
    """Refuse `apply_softmax` over one label, which is always 1."""
    if softmax and labels == 1:
        raise bad("apply_softmax", "apply_softmax: over one label it is always 1.0; name more labels, or leave it out", "2")


def check_temperature(value: Any, *, softmax: bool) -> float:
    """`temperature`, in its range; without `softmax` it must be 1, since it would have no effect."""
    name, allowed = "temperature", f"{LEAST_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise bad(name, f"{name}: {kind(value)}; a number from {allowed}")
    number = float(cast("float", value))
    if not LEAST_TEMPERATURE <= number <= MAX_TEMPERATURE:
        raise bad(name, f"{name}: {number}; a number from {allowed}", allowed)
    if number != 1.0 and not softmax:
        raise bad(name, f"{name}: {number} without apply_softmax, which alone divides by it; set apply_softmax=True")
    return number
