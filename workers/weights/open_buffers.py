"""Memory of other processes that a worker's engine has open for an update. It is freed when no process has it open.

the stager's one device space   stays open for the next update, until the stager ends or replaces it by a larger one
any other memory                is closed as soon as its update is over
"""

import contextlib
import os
from collections.abc import Sequence

from enginepool.protocol.messages.weight_reports import Finding
from enginepool.workers.engine import Engine, EngineError
from enginepool.workers.engine_weights import MemoryRegion, NewWeights
from enginepool.workers.weights.ipc_import import LentMemoryError, pin


class OpenBuffers:
    """The memory that one engine has open. Each call raises EngineDied."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        #: the engine has the regions of these open
        self._opened = NewWeights()
        #: of lent memory: the engine opens it by these
        self._descriptors: list[int] = []

    async def prepare_load(self, weights: NewWeights) -> float:
        """Have the engine prepare to load these while it serves. Returns for how many seconds that kept it from its work."""
        self._opened = weights
        with contextlib.suppress(EngineError):  # the load then takes longer, and reports the error
            return await self._engine.weights.prepare_load(weights)
        return 0.0

    def pin(self, regions: Sequence[MemoryRegion]) -> tuple[MemoryRegion, ...]:
        """Regions that a publisher lends, as the engine may open them until `close`. Raises LentMemoryError or OSError."""
        self._close_descriptors()
        held: list[MemoryRegion] = []
        try:
            for space in regions:
                if space.kind == "file":
                    descriptor, space = pin(space)
                    self._descriptors.append(descriptor)
                held.append(space)
        except LentMemoryError:
            self._close_descriptors()
            raise
        return tuple(held)

    async def verify(self, weights: NewWeights) -> tuple[str, list[Finding]]:
        """Have the engine open these and read every byte, while it serves: (digest, findings). Raises EngineError."""
        self._opened = weights
        return await self._engine.weights.verify(weights)

    async def close_smaller(self, nbytes: int) -> None:
        """Close the regions if they are smaller: memory that a process has open cannot be freed for a larger space."""
        sizes = [space.nbytes for space in self._opened.regions]
        if sizes and (sum(sizes) if self._opened.sharded else min(sizes)) < nbytes:
            await self.close()

    async def close(self) -> None:
        """Have the engine close them."""
        self._close_descriptors()
        opened, self._opened = self._opened, NewWeights()
        if opened.regions:
            with contextlib.suppress(EngineError):  # an engine that refuses to close them has refused to open them
                await self._engine.weights.release_buffers()

    def _close_descriptors(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []
