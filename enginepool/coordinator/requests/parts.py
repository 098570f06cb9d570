"""Parts of a request that was cut: ranges of rows, and the joined answer. Pure."""

from enginepool.coordinator.core.events import Buffer
from enginepool.coordinator.core.request import Request
from enginepool.protocol.messages import FrameSpec


def join_ranges(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ranges of rows in order; adjacent ranges are joined into one."""
    ranges.sort()
    out: list[tuple[int, int]] = []
    for start, end in ranges:
        if out and out[-1][1] == start:
            out[-1] = out[-1][0], end
        else:
            out.append((start, end))
    return out


def join_pieces(request: Request) -> tuple[list[FrameSpec], list[Buffer]]:
    """The pieces of a request that was cut, joined in row order. The bytes of the rows are concatenated unchanged."""
    pieces = sorted(request.pieces, key=lambda piece: piece[0])
    specs: list[FrameSpec] = []
    frames: list[Buffer] = []
    for i, spec in enumerate(pieces[0][1]):
        specs.append(FrameSpec(spec.name, spec.dtype, (request.work.rows, *spec.shape[1:])))
        frames.append(b"".join(piece[2][i] for piece in pieces))
    return specs, frames
