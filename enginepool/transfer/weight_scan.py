"""One scan of an update's bytes as they arrive: their digest, and what is wrong with their tensors, together where a GPU can.

There the Triton kernels of `digest_kernel.py` read each byte once for both, if `make_ready` found them right; else `Digest` and
`Findings` find the same in torch, one after the other.
"""

import importlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol

from enginepool.protocol.layout import ALIGNMENT, digest_text, layout
from enginepool.protocol.manifest import Manifest, overflow
from enginepool.protocol.messages.weight_reports import Finding
from enginepool.transfer.digest import Digest, DigestBatch, Findings, findings_of, kernels_on, use_once, views

torch: Any = importlib.import_module("torch")


class RunningScan(Protocol):
    """A scan that has begun. On a GPU all of it is on one stream, the current one, and nothing waits for it before `result`."""

    def add(self, first: int, until: int | None = None) -> None:
        """Scan part `first`, or those from there until the one before `until`. Each part is scanned once."""
        ...

    def result(self) -> tuple[str, list[Finding]]:
        """(digest, findings in the order of the tensors), when every part was scanned."""
        ...


class WeightScan:
    """Made once for memory that stays, and begun for every update.

    Args:
        space: uint8, with `manifest` at its front as `protocol.layout` has it.
        bounds: where parts end: ascending multiples of ALIGNMENT, the last one the end of the tensors. They may cut tensors.
        targets: the dtype in which the engine holds each tensor, or "" where that is its own; without it, all are their own.
        arrivals: for each part, the buffer through which its bytes arrive, if its digest is to be computed there; such a scan
            runs on one update at a time.

    Raises:
        ValueError: the bounds are others.
    """

    def __init__(
        self, space: Any, manifest: Manifest, bounds: Sequence[int], targets: Sequence[str] = (), arrivals: Sequence[Any] = ()
    ) -> None:
        nbytes = layout(manifest).nbytes
        edges = [0, *bounds]
        if len(edges) < 2 or edges[-1] != nbytes or edges != sorted(edges) or any(edge % ALIGNMENT for edge in edges):
            raise ValueError(f"parts that end at {bounds}: ascending multiples of {ALIGNMENT}, the last one {nbytes}")
        kernels = kernels_on(space.device)
        of: _KernelScan | _HostScan
        targets = targets or [""] * len(manifest)
        space = space[:nbytes]
        if kernels and not arrivals:
            of = _KernelScan(kernels, space, manifest, bounds, targets)
        else:
            of = _HostScan(space, manifest, edges, targets, arrivals)
        #: begins a scan of the present content; of any part when that has arrived
        self.begin: Callable[[], RunningScan] = of.begin


class _KernelScan:
    """A space of a GPU, and what its kernels do at each part."""

    def __init__(self, kernels: Any, space: Any, manifest: Manifest, bounds: Sequence[int], targets: Sequence[str]) -> None:
        self.kernels, self.space = kernels, space
        self.manifest = list(manifest)
        self.offsets = layout(manifest).offsets
        self.words = space.view(torch.int32)
        self.limits = [overflow(one.dtype, target) for one, target in zip(manifest, targets, strict=True)]
        rows, self.starts = kernels.rows(manifest, bounds, targets)
        self.rows = rows.to(space.device)
        #: nothing is wrong with an empty tensor
        self.filled = torch.tensor([tensor.nbytes > 0 for tensor in manifest], dtype=torch.bool)

    def begin(self) -> RunningScan:
        return _RunningKernelScan(self)


class _RunningKernelScan:
    def __init__(self, of: _KernelScan) -> None:
        self._of = of
        #: the two sums, and the levels of the tensors: together, since they go to the host together
        self._found = torch.zeros(4 + len(of.manifest), dtype=torch.int32, device=of.space.device)
        self._sums, self._levels = self._split(self._found)

    def _split(self, found: Any) -> tuple[Any, Any]:
        return found[:4].view(torch.int64), found[4:]

    def add(self, first: int, until: int | None = None) -> None:
        of = self._of
        rows = of.rows[of.starts[first] : of.starts[first + 1 if until is None else until]]
        of.kernels.look(of.words, rows, self._sums, self._levels)

    def result(self) -> tuple[str, list[Finding]]:
        of = self._of
        sums, levels = self._split(self._found.cpu())
        found: list[Finding] = []
        places: list[int] = ((levels != of.kernels.FINE.value) & of.filled).nonzero().flatten().tolist()
        for place in places:
            one = of.manifest[place]
            [tensor] = views(of.space[of.offsets[place] :], [one])
            most = 0 if levels[place] == of.kernels.ZERO.value else float("nan")
            found += findings_of(one.name, tensor, most, of.limits[place])
        return digest_text(*sums.tolist()), found


class _HostScan:
    """A space anywhere, and the tensors that are scanned together: as soon as all parts have arrived that hold any of them."""

    def __init__(
        self, space: Any, manifest: Manifest, edges: list[int], targets: Sequence[str], arrivals: Sequence[Any]
    ) -> None:
        self.edges = edges
        self.arrivals = arrivals or [space[at:end] for at, end in pairwise(edges)]
        names, tensors = [tensor.name for tensor in manifest], views(space, manifest)
        if space.is_cuda:
            use_once(space.device, {tensor.dtype for tensor in tensors})
        self.order = {name: place for place, name in enumerate(names)}
        begins, nbytes = layout(manifest)
        ends = [*begins[1:], nbytes]
        self.batches: list[DigestBatch] = []
        #: by part: the batches that need it; and of how many parts each of them is
        self.needed: list[list[int]] = [[] for _ in edges[1:]]
        self.parts: list[int] = []
        first = 0
        for part, edge in enumerate(edges[1:]):
            until = bisect_right(ends, edge, first)
            since = min(part, bisect_right(edges, begins[first]) - 1) if first < until else part
            for need in range(since, part + 1):
                self.needed[need].append(part)
            self.parts.append(part + 1 - since)
            self.batches.append(DigestBatch(names[first:until], tensors[first:until], targets[first:until]))
            first = until

    def begin(self) -> RunningScan:
        return _RunningHostScan(self)


class _RunningHostScan:
    def __init__(self, of: _HostScan) -> None:
        self._of = of
        self._missing = list(of.parts)
        self._digest, self._findings = Digest(), Findings()

    def add(self, first: int, until: int | None = None) -> None:
        of = self._of
        for part in range(first, first + 1 if until is None else until):
            self._digest.add(of.arrivals[part], of.edges[part])
            for k in of.needed[part]:
                self._missing[k] -= 1
                if not self._missing[k]:
                    self._findings.add(of.batches[k])

    def result(self) -> tuple[str, list[Finding]]:
        return self._digest.text(), sorted(self._findings.found(), key=lambda finding: self._of.order[finding.name])
