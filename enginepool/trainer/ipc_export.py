"""Memory that a publisher lends: all tensors laid out in one space of its own, out of which the engines of its host copy them.

The space has a seal as long as it is lent. Whatever ends an update here (the coordinator's last word, a deadline, the end of
the link) breaks the seal before the memory is used again, so that an engine that is still copying knows.
"""

import importlib
from collections.abc import Callable
from typing import Any

import msgspec

from enginepool.protocol.layout import ALIGNMENT, layout
from enginepool.protocol.updates import MemoryRegion
from enginepool.trainer.buffers import Buffers, cut_up
from enginepool.trainer.streaming import Feed
from enginepool.trainer.tensors import SendPlan
from enginepool.trainer.trainer_ranks import TrainerRanks
from enginepool.transfer.digest import Digest
from enginepool.transfer.shared_memory import DeviceSpace, HostSpace, Memory, break_seal, gpu_uuid, set_seal

torch: Any = importlib.import_module("torch")


class IpcExporter:
    """What a publisher has for lending.

    Args:
        buffers: of the publisher; its memory lies on the same device.
        keep: memory stays for the next update; else it is given back after each.
    """

    def __init__(self, buffers: Buffers, *, keep: bool) -> None:
        self.buffers = buffers
        self._keep = keep
        self._spare: Memory | None = None

    @property
    def gpu(self) -> str:
        """The UUID of the GPU that its memory lies on; "" on none."""
        return gpu_uuid(self.buffers.device) if self.buffers.device.type == "cuda" else ""

    def take(self, nbytes: int) -> Memory:
        """Memory for one update. Raises OSError: no room."""
        spare, self._spare = self._spare, None
        if spare is not None and spare.nbytes >= nbytes:
            return spare
        if spare is not None:
            spare.close()
            del spare
        device = self.buffers.device
        return DeviceSpace(nbytes, [device]) if device.type == "cuda" else HostSpace(nbytes, lent=True)

    def back(self, memory: Memory) -> None:
        """It is lent no more."""
        if self._keep and self._spare is None:
            self._spare = memory
        else:
            memory.close()

    def close(self) -> None:
        """Give back what is kept, and keep nothing from now on."""
        self._keep = False
        if self._spare is not None:
            self._spare.close()
            self._spare = None


class IpcExport:
    """What is lent for one update. A thread that is stuck in one does not touch what the next one lends."""

    def __init__(self, lender: IpcExporter) -> None:
        self._lender = lender
        self._memory: Memory | None = None

    def fill(
        self,
        plan: SendPlan,
        *,
        bucket_bytes: int,
        lockstep: TrainerRanks,
        stopped: Callable[[], bool],
        progress: Callable[[int], None],
        after: Any = None,
    ) -> tuple[str, int, list[MemoryRegion]]:
        """Lay everything out; returns the digest, the bytes of the space, and where it is. Arguments are those of `Sending`.

        Raises:
            BadRequest: the source does not give what was announced.
            RankFailed: another trainer rank does not.
            OSError: there is no room.
            Stopped: the update was given up.
        """
        # Behind the content there is a block for the seal.
        memory = self._memory = self._lender.take(layout(plan.manifest).nbytes + ALIGNMENT)
        content = memory.tensors[0]
        with self._lender.buffers.aside(after):
            if content.is_cuda:
                # What used this memory before it was given back to torch may not be over.
                torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            cut = cut_up(plan.manifest, bucket_bytes, lambda bucket: content[bucket.at : bucket.at + bucket.nbytes])
            feed, digest, laid = Feed(plan, cut.expected, lockstep, stopped), Digest(), 0
            lockstep.begin(plan)
            for filling in cut.fillings:
                feed.fill(filling)
                digest.add(filling.bytes, filling.at)
                laid += filling.bytes.numel()
                progress(laid)
            feed.end()
            # It waits for what the device still has to do.
            seal = set_seal(content)
            return digest.text(), laid, [msgspec.structs.replace(space, seal=seal) for space in memory.regions()]

    def end(self) -> None:
        """The update is over."""
        memory, self._memory = self._memory, None
        if memory is not None:
            with self._lender.buffers.aside():
                break_seal(memory.tensors[0])
            self._lender.back(memory)
