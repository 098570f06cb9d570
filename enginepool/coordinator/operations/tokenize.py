"""Tokenizing: the text of a request becomes token ids at a worker, and the request a work of ids."""

from collections.abc import Sequence

from msgspec.structs import replace

from enginepool.coordinator.operations.base import Work
from enginepool.coordinator.operations.labels import with_labels
from enginepool.protocol.errors import WireError
from enginepool.protocol.frames import Buffer
from enginepool.protocol.messages import FrameSpec
from enginepool.protocol.ragged import ITEMS, SHARED, read_rows


def with_ids(
    work: Work, specs: Sequence[FrameSpec], frames: Sequence[Buffer], truncated: int = 0, labels: Sequence[int] = ()
) -> Work:
    """The text `work` with its rows replaced by token ids, of as many rows, of which so many were truncated, and the texts of
    its labels by these tokens. The frames are `items` and `item_lengths`, of whole rows; or before them the `query` that all
    rows begin with.

    Raises:
        WireError: these are not the ids of that work.
    """
    work = with_labels(work, labels)
    if not work.text:
        return work  # only the labels were text
    layouts = (ITEMS, SHARED) if work.operation.shares else (ITEMS,)
    rows, tokens, longest, max_id, shared, text = read_rows(specs, frames, layouts, "tokenized")
    if text:
        raise WireError("malformed", "tokenized: the items are utf8; they must be int32", field="frames")
    if rows != (asked := len(work.frames[-1]) // 4):
        raise WireError("malformed", f"tokenized: expected {asked} rows, got {rows}", field="item_lengths")
    if not 0 <= truncated <= rows:
        raise WireError("malformed", f"tokenized: truncated = {truncated} of {rows} rows", field="truncated")
    all_specs, all_frames = [*specs], tuple(frames)
    if len(work.frames) > 2 and len(frames) == 2:
        # A row has its query and its item in one: the shared query is empty.
        all_specs, all_frames = [FrameSpec("query", "int32", (0,)), *specs], (b"", *frames)
    return replace(
        work,
        tokens=tokens,
        longest=longest,
        max_id=max_id,
        text=False,
        nbytes=sum(map(len, frames)) + len(work.row_labels),
        # Query and item are joined as the request said: what is shared now comes first.
        part=replace(work.part, frames=all_specs, item_first=False),
        frames=all_frames,
        shared=shared,
        truncation="",
        text_truncation=work.truncation,
        truncated=truncated,
    )
