"""The digest's sums and what is wrong with tensors, in one read of a GPU's memory: Triton, imported only where it may be used.

Torch reads the words, writes them as 64 bits, and reads those twice: 28 bytes of traffic for each 4. For what is wrong with
tensors it reads them once more, tensor by tensor.
"""

import importlib
import struct
from collections.abc import Sequence
from math import inf
from typing import Any

from enginepool.protocol.layout import ALIGNMENT, layout
from enginepool.protocol.manifest import SIZES, Manifest, overflow

torch: Any = importlib.import_module("torch")
triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")

#: words that a program loads at once, and how often it does before it uses the first of them
_LANES: Any = tl.constexpr(1024)
_AHEAD: Any = tl.constexpr(4)
#: words that a program reads, at most
_MOST: Any = tl.constexpr(32_768)
#: A bucket is a whole number of these, by which the compiler knows that it may load 16 bytes at a time: 256 bytes.
_GROUP: Any = tl.constexpr(64)
#: numbers in a row that says what a program reads
_ROW: Any = tl.constexpr(8)

#: What is found of a tensor: nothing but zeros, nothing wrong, NaN or infinity. The highest of all its words is its level.
ZERO: Any = tl.constexpr(0)
FINE: Any = tl.constexpr(1)
NOT_FINITE: Any = tl.constexpr(2)

#: The bits of infinity in each dtype, or the first of NaN, where it has none: what is more is NaN. Others are always finite.
_INFINITY = {
    "float64": 0x7FF0 << 48, "float32": 0x7F80 << 16, "float16": 0x7C00, "bfloat16": 0x7F80,
    "float8_e5m2": 0x7C, "float8_e4m3fn": 0x7F,
}  # fmt: skip


def _masks(dtype: str, target: str) -> list[int]:
    """For the even and the odd words of a tensor: its bits but for the signs, twice; what to add to them, twice.

    Magnitudes sort like their bits. Of one that is not finite in the engine, and of no other, the sum reaches the place of the
    sign. Of a float64 the odd word alone is looked at: a number close to the limit may be taken for one beyond it.
    """
    if dtype not in _INFINITY:
        return [-1, -1, 0, 0]
    bits = 8 * SIZES[dtype]
    sign = 1 << (bits - 1)
    every = sum(1 << at for at in range(0, 64, bits))
    limit = overflow(dtype, target)
    least = _INFINITY[dtype] if limit == inf else _bits(dtype, limit)
    both = [every * (sign - 1), every * (sign - least)]
    words = [number >> at & 0xFFFF_FFFF for number in both for at in (0, 32)]
    return [word - (word >> 31 << 32) for word in words]


def _bits(dtype: str, magnitude: float) -> int:
    """The bits of the least number of `dtype` that is not below this; of a float64 the odd word's."""
    if dtype == "float64":
        return struct.unpack("<Q", struct.pack("<d", magnitude))[0] >> 32 << 32
    bits: int = struct.unpack("<I", struct.pack("<f", magnitude))[0]  # each of the magnitudes is a float32
    return bits if dtype == "float32" else -(-bits >> 16)


def rows(manifest: Manifest, bounds: Sequence[int], targets: Sequence[str] = ()) -> tuple[Any, list[int]]:
    """What programs do to look at a space, in parts that end at `bounds`: (a row for each, int32; where a part's rows begin).
    `targets` as `Batch` has them.

    A row is of one tensor, with the zeros behind it, and of one part: its first group, its groups, the tensor, and its masks.
    After the last part's beginning comes its end.
    """
    offsets, nbytes = layout(manifest)
    starts = torch.tensor(offsets, dtype=torch.int64) // ALIGNMENT
    ends = torch.tensor([0, *bounds], dtype=torch.int64) // ALIGNMENT
    cuts = torch.cat([starts, ends, torch.tensor([nbytes // ALIGNMENT])]).unique()
    begins, sizes = cuts[:-1], cuts.diff()
    most = _MOST.value // _GROUP.value
    programs = (sizes + most - 1) // most
    owner = torch.repeat_interleave(programs)
    before = (torch.arange(len(owner)) - (programs.cumsum(0) - programs)[owner]) * most
    first = begins[owner] + before
    # Of several tensors that begin here all but the last one are empty.
    tensor = torch.searchsorted(starts, first, right=True) - 1
    held = [(one.dtype, target) for one, target in zip(manifest, targets or [""] * len(manifest), strict=True)]
    kinds = {pair: kind for kind, pair in enumerate(dict.fromkeys(held))}
    kind = torch.tensor([kinds[pair] for pair in held], dtype=torch.int64)[tensor]
    masks = torch.tensor([_masks(*pair) for pair in kinds])[kind]
    columns = [first, (sizes[owner] - before).clamp(max=most), tensor, *masks.unbind(1), torch.zeros_like(first)]
    return torch.stack(columns, 1).to(torch.int32), torch.searchsorted(first, ends).tolist()


def level(most: float, limit: float = inf) -> int:
    """That of a tensor with this largest magnitude, whose engine holds nothing from `limit` on."""
    if 0 < most < limit:
        return FINE.value
    return NOT_FINITE.value if most else ZERO.value


@triton.jit
def _read(words: "Any", size: "Any", even: "Any", odd: "Any", to_even: "Any", to_odd: "Any"):
    """Of `size` words: their sum, that of each times its place, counted from 1, and what is found with these masks."""
    lanes = tl.arange(0, _LANES)
    mask = tl.where(lanes % 2 == 0, even, odd)
    added = tl.where(lanes % 2 == 0, to_even, to_odd)
    plain = tl.zeros([_LANES], dtype=tl.int64)
    running = tl.zeros([_LANES], dtype=tl.int64)
    bits = tl.zeros([_LANES], dtype=tl.int32)
    reached = tl.zeros([_LANES], dtype=tl.int32)
    # No products of 64 bits in here: the word of step t is in `running` steps - t times.
    steps = tl.cdiv(size, _LANES * _AHEAD) * _AHEAD
    for step in range(0, steps, _AHEAD):
        for after in tl.static_range(_AHEAD):
            at = (step + after) * _LANES + lanes
            word = tl.load(words + at, mask=at < size, other=0)
            plain += word.to(tl.int64)
            running += plain
            bits |= word
            reached |= (word & mask) + added
    weighted = plain * (lanes + 1).to(tl.int64) + (plain * steps - running) * _LANES
    level = tl.where((reached & ~mask) != 0, NOT_FINITE, tl.where((bits & mask) != 0, FINE, ZERO))
    return tl.sum(plain, 0), tl.sum(weighted, 0), tl.max(level, 0)


@triton.jit(do_not_specialize=["groups"])
def _sum(words: "Any", groups: "Any", sums: "Any"):
    """Each program writes the sum of its words, and that of its words times their place, counted from 1."""
    program = tl.program_id(0)
    first = program * _MOST
    plain, weighted, _ = _read(words + first, tl.minimum(groups * _GROUP - first, _MOST), 0, 0, 0, 0)
    tl.store(sums + 2 * program, plain)
    tl.store(sums + 2 * program + 1, weighted + first * plain)


@triton.jit
def _look(words: "Any", rows: "Any", sums: "Any", levels: "Any"):
    """Each program adds its two sums to those of the space, and raises its tensor's level to what it found."""
    row = rows + tl.program_id(0) * _ROW
    first = tl.load(row).to(tl.int64) * _GROUP
    size = tl.load(row + 1) * _GROUP
    even, odd, to_even, to_odd = tl.load(row + 3), tl.load(row + 4), tl.load(row + 5), tl.load(row + 6)
    plain, weighted, level = _read(words + first, size, even, odd, to_even, to_odd)
    tl.atomic_add(sums, plain, sem="relaxed")
    tl.atomic_add(sums + 1, weighted + first * plain, sem="relaxed")
    tl.atomic_max(levels + tl.load(row + 2), level, sem="relaxed")


def sums(words: Any) -> Any:
    """[Σ x[i], Σ x[i] × (i + 1)] modulo 2^64 of int32 `words`, a multiple of 64 and at most 2^28: int64, on their device."""
    programs = -(-words.numel() // _MOST.value)
    parts = torch.empty((programs, 2), dtype=torch.int64, device=words.device)
    with torch.cuda.device_of(words):
        _sum[(programs,)](words, words.numel() // _GROUP.value, parts, num_warps=8)
    return parts.sum(0)


def look(words: Any, rows: Any, sums: Any, levels: Any) -> None:
    """Look at some rows of a space of int32 `words`, and add to its two `sums`, int64, and to each tensor's level, int32.

    Both are of zeros before the first rows. Everything is on the device of the words.
    """
    if len(rows):
        with torch.cuda.device_of(words):
            _look[(len(rows),)](words, rows, sums, levels, num_warps=8)
