"""Truncation: a row of ids that is longer than its worker takes loses ids on one side. Pure.

What is cut is the item, and the query is kept; of a request for logprobs it is the prompt, and every response is kept. Text is
cut by the worker that tokenizes it, which knows where an item begins.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from enginepool.coordinator.operations.base import Work, longest_row
from enginepool.protocol.frames import Buffer
from enginepool.protocol.messages import Capabilities, FrameSpec
from enginepool.protocol.ragged import ITEMS, PAIRED, SHARED, bad, read_rows

Lengths = npt.NDArray[np.int64]


def truncate(work: Work, longest: int) -> Work:
    """`work` of ids with rows of at most `longest` ids.

    Raises:
        WireError: `bad_request`: of a row no id would be left of what is cut.
    """
    rows, frames = work.rows, work.frames
    items = np.frombuffer(frames[-1], np.uint32).astype(np.int64)
    if len(frames) == 4:
        queries = np.frombuffer(frames[1], np.uint32).astype(np.int64)
    else:
        queries = np.full(rows, len(frames[0]) // 4 if len(frames) == 3 else 0, np.int64)
    if work.operation.truncates == "items":
        kept, cut, room = queries, items, longest - queries
    else:
        kept, cut, room = items, queries, longest - items
    if len(frames) == 3 and work.operation.truncates == "query":
        room = np.full(rows, room.min())  # one prompt for all rows: it is cut for all
    over = cut > room
    if not over.any():
        return work
    _refuse_nothing_left(work, kept, over & (room < 1), longest)
    left = np.where(over, room, cut)
    return _with_frames(work, _cut(work, cut, left), int(over.sum()))


def _refuse_nothing_left(work: Work, kept: Lengths, wrong: npt.NDArray[np.bool_], longest: int) -> None:
    if not wrong.any():
        return
    row = int(np.where(wrong, kept, -1).argmax())
    of_items = work.operation.truncates == "items"
    name = "query" if of_items else "items"
    at = name if of_items and len(work.frames) == 3 else f"{name}[{row}]"
    cut = "item" if of_items else "prompt"
    text = f"{at}: {kept[row]} tokens, which are not truncated; at most {longest - 1}, so that one of its {cut} is left"
    raise bad(at, text, str(longest - 1))


def _cut(work: Work, lengths: Lengths, left: Lengths) -> list[Buffer]:
    """The frames of `work` with so many ids `left` of each of the rows that are cut."""
    frames = list(work.frames)
    at = -2 if work.operation.truncates == "items" else 0
    ids = np.frombuffer(frames[at], np.int32)
    keeps_end = work.truncation == "left"
    if at == 0 and len(frames) == 3:
        frames[0] = ids[-int(left[0]) :].tobytes()
        return frames
    ends = np.cumsum(lengths)
    starts = ends - (left if keeps_end else lengths)
    pieces = [ids[start : start + count] for start, count in zip(starts.tolist(), left.tolist(), strict=True)]
    frames[at] = np.concatenate(pieces).tobytes()
    frames[at + 1] = left.astype(np.uint32).tobytes()
    return frames


def _with_frames(work: Work, frames: Sequence[Buffer], truncated: int) -> Work:
    specs = [FrameSpec(spec.name, spec.dtype, (len(frame) // 4,)) for spec, frame in zip(work.part.frames, frames, strict=True)]
    _, tokens, longest, max_id, shared, _ = read_rows(specs, frames, (ITEMS, SHARED, PAIRED), "a truncated request")
    return replace(
        work,
        tokens=tokens,
        longest=longest,
        max_id=max_id,
        nbytes=sum(map(len, frames)) + len(work.row_labels),
        part=replace(work.part, frames=specs),
        frames=tuple(frames),
        shared=shared if work.shared else 0,
        charge=None,
        truncated=truncated,
    )


def fitted(work: Work, can: Capabilities | None) -> Work:
    """`work`, truncated to what the workers of its group take, as far as it asks for that and they are known.

    Raises:
        WireError: as `truncate`.
    """
    if work.truncation not in ("left", "right") or work.text or can is None:
        return work
    longest = longest_row(can)
    if work.longest <= longest:
        return work
    return truncate(work, longest)
