"""Payload frames to arrays and back: what stands between the wire and an engine."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import msgspec
import numpy as np

from enginepool.protocol.errors import WireError
from enginepool.protocol.frames import check_frames
from enginepool.protocol.media import read_media
from enginepool.protocol.messages import (
    MAX_SEQUENCES,
    MAX_TOP_LOGPROBS,
    Batch,
    Done,
    FrameSpec,
    Part,
    PartDone,
    Sampling,
    StartGeneration,
    TaskId,
    Tokenize,
    Tokenized,
)
from enginepool.protocol.ragged import ITEMS, PAIRED, SHARED, read_rows
from enginepool.protocol.row_labels import check_row_labels, has_row_labels
from enginepool.workers.engine import BatchOutcome, EngineError, Floats, GenerationTask, Ids, RowBatch, RowPart, TaskMedium
from enginepool.workers.events import Frame
from enginepool.workers.texts import TextIds, TextTask, common_prefix

#: answers below this are copied into bytes, so that they do not keep a larger array alive
_COPY_BELOW = 1 << 16


class _Task(msgspec.Struct):
    """What must be known of work to answer that it cannot be read."""

    type: Literal["batch", "tokenize", "start"]
    batch: TaskId | None = None
    task: TaskId | None = None
    parts: list[msgspec.Raw] = []


_task = msgspec.msgpack.Decoder(_Task)


def name_task(header: Frame) -> Batch | Tokenize | StartGeneration | None:
    """The work in a header that cannot be read: its id and its number of parts. None: it is no work, or has no id."""
    try:
        task = _task.decode(header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if task.type == "batch" and task.batch is not None and task.parts:
        return Batch(task.batch, [Part([])] * len(task.parts))
    if task.task is None:
        return None
    return Tokenize(task.task, []) if task.type == "tokenize" else StartGeneration(task.task, [], Sampling())


def decode_batch(batch: Batch, frames: tuple[Frame, ...]) -> RowBatch:
    """The batch that an engine takes. The arrays are read-only views of `frames`.

    Raises:
        WireError: when the frames are not what the header says.
    """
    parts: list[RowPart] = []
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
    return RowBatch(tuple(parts), batch.priority, hidden, batch.parts[0].operation, batch.packed)


def _decode_part(i: int, part: Part, frames: tuple[Frame, ...]) -> RowPart:
    labels, specs = None, part.frames
    if has_row_labels(specs) and len(specs) == len(frames):
        rows = frames[-2]
        check_row_labels(specs[-1], frames[-1], len(rows) // 4)
        labels = np.frombuffer(frames[-1], np.int32).reshape(specs[-1].shape)
        specs, frames = specs[:-1], frames[:-1]
    query, query_lengths, items, lengths = _read(f"parts[{i}]", specs, frames, text=False)
    return RowPart(
        np.frombuffer(query, np.int32),
        np.frombuffer(items, np.int32),
        np.frombuffer(lengths, np.uint32),
        None if query_lengths is None else np.frombuffer(query_lengths, np.uint32),
        part,
        labels,
    )


def _read(
    name: str, specs: Sequence[FrameSpec], frames: tuple[Frame, ...], *, text: bool
) -> tuple[Frame, Frame | None, Frame, Frame]:
    """(query, query lengths or None, items, item lengths) of rows, checked."""
    try:
        *_, is_text = read_rows(specs, frames, (ITEMS, SHARED, PAIRED), name)
    except WireError as error:
        # The coordinator has checked the request: only the message can be wrong.
        raise WireError("malformed", f"{name}: {error.message}", field=f"{name}.{error.field}") from None
    if is_text != text:
        raise WireError(
            "malformed", f"{name}: expected {'text' if text else 'token ids'}, got {specs[0].dtype}", field="frames"
        )
    *queries, items, lengths = frames
    return queries[0] if queries else b"", queries[1] if len(queries) > 1 else None, items, lengths


def decode_texts(task: Tokenize, frames: tuple[Frame, ...]) -> TextTask:
    """What an engine tokenizes.

    Raises:
        WireError: when the frames are not what the header says or a row is not UTF-8.
    """
    if task.labels and not task.frames and not frames:
        return TextTask([], task)
    if task.chat is not None and len(task.frames) != 2:
        raise WireError("malformed", f"tokenize: {len(task.frames)} frames; chats have 2", field="frames")
    query, query_lengths, items, lengths = _read("tokenize", task.frames, frames, text=True)
    rows = _cut(items, lengths)
    queries = [str(query, "utf-8")] * len(rows) if query_lengths is None else _cut(query, query_lengths)
    pairs = zip(rows, queries, strict=True) if task.item_first else zip(queries, rows, strict=True)
    return TextTask(list(pairs), task)


def decode_ids(task: Tokenize, frames: tuple[Frame, ...]) -> list[list[int]]:
    """The rows of token ids whose texts are wanted.

    Raises:
        WireError: when the frames are not what the header says.
    """
    if len(task.frames) != 2:
        raise WireError("malformed", f"tokenize: {len(task.frames)} frames; ids to decode have 2", field="frames")
    _, _, items, lengths = _read("tokenize", task.frames, frames, text=False)
    ids = np.frombuffer(items, np.int32).tolist()
    return [ids[start:end] for start, end in pairwise(_ends(lengths))]


def decode_generation(start: StartGeneration, frames: tuple[Frame, ...]) -> GenerationTask:
    """The generation that an engine takes. The prompt is a read-only view of its frame.

    Raises:
        WireError: when the frames are not what the header says.
    """
    media: tuple[TaskMedium, ...] = ()
    specs = start.frames
    if start.media:
        read = read_media(start.media, specs[1:], frames[1:], 1)
        ends = _ends(frames[2])
        data = memoryview(frames[1])
        media = tuple(
            TaskMedium(one.kind, one.source, bytes(data[begin:end]))
            for one, (begin, end) in zip(read.media, pairwise(ends), strict=True)
        )
        specs, frames = specs[:1], frames[:1]
    check_frames(specs, frames)
    found = [(spec.name, spec.dtype, len(spec.shape)) for spec in specs]
    if found != [("prompt", "int32", 1)] or not len(frames[0]):
        raise WireError("malformed", f"generation {start.task}: its frames are {found}; expected prompt, int32, not empty")
    if not 1 <= start.n <= MAX_SEQUENCES or start.at < 0 or start.sampling.max_new_tokens < 1:
        raise WireError(
            "malformed",
            f"generation {start.task}: n = {start.n}, at = {start.at}, max_new_tokens = {start.sampling.max_new_tokens};"
            f" expected n in 1..{MAX_SEQUENCES}, at 0 or more, max_new_tokens 1 or more",
        )
    wanted = start.prompt_logprobs
    if not 0 <= start.top_logprobs <= MAX_TOP_LOGPROBS or not 0 <= wanted <= len(frames[0]) // 4:
        raise WireError(
            "malformed",
            f"generation {start.task}: top_logprobs = {start.top_logprobs}, prompt_logprobs = {wanted};"
            f" expected top_logprobs in 0..{MAX_TOP_LOGPROBS}, prompt_logprobs in 0..{len(frames[0]) // 4}",
        )
    prompt = np.frombuffer(frames[0], np.int32)
    return GenerationTask(
        prompt, start.sampling, start.n, start.logprobs, start.priority, start.at, start.top_logprobs, wanted, media,
        start.adapter, start.hidden_states, start.routed_experts,
    )  # fmt: skip


def _cut(data: Frame, lengths: Frame) -> list[str]:
    return [str(data[start:end], "utf-8") for start, end in pairwise(_ends(lengths))]


def _ends(lengths: Frame) -> list[int]:
    """Where each row ends, after a 0."""
    return [0, *np.cumsum(np.frombuffer(lengths, np.uint32), dtype=np.int64).tolist()]


def encode_ids(task: TaskId, found: TextIds, *, share: bool = False) -> tuple[Tokenized, tuple[Frame, ...]]:
    """The answer to a tokenizing task, with `items` and `item_lengths`; to `share`, with a `query` that all rows begin with."""
    rows = found.rows
    if not rows:
        return Tokenized(task, labels=found.labels), ()
    query = common_prefix(rows) if share else 0
    ids = np.fromiter((token for row in rows for token in row[query:]), np.int32)
    lengths = np.fromiter((len(row) - query for row in rows), np.uint32)
    specs = [FrameSpec("items", "int32", ids.shape), FrameSpec("item_lengths", "uint32", lengths.shape)]
    frames: tuple[Frame, ...] = (ids.tobytes(), lengths.tobytes())
    if query:
        specs.insert(0, FrameSpec("query", "int32", (query,)))
        frames = (np.array(rows[0][:query], np.int32).tobytes(), *frames)
    return Tokenized(task, specs, truncated=found.truncated, labels=found.labels), frames


def encode_texts(task: TaskId, texts: Sequence[str]) -> tuple[Tokenized, tuple[Frame, ...]]:
    """The answer to a task to decode, with `texts` and `text_lengths`."""
    # What a tokenizer makes of a part of a character may be half of a pair, which no UTF-8 has.
    rows = [text.encode("utf-8", "replace") for text in texts]
    joined = b"".join(rows)
    specs = [FrameSpec("texts", "utf8", (len(joined),)), FrameSpec("text_lengths", "uint32", (len(rows),))]
    return Tokenized(task, specs), (joined, np.fromiter(map(len, rows), np.uint32).tobytes())


def encode_outcome(batch: TaskId, outcome: BatchOutcome, run_us: int) -> tuple[Done, tuple[Frame, ...]]:
    """The answer to a batch, with the frames of its parts. Shapes are the engine's own: the coordinator checks them."""
    parts: list[PartDone] = []
    frames: list[Frame] = []
    for part in outcome.parts:
        if isinstance(part, EngineError):
            parts.append(PartDone(code="engine_error", message=str(part)))
            continue
        parts.append(PartDone([_described(name, values) for name, values in part.items()]))
        frames += map(_to_frame, part.values())
    return Done(batch, parts, outcome.version, outcome.forwards, run_us), tuple(frames)


def failed(work: Batch | Tokenize, message: str, code: str, version: int) -> Done | Tokenized:
    """The answer to work that failed: of a batch, every part has."""
    if isinstance(work, Tokenize):
        return Tokenized(work.task, code=code, message=message)
    return Done(work.batch, [PartDone(code=code, message=message)] * len(work.parts), version, forwards=0)


def _described(name: str, values: Floats | Ids) -> FrameSpec:
    return FrameSpec(name, "int32" if values.dtype == np.int32 else "float32", values.shape)


def _to_frame(array: Floats | Ids) -> Frame:
    if array.nbytes < _COPY_BELOW:
        return array.tobytes()
    return np.ascontiguousarray(array).data.cast("B")
