"""Engines that take weights only at their start, as real processes: a checkpoint restarts them while clients ask."""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file  # pyright: ignore[reportUnknownVariableType]

from enginepool import Pool, WeightPublisher, errors
from tests.process.daemons import PATIENCE_S, Daemon, sim_pool
from tests.process.forking import ForkedDaemon
from tests.process.processes import Processes
from tests.process.scenes import COSTS
from tests.process.weights import Load, some_weights

Scene = Callable[[Pool, Load, Daemon], Coroutine[Any, Any, None]]


def checkpoint(folder: Path, seed: int) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"w": np.random.default_rng(seed).standard_normal((20, 30)).astype(np.float32)}, folder / "model.safetensors")
    return folder


def play(processes: Processes, directory: Path, scene: Scene, mode: str, workers: int = 3) -> None:
    """A scene in a pool under load; its answers are checked."""
    config = sim_pool(directory, workers=workers, options={**COSTS, "tensors": [], "only_at_start": True})
    group = msgspec.structs.replace(config.groups["g"], restart_updates=mode)
    daemon = ForkedDaemon(processes, msgspec.structs.replace(config, groups={"g": group})).listening()

    async def run() -> None:
        load = Load(daemon.address)
        async with Pool.connect(daemon.address) as pool:
            await all_on(pool, 0, workers)
            async with load.running():
                await scene(pool, load, daemon)

    asyncio.run(run())
    assert daemon.end() == 0


async def all_on(pool: Pool, version: int, workers: int = 3) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            held = [worker.version for worker in (await pool.weights()).workers if not worker.message]
            if held == [version] * workers:
                return
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("mode", ["rolling", "at_once"])
def test_a_checkpoint_restarts_all_workers_and_no_answer_is_lost_or_mixed(
    processes: Processes, tmp_path: Path, mode: str
) -> None:
    async def scene(pool: Pool, load: Load, daemon: Daemon) -> None:
        for version in (1, 2):
            load.committed[version] = []
            record = await pool.publish_checkpoint(checkpoint(tmp_path / f"step-{version}", version), version)
            load.committed[version].append(record.digest)
            assert (record.outcome, record.committed) == ("committed", 1 if mode == "rolling" else 3)
            await all_on(pool, version)
            await load.more(10)
        status = (await pool.status()).groups[0]
        victim = next(worker for worker in status.workers if worker.pid)
        os.kill(victim.pid, signal.SIGKILL)
        await all_on(pool, 2)

    directory = tmp_path / "pool"
    directory.mkdir(mode=0o700)
    play(processes, directory, scene, mode)


def test_what_cannot_be_is_refused_and_the_old_weights_serve_on(processes: Processes, tmp_path: Path) -> None:
    async def scene(pool: Pool, load: Load, daemon: Daemon) -> None:
        async with WeightPublisher(pool, device="cpu") as publisher:
            with pytest.raises(errors.Unsupported, match="no staged transfer: this engine takes weights only at its start"):
                await publisher.publish(some_weights(1), 1)
        cut = checkpoint(tmp_path / "cut", 1)
        whole = (cut / "model.safetensors").read_bytes()
        (cut / "model.safetensors").write_bytes(whole[:-8])
        with pytest.raises(errors.WeightsRefused, match="truncated"):
            await pool.publish_checkpoint(cut, 1)
        bare = checkpoint(tmp_path / "bare", 1)
        (bare / "config.json").unlink()
        with pytest.raises(errors.WeightsRefused, match=r"no config\.json"):
            await pool.publish_checkpoint(bare, 1)
        assert (await pool.set_version(5)).version == 5
        load.committed[5] = [""]

    directory = tmp_path / "pool"
    directory.mkdir(mode=0o700)
    play(processes, directory, scene, "rolling", workers=2)
