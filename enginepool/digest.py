"""The digest of an update's bytes, and what is wrong with its tensors, in torch on any device.

The digest is that of `protocol/layout.py`. On a GPU nothing here waits for the device before its result is asked for.
"""

import importlib
from collections.abc import Sequence
from typing import Any

from enginepool.protocol.layout import digest_text, layout
from enginepool.protocol.manifest import Manifest
from enginepool.protocol.updates import Finding

torch: Any = importlib.import_module("torch")

#: Columns of the matrix that the words of a bucket are arranged in.
_COLUMNS = 4096
#: Words that are looked at together: torch widens them to int64 in memory.
_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 24}
#: dtypes with a norm of their own in torch
_NORMED = ("float64", "float32", "float16", "bfloat16")


class Digest:
    """The digest of a space whose buckets are given one after the other, in any order."""

    def __init__(self) -> None:
        self._plain: Any = 0
        self._weighted: Any = 0

    def add(self, bucket: Any, at: int) -> None:
        """The bytes from `at` on, a contiguous uint8 tensor; both `at` and its size are multiples of 256."""
        words = bucket.view(torch.int32)
        first = at // 4
        size = _CHUNK.get(words.device.type, 1 << 18)
        for start in range(0, words.numel(), size):
            chunk = words[start : start + size]
            whole = chunk.numel() // _COLUMNS * _COLUMNS
            if whole:
                self._add(chunk[:whole].view(-1, _COLUMNS), first + start)
            if whole < chunk.numel():
                self._add(chunk[whole:].view(1, -1), first + start + whole)

    def _add(self, words: Any, first: int) -> None:
        """Word [r, c] counts first + r × columns + c + 1 times: rows give the one part of that, columns the other."""
        rows, columns = words.shape
        wide = words.to(torch.int64)
        of_rows, of_columns = wide.sum(1), wide.sum(0)
        device = words.device
        self._plain = self._plain + of_rows.sum()
        self._weighted = (
            self._weighted
            + (of_rows * torch.arange(first, first + rows * columns, columns, device=device)).sum()
            + (of_columns * torch.arange(1, columns + 1, device=device)).sum()
        )

    def text(self) -> str:
        """The digest of what was added."""
        return digest_text(int(self._plain), int(self._weighted))


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


class Findings:
    """Tensors with NaN or infinity in them, or with nothing but zeros. One pass over each; only those found are counted."""

    def __init__(self) -> None:
        self._tensors: list[tuple[str, Any]] = []
        self._largest: list[Any] = []

    def add(self, names: Sequence[str], tensors: Sequence[Any]) -> None:
        """Look at whole tensors, whose memory stays as it is until `found`."""
        self._tensors += zip(names, tensors, strict=True)
        self._largest += _largest(tensors)

    def found(self) -> list[Finding]:
        """All findings, in the order of the tensors; `count` of a zero one is its size."""
        if not self._tensors:
            return []
        largest = _numbers(self._largest)
        found: list[Finding] = []
        for (name, tensor), most in zip(self._tensors, largest, strict=True):
            if most == 0:
                found.append(Finding(name, "zero", tensor.numel()))
            elif most != most or most == float("inf"):
                wide = tensor.to(torch.float32) if tensor.dtype.itemsize == 1 else tensor
                if count := int(torch.isnan(wide).sum()):
                    found.append(Finding(name, "nan", count))
                if count := int(torch.isinf(wide).sum()):
                    found.append(Finding(name, "infinity", count))
        return found


def _numbers(scalars: Sequence[Any]) -> list[float]:
    """What is in them, in one copy for each dtype."""
    numbers = [0.0] * len(scalars)
    together: dict[Any, list[int]] = {}
    for i, scalar in enumerate(scalars):
        together.setdefault(scalar.dtype, []).append(i)
    for places in together.values():
        found = torch.stack([scalars[i] for i in places]).to(torch.float64).tolist()
        for i, number in zip(places, found, strict=True):
            numbers[i] = number
    return numbers


def _largest(tensors: Sequence[Any]) -> list[Any]:
    """The largest magnitude in each tensor; NaN where there is one. Empty tensors count as 1: nothing is wrong with them."""
    largest: list[Any] = [None] * len(tensors)
    together: dict[Any, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if not tensor.numel():
            largest[i] = torch.ones((), device=tensor.device)
        elif str(tensor.dtype).removeprefix("torch.") in _NORMED:
            together.setdefault(tensor.dtype, []).append(i)
        elif tensor.dtype.is_floating_point:
            largest[i] = torch.linalg.vector_norm(tensor.to(torch.float32), ord=float("inf"))
        else:
            largest[i] = tensor.any()
    for places in together.values():
        norms = torch._foreach_norm([tensors[i] for i in places], ord=float("inf"))
        for i, norm in zip(places, norms, strict=True):
            largest[i] = norm
    return largest
