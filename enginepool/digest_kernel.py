"""The two sums of the digest in one read of a GPU's memory: a Triton kernel. Imported only where Triton may be used.

Torch reads the words, writes them as 64 bits, and reads those twice: 28 bytes of traffic for each 4.
"""

import importlib
from typing import Any

torch: Any = importlib.import_module("torch")
triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")

#: words that a program reads at once, and how often it does
_LANES: Any = tl.constexpr(2048)
_STEPS: Any = tl.constexpr(16)
#: A bucket is a whole number of these, by which the compiler knows that it may load 16 bytes at a time.
_GROUP: Any = tl.constexpr(64)


@triton.jit(do_not_specialize=["groups"])
def _sum(words: "Any", groups: "Any", sums: "Any"):
    """Each program writes the sum of its words, and that of its words times their place, counted from 1."""
    program = tl.program_id(0)
    size = groups * _GROUP
    lanes = tl.arange(0, _LANES)
    first = program * (_LANES * _STEPS) + lanes
    plain = tl.zeros([_LANES], dtype=tl.int64)
    running = tl.zeros([_LANES], dtype=tl.int64)
    # No products of 64 bits in here: the word of step t is in `running` STEPS - t times.
    for step in range(_STEPS):
        at = first + step * _LANES
        plain += tl.load(words + at, mask=at < size, other=0).to(tl.int64)
        running += plain
    weighted = plain * (first + 1).to(tl.int64) + (plain * _STEPS - running) * _LANES
    tl.store(sums + 2 * program, tl.sum(plain, 0))
    tl.store(sums + 2 * program + 1, tl.sum(weighted, 0))


def sums(words: Any) -> Any:
    """[Σ x[i], Σ x[i] × (i + 1)] modulo 2^64 of int32 `words`, a multiple of 64 and at most 2^28: int64, on their device."""
    programs = -(-words.numel() // (_LANES.value * _STEPS.value))
    parts = torch.empty((programs, 2), dtype=torch.int64, device=words.device)
    with torch.cuda.device_of(words):
        _sum[(programs,)](words, words.numel() // _GROUP.value, parts, num_warps=8)
    return parts.sum(0)
