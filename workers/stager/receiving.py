"""How an update is received: the broadcasts of a process group into the stager's memory, and the scan of every byte."""

import contextlib
import importlib
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

from enginepool.protocol.layout import buckets, layout
from enginepool.protocol.manifest import Tensor
from enginepool.protocol.messages.weight_reports import Finding
from enginepool.transfer.digest import make_ready
from enginepool.transfer.process_group import QUEUED, ProcessGroup
from enginepool.transfer.weight_scan import RunningScan, WeightScan
from enginepool.workers.stager.shards import cut_space, whole_digest, whole_findings

torch: Any = importlib.import_module("torch")

#: Broadcasts under way at a time where two buffers take turns, or the CPU does the work: one bucket is scanned while the next
#: arrives.
AHEAD = 2
#: The coordinator ends an update that takes too long. This limit is for a stager whose worker is gone.
RECEIVE_S = 24 * 3600.0
#: A GPU scans twice, because each scan interrupts the engine on that GPU. The first scan begins when this part of the bytes has
#: not arrived yet, and is over before they arrive. The second one, after the last byte, is short.
LAST_SCAN = 1 / 8


class TensorPart(NamedTuple):
    """One bucket: where it is received, and its place in each space."""

    into: Any
    regions: list[Any]


class Reception:
    """What is done with each bucket of an update: made before the first byte arrives, and kept for later updates.

    Args:
        memory: a space on each device of the engine. Bytes are received into the first one, and copied from there.
        device: of the process group. Where the memory is on another device, buckets are received into two buffers on this one.
        targets: as `WeightScan` has them.
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
        if space.device.type != torch.device(device).type:
            bounce = [torch.empty(min(bucket_bytes, nbytes), dtype=torch.uint8, device=device) for _ in range(AHEAD)]
        turns = [bounce[k % AHEAD][: bucket.nbytes] for k, bucket in enumerate(cuts)] if bounce else []
        self._scan = WeightScan(space, manifest, ends, targets, turns)
        self._in_place = not bounce
        self._gpus = range(len(memory) if space.is_cuda or device != "cpu" else 0)
        self._parts: list[TensorPart] = []
        for k, (bucket, end) in enumerate(zip(cuts, ends, strict=True)):
            regions = [other[bucket.at : end] for other in memory]
            into = turns[k] if turns else regions[0]
            self._parts.append(TensorPart(into, regions))
        #: after so many buckets a GPU scans those that it has not scanned
        self._scan_after = {bisect_right(ends, (1 - LAST_SCAN) * nbytes), len(ends)} - {0}

    def receive(self, group: ProcessGroup) -> tuple[str, list[Finding]]:
        """Broadcasts into the memory; (digest, findings). Raises CollectiveError.

        On a GPU all work is queued at once. The CPU waits at the end, and where a broadcast is QUEUED buckets ahead.
        """
        scan, scanned = self._scan.begin(), 0
        on_gpu = group.on_device and self._in_place
        # The CPU scans each bucket at once, while the next one arrives.
        scan_after = self._scan_after if on_gpu else range(1, len(self._parts) + 1)
        # A broadcast waits for the work that its stream had before. Where each bucket has memory of its own, and a GPU does the
        # work, no broadcast needs that. So many are begun before the first scan.
        ahead = QUEUED // 2 if on_gpu else AHEAD
        ways = [group.begin(part.into) for part in self._parts[:ahead]]
        for k, part in enumerate(self._parts):
            if self._in_place:
                ways[k].order(RECEIVE_S)
            else:
                # The bytes must be here before they are copied. Only `wait` notices that the group was aborted.
                ways[k].wait(RECEIVE_S)
                part.regions[0].copy_(part.into, non_blocking=part.regions[0].is_cuda)
            for other in part.regions[1:]:
                other.copy_(part.regions[0], non_blocking=True)
            if k + 1 in scan_after:
                scan.add(scanned, k + 1)
                scanned = k + 1
            following = k + ahead
            if following < len(self._parts):
                if following >= QUEUED:
                    ways[following - QUEUED].wait(RECEIVE_S)
                ways.append(group.begin(self._parts[following].into))
        for way in ways[-QUEUED:]:
            way.wait(RECEIVE_S)
        for gpu in self._gpus:
            torch.cuda.synchronize(gpu)
        return scan.result()


class ShardedReception:
    """What is done with each bucket of an update into a space in shards: made before the first byte arrives, and kept.

    The last shard is on the device of the process group, and its bytes are received in place. All others are received into two
    buffers on that device, and copied. The buffers are the last bytes of the last shard, if it has four buckets or more: those
    bytes are received when the buffers are needed no more. Each device scans its shard when it is complete.

    Args:
        memory: the shards, in their order.
        device: of the process group.
        targets: as `WeightScan` has them.
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
        self._scans: list[WeightScan | None] = []
        #: after so many buckets a shard is complete
        self._complete: list[int] = []
        for shard, part in zip(self._shards, memory, strict=True):
            own, size = [targets[place] for place in shard.places] if targets else [], shard.end - shard.begin
            with _on(part.device):
                self._scans.append(WeightScan(part, shard.manifest, [size], own) if size else None)
            self._complete.append(-(-shard.end // bucket_bytes))

    def receive(self, group: ProcessGroup) -> tuple[str, list[Finding]]:
        """Broadcasts into the memory; (digest, findings). Raises CollectiveError."""
        running: list[RunningScan] = []
        scanned = 0
        ways = [group.begin(into) for into, _ in self._parts[:AHEAD]]
        for k, (_, copies) in enumerate(self._parts):
            ways[k].wait(RECEIVE_S)
            for into, source in copies:
                into.copy_(source, non_blocking=into.is_cuda)
            while scanned < len(self._scans) and self._complete[scanned] <= k + 1:
                scan = self._scans[scanned]
                with _on(self._devices[scanned]):
                    if scan is not None:
                        running.append(scan.begin())
                        running[-1].add(0)
                scanned += 1
            # The device copies out of the buffer before it receives into it: it does its work in this order.
            if k + AHEAD < len(self._parts):
                ways.append(group.begin(self._parts[k + AHEAD][0]))
        for device in self._devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        shards = [(shard, device) for shard, device in zip(self._shards, self._devices, strict=True) if shard.end > shard.begin]
        found: list[tuple[str, list[Finding]]] = []
        for one, (_, device) in zip(running, shards, strict=True):
            with _on(device):
                found.append(one.result())
        digest = whole_digest([(shard.begin, digest) for (shard, _), (digest, _) in zip(shards, found, strict=True)])
        return digest, whole_findings(self._manifest, [findings for _, findings in found])


def _on(device: Any) -> Any:
    """A context in which kernels are launched on this device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
