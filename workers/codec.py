"""Payload frames to arrays and back: what stands between the wire and an engine."""

from itertools import pairwise
from typing import Literal

import msgspec
import numpy as np

from enginepool.protocol.errors import WireError
from enginepool.protocol.frames import check_frames
from enginepool.protocol.messages import Batch, FrameSpec, Part, PartDone, TaskId, Tokenize
from enginepool.workers.engine import BatchScores, EngineError, Lengths, ScoreBatch, ScorePart, Scores
from enginepool.workers.events import Frame

_IDS_ITEMS = [("items", "int32"), ("item_lengths", "uint32")]
_IDS = [("query", "int32"), ("items", "int32"), ("item_lengths", "uint32")]
_IDS_PAIRED = [("query", "int32"), ("query_lengths", "uint32"), ("items", "int32"), ("item_lengths", "uint32")]
_TEXT_ITEMS = [("items", "utf8"), ("item_lengths", "uint32")]
_TEXT = [("query", "utf8"), ("items", "utf8"), ("item_lengths", "uint32")]
_TEXT_PAIRED = [("query", "utf8"), ("query_lengths", "uint32"), ("items", "utf8"), ("item_lengths", "uint32")]

#: by operation, the name of the frame with its rows
_ROWS = {"score": "scores", "embed": "embeddings"}
#: answers below this are copied into bytes, so that they do not keep a larger array alive
_COPY_BELOW = 1 << 16


class _Task(msgspec.Struct):
    """What must be known of work to answer that it cannot be read."""

    type: Literal["batch", "tokenize"]
    batch: TaskId | None = None
    task: TaskId | None = None
    parts: list[msgspec.Raw] = []


_task = msgspec.msgpack.Decoder(_Task)


def name_task(header: Frame) -> Batch | Tokenize | None:
    """The work in a header that cannot be read: its id and its number of parts. None: it is no work, or has no id."""
    try:
        task = _task.decode(header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if task.type == "batch" and task.batch is not None and task.parts:
        return Batch(task.batch, [Part([])] * len(task.parts))
    return Tokenize(task.task, []) if task.type == "tokenize" and task.task is not None else None


def decode_batch(batch: Batch, frames: tuple[Frame, ...]) -> ScoreBatch:
    """The batch that an engine takes. The arrays are read-only views of `frames`.

    Raises:
        WireError: `malformed`, when the frames are not what the header says.
    """
    parts: list[ScorePart] = []
    at = 0
    for i, part in enumerate(batch.parts):
        end = at + len(part.frames)
        parts.append(_decode_part(i, part, frames[at:end]))
        at = end
    if not parts or at != len(frames):
        raise WireError("malformed", f"batch {batch.batch}: {len(parts)} parts list {at} frames and {len(frames)} came")
    if len(operations := {part.operation for part in batch.parts}) > 1:
        raise WireError(
            "malformed", f"batch {batch.batch}: its parts are of {', '.join(sorted(operations))}: one operation each"
        )
    hidden = any(part.hidden for part in batch.parts)
    return ScoreBatch(tuple(parts), batch.priority, hidden, batch.parts[0].operation)


def _decode_part(i: int, part: Part, frames: tuple[Frame, ...]) -> ScorePart:
    check_frames(part.frames, frames)
    layout = [(spec.name, spec.dtype) for spec in part.frames]
    query: Frame = b""
    query_lengths = None
    if layout == _IDS_ITEMS:
        items, lengths = frames
    elif layout == _IDS:
        query, items, lengths = frames
    elif layout == _IDS_PAIRED:
        query, paired, items, lengths = frames
        query_lengths = np.frombuffer(paired, np.uint32)
    else:
        raise WireError("malformed", f"parts[{i}].frames: {layout}: not the frames of token ids", field=f"parts[{i}].frames")
    decoded = ScorePart(
        np.frombuffer(query, np.int32),
        np.frombuffer(items, np.int32),
        np.frombuffer(lengths, np.uint32),
        query_lengths,
        tuple(part.labels),
        part.softmax,
        part.item_first,
        part.logprobs,
        part.dimensions,
        part.normalize,
    )
    _check_lengths(f"parts[{i}].items", decoded.item_lengths, decoded.items.size)
    if query_lengths is not None:
        _check_lengths(f"parts[{i}].query", query_lengths, decoded.query.size)
        _check_pairs(f"parts[{i}].query_lengths", query_lengths, decoded.item_lengths)
    return decoded


def _check_lengths(field: str, lengths: Lengths, size: int) -> None:
    if int(lengths.sum(dtype=np.int64)) != size:
        raise WireError("malformed", f"{field}: the lengths add up to {lengths.sum(dtype=np.int64)}, not {size}", field=field)


def _check_pairs(field: str, query_lengths: Lengths, item_lengths: Lengths) -> None:
    if query_lengths.size != item_lengths.size:
        raise WireError("malformed", f"{field}: {query_lengths.size} queries for {item_lengths.size} items", field=field)


def decode_texts(task: Tokenize, frames: tuple[Frame, ...]) -> list[tuple[str, str]]:
    """The two texts of each row, in the order in which they are joined.

    Raises:
        WireError: `malformed`, when the frames are not what the header says or a row is not UTF-8.
    """
    check_frames(task.frames, frames)
    layout = [(spec.name, spec.dtype) for spec in task.frames]
    if layout == _TEXT_ITEMS:
        items_of = _cut("items", *frames)
        queries = [b""] * len(items_of)
    elif layout == _TEXT:
        query, items, lengths = frames
        items_of = _cut("items", items, lengths)
        queries = [bytes(query)] * len(items_of)
    elif layout == _TEXT_PAIRED:
        query, paired, items, lengths = frames
        items_of = _cut("items", items, lengths)
        queries = _cut("query", query, paired)
        _check_pairs("query_lengths", np.frombuffer(paired, np.uint32), np.frombuffer(lengths, np.uint32))
    else:
        raise WireError("malformed", f"frames: {layout}: not the frames of text", field="frames")
    pairs: list[tuple[str, str]] = []
    for i, (head, item) in enumerate(zip(queries, items_of, strict=True)):
        first, second = (item, head) if task.item_first else (head, item)
        try:
            pairs.append((first.decode(), second.decode()))
        except UnicodeDecodeError as error:
            raise WireError("malformed", f"items[{i}]: not UTF-8: {error.reason}", field=f"items[{i}]") from None
    return pairs


def _cut(field: str, data: Frame, lengths: Frame) -> list[bytes]:
    sizes = np.frombuffer(lengths, np.uint32)
    _check_lengths(field, sizes, len(data))
    ends = [0, *np.cumsum(sizes, dtype=np.int64).tolist()]
    return [bytes(data[start:end]) for start, end in pairwise(ends)]


def encode_rows(rows: list[list[int]]) -> tuple[bytes, bytes]:
    """`items` and `item_lengths` of tokenized rows."""
    ids = np.fromiter((token for row in rows for token in row), np.int32)
    lengths = np.fromiter((len(row) for row in rows), np.uint32)
    return ids.tobytes(), lengths.tobytes()


def encode_scores(scores: BatchScores, operation: str = "score") -> tuple[list[PartDone], tuple[Frame, ...]]:
    """The parts of a `done` message and their payload frames. Shapes are the engine's own: the coordinator checks them."""
    parts: list[PartDone] = []
    frames: list[Frame] = []
    for part in scores.parts:
        if isinstance(part, EngineError):
            parts.append(PartDone(code="engine_error", message=str(part)))
            continue
        specs = [FrameSpec(_ROWS[operation], "float32", part.scores.shape)]
        frames.append(_to_frame(part.scores))
        if part.hidden is not None:
            specs.append(FrameSpec("hidden", "float32", part.hidden.shape))
            frames.append(_to_frame(part.hidden))
        parts.append(PartDone(specs))
    return parts, tuple(frames)


def _to_frame(array: Scores) -> Frame:
    if array.nbytes < _COPY_BELOW:
        return array.tobytes()
    return np.ascontiguousarray(array).data.cast("B")
