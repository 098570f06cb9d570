"""The digest of an update's bytes, and what is wrong with its tensors, on any device.

The digest is that of `protocol/layout.py`. There are two implementations: the reference of `checksum.py`, and a Triton kernel
that reads each byte of a GPU once, where `make_ready` found that it gives the same. Nothing waits for a GPU then before the
result is asked for. Without the kernel, bytes of a GPU go to the host. `weight_scan.py` finds digest and findings in one read.
"""

import importlib
import logging
import threading
from collections.abc import Collection, Sequence
from math import inf
from typing import Any

from enginepool.protocol.layout import ALIGNMENT, digest_text, joined_digest, layout
from enginepool.protocol.manifest import SIZES, Manifest, Tensor, overflow
from enginepool.protocol.messages.weight_reports import Finding
from enginepool.transfer.checksum import word_sums

torch: Any = importlib.import_module("torch")
log = logging.getLogger("enginepool")

#: words of one call of the kernel
_KERNEL_CHUNK = 1 << 28
#: Words on which the kernel is tried: several of its programs, the last one with less to do.
_TRIED = 5 * 32_768 + 448
#: Values among others with which it is tried.
_HARD = (0.0, -0.0, 1.0, float("nan"), float("inf"), float("-inf"))
#: dtypes with a norm of their own in torch
_NORMED = ("float64", "float32", "float16", "bfloat16")

#: by device, where `make_ready` was called: the module of the kernels, or None where they cannot be used
_ready: dict[str, Any] = {}
_making = threading.Lock()


def make_ready(device: Any) -> None:
    """Have the kernels compiled for a device, and compared with the reference; once in a process, before an update begins.

    Where Triton is missing or its kernels do not compile, the host computes digests, and one line of the log says so.
    """
    device = torch.device(device)
    with _making:
        if device.type == "cuda" and str(device) not in _ready:
            _ready[str(device)] = _tried(device)


def kernels_on(device: Any) -> Any:
    """The module of the kernels, where they are ready and right, else None."""
    return _ready.get(str(device))


def _tried(device: Any) -> Any:
    """The module of the kernels, if they give there what the reference gives."""
    try:
        kernels = importlib.import_module("enginepool.transfer.digest_kernel")
        # Not drawn: a trainer's random numbers are its own.
        words = (torch.arange(_TRIED, device=device) * 2_654_435_761 % 2**32 - 2**31).to(torch.int32)
        if digest_text(*kernels.sums(words).tolist()) != digest_text(*word_sums(words.cpu().numpy())):
            raise RuntimeError("it gives other sums than the reference")
        _try_look(kernels, device)
    except Exception as error:
        # A compiler, its cache or its driver may raise anything: an update must not fail for it.
        why = str(error).strip().partition("\n")[0]
        log.warning("digests are computed on the host: no Triton kernel on %s: %s: %s", device, type(error).__name__, why)
        return None
    return kernels


def _try_look(kernels: Any, device: Any) -> None:
    """Have them look at tensors of all dtypes, of zeros or ones with one value among them. Raises RuntimeError."""
    cases: list[tuple[str, int, float, str]] = []
    for dtype in SIZES:
        values = _HARD if getattr(torch, dtype).is_floating_point else (0, 1)
        cases += [(dtype, others, value, "") for others in (0, 1) for value in values]
        limits = {target: limit for target in SIZES if (limit := overflow(dtype, target)) < inf}
        cases += [(dtype, 1, value, target) for target, limit in limits.items() for value in (-limit / 2, limit, -limit)]
    targets = [target for _, _, _, target in cases]
    manifest = [Tensor("", dtype, (300 if case % 7 else _TRIED,)) for case, (dtype, _, _, _) in enumerate(cases)]
    space = torch.zeros(layout(manifest).nbytes, dtype=torch.uint8)
    tensors = views(space, manifest)
    for tensor, (_, others, value, _) in zip(tensors, cases, strict=True):
        tensor.fill_(others)
        tensor[-7] = value
    bounds = [space.numel() // 3 // ALIGNMENT * ALIGNMENT, space.numel()]
    rows, _ = kernels.rows(manifest, bounds, targets)
    sums = torch.zeros(2, dtype=torch.int64, device=device)
    levels = torch.zeros(len(manifest), dtype=torch.int32, device=device)
    kernels.look(space.to(device).view(torch.int32), rows.to(device), sums, levels)
    if digest_text(*sums.tolist()) != digest_of(space):
        raise RuntimeError("it gives other sums than the reference where it scans tensors")
    batch = DigestBatch([tensor.name for tensor in manifest], tensors, targets)
    largest = zip(torch.cat(batch.largest()).tolist(), batch.limits, strict=True)
    most = dict(zip(batch.places, largest, strict=True))
    if levels.tolist() != [kernels.level(*most[place]) for place in range(len(manifest))]:
        raise RuntimeError("it finds other tensors than torch")


def use_once(device: Any, dtypes: Collection[Any]) -> None:
    """Have a GPU load what it computes digests and findings with, which it does for each kernel when that is used first."""
    digest, findings = Digest(), Findings()
    for at in (0, ALIGNMENT):
        digest.add(torch.zeros(ALIGNMENT, dtype=torch.uint8, device=device), at)
        tensors = [torch.ones(2, device=device).to(dtype) for dtype in dtypes for _ in range(2)]
        findings.add(DigestBatch(["" for _ in tensors], tensors))
    digest.text()
    findings.found()


class Digest:
    """The digest of a space whose buckets are given one after the other, in any order."""

    def __init__(self) -> None:
        #: of each part: the number of its first word, the sum, and the weighted sum with words counted from 1
        self._parts: list[tuple[int, int, int]] = []
        #: of each part: the number of its first word, and a tensor of both sums on its GPU
        self._on_gpu: list[tuple[int, Any]] = []

    def add(self, bucket: Any, at: int) -> None:
        """The bytes from `at` on, a contiguous uint8 tensor; both `at` and its size are multiples of 256."""
        words = bucket.view(torch.int32)
        kernels = kernels_on(words.device)
        if not kernels:
            self._parts.append((at // 4, *word_sums(words.cpu().numpy())))
            return
        for start in range(0, words.numel(), _KERNEL_CHUNK):
            self._on_gpu.append((at // 4 + start, kernels.sums(words[start : start + _KERNEL_CHUNK])))

    def text(self) -> str:
        """The digest of all bytes so far."""
        parts = list(self._parts)
        if self._on_gpu:
            found: list[list[int]] = torch.stack([sums for _, sums in self._on_gpu]).tolist()
            parts += [(first, plain, weighted) for (first, _), (plain, weighted) in zip(self._on_gpu, found, strict=True)]
        return joined_digest(parts)


def digest_of(space: Any) -> str:
    """The digest of a whole space."""
    digest = Digest()
    digest.add(space, 0)
    return digest.text()


def views(space: Any, manifest: Manifest) -> list[Any]:
    """The tensors of `manifest` as views of `space`, a uint8 tensor laid out by `protocol.layout`."""
    offsets = layout(manifest).offsets
    return [
        space[at : at + tensor.nbytes].view(getattr(torch, tensor.dtype)).view(tensor.shape)
        for tensor, at in zip(manifest, offsets, strict=True)
    ]


class DigestBatch:
    """Tensors that are looked at together, sorted for it: made once for memory that stays, and looked at in every update.

    `targets`: the dtype in which the engine holds each, or "" where that is its own; without it, all are their own.
    """

    def __init__(self, names: Sequence[str], tensors: Sequence[Any], targets: Sequence[str] = ()) -> None:
        #: (name, tensor); nothing is wrong with an empty one
        self.named = [(name, tensor) for name, tensor in zip(names, tensors, strict=True) if tensor.numel()]
        limits = [
            overflow(str(tensor.dtype).removeprefix("torch."), target)
            for tensor, target in zip(tensors, targets or [""] * len(tensors), strict=True)
            if tensor.numel()
        ]
        by_dtype: dict[Any, list[int]] = {}
        for place, (_, tensor) in enumerate(self.named):
            by_dtype.setdefault(tensor.dtype, []).append(place)
        self._sorted = [(places, [self.named[place][1] for place in places]) for places in by_dtype.values()]
        #: the place that each number of `largest` belongs to
        self.places = [place for places, _ in self._sorted for place in places]
        #: for each number of `largest`: what is as large, or larger, is infinity in the engine
        self.limits = [limits[place] for place in self.places]

    def largest(self) -> list[Any]:
        """The largest magnitude in each tensor, NaN where there is one, as vectors of float64 on the device."""
        return [torch.stack(_largest(tensors)).to(torch.float64) for _, tensors in self._sorted]


def _largest(tensors: Sequence[Any]) -> Sequence[Any]:
    """Of tensors of one dtype."""
    dtype = tensors[0].dtype
    if str(dtype).removeprefix("torch.") in _NORMED:
        return torch._foreach_norm(tensors, ord=float("inf"))
    if dtype.is_floating_point:
        return [torch.linalg.vector_norm(tensor.to(torch.float32), ord=float("inf")) for tensor in tensors]
    return [tensor.any() for tensor in tensors]


class Findings:
    """Tensors with NaN or infinity, with numbers that become infinity in the engine, or with zeros alone.

    One pass over each; only those found are counted.
    """

    def __init__(self) -> None:
        self._batches: list[DigestBatch] = []
        self._largest: list[Any] = []

    def add(self, batch: DigestBatch) -> None:
        """Look at whole tensors, whose memory stays as it is until `found`."""
        self._batches.append(batch)
        self._largest += batch.largest()

    def found(self) -> list[Finding]:
        """All findings, in the order of the tensors; `count` of a zero one is its size."""
        if not self._largest:
            return []
        numbers: list[float] = torch.cat(self._largest).tolist()
        limits = [limit for batch in self._batches for limit in batch.limits]
        if all(0 < number < limit for number, limit in zip(numbers, limits, strict=True)):
            return []
        found: list[Finding] = []
        at = 0
        for batch in self._batches:
            own = zip(numbers[at : at + len(batch.places)], batch.limits, strict=True)
            for place, (most, limit) in sorted(zip(batch.places, own, strict=True)):
                found += findings_of(*batch.named[place], most, limit)
            at += len(batch.places)
        return found


def findings_of(name: str, tensor: Any, most: float, limit: float = inf) -> list[Finding]:
    """Findings of one tensor with this largest magnitude, whose engine holds nothing from `limit` on."""
    if most == 0:
        return [Finding(name, "zero", tensor.numel())]
    if 0 < most < limit:
        return []
    wide = tensor.to(torch.float32) if tensor.dtype.itemsize == 1 else tensor
    counted: list[tuple[Any, int]] = [("nan", int(torch.isnan(wide).sum())), ("infinity", int(torch.isinf(wide).sum()))]
    if limit < inf:
        # A limit lies between two numbers of the engine's dtype: compared in one that has it.
        large = wide.to(torch.float64).abs()
        counted.append(("overflow", int(((large >= limit) & (large < inf)).sum())))
    return [Finding(name, kind, count) for kind, count in counted if count]
