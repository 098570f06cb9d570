"""What the weights of an engine are to a worker: the interface that `sglang` and `sim` implement."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from enginepool.protocol.manifest import Tensor, overflow
from enginepool.protocol.messages.weight_reports import Finding
from enginepool.protocol.messages.weights import Join, MemoryRegion

#: the digest of an engine whose weights are gone: it took memory for them back, and has not loaded any since
LOST_WEIGHTS = "lost"


@dataclass(frozen=True, slots=True)
class ModelTensors:
    """The tensors that the engine's own load took from its checkpoint, in that order, and names that it may do without.

    gpus: UUIDs of the GPUs that the engine sees, in whose memory an update may lie.
    held: by name, the dtype in which the engine holds a tensor.
    """

    tensors: tuple[Tensor, ...]
    optional: frozenset[str] = frozenset()
    gpus: tuple[str, ...] = ()
    held: Mapping[str, str] = field(default_factory=dict[str, str])

    def targets(self, tensors: Sequence[Tensor]) -> list[str]:
        """For each tensor, the dtype in which the engine holds it, or "" where nothing can overflow; [] where none can."""
        found = [self.held.get(one.name, "") for one in tensors]
        found = [target if overflow(one.dtype, target) < inf else "" for one, target in zip(tensors, found, strict=True)]
        return found if any(found) else []


@dataclass(frozen=True, slots=True)
class NewWeights:
    """Weights for an engine. One of these, or none: the weights stay, and are called by another version.

    regions: all of them in each, one for each GPU; one does for all. `sharded`: all of them in the bytes of all regions, one
        after the other, which every rank reads.
    checkpoint: a directory.
    group: a process group that the engine has joined, in which `tensors` are broadcast in buckets of `bucket_bytes`.
    """

    tensors: tuple[Tensor, ...] = ()
    regions: tuple[MemoryRegion, ...] = ()
    sharded: bool = False
    checkpoint: str = ""
    group: str = ""
    bucket_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LoadTimes:
    """What taking weights cost inside the engine, in seconds: the load itself, and flushing the caches before and after."""

    load_s: float
    flush_s: float


class Chunk(NamedTuple):
    """Elements of a weight, row-major, as float32 [n]; `dtype` and `shape` are those of the whole weight in the engine."""

    values: npt.NDArray[np.float32]
    dtype: str
    shape: tuple[int, ...]


class EngineWeights(Protocol):
    """The weights of one engine. A call that asks the engine raises EngineDied when it is gone."""

    @property
    def version(self) -> int:
        """The version of the weights that are loaded now."""
        ...

    @property
    def digest(self) -> str:
        """The digest under which the loaded weights were committed; "" for those of the checkpoint."""
        ...

    def model_tensors(self) -> ModelTensors:
        """What an update of this model consists of. Raises EngineError when this engine cannot take updates; it says why.
        OnlyAtStart: it can be started on another checkpoint."""
        ...

    @property
    def ranks(self) -> int:
        """Processes of the engine that hold weights, each on a GPU of its own."""
        ...

    async def join(self, request: Join) -> None:
        """Be ranks `rank` to `rank + ranks - 1` of the process group that `request` names. Raises EngineError."""
        ...

    async def prepare_load(self, weights: NewWeights) -> float:
        """Prepare the load of `weights` while the engine serves and their regions are still written to.

        Returns for how many seconds that kept the engine from its work. From now on the engine refers to the regions' memory,
        until `release_buffers` or its end, also after `load_weights`. Raises EngineError: `load_weights` then does it all.
        """
        ...

    async def verify(self, weights: NewWeights) -> tuple[str, list[Finding]]:
        """Open `weights.regions`, and read every byte while the engine serves: (digest, findings). They stay open, also when
        their owner is gone, until others are verified, or `release_buffers`. Raises EngineError."""
        ...

    async def release_buffers(self) -> None:
        """Release the memory of all regions, and forget a prepared load. Raises EngineError."""
        ...

    async def load_weights(
        self, weights: NewWeights, version: int, digest: str, running: Literal["in_place", "retract"] | None = None
    ) -> LoadTimes:
        """Run on these weights from now on; called while the engine is empty, or, with `running`, while it is paused so.

        What it keeps of prompts serves no prompt that it computes from now on, except, `in_place`, the sequences that run.

        Raises EngineError when the old weights are whole and stay, EngineDied when the loaded weights are unknown, also when
        a region lost its seal meanwhile.
        """
        ...

    async def save(self, target: str) -> str:
        """Write the weights while the engine serves: into files of an empty folder, or into keys of Redis, whose name there is
        new. An engine with the returned `load_format` that starts from it has them. Raises EngineError: it cannot, or other
        weights were loaded meanwhile."""
        ...

    async def inspect(self, what: str) -> tuple[str, list[Finding]]:
        """(digest, findings) of the weights as they are in the engine; `what` is `digest` or `validate`. Raises EngineError;
        NotComparable: their digest cannot be compared with that of the sent bytes."""
        ...

    async def tensor(self, name: str, offset: int, count: int) -> Chunk:
        """Elements of one weight by its checkpoint name. Raises EngineError: no such name."""
        ...
