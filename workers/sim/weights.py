"""The weights of the sim engine: bytes without meaning, of which the digest enters every score."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from enginepool.protocol.layout import layout
from enginepool.protocol.manifest import Tensor, decode_manifest, overflow
from enginepool.protocol.messages.weight_reports import Finding
from enginepool.protocol.messages.weights import Join, MemoryRegion
from enginepool.protocol.redis_url import RedisUrl, parse_redis
from enginepool.transfer.checksum import digest_of_bytes
from enginepool.workers.engine import EngineDied, EngineError, OnlyAtStart, PauseMode
from enginepool.workers.engine_weights import Chunk, LoadTimes, ModelTensors, NewWeights
from enginepool.workers.redis_model import VALUE_S, connected, redis_errors
from enginepool.workers.sim.faults import faults_on_take
from enginepool.workers.sim.options import Fault, SimOptions
from enginepool.workers.weights.checkpoint import DTYPES, CheckpointError, checkpoint_space


class SimWeights:
    """What a sim engine holds, an `EngineWeights`.

    Args:
        options: of the engine: `tensors` is what an update consists of, as a manifest; empty: it takes no updates.
        must_live: raises EngineDied when the engine has died.
        suffer: has the engine suffer a fault.
    """

    def __init__(self, options: SimOptions, must_live: Callable[[], None], suffer: Callable[[Fault], Awaitable[None]]) -> None:
        """Raises WireError: `tensors` is no manifest."""
        self._options, self._must_live, self._suffer = options, must_live, suffer
        self._model = tuple(decode_manifest(msgspec.json.encode(options.tensors))) if options.tensors else ()
        self._held = {tensor.name: options.held or tensor.dtype for tensor in self._model}
        self._only_at_start = options.only_at_start
        #: how often weights were taken
        self._taken = 0
        self.ranks = 1
        #: of what it starts with the digest is ""
        self.version, self.digest = options.version, ""
        self._tensors: tuple[Tensor, ...] = ()
        self._space: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._group: Any = None
        #: the name of the group that is wanted
        self._joining = ""
        #: the verified weights, which stay open
        self._opened: tuple[tuple[MemoryRegion, ...], npt.NDArray[np.uint8]] | None = None

    def model_tensors(self) -> ModelTensors:
        """What an update consists of. Raises EngineError."""
        if self._only_at_start:
            raise OnlyAtStart("this engine takes weights only at its start: options.only_at_start is true")
        if not self._model:
            raise EngineError("sim engine: options.tensors is empty, so it takes no updates")
        return ModelTensors(self._model, held=self._held)

    async def join(self, request: Join) -> None:
        """Join a process group, with torch. Raises EngineError."""
        self._joining = name = request.rendezvous
        if self._group is None or self._group.name != name:
            left, self._group = self._group, None
            if left is not None:
                await asyncio.to_thread(left.abort)
            group = await asyncio.to_thread(_join, request)
            if self._joining != name:
                await asyncio.to_thread(group.abort)
                raise EngineError(f"group {name}: another one was joined meanwhile")
            self._group = group

    async def verify(self, weights: NewWeights) -> tuple[str, list[Finding]]:
        """Open regions and read every byte. Raises EngineError."""
        self._opened = weights.regions, await asyncio.to_thread(_open, weights)
        limits = [overflow(tensor.dtype, self._held.get(tensor.name, "")) for tensor in weights.tensors]
        return await asyncio.to_thread(_verified, weights.tensors, self._opened[1], limits)

    async def prepare_load(self, weights: NewWeights) -> float:
        """It has nothing to prepare."""
        return 0.0

    async def release_buffers(self) -> None:
        """Close the verified weights."""
        self._opened = None

    async def load_weights(self, weights: NewWeights, version: int, digest: str, running: PauseMode | None = None) -> LoadTimes:
        """Take `take_s`, and read all bytes: what scores depend on is what really arrived. Raises EngineError, EngineDied."""
        self._must_live()
        self._taken += 1
        for fault in faults_on_take(self._options.faults, self._taken):
            await self._suffer(fault)
        began = time.monotonic()
        if self._options.take_s:
            await asyncio.sleep(self._options.take_s)
        await self._take(weights, digest)
        self.version = version
        return LoadTimes(time.monotonic() - began, 0.0)

    async def _take(self, weights: NewWeights, digest: str) -> None:
        """Hold these weights. Raises EngineError: the old ones stay; EngineDied: what was copied out of may have changed."""
        if self._only_at_start and (weights.regions or weights.checkpoint or weights.group):
            self.model_tensors()
        try:
            if self._opened is not None and self._opened[0] == weights.regions:
                opened, seal = self._opened[1], weights.regions[0].seal
                self._load(weights.tensors, opened.copy())
                if opened[len(opened) - len(seal) :].tobytes() != seal:
                    raise EngineDied("sim engine: the memory that the weights came from was given to something else meanwhile")
            elif weights.regions:
                self._load(weights.tensors, np.fromfile(weights.regions[0].path, np.uint8, weights.regions[0].nbytes))
            elif weights.checkpoint:
                self._load(weights.tensors, np.frombuffer(checkpoint_space(weights.checkpoint), np.uint8))
            elif weights.group:
                self._load(weights.tensors, await asyncio.to_thread(self._receive, weights))
            elif digest != self.digest:
                self.digest = digest
        except (OSError, CheckpointError) as error:
            raise EngineError(f"sim engine: {error}") from None

    def _load(self, tensors: tuple[Tensor, ...], space: npt.NDArray[np.uint8]) -> None:
        nbytes = layout(tensors).nbytes
        if len(space) < nbytes:
            raise EngineError(f"sim engine: {len(space)} bytes for {nbytes}")
        self._tensors, self._space = tensors, space[:nbytes]
        self.digest = digest_of_bytes(self._space)

    def _receive(self, weights: NewWeights) -> npt.NDArray[np.uint8]:
        from enginepool.transfer.process_group import CollectiveError
        from enginepool.workers.stager.memory import HostMemory

        memory = HostMemory(layout(weights.tensors).nbytes)
        try:
            memory.reception(weights.tensors, weights.bucket_bytes, "cpu").receive(self._group)
        except CollectiveError as error:
            raise EngineError(str(error)) from None
        return memory.tensors[0].numpy().copy()

    async def save(self, target: str) -> str:
        """Take `take_s`, and write a checkpoint, or the bytes of each tensor into a key. Raises EngineError: others were loaded
        meanwhile."""
        self._must_live()
        taken, tensors, space = self._taken, self._tensors, self._space
        await asyncio.sleep(self._options.take_s)
        if self._taken != taken:
            raise EngineError("not saved: other weights were loaded meanwhile; save again")
        if (at := parse_redis(target)) is not None:
            with redis_errors(target):
                return await asyncio.to_thread(_write_keys, at, tensors, space)
        _write(Path(target) / "model.safetensors", tensors, space)
        return "safetensors"

    async def inspect(self, what: str) -> tuple[str, list[Finding]]:
        """(digest, nothing): bytes without meaning are never wrong."""
        self._must_live()
        return self.digest, []

    async def tensor(self, name: str, offset: int, count: int) -> Chunk:
        """Elements of a float32 tensor by its name. Raises EngineError."""
        self._must_live()
        for tensor, at in zip(self._tensors, layout(self._tensors).offsets, strict=True):
            if tensor.name == name and tensor.dtype == "float32":
                values = self._space[at : at + tensor.nbytes].view(np.float32)[offset : offset + count]
                return Chunk(values, tensor.dtype, tuple(tensor.shape))
        raise EngineError(f"sim engine: no float32 tensor {name!r} is loaded")


def _write(file: Path, tensors: tuple[Tensor, ...], space: npt.NDArray[np.uint8]) -> None:
    """A checkpoint of these bytes. Raises OSError."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {}
    parts: list[bytes] = []
    end = 0
    for tensor, at in zip(tensors, layout(tensors).offsets, strict=True):
        parts.append(space[at : at + tensor.nbytes].tobytes())
        offsets = [end, end := end + tensor.nbytes]
        header[tensor.name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    file.write_bytes(b"".join((len(text).to_bytes(8, "little"), text, *parts)))


def _write_keys(at: RedisUrl, tensors: tuple[Tensor, ...], space: npt.NDArray[np.uint8]) -> str:
    """The bytes of each tensor, by the keys that an engine writes."""
    with connected(at, VALUE_S) as client:
        for tensor, offset in zip(tensors, layout(tensors).offsets, strict=True):
            client.set(f"{at.name}/keys/rank_0/{tensor.name}", space[offset : offset + tensor.nbytes].tobytes())
    return "remote"


def _join(request: Join) -> Any:
    # Importing torch takes seconds, which the worker's loop has better uses for.
    from enginepool.transfer.collective import join
    from enginepool.transfer.process_group import CollectiveError

    try:
        return join(request.address, request.rendezvous, request.world, request.rank, backend=request.backend)
    except CollectiveError as error:
        raise EngineError(str(error)) from None


def _open(weights: NewWeights) -> npt.NDArray[np.uint8]:
    if not weights.regions:
        raise EngineError("sim engine: regions: expected one or more, got none")
    space = weights.regions[0]
    try:
        opened = np.memmap(space.path, np.uint8, "r", shape=(space.nbytes,))
    except (OSError, ValueError) as error:
        raise EngineError(f"sim engine: {error}") from None
    if len(opened) < layout(weights.tensors).nbytes:
        raise EngineError(f"sim engine: {len(opened)} bytes for {layout(weights.tensors).nbytes}")
    return opened


def _verified(tensors: tuple[Tensor, ...], space: npt.NDArray[np.uint8], limits: list[float]) -> tuple[str, list[Finding]]:
    """The digest, and the findings of float32 tensors. A value of `limits` or more is infinity in the engine.

    Tensors of other dtypes have no findings.
    """
    where = layout(tensors)
    findings: list[Finding] = []
    for tensor, at, limit in zip(tensors, where.offsets, limits, strict=True):
        if tensor.dtype == "float32":
            values = space[at : at + tensor.nbytes].view(np.float32)
            large = np.abs(values)
            counts = [
                Finding(tensor.name, "nan", int(np.isnan(values).sum())),
                Finding(tensor.name, "infinity", int((large == np.inf).sum())),
                Finding(tensor.name, "overflow", int(((large >= limit) & (large < np.inf)).sum())),
            ]
            findings += [finding for finding in counts if finding.count]
    return digest_of_bytes(space[: where.nbytes]), findings
