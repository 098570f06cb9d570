"""The two buffers of a publisher, and which tensor goes where in memory that takes buckets.

For the two buffers this plan is made once for a manifest, and kept between updates.
"""

import importlib
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from enginepool.errors import BadRequest
from enginepool.protocol.layout import Bucket, buckets, layout
from enginepool.protocol.manifest import Tensor
from enginepool.trainer.tensors import fits
from enginepool.transfer.digest import make_ready
from enginepool.transfer.shared_memory import Memory, make_space

torch: Any = importlib.import_module("torch")

#: Devices whose ranks copy where they are on one host. Not "cpu": gloo does as well there, and works between hosts too.
COPYING = ("cuda",)
#: Tensors are copied as words of the largest kind that their sizes are multiples of: wide ones go faster, and whole ones keep
#: every bit, which floating ones need not.
_WORDS: tuple[Any, ...] = (torch.int64, torch.int32, torch.int16, torch.uint8)


def copied(device: Any) -> bool:
    """Whether others may copy buckets on this device."""
    return device.type in COPYING


def stand_behind(device: Any = None) -> None:
    """Make later work of other threads on a GPU, which is on its default stream, wait for this thread's current stream.

    `device`: a GPU; else the current one, if this process uses any.
    """
    if (device is None or device.type != "cuda") and not torch.cuda.is_initialized():
        return
    gpu = device if device is not None and device.type == "cuda" else torch.device("cuda", torch.cuda.current_device())
    torch.cuda.default_stream(gpu).wait_event(torch.cuda.current_stream(gpu).record_event())


class BufferCopies(NamedTuple):
    """Copies that are one call: words of tensors, by their places, into `targets`. A part of None is the whole tensor."""

    targets: list[Any]
    sources: list[tuple[int, slice | None]]


class Filling(NamedTuple):
    """How one bucket is filled.

    at: of its first byte in the space. bytes: the bucket in its memory. until: tensors before this place are needed for it.
    through: places of the tensors that are needed no more after it. gaps: what no tensor covers.
    """

    at: int
    bytes: Any
    until: int
    through: list[int]
    copies: list[BufferCopies]
    gaps: list[Any]


class Expected:
    """One tensor of the manifest, as torch says it."""

    __slots__ = ("described", "dtype", "name", "nbytes", "shape", "word")

    def __init__(self, described: Tensor) -> None:
        self.described = described
        self.name, self.shape, self.nbytes = described.name, described.shape, described.nbytes
        self.dtype = getattr(torch, described.dtype)
        self.word = next(word for word in _WORDS if self.nbytes % word.itemsize == 0)

    def words(self, name: str, tensor: Any) -> Any:
        """The tensor's bytes as words. Raises BadRequest: it is not the one that was announced."""
        if name != self.name or tensor.dtype != self.dtype or tensor.shape != self.shape:
            raise BadRequest(f"source: {fits(name, tensor, self.described)}", field=f"source[{self.name}]")
        size = self.word.itemsize
        if not tensor.is_contiguous():
            tensor = tensor.contiguous()
        elif tensor.data_ptr() % size or tensor.storage_offset() * tensor.element_size() % size:
            tensor = tensor.clone()
        return tensor.view(-1).view(self.word)


class Cut(NamedTuple):
    """A manifest in buckets."""

    manifest: Sequence[Tensor]
    bucket_bytes: int
    expected: list[Expected]
    fillings: list[Filling]


class Buffers:
    """The two buffers of a publisher."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pair: list[Any] = []
        #: what they lie in, where others may copy them
        self._regions: list[Memory] = []
        self._cut: Cut | None = None

    def make_ready(self) -> None:
        """What takes seconds the first time, and is not to be waited for by a pool."""
        make_ready(self.device)

    def close(self) -> None:
        """Free their memory, also while other code refers to this object."""
        self._cut = None
        self._pair.clear()
        self._regions.clear()

    @contextmanager
    def aside(self, after: Any = None) -> Generator[None]:
        """On a GPU the block runs on the stream of these buffers, behind the event `after` if there is one. What it leaves to
        the device may go on when it is left."""
        if self.stream is None:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            if after is not None:
                self.stream.wait_event(after)
            yield

    def cut(self, manifest: Sequence[Tensor], bucket_bytes: int) -> Cut:
        """How these tensors go through the buffers, which are there afterwards."""
        cut = self._cut
        if cut is None or cut.bucket_bytes != bucket_bytes or cut.manifest != manifest:
            self._cut = None
            pair = self._have(min(bucket_bytes, layout(manifest).nbytes))

            def in_turn(bucket: Bucket) -> Any:
                return pair[bucket.at // bucket_bytes % 2][: bucket.nbytes]

            cut = self._cut = cut_up(manifest, bucket_bytes, in_turn)
        return cut

    def _have(self, nbytes: int) -> list[Any]:
        """Two uint8 tensors of at least so many bytes. Raises OSError: no room."""
        if not self._pair or self._pair[0].numel() < nbytes:
            self._pair.clear()
            self._regions.clear()
            if copied(self.device):
                self._regions += [make_space(nbytes, self.device) for _ in range(2)]
                self._pair += [memory.tensors[0] for memory in self._regions]
            else:
                self._pair += [torch.empty(nbytes, dtype=torch.uint8, device=self.device) for _ in range(2)]
        return self._pair


def cut_up(manifest: Sequence[Tensor], bucket_bytes: int, memory: Callable[[Bucket], Any]) -> Cut:
    """How these tensors fill buckets, each in the uint8 tensor of its size that `memory` gives for it."""
    expected = [Expected(tensor) for tensor in manifest]
    needed = 0
    fillings: list[Filling] = []
    for bucket in buckets(manifest, bucket_bytes):
        needed = max([needed, *(piece.tensor + 1 for piece in bucket.pieces)])
        fillings.append(_filling(bucket, expected, memory(bucket), needed))
    return Cut(manifest, bucket_bytes, expected, fillings)


def _filling(bucket: Bucket, expected: Sequence[Expected], memory: Any, needed: int) -> Filling:
    copies: dict[Any, BufferCopies] = {}
    gaps: list[Any] = []
    through: list[int] = []
    end = 0
    for place, tensor_at, bucket_at, nbytes in bucket.pieces:
        if bucket_at > end:
            gaps.append(memory[end:bucket_at])
        end = bucket_at + nbytes
        tensor = expected[place]
        size = tensor.word.itemsize
        whole = nbytes == tensor.nbytes
        targets, sources = copies.setdefault(tensor.word, BufferCopies([], []))
        targets.append(memory[bucket_at:end].view(tensor.word))
        sources.append((place, None if whole else slice(tensor_at // size, (tensor_at + nbytes) // size)))
        if tensor_at + nbytes == tensor.nbytes:
            through.append(place)
    if end < bucket.nbytes:
        gaps.append(memory[end:])
    return Filling(bucket.at, memory, needed, through, list(copies.values()), gaps)
