"""Memory that a publisher shares over IPC: all tensors in one region. The engines of the same host copy the tensors from it.

A shared region has a seal. When the update ends (committed, aborted, too late, or without a connection), the seal is broken
before the memory is used again, so that an engine that is still copying notices.
"""

import importlib
from collections.abc import Callable
from typing import Any

import msgspec

from enginepool.protocol.layout import ALIGNMENT, layout
from enginepool.protocol.messages.weights import MemoryRegion
from enginepool.trainer.buffers import Buffers, cut_up
from enginepool.trainer.tensor_feed import TensorFeed
from enginepool.trainer.tensors import SendPlan
from enginepool.trainer.trainer_ranks import TrainerRanks
from enginepool.transfer.digest import Digest
from enginepool.transfer.shared_memory import DeviceSpace, HostSpace, Memory, break_seal, gpu_uuid, set_seal

torch: Any = importlib.import_module("torch")


class IpcExporter:
    """The memory that a publisher shares.

    Args:
        buffers: of the publisher; its memory lies on the same device.
        keep: memory stays for the next update; else it is freed after each update.
    """

    def __init__(self, buffers: Buffers, *, keep: bool) -> None:
        self.buffers = buffers
        self._keep = keep
        self._spare: Memory | None = None

    @property
    def gpu(self) -> str:
        """The UUID of the GPU that its memory lies on; "" on none."""
        return gpu_uuid(self.buffers.device) if self.buffers.device.type == "cuda" else ""

    def allocate(self, nbytes: int) -> Memory:
        """Memory for one update. Raises OSError: not enough memory."""
        spare, self._spare = self._spare, None
        if spare is not None and spare.nbytes >= nbytes:
            return spare
        if spare is not None:
            spare.close()
            del spare
        device = self.buffers.device
        return DeviceSpace(nbytes, [device]) if device.type == "cuda" else HostSpace(nbytes, lent=True)

    def release(self, memory: Memory) -> None:
        """It is no longer shared."""
        if self._keep and self._spare is None:
            self._spare = memory
        else:
            memory.close()

    def close(self) -> None:
        """Free all memory, and keep none from now on."""
        self._keep = False
        if self._spare is not None:
            self._spare.close()
            self._spare = None


class IpcExport:
    """The shared memory of one update. A thread that is stuck in one update does not touch the memory of the next one."""

    def __init__(self, exporter: IpcExporter) -> None:
        self._exporter = exporter
        self._memory: Memory | None = None

    def fill(
        self,
        plan: SendPlan,
        *,
        bucket_bytes: int,
        ranks: TrainerRanks,
        stopped: Callable[[], bool],
        progress: Callable[[int], None],
        after: Any = None,
    ) -> tuple[str, int, list[MemoryRegion]]:
        """Lay all tensors out. Returns the digest, the bytes of the content, and the regions.

        Args:
            bucket_bytes: bytes that are copied at once.
            ranks: the other trainer ranks.
            stopped: whether the update was aborted.
            progress: called with the bytes that are laid out so far.
            after: a CUDA event to wait for before the source is read.

        Raises:
            BadRequest: the source gives other tensors than it announced.
            RankFailed: another trainer rank does not.
            OSError: not enough memory.
            Stopped: the update was aborted.
        """
        # Behind the content there is a block for the seal.
        memory = self._memory = self._exporter.allocate(layout(plan.manifest).nbytes + ALIGNMENT)
        content = memory.tensors[0]
        with self._exporter.buffers.aside(after):
            if content.is_cuda:
                # Earlier use of this memory, before torch reused it, may still be under way.
                torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            cut = cut_up(plan.manifest, bucket_bytes, lambda bucket: content[bucket.at : bucket.at + bucket.nbytes])
            feed, digest, laid = TensorFeed(plan, cut.expected, ranks, stopped), Digest(), 0
            ranks.begin(plan)
            for filling in cut.fillings:
                feed.fill(filling)
                digest.add(filling.bytes, filling.at)
                laid += filling.bytes.numel()
                progress(laid)
            feed.end()
            # It waits for what the device still has to do.
            seal = set_seal(content)
            return digest.text(), laid, [msgspec.structs.replace(region, seal=seal) for region in memory.regions()]

    def end(self) -> None:
        """The update ended: break the seal."""
        memory, self._memory = self._memory, None
        if memory is not None:
            with self._exporter.buffers.aside():
                break_seal(memory.tensors[0])
            self._exporter.release(memory)
