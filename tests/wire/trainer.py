"""A rank of a trainer of two. Rank 0 has the pool.

Every rank publishes version 1 and 2 and says how each ended, with the tensors that it gathered.
"""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from enginepool import Pool, WeightPublisher
from enginepool.errors import EnginepoolError
from enginepool.trainer.update_handle import UpdateHandle

#: exit code of a rank that leaves without a word
GONE = 7


def main(said: Connection, rank: int, meeting: str, address: str, fault: str, errors: str) -> None:
    """One rank. `meeting`: a file by which the ranks find each other; `errors`: the file that takes its stderr."""
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT, 0o600), 2)
    dist: Any = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    ranks = dist.new_group(backend="gloo")
    gathered: list[str] = []
    # A thread stays in a collective that the other rank never enters.
    hangs = fault == "stopped" or fault.startswith("torn")

    def gather(name: str, tensor: Any) -> Any:
        """A collective of all ranks, as a sharded model has it: the sum of the ranks' parts."""
        if fault == f"rank {rank}" and name == "2.weight" and "1" not in done:
            raise RuntimeError(f"rank {rank} has lost its shard")
        if fault == f"torn {rank}" and name == "2.weight":
            raise RuntimeError("no such shard")
        if fault in ("gone", "stopped") and rank == 1 and name == "2.weight":
            if fault == "gone":
                os._exit(GONE)
            os.kill(os.getpid(), signal.SIGSTOP)
        whole = tensor.clone()
        if fault != "rank 1":
            dist.all_reduce(whole)
        gathered.append(name)
        return whole

    done: dict[str, str] = {}

    async def run() -> None:
        async with AsyncExitStack() as stack:
            pool = await stack.enter_async_context(Pool.connect(address)) if rank == 0 else None
            bucket = 1 << 20 if fault == "manifest" else 4096
            options: dict[str, Any] = {"device": "cpu", "bucket_bytes": bucket, "trainer_group": ranks, "rank_timeout": 6.0}
            if fault != "sharded":
                options["gather"] = gather
            publisher = await stack.enter_async_context(WeightPublisher(pool, **options))
            for version in (1, 2):
                net = torch.nn.Sequential(*(torch.nn.Linear(40, 40, bias=False) for _ in range(4)))
                for i, parameter in enumerate(net.parameters()):
                    torch.nn.init.constant_(parameter, version + i)
                source: Any = sharded(version) if fault == "sharded" else net
                if fault == "source" and version == 1:
                    source = broken(net, rank)
                manifest = None
                if fault == "manifest" and version == 1:
                    manifest = [(name, "float32", (40, 41 if "1" in name else 40)) for name in net.state_dict()]
                if fault == "host" and rank == 0:
                    # No address of this machine: the endpoint of the first update cannot be made.
                    publisher._context.host = "192.0.2.1" if version == 1 else "127.0.0.1"  # pyright: ignore[reportPrivateUsage]
                transfer = "ipc" if "lent" in fault else "staged"
                # A rank that is ahead of the others by an update.
                mine = None if fault == "next" else 2 if fault == "ahead" and rank == 1 else version
                if fault == f"late {rank}" and version == 1:
                    # It calls when the other rank has given up.
                    await asyncio.to_thread(wait_for, Path(f"{meeting}-{1 - rank}"))
                try:
                    if fault.startswith("trains"):
                        handle = await publisher.start(source, mine, transfer=transfer)
                        await handle.sent()
                        if fault in ("trains, aborts", "trains, late", "trains, waits") and version == 1:
                            await fail_on_rank_1(handle, rank, fault)
                        await asyncio.to_thread(dist.barrier)  # the next step of the training is a collective
                        record = await handle.finish()
                    else:
                        record = await publisher.publish(source, mine, transfer=transfer, manifest=manifest)
                    done[str(version)] = record.outcome
                except (EnginepoolError, RuntimeError) as error:
                    done[str(version)] = f"{type(error).__name__}: {error}"
                if fault.startswith("late") and version == 1:
                    await asyncio.to_thread(Path(f"{meeting}-{rank}").touch)
                    await asyncio.to_thread(wait_for, Path(f"{meeting}-{1 - rank}"))
                if hangs:
                    break

    asyncio.run(run())
    if not hangs:
        dist.destroy_process_group()
    said.send({"done": done, "gathered": gathered})
    if hangs:
        os._exit(0)


async def fail_on_rank_1(handle: UpdateHandle, rank: int, fault: str) -> None:
    """Rank 1 leaves the update, or waits for its end in vain, while rank 0 has not called `finish`; raises what each hears."""
    if rank == 1 and fault == "trains, aborts":
        await handle.abort("no memory")
    elif rank == 1 and fault == "trains, waits":
        context = handle._context  # pyright: ignore[reportPrivateUsage]
        with patch.object(context, "timeout", 0.3), patch.object(context, "rank_timeout", 0.1):
            await handle.finish()
    elif rank == 1:
        await handle.finish(0.1)
    await asyncio.wait([handle._final])  # pyright: ignore[reportPrivateUsage]
    await handle.finish()


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def sharded(version: int) -> dict[str, Any]:
    """DTensors over both ranks: one of them has nothing of the vector, and two names are tied."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    matrix = distribute_tensor(torch.full((5, 300), float(version)), mesh, [Shard(0)])
    vector = distribute_tensor(torch.full((1,), float(version)), mesh, [Shard(0)])
    return {"embed": matrix, "norm": vector, "head": matrix.detach(), "bias": vector + 1}


def broken(net: torch.nn.Module, rank: int) -> Any:
    """A source that rank 0 cannot read: it never opens a transaction."""
    if rank > 0:
        return net

    def fails() -> Iterator[tuple[str, torch.Tensor]]:
        raise RuntimeError("nothing here")

    return fails
