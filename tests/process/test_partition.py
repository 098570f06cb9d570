"""External workers behind a network partition: their models stay loaded, every call ends, and the pool is whole again after it.

Times are scaled where a partition outlasts the deadlines that matter: with `silence_s` = 1 one of 6 s stands for one of 60 s.
"""

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from enginepool import Pool
from enginepool.protocol.messages import WorkerStatus
from tests.process.daemons import PATIENCE_S, sim_pool
from tests.process.forking import ForkedDaemon, ForkedProcess
from tests.process.forwarder import Forwarder
from tests.process.processes import Processes

#: seconds between calls
EVERY_S = 0.05


class Scene:
    """A pool without workers of its own, and two external ones that reach it through a forwarder."""

    def __init__(self, processes: Processes, directory: Path, silence_s: float) -> None:
        config = sim_pool(directory, workers=0, silence_s=silence_s, orphan_s=silence_s)
        config = msgspec.structs.replace(config, listen_workers="tcp://127.0.0.1:*", insecure_loopback=True)
        self.daemon = ForkedDaemon(processes, config).listening()
        self.forwarder = Forwarder(self.daemon.workers)
        self.logs = [directory / f"outside-{i}.log" for i in range(2)]
        for log in self.logs:
            spec: dict[str, Any] = {
                "endpoint": self.forwarder.address, "group": "g", "incarnation": log.stem, "engine": "sim", "model": "sim",
                "external": True,
            }  # fmt: skip
            with log.open("wb") as stderr:
                environment = {**os.environ, "ENGINEPOOL_WORKER": json.dumps(spec)}
                command = [sys.executable, "-m", "enginepool.workers.main"]
                processes.keep(ForkedProcess(command, env=environment, stdout=stderr, stderr=stderr))


@pytest.fixture
def scenes(processes: Processes, tmp_path: Path) -> Iterator[Any]:
    made: list[Scene] = []

    def make(silence_s: float) -> Scene:
        made.append(Scene(processes, tmp_path, silence_s))
        return made[-1]

    yield make
    for scene in made:
        scene.forwarder.close()


async def ready_workers(pool: Pool) -> dict[int, WorkerStatus]:
    """The ready workers by their process."""
    workers = (await pool.status()).groups[0].workers
    return {worker.pid: worker for worker in workers if worker.stage == "ready"}


async def both(pool: Pool) -> dict[int, WorkerStatus]:
    async with asyncio.timeout(PATIENCE_S):
        while len(workers := await ready_workers(pool)) < 2:
            await asyncio.sleep(0.01)
    return workers


@pytest.mark.parametrize(
    ("silence_s", "partition_s", "broken", "lost"),
    [
        pytest.param(10.0, 5.0, False, False, id="5 s: the link only stands still"),
        pytest.param(1.0, 2.0, False, True, id="as 20 s: connections outlive it"),
        pytest.param(1.0, 2.0, True, True, id="as 20 s: connections are broken"),
        pytest.param(1.0, 6.0, True, True, id="as 60 s: longer than any patience"),
    ],
)
def test_a_partition_costs_no_model_and_no_call(
    scenes: Any, silence_s: float, partition_s: float, broken: bool, lost: bool
) -> None:
    scene: Scene = scenes(silence_s)

    async def play() -> None:
        async with Pool.connect(scene.daemon.address) as pool:
            await pool.ready(PATIENCE_S)
            before = await both(pool)
            calls: list[asyncio.Task[Any]] = []

            async def call_for(seconds: float) -> None:
                end = asyncio.get_running_loop().time() + seconds
                while asyncio.get_running_loop().time() < end:
                    calls.append(asyncio.create_task(pool.score([1, 2], [[3], [4]], label_token_ids=[5])))
                    await asyncio.sleep(EVERY_S)

            await call_for(0.5)
            await asyncio.to_thread(scene.forwarder.partition)
            await call_for(partition_s / 2)
            if broken:
                await asyncio.to_thread(scene.forwarder.partition, broken=True)
            await call_for(partition_s / 2)
            # Until its end all workers are noticed to be lost, or none is.
            assert lost or len(await ready_workers(pool)) == 2
            async with asyncio.timeout(PATIENCE_S):
                while lost and await ready_workers(pool):
                    await call_for(EVERY_S)
            await asyncio.to_thread(scene.forwarder.heal)
            await call_for(0.5)
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.gather(*calls)
            after = await both(pool)
            assert after.keys() == before.keys(), "a process was replaced, and its model loaded again"
            renamed = {worker.incarnation for worker in after.values()} - {w.incarnation for w in before.values()}
            assert len(renamed) == (2 if lost else 0)

    asyncio.run(play())
