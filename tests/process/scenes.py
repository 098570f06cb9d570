"""Scenes of weight updates: a pool of real processes under load, what happens to it, and that it must serve on afterwards."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from enginepool import Pool, WeightPublisher, errors
from enginepool.protocol.messages.weight_reports import HELD, UpdateRecord
from enginepool.trainer.update_handle import UpdateHandle
from tests.process.daemons import PATIENCE_S, Daemon, sim_pool
from tests.process.forking import ForkedDaemon
from tests.process.processes import Processes
from tests.process.weights import MANIFEST, TENSORS, Gate, Load, some_weights

COSTS: dict[str, Any] = {
    "forward_s": 0.005, "batch_tokens": 400, "batch_rows": 8, "inflight_tokens": 800, "inflight_rows": 16, "tensors": TENSORS,
    "held": "float16",
}  # fmt: skip
TIMES: dict[str, Any] = {
    "silence_s": 3.0,
    "update_prepare_s": 20.0,
    "update_join_s": 20.0,
    "update_stall_s": 5.0,
    "update_load_s": 10.0,
}
#: how a publisher is made here
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "bucket_bytes": 4096,
    "lease": 20.0,
    "collective_timeout": 15.0,
    "timeout": 50.0,
    "retry_timeout": 0,
}
#: of the engine, in a pool of its own: the second hand-over takes so long that every fault happens in it
SLOW_TAKE: dict[str, Any] = {"faults": [{"kind": "slow_on_take", "at_take": 2, "seconds": 2.5}], "fresh": True}
#: seconds of a scene with its fault, its healing and what follows; nothing may take longer
LIMIT_S = 240.0


class Stage:
    """A pool under load with a publisher, for a scene."""

    def __init__(self, processes: Processes, daemon: Daemon, pool: Pool, publisher: WeightPublisher, load: Load) -> None:
        self.processes, self.daemon, self.pool, self.publisher, self.load = processes, daemon, pool, publisher, load
        #: the version that is committed when the scene begins
        self.old = 0

    async def publish(self, version: int, **options: Any) -> UpdateRecord:
        """A whole update, whose answers are then allowed."""
        return self.committed(await self.publisher.publish(some_weights(version), version, **options))

    def committed(self, record: UpdateRecord) -> UpdateRecord:
        assert record.outcome == "committed"
        assert any(0 < microseconds % 1000 < 999 for microseconds in record.phases.values()), "phases are told in whole ms"
        assert record.phases["hold"] == sum(record.phases[part] for part in HELD), record.phases
        self.load.committed.setdefault(record.version, []).append(record.digest)
        return record

    async def end(self, finish: Awaitable[UpdateRecord]) -> str:
        """Why an update was aborted, or "": it is committed."""
        try:
            self.committed(await finish)
        except errors.UpdateAborted as error:
            return str(error)
        return ""

    async def start(self, version: int, gate: Gate | None = None) -> UpdateHandle:
        """Begin an update; with a gate, in the middle of its bytes."""
        if gate is None:
            return await self.publisher.start(some_weights(version), version)
        handle = await self.publisher.start(gate, version, manifest=MANIFEST)
        assert await asyncio.to_thread(gate.reached.wait, PATIENCE_S)
        return handle

    async def phase(self, handle: UpdateHandle, phase: str) -> None:
        """Wait until it is there."""
        async with asyncio.timeout(PATIENCE_S):
            while handle.phase != phase:
                assert handle.phase not in ("failed", "committed"), f"the update is over before {phase} was seen"
                await asyncio.sleep(0.002)

    async def failed(self, handle: UpdateHandle) -> None:
        """Wait until the coordinator has given it up."""
        async with asyncio.timeout(PATIENCE_S):
            while handle.phase != "failed":
                assert handle.phase != "committed"
                await asyncio.sleep(0.002)

    async def pid(self, place: int) -> int:
        """Of the worker at a place."""
        workers = {worker.name: worker for worker in (await self.pool.status()).groups[0].workers}
        return workers[f"g-{place}"].pid

    def stager(self, place: int) -> int:
        """The process of the stager of a slot."""
        path = Path(self.daemon.config.state_dir) / "stagers" / f"g.{place}.json"
        return msgspec.json.decode(path.read_bytes())["pid"]

    async def all_on(self, version: int) -> None:
        """Wait until every worker is ready on this version."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                report = await self.pool.weights()
                held = [worker.version for worker in report.workers if not worker.message]
                if held == [version] * self.daemon.config.groups["g"].workers:
                    return
                await asyncio.sleep(0.02)


Scene = Callable[[Stage], Coroutine[Any, Any, None]]
Play = Callable[..., None]


class Arena:
    """The pool that scenes share, as long as they have the same options and leave it well."""

    def __init__(self, processes: Processes, directories: Callable[[], Path]) -> None:
        self.processes, self.directories = processes, directories
        self.options: dict[str, Any] = {}
        self.daemon: Daemon | None = None

    def pool(self, options: dict[str, Any]) -> Daemon:
        """One that runs with these options of the engine."""
        if self.daemon is None or options != self.options:
            self.close()
            config = sim_pool(self.directories(), workers=3, options={**COSTS, **options}, **TIMES)
            self.daemon, self.options = ForkedDaemon(self.processes, config).listening(), options
        return self.daemon

    def close(self) -> None:
        """It and its workers have to end well."""
        daemon, self.daemon = self.daemon, None
        if daemon is not None:
            assert daemon.end() == 0

    async def play(self, scene: Scene, options: dict[str, Any]) -> None:
        """After `scene` the pool must serve, a further update succeed, and every worker be on it."""
        daemon = await asyncio.to_thread(self.pool, options)
        async with Pool.connect(daemon.address) as pool, WeightPublisher(pool, **OPTIONS) as publisher:
            await pool.ready(PATIENCE_S)
            before = await pool.weights()
            load = Load(daemon.address, committed={before.version: [before.digest]})
            stage = Stage(self.processes, daemon, pool, publisher, load)
            await stage.all_on(before.version)
            async with load.running():
                stage.old = (await stage.publish(before.version + 1)).version
                await scene(stage)
                self.daemon = stage.daemon
                await load.more(10)
                last = (await pool.weights()).version + 10
                async with asyncio.timeout(PATIENCE_S):
                    while (await again(stage, last)) is None:
                        last += 1
                await stage.all_on(last)
            assert last in load.versions()


@pytest.fixture(scope="module")
def arena(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    with Processes() as processes:
        arena = Arena(processes, lambda: tmp_path_factory.mktemp("pool"))
        yield arena
        arena.close()


@pytest.fixture
def play(arena: Arena) -> Play:
    """Runs a scene, with options of the sim engine, in a `fresh` pool if it is told to. No scene uses the pool of one
    that failed."""

    def play(scene: Scene, *, fresh: bool = False, **options: Any) -> None:
        if fresh:
            arena.close()
        try:
            asyncio.run(asyncio.wait_for(arena.play(scene, options), LIMIT_S))
        except BaseException:
            arena.daemon = None
            raise

    return play


async def again(stage: Stage, version: int) -> UpdateRecord | None:
    """A further update; one that meets the consequences of the fault (a worker that is only just lost) may be aborted."""
    try:
        return await stage.publish(version)
    except errors.UpdateAborted:
        return None
