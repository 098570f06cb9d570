"""The stager's hands: memory for an update, the process group it comes by, and the look at every byte as it passes."""

import contextlib
import importlib
import itertools
import os
import secrets
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import msgspec

from enginepool.host import SHARED, unnamed_file
from enginepool.protocol.layout import buckets, layout
from enginepool.protocol.manifest import Tensor
from enginepool.protocol.updates import Finding, MemoryRegion
from enginepool.transfer.digest import Digest, DigestBatch, Findings, make_ready, views
from enginepool.transfer.process_group import QUEUED, ProcessGroup
from enginepool.transfer.shared_memory import DeviceSpace, HostSpace
from enginepool.transfer.weight_scan import Look, Looking
from enginepool.workers.stager.shards import cut_space, shard_sizes, whole_digest, whole_findings
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
#: Bytes of a shard on GPU 0, if the space has as many: in a publisher's default buckets, what `ShardedReception` needs.
LEAST_ON_FIRST = 2 << 30
#: threads that write a snapshot, and bytes that each writes at once
WRITERS = 4
WRITTEN = 32 << 20


class HostMemory(HostSpace):
    """A space in memory of this host."""

    shards = 0
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
    """One space for all GPUs of the engine, in shards, where these GPUs reach each other's memory; else a space on each GPU.

    Attributes:
        shards: their number; 0: each of `tensors` is a whole space.
    """

    shards = 0

    def __init__(self, nbytes: int, gpus: int) -> None:
        """Raises OSError: no room."""
        self._reception: Reception | ShardedReception | None = None
        sizes = shard_sizes(nbytes, gpus, LEAST_ON_FIRST) if _reach_each_other(gpus) else dict.fromkeys(range(gpus), nbytes)
        for gpu in sizes:
            with torch.cuda.device(gpu):
                make_ready(f"cuda:{gpu}")
        torch.cuda.empty_cache()
        for gpu, size in sizes.items():
            free, _ = torch.cuda.mem_get_info(gpu)
            if free < size + MARGIN:
                raise OSError(f"GPU {gpu} has {free >> 20} MiB left for {size >> 20} MiB of weights")
        DeviceSpace.__init__(self, nbytes, [f"cuda:{gpu}" for gpu in sizes], list(sizes.values()))
        self.shards = len(sizes) if _reach_each_other(gpus) else 0

    def regions(self) -> list[MemoryRegion]:
        """As other processes open them."""
        found = DeviceSpace.regions(self)
        return [msgspec.structs.replace(one, nbytes=own.numel()) for one, own in zip(found, self.tensors, strict=True)]

    def reception(
        self, manifest: Sequence[Tensor], bucket_bytes: int, device: str, targets: Sequence[str] = ()
    ) -> "Reception | ShardedReception":
        """What receives these tensors here: that of last time, if they are the same."""
        kept = self._reception
        if kept is None or kept.made_for != (list(manifest), bucket_bytes, device, list(targets)):
            make = ShardedReception if self.shards > 1 else Reception
            kept = self._reception = make(self.tensors, manifest, bucket_bytes, device, targets)
        return kept

    def save(self, path: str, footer: Footer, left: Callable[[], None]) -> None:
        """As `HostMemory.save`; to a disk it goes by way of the host's memory. Raises OSError, RuntimeError."""
        nbytes = layout(footer.manifest).nbytes
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
            if not link(fd, path):
                copy_snapshot(fd, path)
        finally:
            os.close(fd)


def _reach_each_other(gpus: int) -> bool:
    """Whether there are several GPUs, each of which can read the memory of all others."""
    return gpus > 1 and all(torch.cuda.can_device_access_peer(*pair) for pair in itertools.permutations(range(gpus), 2))


def _shared_file(nbytes: int) -> int:
    """An unnamed file in this host's memory with room for so many bytes. Raises OSError."""
    with contextlib.suppress(OSError):
        room = os.statvfs(SHARED)
        if room.f_bavail * room.f_frsize > nbytes:
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
    if gpus:
        with contextlib.suppress(OSError):
            return DeviceMemory(nbytes, gpus)
    return HostMemory(nbytes, pinned=bool(gpus))


def gpus_of(device: str, wanted: int) -> int:
    """GPUs that hold regions: `wanted` of them, or none on a CPU."""
    if device == "cpu" or not torch.cuda.is_available():
        return 0
    return wanted


def be_small() -> None:
    """An engine beside this process needs the cores."""
    torch.set_num_threads(1)


class TensorPart(NamedTuple):
    """One bucket: where it is received, and its place in each space."""

    into: Any
    regions: list[Any]


class _Bounced:
    """The look at buckets that come by way of two buffers on a GPU: their digest is taken there, and findings where they end.

    Args:
        came: where each bucket begins in the space, and the buffer that it comes by.
    """

    def __init__(self, space: Any, manifest: Sequence[Tensor], came: list[tuple[int, Any]], targets: Sequence[str]) -> None:
        self._came = came
        ends = [*layout(manifest).offsets[1:], space.numel()]
        names, tensors = [tensor.name for tensor in manifest], views(space, manifest)
        self._batches: list[DigestBatch] = []
        looked = 0
        for at, buffer in came:
            until = bisect_right(ends, at + buffer.numel(), looked)
            self._batches.append(DigestBatch(names[looked:until], tensors[looked:until], targets[looked:until]))
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
        self._parts: list[TensorPart] = []
        for k, (bucket, end) in enumerate(zip(cuts, ends, strict=True)):
            regions = [other[bucket.at : end] for other in memory]
            into = bounce[k % AHEAD][: bucket.nbytes] if bounce else regions[0]
            self._parts.append(TensorPart(into, regions))
        #: after so many buckets a GPU looks at those that it has not looked at
        self._looks = {bisect_right(ends, (1 - LAST_LOOK) * nbytes), len(ends)} - {0}

    def receive(self, group: ProcessGroup) -> tuple[str, list[Finding]]:
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
                part.regions[0].copy_(part.into, non_blocking=part.regions[0].is_cuda)
            for other in part.regions[1:]:
                other.copy_(part.regions[0], non_blocking=True)
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


class ShardedReception:
    """What is done with each bucket of an update into a space in shards: made before the first byte comes, and kept.

    Bytes of the last shard come straight into it, on the device of the process group. All others come by way of two buffers
    there: the last bytes of that shard, if it has four buckets or more, which are needed for bytes of its own when the buffers
    are needed no more. Each device looks at its shard when that is complete.

    Args:
        memory: the shards, in their order.
        device: of the process group.
        targets: as `Look` has them.
    """

    def __init__(
        self, memory: Sequence[Any], manifest: Sequence[Tensor], bucket_bytes: int, device: str, targets: Sequence[str] = ()
    ) -> None:
        self.made_for = (list(manifest), bucket_bytes, device, list(targets))
        self._manifest = list(manifest)
        self._shards = cut_space(manifest, [part.numel() for part in memory])
        self._devices = [part.device for part in memory]
        nbytes, last, first = layout(manifest).nbytes, memory[-1], self._shards[-1].begin
        in_place = last.device.type == torch.device(device).type
        if in_place and last.numel() >= 4 * bucket_bytes:
            buffers = [last[-2 * bucket_bytes : -bucket_bytes], last[-bucket_bytes:]]
        else:
            buffers = [torch.empty(min(bucket_bytes, nbytes), dtype=torch.uint8, device=device) for _ in range(AHEAD)]
        #: for each bucket: where it is received, and from there the copies (to, from) into shards
        self._parts: list[tuple[Any, list[tuple[Any, Any]]]] = []
        for k, bucket in enumerate(buckets(manifest, bucket_bytes)):
            if in_place and bucket.at >= first:
                self._parts.append((last[bucket.at - first :][: bucket.nbytes], []))
                continue
            into, copies = buffers[k % AHEAD][: bucket.nbytes], list[tuple[Any, Any]]()
            for shard, part in zip(self._shards, memory, strict=True):
                begin, end = max(shard.begin, bucket.at), min(shard.end, bucket.at + bucket.nbytes)
                if begin < end:
                    copies.append((part[begin - shard.begin : end - shard.begin], into[begin - bucket.at : end - bucket.at]))
            self._parts.append((into, copies))
        self._looks: list[Look | None] = []
        #: after so many buckets a shard is complete
        self._complete: list[int] = []
        for shard, part in zip(self._shards, memory, strict=True):
            own, size = [targets[place] for place in shard.places] if targets else [], shard.end - shard.begin
            with _on(part.device):
                self._looks.append(Look(part, shard.manifest, [size], own) if size else None)
            self._complete.append(-(-shard.end // bucket_bytes))

    def receive(self, group: ProcessGroup) -> tuple[str, list[Finding]]:
        """Broadcasts into the memory; (digest, findings). Raises CollectiveError."""
        looking: list[Looking] = []
        looked = 0
        ways = [group.begin(into) for into, _ in self._parts[:AHEAD]]
        for k, (_, copies) in enumerate(self._parts):
            ways[k].wait(FOREVER_S)
            for into, source in copies:
                into.copy_(source, non_blocking=into.is_cuda)
            while looked < len(self._looks) and self._complete[looked] <= k + 1:
                look = self._looks[looked]
                with _on(self._devices[looked]):
                    if look is not None:
                        looking.append(look.begin())
                        looking[-1].add(0)
                looked += 1
            # What was copied out of its buffer is copied before, for the device does both in this order.
            if k + AHEAD < len(self._parts):
                ways.append(group.begin(self._parts[k + AHEAD][0]))
        for device in self._devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        shards = [(shard, device) for shard, device in zip(self._shards, self._devices, strict=True) if shard.end > shard.begin]
        found: list[tuple[str, list[Finding]]] = []
        for one, (_, device) in zip(looking, shards, strict=True):
            with _on(device):
                found.append(one.result())
        digest = whole_digest([(shard.begin, digest) for (shard, _), (digest, _) in zip(shards, found, strict=True)])
        return digest, whole_findings(self._manifest, [findings for _, findings in found])


def _on(device: Any) -> Any:
    """Where kernels are launched meanwhile."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def new_peer() -> str:
    """A name for this side of a process group."""
    return secrets.token_hex(8)
