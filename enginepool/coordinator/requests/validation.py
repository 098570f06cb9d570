"""The door: everything about a score request that can be refused, checked before the queue.

`open_score` checks what needs no knowledge of the model, `check_limits` the rest against a worker's capabilities (at once, or
when the first one is ready; `classes` asks for it). Both name the field, where in it, and the limit. `cut` and `with_ids` are
the only other places that look into payload frames, but for their lengths; neither changes a byte of them.

Reading a frame of 2,000 ids costs about two microseconds: ids are viewed as uint32, so that one maximum finds both the
largest id and a negative one.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from enginepool.coordinator.core.events import Buffer, Work
from enginepool.coordinator.requests.memory import labels_charge
from enginepool.protocol.errors import WireError
from enginepool.protocol.frames import check_frames
from enginepool.protocol.messages import MAX_ID, MAX_PRIORITY, Capabilities, FrameSpec, Part, Score

_SHARED = ("query", "items", "item_lengths")
_PAIRED = ("query", "query_lengths", "items", "item_lengths")
_INT31 = 2**31
#: A row's index is named in an error up to this many rows in; sums over fewer rows are cheaper without numpy.
_FEW = 64


def open_score(score: Score, frames: Sequence[Buffer]) -> Work:
    """The work that a `score` message asks for.

    Raises:
        WireError: `malformed` for frames that do not fit their header, `bad_request` for a value that nothing could serve.
    """
    if not 0 <= score.id <= MAX_ID:
        raise _bad("id", f"id: {score.id} is outside 0..{MAX_ID}", str(MAX_ID))
    if not -MAX_PRIORITY <= score.priority <= MAX_PRIORITY:
        raise _bad("priority", f"priority: {score.priority} is outside ±{MAX_PRIORITY}", str(MAX_PRIORITY))
    if not 0 <= score.min_version <= MAX_ID:
        raise _bad("min_version", f"min_version: {score.min_version} is outside 0..{MAX_ID}", str(MAX_ID))
    if score.timeout_ms is not None and score.timeout_ms <= 0:
        raise _bad("timeout_ms", f"timeout_ms: {score.timeout_ms}; a timeout is more than 0", "0")
    labels = score.labels
    max_label = -1
    if labels:
        max_label = max(labels)
        if min(labels) < 0 or max_label >= _INT31:
            at = next(i for i, label in enumerate(labels) if not 0 <= label < _INT31)
            raise _bad("labels", f"labels[{at}]: {labels[at]}; a token id is 0 to {_INT31 - 1}", str(_INT31 - 1))
        if score.softmax and len(labels) == 1:
            raise _bad("softmax", "softmax: over one label it is always 1.0; name more labels, or leave softmax out", "2")
    specs = score.frames
    check_frames(specs, frames)
    names = tuple([spec.name for spec in specs])
    if names == _SHARED:
        query, items, item_lengths = frames
        query_lengths = None
    elif names == _PAIRED:
        query, query_lengths, items, item_lengths = frames
    else:
        raise WireError(
            "malformed",
            f"frames: {list(names)}; a score request has {list(_SHARED)}, or {list(_PAIRED)}",
            field="frames",
        )
    text = specs[0].dtype == "utf8"
    _check_dtypes(specs, text)
    rows, tokens, longest, shared = _measure(query, query_lengths, items, item_lengths, text)
    if text or score.item_first:
        shared = 0
    if text:
        max_id = -1
        _check_text("query", query, query_lengths)
        _check_text("items", items, item_lengths)
    else:
        # One look over both: a second one costs more than joining them.
        max_id = _max_id(b"".join((query, items)))
        if max_id >= _INT31:
            raise _negative_id(("query", query, query_lengths), ("items", items, item_lengths))
    nbytes = sum(map(len, frames))
    part = Part(specs, labels, score.softmax, score.item_first, score.logprobs)
    shape = (score.group, tuple(labels), score.softmax, score.item_first, score.logprobs, score.raw, score.hidden)
    digest = hash((*shape, score.min_version, names, *frames))
    charge = None if text or score.hidden or not labels else labels_charge(rows, len(labels), nbytes)
    return Work(
        score.group, rows, tokens, longest, max_id, max_label, score.hidden, text, nbytes, digest, part, tuple(frames), shared,
        score.raw, charge,
    )  # fmt: skip


def check_limits(work: Work, can: Capabilities, *, alone: bool = True) -> WireError | None:
    """What stands against `work` on a plain worker of these capabilities; None when it can be served.

    Without `alone`, what stands against it on any worker of this model, whatever its size and class.
    """
    if can.kind == "causal" and work.max_label < 0:
        return _bad("labels", "labels: a causal model scores label token ids; name at least one", "1")
    if can.kind == "classifier":
        if work.max_label >= 0:
            return _bad("labels", f"labels: a classifier has its own {can.labels} labels; name none", "0")
        if wrong := _check_outputs(work, can):
            return wrong
    if work.max_label >= can.vocab:
        return _bad("labels", f"labels: id {work.max_label} is outside the vocabulary of {can.vocab}", str(can.vocab))
    if work.text and not can.text:
        return _bad("query", "query: the model has no tokenizer: send token ids", "")
    if work.max_id >= can.vocab:
        return _bad(*_locate_id(work, can.vocab))
    if can.separator is not None and not work.text and not work.raw and (wrong := _check_separated(work, can.separator)):
        return wrong
    if not alone:
        return None
    if work.hidden and not can.hidden:
        return _bad("hidden", "hidden: this model returns no pooled hidden states", "0")
    if work.text:
        return None
    longest = longest_row(can)
    if work.longest > longest:
        row, length = next((i, n) for i, n in enumerate(row_lengths(work)) if n > longest)
        text = f"items[{row}]: {length} tokens with its query; at most {longest}{_of_context(can, longest)}"
        return _bad(f"items[{row}]", text, str(longest))
    return None


def _check_outputs(work: Work, can: Capabilities) -> WireError | None:
    """What stands against how `work` wants the outputs of a classifier's head."""
    if work.part.softmax and can.labels == 1:
        return _bad("softmax", "softmax: this model's head has one output, over which it is always 1.0; leave it out", "2")
    if work.part.logprobs and not work.part.softmax and not can.activation:
        return _bad("logprobs", "logprobs: this model's head gives logits, not probabilities; add softmax", "")
    return None


def _of_context(can: Capabilities, longest: int) -> str:
    """Why a row may not be as long as the model's context, where that is what bounds it."""
    if not can.reserved or longest != can.context:
        return ""
    return f": the model's context of {can.context + can.reserved}, less {can.reserved} that the engine reserves"


def longest_row(can: Capabilities) -> int:
    """Tokens of the longest row, query and item together, that a worker of these capabilities is given."""
    return min(can.context, can.inflight_tokens - (can.page - 1))


def _check_separated(work: Work, separator: int) -> WireError | None:
    """The first row whose query and item have no separator between them; rows of one of the two have nothing to separate."""
    frames = work.frames
    rows = len(frames[-1]) // 4
    texts = [
        (np.frombuffer(frames[0], np.int32), frames[1] if len(frames) == 4 else None),
        (np.frombuffer(frames[-2], np.int32), frames[-1]),
    ]
    first, second = reversed(texts) if work.part.item_first else texts
    last, some = _edge(*first, rows, end=True)
    next_, more = _edge(*second, rows, end=False)
    wrong = np.flatnonzero(some & more & (last != separator) & (next_ != separator))
    if not wrong.size:
        return None
    at = f"items[{wrong[0]}]"
    text = f"{at}: no separator token {separator} between query and item; end the query with it, or say raw=True"
    return _bad(at, text, str(separator))


def _edge(
    ids: npt.NDArray[np.int32], lengths: Buffer | None, rows: int, *, end: bool
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """(the last id of each row, or the first one, which rows have any); without `lengths` all rows are `ids`."""
    if lengths is None:
        return np.full(rows, ids[-1 if end else 0] if ids.size else 0, np.int32), np.full(rows, ids.size > 0)
    sizes = np.frombuffer(lengths, np.uint32).astype(np.int64)
    ends = np.cumsum(sizes)
    some = sizes > 0
    edges = np.zeros(rows, np.int32)
    edges[some] = ids[(ends - 1 if end else ends - sizes)[some]]
    return edges, some


def row_lengths(work: Work, start: int = 0, end: int | None = None) -> list[int]:
    """Tokens of rows `start` to `end`, query and item together."""
    specs, frames = work.part.frames, work.frames
    items = memoryview(frames[-1]).cast("I")[start:end]
    if len(specs) == 3:
        shared = specs[0].shape[0]
        return [n + shared for n in items]
    return [q + n for q, n in zip(memoryview(frames[1]).cast("I")[start:end], items, strict=True)]


class Offsets:
    """Where the rows of `work` begin in its frames: the beginning of one row in `STEP` is kept, so that a cut looks at no more
    lengths than that before its own rows."""

    __slots__ = ("_items", "_queries")

    STEP = 256

    def __init__(self, work: Work) -> None:
        frames = work.frames
        self._items = self._sums(frames[-1])
        self._queries = self._sums(frames[1]) if len(frames) == 4 else []

    def _sums(self, lengths: Buffer) -> list[int]:
        view = np.frombuffer(lengths, np.uint32)
        sums = np.add.reduceat(view, np.arange(0, len(view), self.STEP), dtype=np.int64)
        return [0, *np.cumsum(sums).tolist()]

    def span(self, name: str, lengths: "memoryview[int]", start: int, end: int) -> tuple[int, int]:
        """(first, count) of the elements that rows `start` to `end` have in the frame `name`, of these lengths."""
        step = start // self.STEP
        known = (self._queries if name == "query" else self._items)[step]
        return known + sum(lengths[step * self.STEP : start]), sum(lengths[start:end])


def cut(work: Work, offsets: Offsets, start: int, end: int) -> tuple[Part, list[Buffer]]:
    """Rows `start` to `end` of `work`, as a part with its frames: slices of the same bytes."""
    part, frames = work.part, work.frames
    name = part.frames[-2].name
    items, item_lengths, items_spec, lengths_spec = _cut_ragged(name, frames[-2], frames[-1], offsets, start, end)
    if len(frames) == 3:
        specs = [part.frames[0], items_spec, lengths_spec]
        buffers: list[Buffer] = [frames[0], items, item_lengths]
    else:
        query, query_lengths, query_spec, query_lengths_spec = _cut_ragged(
            "query", frames[0], frames[1], offsets, start, end
        )  # fmt: skip
        specs = [query_spec, query_lengths_spec, items_spec, lengths_spec]
        buffers = [query, query_lengths, items, item_lengths]
    return Part(specs, part.labels, part.softmax, part.item_first, part.logprobs), buffers


def with_ids(work: Work, specs: Sequence[FrameSpec], frames: Sequence[Buffer]) -> Work:
    """The text `work` with its rows replaced by token ids, frames `items` and `item_lengths` of as many rows.

    Raises:
        WireError: `malformed`: these are not the ids of that work.
    """
    if [(s.name, s.dtype) for s in specs] != [("items", "int32"), ("item_lengths", "uint32")]:
        raise WireError("malformed", "tokenized: frames are not items int32 and item_lengths uint32", field="frames")
    items, item_lengths = frames
    rows, tokens, longest, _ = _measure(b"", None, items, item_lengths, False)
    if rows != work.rows:
        raise WireError("malformed", f"tokenized: {rows} rows for {work.rows}", field="item_lengths")
    max_id = _max_id(items)
    if max_id >= _INT31:
        raise _negative_id(("items", items, item_lengths))
    all_specs = [FrameSpec("query", "int32", (0,)), *specs]
    part = Part(all_specs, work.part.labels, work.part.softmax, work.part.item_first, work.part.logprobs)
    return Work(
        work.group, rows, tokens, longest, max_id, work.max_label, work.hidden, False,
        len(items) + len(item_lengths), work.digest, part, (b"", items, item_lengths),
    )  # fmt: skip


# --- the parts of the door ---------------------------------------------------------------------------------------------


def _bad(field: str, message: str, limit: str) -> WireError:
    return WireError("bad_request", message, field=field, limit=limit)


def _check_dtypes(specs: Sequence[FrameSpec], text: bool) -> None:
    content = "utf8" if text else "int32"
    if len(specs) == 3:
        query, items, lengths = specs
        if (
            items.dtype == query.dtype == content
            and lengths.dtype == "uint32"
            and len(query.shape) == len(items.shape) == len(lengths.shape) == 1
        ):
            return
    for spec in specs:
        want = "uint32" if spec.name.endswith("_lengths") else content
        if spec.dtype != want:
            raise WireError(
                "malformed",
                f"frame {spec.name!r} is {spec.dtype}; query and items are both int32 or both utf8, lengths are uint32",
                field=spec.name,
                limit=want,
            )
        if len(spec.shape) != 1:
            raise WireError("malformed", f"frame {spec.name!r} has shape {list(spec.shape)}; one side", field=spec.name)


def _measure(
    query: Buffer, query_lengths: Buffer | None, items: Buffer, item_lengths: Buffer, text: bool
) -> tuple[int, int, int, int]:
    """(rows, tokens, longest row, `Work.shared`), with the lengths held to their frames. Text counts in bytes."""
    unit = 1 if text else 4
    rows = len(item_lengths) // 4
    if not rows:
        raise _bad("items", "items: empty; a score request has at least one item", "1")
    lengths = memoryview(item_lengths).cast("I") if rows <= _FEW else np.frombuffer(item_lengths, np.uint32)
    total, shortest, longest = _spread(lengths)
    if total * unit != len(items):
        raise WireError(
            "malformed", f"item_lengths: sum {total}; frame 'items' has {len(items) // unit}", field="item_lengths"
        )  # fmt: skip
    if query_lengths is None:
        shared = len(query) // unit
        if not shared and not shortest:
            row = next(i for i, n in enumerate(lengths) if not n)
            raise _bad(f"items[{row}]", f"items[{row}]: empty, and so is the query", "1")
        return rows, total + shared * rows, longest + shared, shared if shortest else 0
    if len(query_lengths) != len(item_lengths):
        raise WireError(
            "malformed",
            f"query_lengths: {len(query_lengths) // 4} rows for {rows} items",
            field="query_lengths",
            limit=str(rows),
        )
    heads = np.frombuffer(query_lengths, np.uint32)
    heads_total = int(heads.sum(dtype=np.int64))
    if heads_total * unit != len(query):
        raise WireError(
            "malformed", f"query_lengths: sum {heads_total}; frame 'query' has {len(query) // unit}", field="query_lengths"
        )  # fmt: skip
    both = heads.astype(np.int64) + np.frombuffer(item_lengths, np.uint32)
    if not both.min():
        row = int(both.argmin())
        raise _bad(f"items[{row}]", f"items[{row}]: empty, and so is its query", "1")
    return rows, int(both.sum()), int(both.max()), 0


def _spread(lengths: "memoryview[int] | npt.NDArray[np.uint32]") -> tuple[int, int, int]:
    """(sum, minimum, maximum)."""
    if isinstance(lengths, memoryview):
        return sum(lengths), min(lengths), max(lengths)
    return int(lengths.sum(dtype=np.int64)), int(lengths.min()), int(lengths.max())


def _max_id(ids: Buffer) -> int:
    """The largest id, seen as unsigned: over 31 bits when one is negative; -1 when there is none."""
    return int(np.maximum.reduce(np.frombuffer(ids, np.uint32))) if ids else -1


def _negative_id(*ragged: tuple[str, Buffer, Buffer | None]) -> WireError:
    for name, ids, lengths in ragged:
        view = np.frombuffer(ids, np.uint32)
        if len(view) and int(view.max()) >= _INT31:
            at = int(view.argmax())
            where = _where(name, at, lengths)
            return _bad(where, f"{where}: token id {int(view[at]) - 2**32} is negative", "0")
    raise AssertionError("no id is negative")


def _where(name: str, at: int, lengths: Buffer | None) -> str:
    """`items[row][position]` of the id at `at` in a ragged frame."""
    if lengths is None:
        return f"{name}[{at}]"
    ends = np.cumsum(np.frombuffer(lengths, np.uint32).astype(np.int64))
    row = int(np.searchsorted(ends, at, side="right"))
    return f"{name}[{row}][{at - (int(ends[row - 1]) if row else 0)}]"


def _locate_id(work: Work, vocab: int) -> tuple[str, str, str]:
    frames = work.frames
    ragged = [("items", frames[-2], frames[-1]), ("query", frames[0], frames[1] if len(frames) == 4 else None)]
    for name, ids, lengths in ragged:
        view = np.frombuffer(ids, np.uint32)
        over = np.flatnonzero(view >= vocab)
        if len(over):
            where = _where(name, int(over[0]), lengths)
            return where, f"{where}: token id {int(view[over[0]])} is outside the vocabulary of {vocab}", str(vocab)
    raise AssertionError("no id is outside the vocabulary")


def _check_text(name: str, frame: Buffer, lengths: Buffer | None) -> None:
    data = np.frombuffer(frame, np.uint8)
    wrong = len(data)
    try:
        str(memoryview(frame), "utf-8")
    except UnicodeDecodeError as error:
        wrong = error.start
    if lengths is None:
        if wrong < len(data):
            raise _bad(name, f"{name}: not UTF-8 at byte {wrong}", "")
        return
    # A whole is UTF-8 in each of its rows when no row begins inside a character. There may be millions of rows.
    counts = np.frombuffer(lengths, np.uint32)
    begins = np.cumsum(counts[counts > 0], dtype=np.int64)
    begins = begins[begins < wrong]
    torn = begins[data[begins] & 0xC0 == 0x80]
    if len(torn):
        # The row before ends in the middle of the character whose first byte is its last one that is no continuation.
        wrong = int(torn[0]) - 1
        while data[wrong] & 0xC0 == 0x80:
            wrong -= 1
    if wrong < len(data):
        ends = np.cumsum(counts, dtype=np.int64)
        row = int(np.searchsorted(ends, wrong, side="right"))
        where = f"{name}[{row}]"
        raise _bad(where, f"{where}: not UTF-8 at byte {wrong - (int(ends[row - 1]) if row else 0)}", "")


def _cut_ragged(
    name: str, values: Buffer, lengths: Buffer, offsets: Offsets, start: int, end: int
) -> tuple[Buffer, Buffer, FrameSpec, FrameSpec]:
    view = memoryview(lengths).cast("I")
    first, count = offsets.span(name, view, start, end)
    return (
        memoryview(values)[4 * first : 4 * (first + count)],
        memoryview(lengths)[4 * start : 4 * end],
        FrameSpec(name, "int32", (count,)),
        FrameSpec("query_lengths" if name == "query" else "item_lengths", "uint32", (end - start,)),
    )
