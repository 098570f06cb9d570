"""What a worker's engine has ready to take, and open for it: memory of others, which lives as long as it is open anywhere.

the stager's one device space   stays open for the next update, until the stager is gone, or about to take a larger one
any other                       is closed as soon as its update is over
"""

import contextlib
import os
from collections.abc import Sequence

from enginepool.protocol.updates import Finding
from enginepool.workers.engine import Engine, EngineError, MemoryRegion, NewWeights
from enginepool.workers.weights.ipc_import import LentError, hold


class OpenBuffers:
    """What one engine has open. Each call raises EngineDied."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        #: of the weights that it has open
        self._regions: tuple[MemoryRegion, ...] = ()
        self._sharded = False
        #: of lent memory, which the engine opens by them
        self._descriptors: list[int] = []

    async def get_ready(self, weights: NewWeights) -> float:
        """Have the engine get ready to take these while it serves; for how many seconds that kept it from its work."""
        self._regions, self._sharded = weights.regions, weights.sharded
        with contextlib.suppress(EngineError):  # taking them takes longer then, and says what is wrong, if that is
            return await self._engine.ready(weights)
        return 0.0

    def hold(self, regions: Sequence[MemoryRegion]) -> tuple[MemoryRegion, ...]:
        """Spaces that a publisher lends, as the engine may open them until `close`. Raises LentError, or OSError: gone."""
        self._close_descriptors()
        held: list[MemoryRegion] = []
        try:
            for space in regions:
                if space.kind == "file":
                    descriptor, space = hold(space)
                    self._descriptors.append(descriptor)
                held.append(space)
        except LentError:
            self._close_descriptors()
            raise
        return tuple(held)

    async def verify(self, weights: NewWeights) -> tuple[str, list[Finding]]:
        """Have the engine open these and look at every byte, while it serves: (digest, findings). Raises EngineError."""
        self._regions, self._sharded = weights.regions, weights.sharded
        return await self._engine.verify(weights)

    async def close_smaller(self, nbytes: int) -> None:
        """Close it if it is less: memory that somebody has open cannot make room for more."""
        sizes = [space.nbytes for space in self._regions]
        if sizes and (sum(sizes) if self._sharded else min(sizes)) < nbytes:
            await self.close()

    async def close(self) -> None:
        """Have the engine let go of it."""
        self._close_descriptors()
        if not self._regions:
            return
        self._regions = ()
        with contextlib.suppress(EngineError):  # it has refused to open it, too
            await self._engine.let_go()

    def _close_descriptors(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []
