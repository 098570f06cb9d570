"""Arguments to frames, frames to results: texts, token ids and options of the Python API on one side, buffers on the other.

What needs no knowledge of the model is refused here with the same error that the coordinator would give, in Python's names
(`items[3][7]`, `label_token_ids`). Buffers are always copies: the caller may change its arrays while a request waits.
"""

import math
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypedDict, TypeVar, cast

import numpy as np
import numpy.typing as npt

from enginepool.errors import BadRequest, EngineFailed, Malformed
from enginepool.protocol.basis import MAX_ID
from enginepool.protocol.frames import Buffer
from enginepool.protocol.messages import MAX_LABELS, MAX_PRIORITY, FrameSpec, Result
from enginepool.protocol.updates import WeightsReport

if sys.byteorder != "little":
    raise ImportError("enginepool's Python client needs a little-endian machine: frames are sent as they lie in memory")

#: One row of token ids: a sequence of ints, a one-dimensional integer array, or what numpy makes one of (a CPU tensor).
Ids: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]
Ids32: TypeAlias = npt.NDArray[np.int32]
Floats: TypeAlias = npt.NDArray[np.float32]
Payload: TypeAlias = tuple[list[FrameSpec], tuple[Buffer, ...]]

_MAX_TOKEN = 2**31 - 1
#: Below this a copy is cheaper than a view.
_LARGE = 1 << 16


class ScoreOptions(TypedDict, total=False):
    """The options of `Pool.score` and `Pool.score_pairs`, which say what each one does."""

    label_token_ids: Ids | None
    apply_softmax: bool
    item_first: bool
    return_pooled_hidden_states: bool
    group: str
    priority: int
    timeout: float | None
    retry_busy: bool
    min_version: int


class Usage(NamedTuple):
    """Rows scored and prompt tokens computed, over all parts of a request."""

    items: int
    tokens: int


class ScoreTimings(NamedTuple):
    """Seconds from arrival to first dispatch on the coordinator's clock; longest time of a part in an engine."""

    queued_s: float
    run_s: float


@dataclass(frozen=True, slots=True, eq=False)
class ScoreResult:
    """The answer of a score request.

    Attributes:
        scores: float32 [items, labels]. CausalLM: the probability of each label token, in the order asked. Classifiers and
            reward models: one column for each output of the head.
        hidden: pooled hidden states, float32 [items, size], if asked for.
        version: version of the weights that computed every row.
        forwards: for each batch that held rows of this request, the forward passes that it took, as measured in the engine:
            1 is whole.
        timings: time in the queue and in the engine.
        usage: rows and tokens.
    """

    scores: Floats
    hidden: Floats | None
    version: int
    forwards: tuple[int, ...]
    timings: ScoreTimings
    usage: Usage


def read_result(result: Result, frames: Sequence[Buffer]) -> ScoreResult:
    """The result in an answer whose frames are of the announced lengths; the arrays are the caller's to change.

    Raises:
        Malformed: there are no scores, or they are no numbers.
    """
    arrays = {
        spec.name: np.frombuffer(frame, np.float32).reshape(spec.shape)
        for spec, frame in zip(result.frames, frames, strict=True)
        if spec.dtype == "float32"
    }
    scores = arrays.get("scores")
    if scores is None or scores.ndim != 2:
        raise Malformed("the answer holds no scores float32 [items, labels]", field="scores")
    hidden = arrays.get("hidden")
    return ScoreResult(
        scores if scores.flags.writeable else scores.copy(),
        hidden if hidden is None or hidden.flags.writeable else hidden.copy(),
        result.version,
        tuple(result.forwards),
        ScoreTimings(result.timings.queued_us / 1e6, result.timings.run_us / 1e6),
        Usage(result.usage.items, result.usage.tokens),
    )


def read_weight(report: WeightsReport, frames: Sequence[Buffer]) -> Floats:
    """The weight in a report that was asked for one.

    Raises:
        EngineFailed: the worker that was asked has none of that name, or could not say.
        Malformed: there is none, and no reason.
    """
    for spec, frame in zip(report.frames, frames, strict=True):
        if spec.name == "tensor" and spec.dtype == "float32":
            return np.frombuffer(frame, np.float32).reshape(spec.shape).copy()
    for worker in report.workers:
        if worker.message:
            raise EngineFailed(f"{worker.name}: {worker.message}")
    raise Malformed("the answer holds no tensor", field="tensor")


# --- query and items ---------------------------------------------------------------------------------------------------


def encode_shared(query: str | Ids, items: Sequence[str] | Sequence[Ids] | npt.NDArray[np.integer[Any]]) -> Payload:
    """Frames of one query for all items."""
    rows = _rows("items", items)
    if isinstance(query, str):
        head = _text("query", query)
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
        raise _bad("responses", f"responses: {len(rows)} for {len(heads)} prompts; as many of each", str(len(heads)))
    if isinstance(heads[0], str):
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


def _bad(field: str, message: str, limit: str = "") -> BadRequest:
    return BadRequest(message, field=field, limit=limit)


def _rows(name: str, rows: Any) -> Sequence[Any]:
    if isinstance(rows, str | bytes | bytearray) or not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
        raise _bad(name, f"{name}: {_kind(rows)}; a list of texts, or a list of token id sequences")
    if isinstance(rows, dict):
        raise _bad(name, f"{name}: a dict; a list of texts, or a list of token id sequences")
    if not len(rows):
        raise _bad(name, f"{name}: empty; a score request has at least one item", "1")
    return rows


def _text(where: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise _bad(where, f"{where}: not UTF-8: a lone surrogate at character {error.start}") from None


def _texts(name: str, rows: Sequence[Any], because: str) -> tuple[npt.NDArray[np.uint32], bytes]:
    encoded: list[bytes] = []
    for i, row in enumerate(rows):
        if not isinstance(row, str):
            raise _bad(f"{name}[{i}]", f"{name}[{i}]: {_kind(row)}; {because}, so every item is text")
        encoded.append(_text(f"{name}[{i}]", row))
    return _lengths(encoded), b"".join(encoded)


def _ragged(name: str, rows: Sequence[Any], because: str) -> tuple[npt.NDArray[np.uint32], Ids32]:
    arrays: list[Ids32] = []
    for i, row in enumerate(rows):
        if isinstance(row, str):
            raise _bad(f"{name}[{i}]", f"{name}[{i}]: text; {because}, so every item is token ids")
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
            raise _bad(_at(name, index), f"{_at(name, index)}: {error}") from None
    else:
        raise _bad(_at(name, index), f"{_at(name, index)}: {_kind(row)}; a sequence of token ids")
    if found.dtype == np.int32 and found.ndim == 1:
        return cast("Ids32", found)
    where = _at(name, index)
    if found.ndim != 1:
        raise _bad(where, f"{where}: an array of shape {list(found.shape)}; token ids have one dimension")
    if found.size and found.dtype.kind not in "iu":
        raise _bad(where, f"{where}: an array of {found.dtype}; token ids are integers")
    if found.size and (int(found.max()) > _MAX_TOKEN or int(found.min()) < 0):
        raise _bad_element(where, found.tolist())
    return found.astype(np.int32)


def _at(name: str, index: int | None) -> str:
    return name if index is None else f"{name}[{index}]"


def _bad_element(where: str, values: Iterable[Any]) -> BadRequest:
    """The first element that is no token id, named."""
    for i, value in enumerate(values):
        at = f"{where}[{i}]"
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            return _bad(at, f"{at}: {_kind(cast('object', value))}; a token id is an int")
        number = int(cast("int", value))
        if number < 0:
            return _bad(at, f"{at}: token id {number} is negative", "0")
        if number > _MAX_TOKEN:
            return _bad(at, f"{at}: token id {number} does not fit in 31 bits", str(_MAX_TOKEN))
    return _bad(where, f"{where}: these are no token ids")


def _no_negative(name: str, flat: Ids32, lengths: npt.NDArray[np.uint32] | None) -> None:
    if not flat.size or int(flat.min()) >= 0:
        return
    at = int((flat < 0).argmax())
    if lengths is None:
        where = f"{name}[{at}]"
    else:
        ends = np.cumsum(lengths.astype(np.int64))
        row = int(np.searchsorted(ends, at, side="right"))
        where = f"{name}[{row}][{at - (int(ends[row - 1]) if row else 0)}]"
    raise _bad(where, f"{where}: token id {int(flat[at])} is negative", "0")


def _no_empty(name: str, lengths: npt.NDArray[Any], head: str) -> None:
    if not lengths.all():
        row = int((lengths == 0).argmax())
        raise _bad(f"{name}[{row}]", f"{name}[{row}]: empty, and so is {head}", "1")


def _buffer(flat: Ids32) -> Buffer:
    """`flat` is fresh from concatenate, so a large one needs no second copy."""
    return flat.tobytes() if flat.nbytes < _LARGE else flat.data.cast("B")


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


# --- options -----------------------------------------------------------------------------------------------------------


def check_labels(labels: Any) -> list[int]:
    """`label_token_ids` as the wire wants it; None is none."""
    if labels is None:
        return []
    found = _ids("label_token_ids", labels)
    if len(found) > MAX_LABELS:
        raise _bad("label_token_ids", f"label_token_ids: {len(found)} ids; at most {MAX_LABELS}", str(MAX_LABELS))
    _no_negative("label_token_ids", found, None)
    return found.tolist()


def check_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise _bad(name, f"{name}: {_kind(value)}; True or False")
    return bool(cast("bool", value))


def check_priority(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        shown = value if isinstance(value, float) else _kind(value)
        raise _bad("priority", f"priority: {shown}; an int within ±{MAX_PRIORITY}", str(MAX_PRIORITY))
    priority = int(cast("int", value))
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise _bad("priority", f"priority: {priority} is outside ±{MAX_PRIORITY}", str(MAX_PRIORITY))
    return priority


def check_timeout(value: Any, name: str = "timeout") -> float | None:
    """Seconds, or None for no deadline."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise _bad(name, f"{name}: {_kind(value)}; seconds, or None")
    seconds = float(cast("float", value))
    if not (math.isfinite(seconds) and seconds > 0):
        raise _bad(name, f"{name}: {seconds}; a finite number of seconds, more than 0", "0")
    return seconds


def check_version(value: Any, name: str = "version") -> int:
    """A weight version: an int from 0 on."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise _bad(name, f"{name}: {value if isinstance(value, float) else _kind(value)}; an int from 0 on")
    version = int(cast("int", value))
    if not 0 <= version <= MAX_ID:
        raise _bad(name, f"{name}: {version}; an int from 0 to 2^63 - 1", "0" if version < 0 else str(MAX_ID))
    return version


T = TypeVar("T", bound=str)


def check_choice(name: str, value: T, known: Sequence[str]) -> T:
    """One of a few words."""
    if value not in known:
        raise _bad(name, f"{name}: {value!r}; one of {', '.join(known)}", ", ".join(known))
    return value


def check_name(value: Any) -> str:
    """The name of a weight."""
    if not isinstance(value, str) or not value:
        shown = "empty" if isinstance(value, str) else _kind(value)
        raise _bad("name", f"name: {shown}; the name of a weight in the checkpoint")
    _text("name", value)
    return value


def check_group(value: Any) -> str:
    if not isinstance(value, str):
        raise _bad("group", f"group: {_kind(value)}; the name of a group, or '' where there is one")
    _text("group", value)
    return value
