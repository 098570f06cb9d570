"""A load that is prepared while the engine serves: the space is open, and all copies out of it are in a few lists.

Two steps remain for the hold: a check that the model's tensors have the same addresses as before, and one call for each kind of
copy. Preparing keeps the scheduler's thread from forwards, so it is done a moment at a time. Only host memory is pinned all at
once. Runs in the engine's processes; no SGLang here.
"""

import importlib
import time
from bisect import bisect_right
from collections.abc import Generator, Iterator, Sequence
from itertools import accumulate
from typing import Any

import msgspec

from enginepool.protocol.layout import layout
from enginepool.protocol.manifest import Tensor
from enginepool.protocol.messages.weights import MemoryRegion
from enginepool.transfer import shared_memory as regions
from enginepool.workers.sglang.weights.load_plan import LoadPlan
from enginepool.workers.sglang.weights.load_watch import Copy

torch: Any = importlib.import_module("torch")

_manifests = msgspec.json.Decoder(list[Tensor])
#: Elements of one dtype are copied as the widest of these that both ends are made of. Torch's kernel for many copies has four
#: elements of each thread on their way, of bfloat16 too few bytes for the memory of a GPU; and whole numbers keep every bit.
_WORDS: tuple[Any, ...] = (torch.int64, torch.int32, torch.int16, torch.uint8)
#: kinds of copies whose kernels a GPU of this process has loaded
_warm: set[tuple[Any, ...]] = set()


def manifest_of(text: str) -> list[Tensor]:
    """The tensors of a ticket's manifest, which the worker has looked at."""
    return _manifests.decode(text)


class OpenedMemory:
    """The bytes of an update, open in this process: in one part, or in shards that follow each other."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = list(parts)
        self._begins = list(accumulate((part.numel() for part in parts), initial=0))

    def elements(self, tensor: Tensor, at: int) -> list[tuple[int, Any]]:
        """Of a tensor at byte `at`: (number of the first element, the elements, flat) in each part that has some."""
        dtype = getattr(torch, tensor.dtype)
        found: list[tuple[int, Any]] = []
        for begin, part in zip(self._begins, self.parts, strict=False):
            first, last = max(begin, at), min(begin + part.numel(), at + tensor.nbytes)
            if first < last:
                found.append(((first - at) // dtype.itemsize, part[first - begin : last - begin].view(dtype)))
        return found or [(0, self.parts[0][:0].view(dtype))]

    def tensors(self, manifest: Sequence[Tensor]) -> Iterator[tuple[str, Any]]:
        """(name, tensor): a view, or a copy of a tensor that is cut by shards."""
        for tensor, at in zip(manifest, layout(manifest).offsets, strict=True):
            found = [elements for _, elements in self.elements(tensor, at)]
            yield tensor.name, (found[0] if len(found) == 1 else torch.cat(found)).view(tensor.shape)


def open_regions(described: Sequence[dict[str, Any]], nbytes: int) -> OpenedMemory:
    """The bytes of a ticket's regions in this process, of which at least `nbytes` are there; what is written later shows.

    The memory of another process stays as long as anything refers to it here. Raises ValueError, OSError or RuntimeError.
    """
    found = msgspec.convert(described, list[MemoryRegion])
    size = sum(space.nbytes for space in found)
    if size < nbytes:
        raise ValueError(f"a space of {size} bytes for {nbytes}")
    # The memory of a publisher has a seal, and is looked at on its own GPU.
    pinned = torch.cuda.is_initialized()
    return OpenedMemory([regions.open_space(space, by_current=not space.seal, pinned=pinned) for space in found])


def sealed(opened: OpenedMemory, described: Sequence[dict[str, Any]]) -> bool:
    """Whether the seals of all these regions, which are open, are there."""
    seals = [msgspec.convert(space, MemoryRegion).seal for space in described]
    return all(regions.sealed(part, seal) for part, seal in zip(opened.parts, seals, strict=True))


class HostCopies:
    """Copies and fills in runs, for as few calls as possible. Within a run none writes to memory that another one writes to, so
    that their order does not matter. A copy that would begins the next run. Runs keep their order."""

    def __init__(self) -> None:
        self._runs: list[_Run] = []

    def add(self, copy: Copy, tensor: Any) -> None:
        """One copy of a plan, of elements of `tensor`."""
        if copy.target.numel() and not (self._runs and self._runs[-1].takes(copy.target)):
            self._runs.append(_Run())
            self._runs[-1].takes(copy.target)
        if copy.target.numel():
            self._runs[-1].add(copy, tensor)

    def warm(self) -> None:
        """Have a GPU load the kernels, which it does when they are used first."""
        for run in self._runs:
            for kind, (targets, sources) in run.together.items():
                if kind not in _warm and targets[0].is_cuda:
                    torch._foreach_copy_([torch.empty_like(targets[0][:1])], [torch.zeros_like(sources[0][:1])])
                    _warm.add(kind)

    def replay(self) -> None:
        """Do them all. On a GPU they are only begun."""
        with torch.no_grad():
            for run in self._runs:
                for targets, sources in run.together.values():
                    torch._foreach_copy_(targets, sources, non_blocking=True)
                for target, source in run.apart:
                    target.copy_(source, non_blocking=True)
                for target, value in run.fills:
                    target.fill_(value)


class _Run:
    """Copies and fills that may be done in any order."""

    def __init__(self) -> None:
        #: of one kind and without holes: torch does hundreds of them in a few launches, if all are
        self.together: dict[tuple[Any, ...], tuple[list[Any], list[Any]]] = {}
        self.apart: list[tuple[Any, Any]] = []
        self.fills: list[tuple[Any, Any]] = []
        #: where what is written begins and ends, in order
        self._begins: list[int] = []
        self._ends: list[int] = []

    def takes(self, target: Any) -> bool:
        """Whether nothing here writes between the first and the last byte of `target`; from now on it does."""
        begin = target.data_ptr()
        last = sum((size - 1) * stride for size, stride in zip(target.shape, target.stride(), strict=True))
        end = begin + (last + 1) * target.element_size()
        at = bisect_right(self._begins, begin)
        if (at and self._ends[at - 1] > begin) or (at < len(self._begins) and self._begins[at] < end):
            return False
        self._begins.insert(at, begin)
        self._ends.insert(at, end)
        return True

    def add(self, copy: Copy, tensor: Any) -> None:
        target = copy.target
        if copy.fill is not None:
            self.fills.append((target, copy.fill))
            return
        source = copy.source(tensor)
        if not (target.is_contiguous() and source.is_contiguous()):
            self.apart.append((target, source))
            return
        target, source = target.view(-1), source.view(-1)
        if target.dtype == source.dtype:
            word = next(word for word in _WORDS if _is_made_of(word.itemsize, target, source))
            target, source = target.view(word), source.view(word)
        kind = (target.dtype, source.dtype, target.device, source.device)
        targets, sources = self.together.setdefault(kind, ([], []))
        targets.append(target)
        sources.append(source)


def _is_made_of(size: int, *tensors: Any) -> bool:
    """Whether the bytes of flat tensors are whole words of this size, where words of it may be read."""
    return not any(
        (tensor.numel() * tensor.element_size()) % size
        or (tensor.storage_offset() * tensor.element_size()) % size
        or tensor.data_ptr() % size
        for tensor in tensors
    )


class PreparedLoad:
    """One update that is, or is being, made ready.

    Args:
        name: what the worker calls it.
        described, text: the regions where its bytes will lie, and its manifest, as a ticket has them.
        opened: the bytes of these regions, where they are open already.
    """

    def __init__(
        self, name: int, plan: LoadPlan, described: list[dict[str, Any]], text: str, opened: OpenedMemory | None = None
    ) -> None:
        """Raises ValueError, OSError or RuntimeError: the space cannot be opened."""
        self.name = name
        self.done = False
        #: seconds that were spent on it
        self.seconds = 0.0
        self.copies = HostCopies()
        began = time.perf_counter()
        self.manifest = manifest_of(text)
        self._plan = plan
        self._source = described, text
        self._layout = layout(self.manifest)
        self._opened = open_regions(described, self._layout.nbytes) if opened is None else opened
        self._steps = self._make()
        self.seconds += time.perf_counter() - began

    def serves(self, name: int, described: list[dict[str, Any]], text: str) -> bool:
        """Whether another update with the same tensors in the same memory can use it. If so it takes that name, and the model's
        addresses are checked again. A GPU's handle always names the same memory; a file's path does not."""
        if not self.done or any(space["kind"] != "cuda" for space in described) or self._source != (described, text):
            return False
        self.name, self.done, self.seconds = name, False, 0.0
        self._steps = self._look()
        return True

    @property
    def sealed(self) -> bool:
        """Whether the bytes copied out of the regions are those that were lent."""
        return sealed(self._opened, self._source[0])

    def go_on(self, seconds: float) -> None:
        """Work for about so long, one step at least, or to the end. Raises ValueError: it cannot be made ready."""
        began = time.perf_counter()
        spent = 0.0
        while not self.done and spent <= seconds:
            self.done = next(self._steps, True)
            spent = time.perf_counter() - began
        self.seconds += spent

    def close(self) -> None:
        """End the preparation, so that its memory is freed with the last reference, not by Python's next search for cycles."""
        self._steps.close()

    def _look(self) -> Generator[bool]:
        if not self._plan.holds(tensor.name for tensor in self.manifest):
            raise ValueError("the model's memory is not where it was when its load was watched")
        yield False

    def _make(self) -> Generator[bool]:
        yield from self._look()
        for tensor, at in zip(self.manifest, self._layout.offsets, strict=True):
            begins, parts = zip(*self._opened.elements(tensor, at), strict=True)
            for copy in self._plan.copies[tensor.name]:
                for part, own in copy.cut(begins):
                    self.copies.add(own, parts[part])
            yield False
        self.copies.warm()
