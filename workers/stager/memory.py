"""The stager's memory for the bytes of an update, on the host or on GPUs, and how it is saved as a snapshot."""

import contextlib
import importlib
import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import psutil

from enginepool.host import SHARED, check_room, unnamed_file
from enginepool.protocol.layout import layout
from enginepool.protocol.manifest import Tensor
from enginepool.protocol.messages.weights import MemoryRegion
from enginepool.transfer.digest import make_ready
from enginepool.transfer.shared_memory import DeviceSpace, HostSpace
from enginepool.workers.stager.receiving import Reception, ShardedReception
from enginepool.workers.stager.shards import cut_space, shard_sizes
from enginepool.workers.stager.snapshot import Footer, name_snapshot, write_footer

torch: Any = importlib.import_module("torch")

#: Of a GPU's memory, left for other allocations: before its engine starts, and, as a part of all, where the engine runs already
#: and takes more now and then.
MARGIN = 256 << 20
ENGINES_PART = 1 / 32
#: Bytes of a shard on GPU 0, if the space has as many: in a publisher's default buckets, what `ShardedReception` needs.
LEAST_ON_FIRST = 2 << 30
#: threads that write a snapshot, and bytes that each writes at once
WRITERS = 4
WRITTEN = 32 << 20


class HostMemory(HostSpace):
    """A space in memory of this host."""

    shards = 0
    #: why these bytes are not on the GPUs of the engine; "": it has none
    why_host = ""
    _complete = False

    def reception(self, manifest: Sequence[Tensor], bucket_bytes: int, device: str, targets: Sequence[str] = ()) -> Reception:
        """What receives these tensors here."""
        return Reception(self.tensors, manifest, bucket_bytes, device, targets)

    def save(self, path: str, footer: Footer, left: Callable[[], None]) -> None:
        """Keep it as a snapshot, in a folder that exists; `left` is called when the snapshot no longer needs this memory.

        Raises OSError.
        """
        if not self._complete:
            write_footer(self.fd, self.nbytes, footer)
            self._complete = True
        name_snapshot(self.fd, path)
        left()


class DeviceMemory(DeviceSpace):
    """One space for all GPUs of the engine, in shards, where these GPUs reach each other's memory; else a space on each GPU.

    Attributes:
        shards: their number; 0: each of `tensors` is a whole space.
    """

    shards = 0

    def __init__(self, nbytes: int, gpus: int, *, engine_runs: bool = False) -> None:
        """Raises OSError: no room."""
        self._reception: Reception | ShardedReception | None = None
        sizes = shard_sizes(nbytes, gpus, LEAST_ON_FIRST) if _reach_each_other(gpus) else dict.fromkeys(range(gpus), nbytes)
        for gpu in sizes:
            with torch.cuda.device(gpu):
                make_ready(f"cuda:{gpu}")
        torch.cuda.empty_cache()
        for gpu, size in sizes.items():
            free, total = torch.cuda.mem_get_info(gpu)
            if free < size + (int(total * ENGINES_PART) if engine_runs else MARGIN):
                raise OSError(f"GPU {gpu} has {free >> 20} MiB left for {size >> 20} MiB of weights")
        DeviceSpace.__init__(self, nbytes, [f"cuda:{gpu}" for gpu in sizes], list(sizes.values()))
        self.shards = len(sizes) if _reach_each_other(gpus) else 0

    def regions(self) -> list[MemoryRegion]:
        """As other processes open them."""
        found = DeviceSpace.regions(self)
        return [msgspec.structs.replace(one, nbytes=own.numel()) for one, own in zip(found, self.tensors, strict=True)]

    def reception(
        self, manifest: Sequence[Tensor], bucket_bytes: int, device: str, targets: Sequence[str] = ()
    ) -> Reception | ShardedReception:
        """What receives these tensors here: that of last time, if they are the same."""
        kept = self._reception
        if kept is None or kept.made_for != (list(manifest), bucket_bytes, device, list(targets)):
            make = ShardedReception if self.shards > 1 else Reception
            kept = self._reception = make(self.tensors, manifest, bucket_bytes, device, targets)
        return kept

    def save(self, path: str, footer: Footer, left: Callable[[], None]) -> None:
        """As `HostMemory.save`; to a disk it goes by way of the host's memory. Raises OSError, RuntimeError."""
        nbytes = layout(footer.manifest).nbytes
        check_room(Path(path).parent, nbytes)  # before the GPUs' memory is read: on a full disk that is tried often
        fd = _shared_file(nbytes)
        try:
            if self.shards:
                shards = cut_space(footer.manifest, [tensor.numel() for tensor in self.tensors])
                for shard, tensor in zip(shards, self.tensors, strict=True):
                    write_out(tensor[: shard.end - shard.begin], fd, shard.begin)
            else:
                write_out(self.tensors[0][:nbytes], fd)
            left()
            write_footer(fd, nbytes, footer)
            name_snapshot(fd, path)
        finally:
            os.close(fd)


def _reach_each_other(gpus: int) -> bool:
    """Whether there are several GPUs, each of which can read the memory of all others."""
    return gpus > 1 and all(torch.cuda.can_device_access_peer(*pair) for pair in itertools.permutations(range(gpus), 2))


def _shared_file(nbytes: int) -> int:
    """An unnamed file in this host's memory with room for so many bytes. Raises OSError."""
    with contextlib.suppress(OSError):
        check_room(SHARED, nbytes)
        return unnamed_file(SHARED)
    return os.memfd_create("enginepool-weights", os.MFD_CLOEXEC)


def write_out(space: Any, fd: int, at: int = 0) -> None:
    """Write a space into a file, from byte `at` of it on.

    By several threads: one alone takes a second for a gigabyte, and the next update waits for it.

    Raises OSError: no room.
    """

    def write(first: int) -> None:
        part = torch.empty(min(WRITTEN, space.numel()), dtype=torch.uint8, pin_memory=space.is_cuda)
        stream = torch.cuda.Stream(space.device) if space.is_cuda else None
        for begin in range(first * WRITTEN, space.numel(), WRITERS * WRITTEN):
            size = min(WRITTEN, space.numel() - begin)
            with torch.cuda.stream(stream):
                part[:size].copy_(space[begin : begin + size])
            data = memoryview(part.numpy())[:size]
            written = 0
            while written < size:
                written += os.pwrite(fd, data[written:], at + begin + written)

    with ThreadPoolExecutor(WRITERS) as writers:
        for done in [writers.submit(write, first) for first in range(WRITERS)]:
            done.result()


Memory = HostMemory | DeviceMemory


def make_memory(nbytes: int, *, gpus: int) -> Memory:
    """Room on the GPUs if there are some and they have it, else on the host. Raises OSError: neither."""
    if not gpus:
        return HostMemory(nbytes)
    try:
        return DeviceMemory(nbytes, gpus, engine_runs=True)
    except OSError as error:
        why = str(error)
    available = psutil.virtual_memory().available
    if available < nbytes:
        # Shared memory past what there is does not fail: the kernel kills a process for it.
        raise OSError(f"{why}, and the host has {available >> 20} MiB; reserve_staging = true keeps memory of the GPU")
    memory = HostMemory(nbytes, pinned=True)
    memory.why_host = why
    return memory


def gpus_of(device: str, wanted: int) -> int:
    """GPUs that hold regions: `wanted` of them, or none on a CPU."""
    if device == "cpu" or not torch.cuda.is_available():
        return 0
    return wanted


def be_small() -> None:
    """Leave the cores of this host to the engine."""
    torch.set_num_threads(1)
