"""Rows of different lengths in flat frames: reading, checking and cutting them.

The rows of a request lie in two frames: all values one after the other, and the length of each row. Three layouts:

    ITEMS    items, item_lengths                           rows as they are
    SHARED   query, items, item_lengths                    one query belongs to all items
    PAIRED   query, query_lengths, items, item_lengths     row i of the query belongs to item i

Values are int32 token ids or utf8 bytes; lengths are uint32. Every receiver of such frames checks them here.

Reading a frame of 2,000 ids costs about two microseconds: ids are viewed as uint32, so that one maximum finds both the
largest id and a negative one.
"""

import codecs
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from enginepool.protocol.basis import FrameSpec
from enginepool.protocol.errors import WireError
from enginepool.protocol.frames import Buffer, check_frames

ITEMS = ("items", "item_lengths")
SHARED = ("query", "items", "item_lengths")
PAIRED = ("query", "query_lengths", "items", "item_lengths")

#: token ids are below this
MAX_TOKENS = 2**31
#: Sums over fewer rows are cheaper without numpy.
_FEW = 64
#: Bytes up to which a copy is cheaper than another call of numpy; ids, or bytes of text, that are looked at together.
_JOINED, _PIECE = 1 << 16, 1 << 18


def read_rows(
    specs: Sequence[FrameSpec], frames: Sequence[Buffer], layouts: Sequence[tuple[str, ...]], request: str
) -> tuple[int, int, int, int, int, bool]:
    """(rows, tokens, longest row, largest id, length of the shared query, whether it is text) of checked frames.

    Tokens of a row count its query and its item together; text counts in bytes, and its largest id is -1. The shared query is
    0 for text, without a shared query, and where an item is empty. `request` says in an error what has these layouts.

    Raises:
        WireError: `malformed` for frames that are not what `specs` say, another layout, another dtype or lengths that do not
            fit; `bad_request` for an empty row, a negative id or text that is not UTF-8.
    """
    check_frames(specs, frames)
    names = tuple([spec.name for spec in specs])
    if names not in layouts:
        allowed = ", or ".join(str(list(layout)) for layout in layouts)
        raise WireError("malformed", f"frames: {list(names)}; {request} has {allowed}", field="frames")
    text = specs[0].dtype == "utf8"
    _check_dtypes(specs, text)
    query: Buffer = b""
    query_lengths = None
    if len(frames) == 3:
        query, items, item_lengths = frames
    elif len(frames) == 4:
        query, query_lengths, items, item_lengths = frames
    else:
        items, item_lengths = frames
    rows, tokens, longest, shared = measure(query, query_lengths, items, item_lengths, text)
    if text:
        _check_text("query", query, query_lengths)
        _check_text("items", items, item_lengths)
        return rows, tokens, longest, -1, 0, True
    # One look over both, where a second one costs more than joining them.
    joined = query and len(items) <= _JOINED
    most = max_id(b"".join((query, items))) if joined else max(max_id(query), max_id(items))
    if most >= MAX_TOKENS:
        where, id_ = _first_over(MAX_TOKENS, ("query", query, query_lengths), ("items", items, item_lengths))
        raise bad(where, f"{where}: token id {id_ - 2**32} is negative", "0")
    return rows, tokens, longest, most, shared, False


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
            text_ = f"frame {spec.name!r} must be one-dimensional, got shape {list(spec.shape)}"
            raise WireError("malformed", text_, field=spec.name)


def measure(
    query: Buffer, query_lengths: Buffer | None, items: Buffer, item_lengths: Buffer, text: bool
) -> tuple[int, int, int, int]:
    """(rows, tokens, longest row, length of the shared query); the lengths fit their frames, and no row is empty."""
    unit = 1 if text else 4
    rows = len(item_lengths) // 4
    if not rows:
        raise bad("items", "items: empty; a request has at least one item", "1")
    lengths = memoryview(item_lengths).cast("I") if rows <= _FEW else np.frombuffer(item_lengths, np.uint32)
    total, shortest, longest = _spread(lengths)
    check_sum("items", total, len(items) // unit)
    if query_lengths is None:
        shared = len(query) // unit
        if not shared and not shortest:
            row = next(i for i, n in enumerate(lengths) if not n)
            raise bad(f"items[{row}]", f"items[{row}]: empty, and there is no query before it", "1")
        return rows, total + shared * rows, longest + shared, shared if shortest else 0
    check_pairs(len(query_lengths) // 4, rows)
    if rows <= _FEW:
        heads = memoryview(query_lengths).cast("I").tolist()
        both = [q + n for q, n in zip(heads, lengths, strict=True)]
    else:
        heads = np.frombuffer(query_lengths, np.uint32)
        both = heads.astype(np.int64) + np.frombuffer(item_lengths, np.uint32)
    check_sum("query", _spread(heads)[0], len(query) // unit)
    total, shortest, longest = _spread(both)
    if not shortest:
        row = next(i for i, n in enumerate(both) if not n)
        raise bad(f"items[{row}]", f"items[{row}]: empty, and so is its query", "1")
    return rows, total, longest, 0


def check_sum(name: str, total: int, size: int) -> None:
    """The lengths of the rows of frame `name` add up to its `size`."""
    if total != size:
        field = "query_lengths" if name == "query" else "item_lengths"
        raise WireError("malformed", f"{field}: sum {total}; frame {name!r} has {size}", field=field)


def check_pairs(queries: int, rows: int) -> None:
    """There is one query for each item."""
    if queries != rows:
        raise WireError(
            "malformed", f"query_lengths: {queries} rows for {rows} items", field="query_lengths", limit=str(rows)
        )  # fmt: skip


def _spread(lengths: "memoryview[int] | list[int] | npt.NDArray[Any]") -> tuple[int, int, int]:
    """(sum, minimum, maximum)."""
    if isinstance(lengths, np.ndarray):
        return int(lengths.sum(dtype=np.int64)), int(lengths.min()), int(lengths.max())
    return sum(lengths), min(lengths), max(lengths)


def max_id(ids: Buffer) -> int:
    """The largest id, seen as unsigned: at least MAX_TOKENS when one is negative; -1 when there is none."""
    return int(np.maximum.reduce(np.frombuffer(ids, np.uint32))) if ids else -1


def _first_over(bound: int, *ragged: tuple[str, Buffer, Buffer | None]) -> tuple[str, int]:
    """Where the first id is that is, seen as unsigned, not below `bound`, and what it is. There is one."""
    for name, ids, lengths in ragged:
        view = np.frombuffer(ids, np.uint32)
        first = next((at for at in range(0, len(view), _PIECE) if np.maximum.reduce(view[at : at + _PIECE]) >= bound), None)
        if first is not None:
            at = first + int(np.argmax(view[first : first + _PIECE] >= bound))
            return locate(name, at, np.frombuffer(lengths, np.uint32) if lengths else None), int(view[at])
    raise AssertionError("no such id")


def _not_utf8(text: memoryview) -> tuple[int, bool]:
    """(where the first byte is that is not UTF-8, or the length; whether all of it is ASCII). A long text is decoded piece by
    piece: memory for all of it takes longer than the decoding."""
    if len(text) <= _JOINED:
        try:
            return len(text), str(text, "utf-8").isascii()
        except UnicodeDecodeError as error:
            return error.start, False
    if np.maximum.reduce(np.frombuffer(text, np.uint8)) < 0x80:
        return len(text), True
    decoder = codecs.getincrementaldecoder("utf-8")()
    ascii_ = True
    for start in range(0, len(text), _PIECE):
        before, _ = decoder.getstate()
        try:
            ascii_ &= decoder.decode(text[start : start + _PIECE], start + _PIECE >= len(text)).isascii()
        except UnicodeDecodeError as error:
            return start - len(before) + error.start, False
    return len(text), ascii_


def locate(name: str, at: int, lengths: npt.NDArray[Any] | None) -> str:
    """`items[row][position]` of the value at `at` of a frame; `query[position]` of one without rows."""
    if lengths is None:
        return f"{name}[{at}]"
    ends = np.cumsum(lengths, dtype=np.int64)
    row = int(np.searchsorted(ends, at, side="right"))
    return f"{name}[{row}][{at - (int(ends[row - 1]) if row else 0)}]"


def id_outside(frames: Sequence[Buffer], vocab: int) -> WireError:
    """The refusal of checked ids of which one is not in the vocabulary."""
    query = frames[0] if len(frames) > 2 else b""
    heads = frames[1] if len(frames) == 4 else None
    where, id_ = _first_over(vocab, ("items", frames[-2], frames[-1]), ("query", query, heads))
    return bad(where, f"{where}: token id {id_} is outside the vocabulary of {vocab}", str(vocab))


def _check_text(name: str, frame: Buffer, lengths: Buffer | None) -> None:
    wrong, ascii_ = _not_utf8(memoryview(frame))
    if ascii_:
        return  # and so is each row
    data = np.frombuffer(frame, np.uint8)
    if lengths is None:
        if wrong < len(data):
            raise bad(name, f"{name}: not UTF-8 at byte {wrong}", "")
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
        raise bad(where, f"{where}: not UTF-8 at byte {wrong - (int(ends[row - 1]) if row else 0)}", "")


def bad(field: str, message: str, limit: str) -> WireError:
    return WireError("bad_request", message, field=field, limit=limit)


# --- parts of rows -----------------------------------------------------------------------------------------------------


def row_lengths(frames: Sequence[Buffer], start: int = 0, end: int | None = None) -> list[int]:
    """Tokens of rows `start` to `end` of ids, query and item together."""
    items = memoryview(frames[-1]).cast("I")[start:end]
    if len(frames) == 3 and (shared := len(frames[0]) // 4):
        return [n + shared for n in items]
    if len(frames) == 4:
        return [q + n for q, n in zip(memoryview(frames[1]).cast("I")[start:end], items, strict=True)]
    return items.tolist()


class Offsets:
    """Where rows of ids begin in their frames: the beginning of one row in `STEP` is kept, so that a cut looks at no more
    lengths than that before its own rows."""

    __slots__ = ("_items", "_queries")

    STEP = 256

    def __init__(self, frames: Sequence[Buffer]) -> None:
        self._items = self._sums(frames[-1])
        self._queries = self._sums(frames[1]) if len(frames) == 4 else []

    def _sums(self, lengths: Buffer) -> list[int]:
        if len(lengths) < 4 * self.STEP:
            return [0]
        view = np.frombuffer(lengths, np.uint32)
        sums = np.add.reduceat(view, np.arange(0, len(view), self.STEP), dtype=np.int64)
        return [0, *np.cumsum(sums).tolist()]

    def span(self, name: str, lengths: "memoryview[int]", start: int, end: int) -> tuple[int, int]:
        """(first, count) of the elements that rows `start` to `end` have in the frame `name`, of these lengths."""
        step = start // self.STEP
        known = (self._queries if name == "query" else self._items)[step]
        return known + sum(lengths[step * self.STEP : start]), sum(lengths[start:end])


def cut(
    specs: Sequence[FrameSpec], frames: Sequence[Buffer], offsets: Offsets, start: int, end: int
) -> tuple[list[FrameSpec], list[Buffer]]:
    """Rows `start` to `end` of ids: slices of the same bytes."""
    items = _cut_frame(specs[-2].name, frames[-2], frames[-1], offsets, start, end)
    if len(frames) == 4:
        query = _cut_frame("query", frames[0], frames[1], offsets, start, end)
        return [*query[0], *items[0]], [*query[1], *items[1]]
    return [*specs[:-2], *items[0]], [*frames[:-2], *items[1]]


def _cut_frame(
    name: str, values: Buffer, lengths: Buffer, offsets: Offsets, start: int, end: int
) -> tuple[tuple[FrameSpec, FrameSpec], tuple[Buffer, Buffer]]:
    view = memoryview(lengths).cast("I")
    first, count = offsets.span(name, view, start, end)
    lengths_name = "query_lengths" if name == "query" else "item_lengths"
    return (
        (FrameSpec(name, "int32", (count,)), FrameSpec(lengths_name, "uint32", (end - start,))),
        (memoryview(values)[4 * first : 4 * (first + count)], memoryview(lengths)[4 * start : 4 * end]),
    )
