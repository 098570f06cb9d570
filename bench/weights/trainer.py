"""The trainer: holds two sets of weights, and sends them as SGLang's own updates want them, or through a `WeightPublisher`.

    python -m bench.weights.trainer {cuda,cpu} MODEL

`first` are those of the checkpoint; in `other` the rows of each matrix stand in the reverse order.
"""

import asyncio
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.score.load import own_voice
from bench.weights.obeying import obey_awaited
from bench.weights.parts import StandIns, left_out
from bench.weights.raw import BUCKET_S, broadcast
from bench.weights.training_step import card_memory, train
from enginepool import Pool, WeightPublisher
from enginepool.errors import UpdateAborted
from enginepool.protocol.manifest import Tensor
from enginepool.trainer import bucket_stream
from enginepool.trainer.bucket_stream import BucketStream
from enginepool.trainer.buffers import Buffers, Cut
from enginepool.trainer.tensors import SendPlan, make_plan
from enginepool.trainer.trainer_ranks import TrainerRanks
from enginepool.transfer.collective import Rendezvous
from enginepool.transfer.digest import Digest
from enginepool.transfer.process_group import ProcessGroup

torch: Any = importlib.import_module("torch")

#: how closely the phases of an update are watched, in seconds
_LOOK_S = 0.0003


def cut(sizes: list[int], bucket_bytes: int) -> Iterator[slice]:
    """Runs of tensors that fill a bucket, as SGLang's flattened buckets hold whole ones; 0: all in one."""
    first = filled = 0
    for i, size in enumerate(sizes):
        if bucket_bytes and filled and filled + size > bucket_bytes:
            yield slice(first, i)
            first, filled = i, 0
        filled += size
    yield slice(first, len(sizes))


class NoDigest(Digest):
    """That of no bytes at all."""

    def add(self, bucket: Any, at: int) -> None:
        """Look at nothing."""


#: as it is when nothing is left out
CUT = Buffers.cut


def unfilled(buffers: Buffers, manifest: Sequence[Tensor], bucket_bytes: int) -> Cut:
    """Buckets that are sent as they are."""
    cut = CUT(buffers, manifest, bucket_bytes)
    return cut._replace(fillings=[filling._replace(copies=[], gaps=[]) for filling in cut.fillings])


STAND_INS: StandIns = {"digest": (bucket_stream, "Digest", NoDigest), "filling": (Buffers, "cut", unfilled)}


class Gate:
    """The tensors of a plan; the first one in the second half of the bytes comes when the gate is opened."""

    def __init__(self, plan: SendPlan) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()
        self._plan = plan

    def __call__(self) -> Iterator[tuple[str, Any]]:
        """The source of an update."""
        before, last = 0, self._plan.manifest[-1].name
        for name, tensor in self._plan.tensors():
            if not self.reached.is_set() and (2 * before >= self._plan.nbytes or name == last):
                self.reached.set()
                self.opened.wait(BUCKET_S)
            before += tensor.numel() * tensor.element_size()
            yield name, tensor


class Trainer:
    """Each `do_` is an order."""

    def __init__(self, device: str, model: str) -> None:
        safetensors: Any = importlib.import_module("safetensors.torch")
        self._device = device
        first: dict[str, Any] = {}
        for file in sorted(Path(model).glob("*.safetensors")):
            first.update(safetensors.load_file(str(file), device=device))
        other = {name: tensor.flip(0) if tensor.dim() > 1 else tensor.clone() for name, tensor in first.items()}
        self._weights = {"first": first, "other": other}
        self.nbytes = sum(tensor.numel() * tensor.element_size() for tensor in first.values())
        self._rendezvous = Rendezvous()
        self._groups: dict[str, ProcessGroup] = {}
        self._buffers: Buffers | None = None
        self._pool: Pool | None = None
        self._publishers: dict[int, WeightPublisher] = {}
        self._folder = Path(model)
        self._recomputed: Any = None

    # --- groups of its own ----------------------------------------------------------------------------------------------

    async def do_listen(self) -> dict[str, object]:
        """Where groups are joined."""
        return {"address": self._rendezvous.address}

    async def do_join(self, name: str, world: int, backend: str, engines: bool, copies: bool) -> dict[str, object]:
        """Be rank 0 of a group, whose other ranks are engines that joined in SGLang's own way, or not, or that may copy."""
        self._groups[name] = await asyncio.to_thread(
            self._rendezvous.join, name, world, backend=backend, device=self._device, connect=not engines, copies=copies
        )
        return {}

    async def do_leave(self, name: str) -> dict[str, object]:
        """Leave a group."""
        await asyncio.to_thread(self._groups.pop(name).abort)
        return {}

    async def do_raw(self, name: str, nbytes: int, bucket_bytes: int, times: int) -> dict[str, object]:
        """Broadcast so many bytes so many times."""
        space = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        return {"seconds": await asyncio.to_thread(broadcast, self._groups[name], space, bucket_bytes, times)}

    async def do_manifest(self) -> dict[str, object]:
        """What tensors there are."""
        return {"manifest": msgspec.to_builtins(make_plan(self._weights["first"]).manifest)}

    async def do_stream(self, name: str, bucket_bytes: int, times: int, without: list[str], rest_s: float) -> dict[str, object]:
        """Send all tensors so many times as a publisher does: when each began, by `time.monotonic`, and the digests.

        Args:
            without: names of STAND_INS.
            rest_s: seconds before each, for receivers that are not through with the last one.
        """
        return await asyncio.to_thread(self._stream, self._groups[name], bucket_bytes, times, without, rest_s)

    def _stream(
        self, group: ProcessGroup, bucket_bytes: int, times: int, without: list[str], rest_s: float
    ) -> dict[str, object]:
        buffers = self._buffers = self._buffers or Buffers(torch.device(self._device))
        buffers.make_ready()
        starts: list[float] = []
        digests: list[str] = []
        with left_out(without, STAND_INS):
            for _ in range(times):
                sending = BucketStream(make_plan(self._weights["first"]), buffers, bucket_bytes, TrainerRanks(), lambda: False)
                sending.prepare()
                if buffers.stream is not None:
                    buffers.stream.synchronize()  # a pool's workers join meanwhile
                time.sleep(rest_s)
                starts.append(time.monotonic())
                digests.append(sending.send(group, BUCKET_S, lambda _sent: None)[0])
        return {"starts": starts, "digests": digests}

    # --- SGLang's own ---------------------------------------------------------------------------------------------------

    async def do_calls(self, bucket_bytes: int) -> dict[str, object]:
        """What the engine's calls of an update name: [names, dtypes, shapes] of each."""
        named = list(self._weights["first"].items())
        calls: list[object] = []
        for run in cut([tensor.numel() * tensor.element_size() for _, tensor in named], bucket_bytes):
            part = named[run]
            dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in part]
            calls.append([[name for name, _ in part], dtypes, [list(tensor.shape) for _, tensor in part]])
        return {"calls": calls}

    async def do_send(self, name: str, which: str, bucket_bytes: int, flat: bool) -> dict[str, object]:
        """Broadcast all tensors, one by one or in SGLang's flattened buckets."""
        await asyncio.to_thread(self._send, self._groups[name], list(self._weights[which].values()), bucket_bytes, flat)
        return {}

    def _send(self, group: ProcessGroup, tensors: list[Any], bucket_bytes: int, flat: bool) -> None:
        for run in cut([tensor.numel() * tensor.element_size() for tensor in tensors], bucket_bytes):
            parts = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors[run]]
            for way in [group.begin(part) for part in ([torch.cat(parts)] if flat else parts)]:
                way.wait(BUCKET_S)
        if self._device != "cpu":
            torch.cuda.synchronize()

    # --- through the pool -----------------------------------------------------------------------------------------------

    async def do_connect(self, address: str) -> dict[str, object]:
        """Have publishers for this pool."""
        self._pool = await Pool.connect(address)
        return {}

    async def do_kill(self, version: int, which: str, transfer: str, bucket_bytes: int, victim: int) -> dict[str, object]:
        """Begin an update, and kill a worker by its process when half of the bytes are on their way: when that was, when the
        update had ended, by `time.monotonic`, and how it did."""
        assert self._pool is not None, "not connected"
        plan = make_plan(self._weights[which])
        gate = Gate(plan)
        handle = await self._publisher(bucket_bytes).start(
            gate,
            version,
            transfer=transfer,  # pyright: ignore[reportArgumentType]
            manifest=plan.manifest,
        )
        finished = asyncio.create_task(handle.finish())
        try:
            async with asyncio.timeout(BUCKET_S / 2):
                await asyncio.to_thread(gate.reached.wait, BUCKET_S / 2)
                while not handle.sent_bytes:  # noqa: ASYNC110 (a handle says where it is when it is asked)
                    await asyncio.sleep(_LOOK_S)
                killed = time.monotonic()
                os.kill(victim, signal.SIGKILL)
                while await self._ready(victim):  # noqa: ASYNC110 (and a pool too)
                    await asyncio.sleep(0.005)
        finally:
            gate.opened.set()
            [outcome] = await asyncio.gather(finished, return_exceptions=True)
        ended = time.monotonic()
        if isinstance(outcome, BaseException) and not isinstance(outcome, UpdateAborted):
            raise outcome
        return {"killed": killed, "ended": ended, "aborted": str(outcome) if isinstance(outcome, UpdateAborted) else ""}

    async def _ready(self, process: int) -> bool:
        assert self._pool is not None
        [group] = (await self._pool.status()).groups
        return any(worker.pid == process and worker.stage == "ready" for worker in group.workers)

    async def do_publish(
        self, version: int, which: str, transfer: str, bucket_bytes: int, in_flight: str = "drain"
    ) -> dict[str, object]:
        """One update from beginning to end. Moments are of `time.monotonic`, which all processes of a host share."""
        began = time.monotonic()
        publisher = self._publisher(bucket_bytes)
        options: dict[str, Any] = {"transfer": transfer, "in_flight": in_flight}
        handle = await publisher.start(self._weights[which], version, **options)
        # In direct transfer the bytes wait for the hold.
        finished = asyncio.create_task(handle.finish()) if transfer == "direct" else None
        while handle.phase in ("open", "join"):  # noqa: ASYNC110 (a handle says where it is when it is asked)
            await asyncio.sleep(_LOOK_S)
        flowing = time.monotonic()
        if finished is None:
            await handle.sent()
        record = await (handle.finish() if finished is None else finished)
        ended = time.monotonic()
        return {"record": msgspec.to_builtins(record), "began": began, "flowing": flowing, "ended": ended}

    async def do_recompute(
        self, prompt: list[int], tokens: list[int], spans: list[tuple[str, int]], kept: bool
    ) -> dict[str, object]:
        """Log-probabilities of tokens that an engine generated, by the weights that computed them, and by the other ones."""
        if self._recomputed is None:
            module = importlib.import_module("bench.in_flight.recompute")
            self._recomputed = await asyncio.to_thread(module.Recomputed, self._folder, self._weights)
        named, other = await asyncio.to_thread(self._recomputed.named_and_other, prompt, tokens, spans, kept)
        return {"named": named.tolist(), "other": other.tolist()}

    async def do_train(self, share: float) -> dict[str, object]:
        """A training step in this share of the memory that is free."""
        return {**await asyncio.to_thread(train, self._device, share)}

    async def do_used(self) -> dict[str, object]:
        """MiB of the card that are used by all processes, and that are free."""
        return {**card_memory(self._device)}

    async def do_close(self) -> dict[str, object]:
        """Leave the pool."""
        for publisher in self._publishers.values():
            await publisher.close()
        self._publishers.clear()
        if self._pool is not None:
            await self._pool.close()
            self._pool = None
        return {}

    def _publisher(self, bucket_bytes: int) -> WeightPublisher:
        assert self._pool is not None, "not connected"
        if bucket_bytes not in self._publishers:
            self._publishers[bucket_bytes] = WeightPublisher(self._pool, device=self._device, bucket_bytes=bucket_bytes)
        return self._publishers[bucket_bytes]


async def main() -> None:
    """Take orders."""
    voice = own_voice()
    device = "cuda:0" if sys.argv[1] == "cuda" else "cpu"
    trainer = Trainer(device, sys.argv[2])
    await obey_awaited(voice, trainer, {"bytes": trainer.nbytes})


if __name__ == "__main__":
    asyncio.run(main())
