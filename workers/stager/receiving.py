"""The stager's hands: memory for an update, the process group it comes by, and the look at every byte as it passes."""

import contextlib
import importlib
import os
import secrets
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from enginepool.digest import Batch, Digest, Findings, make_ready, views
from enginepool.group import QUEUED, Group
from enginepool.host import SHARED, unnamed_file
from enginepool.looking import Look
from enginepool.protocol.layout import buckets, layout
from enginepool.protocol.manifest import Tensor
from enginepool.protocol.updates import Finding
from enginepool.spaces import DeviceSpace, HostSpace
from enginepool.workers.stager.snapshot import Footer, copy_snapshot, link, write_footer

torch: Any = importlib.import_module("torch")

#: Broadcasts on their way at a time where buffers take turns, or the processor does the work: one is looked at while the next
#: comes in.
AHEAD = 2
#: The coordinator ends an update that takes too long; this is for a stager that everybody forgot.
FOREVER_S = 24 * 3600.0
#: of a GPU's memory, left to whoever needs a little more
MARGIN = 256 << 20
#: A GPU looks at what has come twice: each look makes it leave off what its engine has it do. The first one comes when at least
#: this part of the bytes is yet to come, so that it is over before they are here; the second, after the last byte, is short.
LAST_LOOK = 1 / 8
#: threads that write a snapshot, and bytes that each writes at once
WRITERS = 4
WRITTEN = 32 << 20


class HostMemory(HostSpace):
    """A space in memory of this host."""

    _complete = False

    def reception(self, manifest: Sequence[Tensor], bucket_bytes: int, device: str, targets: Sequence[str] = ()) -> "Reception":
        """What receives these tensors here."""
        return Reception(self.tensors, manifest, bucket_bytes, device, targets)

    def save(self, path: str, footer: Footer, left: Callable[[], None]) -> None:
        """Keep it as a snapshot, in a folder that exists; `left` is called when this memory is needed no more for that.

        Raises OSError.
        """
        if not self._complete:
            write_footer(self.fd, self.nbytes, footer)
            self._complete = True
        if not link(self.fd, path):
            copy_snapshot(self.fd, path)
        left()


class DeviceMemory(DeviceSpace):
    """A space on each GPU of the engine."""

    def __init__(self, nbytes: int, gpus: int) -> None:
        """Raises OSError: no room."""
        self._reception: Reception | None = None
        make_ready("cuda:0")
        torch.cuda.empty_cache()
        for gpu in range(gpus):
            free, _ = torch.cuda.mem_get_info(gpu)
            if free < nbytes + MARGIN:
                raise OSError(f"GPU {gpu} has {free >> 20} MiB left for {nbytes >> 20} MiB of weights")
        DeviceSpace.__init__(self, nbytes, [f"cuda:{gpu}" for gpu in range(gpus)])

    def reception(self, manifest: Sequence[Tensor], bucket_bytes: int, device: str, targets: Sequence[str] = ()) -> "Reception":
        """What receives these tensors here: that of last time, if they are the same."""
        kept = self._reception
        if kept is None or kept.made_for != (list(manifest), bucket_bytes, device, list(targets)):
            kept = self._reception = Reception(self.tensors, manifest, bucket_bytes, device, targets)
        return kept

    def save(self, path: str, footer: Footer, left: Callable[[], None]) -> None:
        """As `HostMemory.save`; to a disk it goes by way of the host's memory. Raises OSError, RuntimeError."""
        nbytes = layout(footer.manifest).nbytes
        fd = _shared_file(nbytes)
        try:
            write_out(self.tensors[0][:nbytes], fd)
            left()
            write_footer(fd, nbytes, footer)
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


class Part(NamedTuple):
    """One bucket: where it is received, and its place in each space."""

    into: Any
    spaces: list[Any]


class _Bounced:
    """The look at buckets that come by way of two buffers on a GPU: their digest is taken there, and findings where they end.

    Args:
        came: where each bucket begins in the space, and the buffer that it comes by.
    """

    def __init__(self, space: Any, manifest: Sequence[Tensor], came: list[tuple[int, Any]], targets: Sequence[str]) -> None:
        self._came = came
        ends = [*layout(manifest).offsets[1:], space.numel()]
        names, tensors = [tensor.name for tensor in manifest], views(space, manifest)
        self._batches: list[Batch] = []
        looked = 0
        for at, buffer in came:
            until = bisect_right(ends, at + buffer.numel(), looked)
            self._batches.append(Batch(names[looked:until], tensors[looked:until], targets[looked:until]))
            looked = until

    def begin(self) -> "_Bounced":
        """Another update. Only one is looked at at a time."""
        self._digest, self._findings = Digest(), Findings()
        return self

    def add(self, first: int, until: int) -> None:
        """As `Looking` has it; in their order."""
        for (at, buffer), batch in zip(self._came[first:until], self._batches[first:until], strict=True):
            self._digest.add(buffer, at)
            self._findings.add(batch)

    def result(self) -> tuple[str, list[Finding]]:
        """As `Looking` has it."""
        return self._digest.text(), self._findings.found()


class Reception:
    """What is done with each bucket of an update: made before the first byte comes, and kept for the updates after it.

    Args:
        memory: a space on each device of the engine; bytes come into the first one, and go on from there.
        device: of the process group; where the memory is elsewhere, buckets come by way of two buffers there.
        targets: as `Look` has them.
    """

    def __init__(
        self, memory: Sequence[Any], manifest: Sequence[Tensor], bucket_bytes: int, device: str, targets: Sequence[str] = ()
    ) -> None:
        self.made_for = (list(manifest), bucket_bytes, device, list(targets))
        nbytes = layout(manifest).nbytes
        space = memory[0][:nbytes]
        make_ready(device)
        cuts = list(buckets(manifest, bucket_bytes))
        ends = [bucket.at + bucket.nbytes for bucket in cuts]
        bounce: list[Any] = []
        self._look: Look | _Bounced
        if space.device.type == torch.device(device).type:
            self._look = Look(space, manifest, ends, targets)
        else:
            bounce = [torch.empty(min(bucket_bytes, nbytes), dtype=torch.uint8, device=device) for _ in range(AHEAD)]
            turns = [bounce[k % AHEAD][: bucket.nbytes] for k, bucket in enumerate(cuts)]
            self._look = _Bounced(
                space, manifest, [(bucket.at, turn) for bucket, turn in zip(cuts, turns, strict=True)], targets
            )
        self._in_place = not bounce
        self._gpus = range(len(memory) if space.is_cuda or device != "cpu" else 0)
        self._parts: list[Part] = []
        for k, (bucket, end) in enumerate(zip(cuts, ends, strict=True)):
            spaces = [other[bucket.at : end] for other in memory]
            into = bounce[k % AHEAD][: bucket.nbytes] if bounce else spaces[0]
            self._parts.append(Part(into, spaces))
        #: after so many buckets a GPU looks at those that it has not looked at
        self._looks = {bisect_right(ends, (1 - LAST_LOOK) * nbytes), len(ends)} - {0}

    def receive(self, group: Group) -> tuple[str, list[Finding]]:
        """Broadcasts into the memory; (digest, findings). Raises CollectiveError.

        On a GPU all of it is put in order at once and nothing waits until the end, save for what is far ahead.
        """
        looking, looked = self._look.begin(), 0
        on_gpu = group.on_device and self._in_place
        # What the processor looks at it looks at once, while the next bucket comes.
        looks = self._looks if on_gpu else range(1, len(self._parts) + 1)
        # A broadcast waits for what the stream had before it was begun. Where each bucket has memory of its own, and the device
        # does the work, no broadcast needs that, and many are begun before the first look at any bytes.
        ahead = QUEUED // 2 if on_gpu else AHEAD
        ways = [group.begin(part.into) for part in self._parts[:ahead]]
        for k, part in enumerate(self._parts):
            if self._in_place:
                ways[k].order(FOREVER_S)
            else:
                # What the processor looks at next must have come, and only `wait` hears of a group that is given up.
                ways[k].wait(FOREVER_S)
                part.spaces[0].copy_(part.into, non_blocking=part.spaces[0].is_cuda)
            for other in part.spaces[1:]:
                other.copy_(part.spaces[0], non_blocking=True)
            if k + 1 in looks:
                looking.add(looked, k + 1)
                looked = k + 1
            following = k + ahead
            if following < len(self._parts):
                if following >= QUEUED:
                    ways[following - QUEUED].wait(FOREVER_S)
                ways.append(group.begin(self._parts[following].into))
        for way in ways[-QUEUED:]:
            way.wait(FOREVER_S)
        for gpu in self._gpus:
            torch.cuda.synchronize(gpu)
        return looking.result()


def new_peer() -> str:
    """A name for this side of a process group."""
    return secrets.token_hex(8)
