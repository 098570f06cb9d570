"""One scan of an update's bytes as they arrive: their digest, and what is wrong with their tensors, together where a GPU can.

There the Triton kernels of `digest_kernel.py` read each byte once for both, if `make_ready` found them right; else `Digest` and
`Findings` find the same in torch, one after the other.
"""

import importlib
from bisect import bisect_right
from collections.abc import Sequence
from copy import copy
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
        targets = targets or [""] * len(manifest)
        space = space[:nbytes]
        self._scan: _KernelScan | _HostScan
        if kernels and not arrivals:
            self._scan = _KernelScan(kernels, space, manifest, bounds, targets)
        else:
            self._scan = _HostScan(space, manifest, edges, targets, arrivals)

    def begin(self) -> RunningScan:
        """A scan of the present content; of each part when that has arrived."""
        return self._scan.begin()


class _KernelScan:
    """A space of a GPU, and what its kernels do at each part."""

    def __init__(self, kernels: Any, space: Any, manifest: Manifest, bounds: Sequence[int], targets: Sequence[str]) -> None:
        self._kernels, self._space = kernels, space
        self._manifest = list(manifest)
        self._offsets = layout(manifest).offsets
        self._words = space.view(torch.int32)
        self._limits = [overflow(one.dtype, target) for one, target in zip(manifest, targets, strict=True)]
        rows, self._starts = kernels.rows(manifest, bounds, targets)
        self._rows = rows.to(space.device)
        #: nothing is wrong with an empty tensor
        self._filled = torch.tensor([tensor.nbytes > 0 for tensor in manifest], dtype=torch.bool)
        #: the two sums of one scan, and the levels of its tensors: together, since they go to the host together
        self._found: Any = None

    def begin(self) -> RunningScan:
        """A copy, with results of its own."""
        scan = copy(self)
        scan._found = torch.zeros(4 + len(self._manifest), dtype=torch.int32, device=self._space.device)
        return scan

    def add(self, first: int, until: int | None = None) -> None:
        rows = self._rows[self._starts[first] : self._starts[first + 1 if until is None else until]]
        self._kernels.look(self._words, rows, self._found[:4].view(torch.int64), self._found[4:])

    def result(self) -> tuple[str, list[Finding]]:
        results = self._found.cpu()
        sums, levels = results[:4].view(torch.int64), results[4:]
        found: list[Finding] = []
        places: list[int] = ((levels != self._kernels.FINE.value) & self._filled).nonzero().flatten().tolist()
        for place in places:
            one = self._manifest[place]
            [tensor] = views(self._space[self._offsets[place] :], [one])
            most = 0 if levels[place] == self._kernels.ZERO.value else float("nan")
            found += findings_of(one.name, tensor, most, self._limits[place])
        return digest_text(*sums.tolist()), found


class _HostScan:
    """A space anywhere, and the tensors that are scanned together: as soon as all parts have arrived that hold any of them."""

    def __init__(
        self, space: Any, manifest: Manifest, edges: list[int], targets: Sequence[str], arrivals: Sequence[Any]
    ) -> None:
        self._edges = edges
        self._arrivals = arrivals or [space[at:end] for at, end in pairwise(edges)]
        names, tensors = [tensor.name for tensor in manifest], views(space, manifest)
        if space.is_cuda:
            use_once(space.device, {tensor.dtype for tensor in tensors})
        self._order = {name: place for place, name in enumerate(names)}
        begins, nbytes = layout(manifest)
        ends = [*begins[1:], nbytes]
        self._batches: list[DigestBatch] = []
        #: by part: the batches that need it; and of how many parts each of them is
        self._needed: list[list[int]] = [[] for _ in edges[1:]]
        self._parts: list[int] = []
        first = 0
        for part, edge in enumerate(edges[1:]):
            until = bisect_right(ends, edge, first)
            since = min(part, bisect_right(edges, begins[first]) - 1) if first < until else part
            for need in range(since, part + 1):
                self._needed[need].append(part)
            self._parts.append(part + 1 - since)
            self._batches.append(DigestBatch(names[first:until], tensors[first:until], targets[first:until]))
            first = until
        #: of one scan: how many parts each batch waits for, and the results
        self._missing = list[int]()
        self._digest, self._findings = Digest(), Findings()

    def begin(self) -> RunningScan:
        """A copy, with results of its own."""
        scan = copy(self)
        scan._missing = list(self._parts)
        scan._digest, scan._findings = Digest(), Findings()
        return scan

    def add(self, first: int, until: int | None = None) -> None:
        for part in range(first, first + 1 if until is None else until):
            self._digest.add(self._arrivals[part], self._edges[part])
            for k in self._needed[part]:
                self._missing[k] -= 1
                if not self._missing[k]:
                    self._findings.add(self._batches[k])

    def result(self) -> tuple[str, list[Finding]]:
        return self._digest.text(), sorted(self._findings.found(), key=lambda finding: self._order[finding.name])
