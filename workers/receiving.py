"""The stager's hands: memory for an update, the process group it comes by, and the look at every byte as it passes."""

import contextlib
import importlib
import os
import secrets
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from enginepool.collective import Group
from enginepool.digest import Digest, Findings, views
from enginepool.host import SHARED, unnamed_file
from enginepool.protocol.layout import buckets, layout
from enginepool.protocol.manifest import Tensor
from enginepool.protocol.updates import Finding
from enginepool.spaces import DeviceSpace, HostSpace
from enginepool.workers.snapshot import Footer, copy_snapshot, link, write_footer

torch: Any = importlib.import_module("torch")

#: broadcasts on their way at a time: one is looked at while the next comes in
AHEAD = 2
#: The coordinator ends an update that takes too long; this is for a stager that everybody forgot.
FOREVER_S = 24 * 3600.0
#: of a GPU's memory, left to whoever needs a little more
MARGIN = 256 << 20
#: threads that write a snapshot, and bytes that each writes at once
WRITERS = 4
WRITTEN = 32 << 20


class HostMemory(HostSpace):
    """A space in memory of this host."""

    _complete = False

    def save(self, path: str, footer: Footer) -> None:
        """Keep it as a snapshot. Raises OSError."""
        if not self._complete:
            write_footer(self.fd, self.nbytes, footer)
            self._complete = True
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        if not link(self.fd, path):
            copy_snapshot(self.fd, path)


class DeviceMemory(DeviceSpace):
    """A space on each GPU of the engine."""

    def __init__(self, nbytes: int, gpus: int) -> None:
        """Raises OSError: no room."""
        torch.cuda.empty_cache()
        for gpu in range(gpus):
            free, _ = torch.cuda.mem_get_info(gpu)
            if free < nbytes + MARGIN:
                raise OSError(f"GPU {gpu} has {free >> 20} MiB left for {nbytes >> 20} MiB of weights")
        DeviceSpace.__init__(self, nbytes, [f"cuda:{gpu}" for gpu in range(gpus)])

    def save(self, path: str, footer: Footer) -> None:
        """Keep it as a snapshot. Raises OSError."""
        nbytes = layout(footer.manifest).nbytes
        fd = _shared_file(nbytes)
        try:
            write_out(self.tensors[0][:nbytes], fd)
            write_footer(fd, nbytes, footer)
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            if not link(fd, path):
                copy_snapshot(fd, path)
        finally:
            os.close(fd)


def _shared_file(nbytes: int) -> int:
    """An unnamed file in this host's memory with room for so many bytes. Raises OSError."""
    with contextlib.suppress(OSError):
        room = os.statvfs(SHARED)
        if room.f_bavail * room.f_frsize > nbytes:
            return unnamed_file(SHARED)
    return os.memfd_create("enginepool-weights", os.MFD_CLOEXEC)


def write_out(space: Any, fd: int) -> None:
    """Write a space into a file, by several threads: one alone takes a second for a gigabyte, and the next update waits for it.

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
            at = 0
            while at < size:
                at += os.pwrite(fd, data[at:], begin + at)

    with ThreadPoolExecutor(WRITERS) as writers:
        for done in [writers.submit(write, first) for first in range(WRITERS)]:
            done.result()


Memory = HostMemory | DeviceMemory


def make_memory(nbytes: int, *, gpus: int) -> Memory:
    """Room on the GPUs if there are some and they have it, else on the host. Raises OSError: neither."""
    if gpus:
        with contextlib.suppress(OSError):
            return DeviceMemory(nbytes, gpus)
    return HostMemory(nbytes, pinned=bool(gpus))


def gpus_of(device: str, wanted: int) -> int:
    """GPUs that hold spaces: `wanted` of them, or none on a CPU."""
    if device == "cpu" or not torch.cuda.is_available():
        return 0
    return wanted


def be_small() -> None:
    """An engine beside this process needs the cores."""
    torch.set_num_threads(1)


class Reception:
    """One update, from its first byte to its last."""

    def __init__(self, memory: Memory, manifest: Sequence[Tensor], bucket_bytes: int) -> None:
        self.memory = memory
        self.manifest = list(manifest)
        self._bucket_bytes = bucket_bytes
        self._layout = layout(manifest)
        #: before the first byte comes: there are hundreds of them
        self._tensors = views(memory.tensors[0][: self._layout.nbytes], self.manifest)

    def receive(self, group: Group) -> tuple[str, list[Finding]]:
        """Broadcasts into the memory; (digest, findings). Raises CollectiveError."""
        digest, findings = Digest(), Findings()
        space = self.memory.tensors[0][: self._layout.nbytes]
        tensors = self._tensors
        names = [tensor.name for tensor in self.manifest]
        ends = [*self._layout.offsets[1:], self._layout.nbytes]
        bounce = self._bounce(group)
        way: deque[tuple[Any, Any, Any]] = deque()
        looked = 0

        def land() -> None:
            nonlocal looked
            broadcast, bucket, into = way.popleft()
            broadcast.wait(FOREVER_S)
            whole = space[bucket.at : bucket.at + bucket.nbytes]
            if into is not whole:
                # What the processor looks at next must have come.
                whole.copy_(into, non_blocking=whole.is_cuda)
            digest.add(into, bucket.at)
            for other in self.memory.tensors[1:]:
                other[bucket.at : bucket.at + bucket.nbytes].copy_(whole, non_blocking=True)
            first = looked
            while looked < len(ends) and ends[looked] <= bucket.at + bucket.nbytes:
                looked += 1
            findings.add(names[first:looked], tensors[first:looked])

        for k, bucket in enumerate(buckets(self.manifest, self._bucket_bytes)):
            if len(way) == AHEAD:
                land()
            into = bounce[k % AHEAD][: bucket.nbytes] if bounce else space[bucket.at : bucket.at + bucket.nbytes]
            way.append((group.begin(into), bucket, into))
        while way:
            land()
        if space.is_cuda or bounce:
            for gpu in range(len(self.memory.tensors) if torch.cuda.is_available() else 0):
                torch.cuda.synchronize(gpu)
        return digest.text(), findings.found()

    def _bounce(self, group: Group) -> list[Any]:
        """Buckets on the group's device, where the memory itself is elsewhere."""
        if self.memory.tensors[0].device.type == group.device.split(":")[0]:
            return []
        size = min(self._bucket_bytes, self._layout.nbytes)
        return [torch.empty(size, dtype=torch.uint8, device=group.device) for _ in range(AHEAD)]


def new_peer() -> str:
    """A name for this side of a process group."""
    return secrets.token_hex(8)
