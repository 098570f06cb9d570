"""Labels of each row: the last payload frame of a score request, `labels` int32 [rows, labels], where it has one."""

from collections.abc import Sequence

from enginepool.protocol.basis import MAX_LABELS, FrameSpec
from enginepool.protocol.errors import WireError
from enginepool.protocol.frames import Buffer, check_frames
from enginepool.protocol.ragged import MAX_TOKENS, bad, max_id

#: its name
LABELS_FRAME = "labels"


def has_row_labels(specs: Sequence[FrameSpec]) -> bool:
    """Whether the last of these frames has labels of each row."""
    return bool(specs) and specs[-1].name == LABELS_FRAME


def check_row_labels(spec: FrameSpec, frame: Buffer, rows: int) -> int:
    """The largest of the labels of so many rows.

    Raises:
        WireError: `malformed` for another dtype, or a shape without a row for each; `bad_request` for what is no token id.
    """
    check_frames([spec], [frame])
    if spec.dtype != "int32" or len(spec.shape) != 2 or spec.shape[0] != rows:
        text = f"labels: {spec.dtype} {list(spec.shape)}; int32 [{rows}, labels], a row for each item"
        raise WireError("malformed", text, field=LABELS_FRAME, limit=str(rows))
    if not 0 < spec.shape[1] <= MAX_LABELS:
        raise bad(LABELS_FRAME, f"labels: {spec.shape[1]} of each row; 1 to {MAX_LABELS}", str(MAX_LABELS))
    most = max_id(frame)
    if most >= MAX_TOKENS:
        raise bad(LABELS_FRAME, f"labels: token id {most - 2**32} is negative", "0")
    return most


def cut_row_labels(frame: Buffer, columns: int, start: int, end: int) -> tuple[FrameSpec, Buffer]:
    """Those of rows `start` to `end`: a slice of the same bytes."""
    return FrameSpec(LABELS_FRAME, "int32", (end - start, columns)), memoryview(frame)[4 * columns * start : 4 * columns * end]
