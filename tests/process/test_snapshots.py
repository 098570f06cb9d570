"""Snapshots of weights in shared memory: one for a group at most, and none of a pool that is gone."""

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from queue import SimpleQueue

import msgspec
import pytest
import torch

from enginepool import Pool, WeightPublisher
from enginepool.config import PoolConfig
from enginepool.coordinator.shell.snapshots import SnapshotFolders
from enginepool.host.child_process import created_at
from enginepool.host.folders import OWNER, snapshot_folders
from tests.process.daemons import PATIENCE_S, sim_pool
from tests.process.forking import ForkedDaemon
from tests.process.processes import Processes

#: MiB of the model
SIZE = 4
WEIGHTS = {"a": torch.ones(SIZE << 8, 1 << 10)}
MODEL = {"tensors": [["a", "float32", [SIZE << 8, 1 << 10]], ["b", "float32", [1]]]}


def pool_in(directory: Path) -> PoolConfig:
    directory.mkdir(mode=0o700, exist_ok=True)
    return sim_pool(directory, workers=1, options=MODEL, orphan_s=60.0)


def on_disk(directory: Path) -> PoolConfig:
    directory.mkdir(mode=0o700)
    return sim_pool(directory, workers=2, snapshot="disk", options=MODEL, orphan_s=60.0)


def memory_of(config: PoolConfig) -> Path:
    return Path(snapshot_folders(Path(config.state_dir))["memory"])


def snapshots(config: PoolConfig) -> list[Path]:
    folder = memory_of(config)
    return sorted(folder.glob("g*-*")) if folder.exists() else []


def run(story: Callable[[], Awaitable[None]]) -> None:
    async def within_time() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await story()

    asyncio.run(within_time())


async def publish(address: str, version: int, *, partial: bool = False) -> None:
    async with Pool.connect(address) as pool, WeightPublisher(pool, device="cpu") as publisher:
        await pool.ready(PATIENCE_S)
        extra = {} if partial else {"b": torch.ones(1)}
        await publisher.publish({"a": WEIGHTS["a"] * version, **extra}, version, partial=partial)


def test_a_commit_removes_the_snapshots_that_the_journal_does_not_name(processes: Processes, tmp_path: Path) -> None:
    """A journal that was lost, and versions that begin again below the lost ones, leave one snapshot, not one for each time."""
    config = pool_in(tmp_path / "pool")
    most = 0

    async def story() -> None:
        nonlocal most
        for version in (9, 5, 1):
            daemon = await asyncio.to_thread(ForkedDaemon(processes, config).listening)
            await publish(daemon.address, version)
            assert await asyncio.to_thread(daemon.end) == 0
            most = max(most, len(snapshots(config)))
            (tmp_path / "pool/state/journal.json").unlink()

    run(story)
    assert most == 1, f"{most} of {SIZE} MiB: {snapshots(config)}"


def test_a_commit_without_a_snapshot_removes_the_one_before(processes: Processes, tmp_path: Path) -> None:
    config = pool_in(tmp_path / "pool")
    daemon = ForkedDaemon(processes, config).listening()

    async def story() -> None:
        await publish(daemon.address, 1)
        while not snapshots(config):
            await asyncio.sleep(0.02)
        await publish(daemon.address, 2, partial=True)
        while snapshots(config):
            await asyncio.sleep(0.02)

    run(story)
    assert daemon.end() == 0


def test_a_pool_removes_the_snapshots_of_a_pool_whose_state_directory_is_gone_and_of_no_other(
    processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    gone, stopped, alive = (pool_in(tmp_path / name) for name in ("gone", "stopped", "alive"))

    async def story() -> None:
        for config in (gone, stopped):
            daemon = await asyncio.to_thread(ForkedDaemon(processes, config).listening)
            await publish(daemon.address, 1)
            assert await asyncio.to_thread(daemon.end) == 0
            assert len(snapshots(config)) == 1
        shutil.copytree(memory_of(gone), shared / "enginepool-gone")
        shutil.rmtree(gone.state_dir)
        daemon = await asyncio.to_thread(ForkedDaemon(processes, alive).listening)
        while memory_of(gone).exists():  # a pool of another test that starts now may remove it first
            await asyncio.sleep(0.02)
        await publish(daemon.address, 1)
        while len(snapshots(alive)) != 1:
            await asyncio.sleep(0.02)

    run(story)
    assert not memory_of(gone).exists() and len(snapshots(stopped)) == 1
    monkeypatch.setattr("enginepool.coordinator.shell.snapshots.SHARED", shared)
    said: SimpleQueue[str] = SimpleQueue()
    folders = SnapshotFolders(Path(alive.state_dir), said.put)
    folders.start()
    removed = f"{shared}/enginepool-gone is removed: it has snapshots of the pool in {gone.state_dir}, which is gone"
    assert said.get(timeout=PATIENCE_S) == removed
    folders.close()
    assert said.empty()


def test_what_does_not_belong_to_a_pool_that_is_gone_stays(processes: Processes, tmp_path: Path) -> None:
    """A folder whose owner may live, or lies on a disk that is not mounted, or that another user can write."""
    config = pool_in(tmp_path / "pool")
    folder = memory_of(pool_in(tmp_path / "other"))
    first = ForkedDaemon(processes, config).listening()

    async def story() -> None:
        await publish(first.address, 1)
        while not (memory_of(config) / OWNER).exists():  # a thread writes it
            await asyncio.sleep(0.02)

    run(story)
    owner = msgspec.json.decode((memory_of(config) / OWNER).read_bytes())
    assert first.end() == 0
    absent = {**owner, "state": str(tmp_path / "absent")}
    for changes, mode in [
        ({"pid": os.getpid(), "made": created_at(os.getpid())}, 0o700),
        ({"device": -1}, 0o700),
        ({"mounts": "mnt:[1]"}, 0o700),
        ({"host": "another"}, 0o700),
        ({}, 0o777),
    ]:
        folder.mkdir(0o700)
        folder.chmod(mode)
        (folder / OWNER).write_bytes(msgspec.json.encode({**absent, **changes}))
        assert ForkedDaemon(processes, config).listening().end() == 0
        assert (folder / OWNER).exists(), changes
        shutil.rmtree(folder)


def test_weights_whose_snapshot_cannot_be_written_are_in_the_log_and_the_status_and_have_one_at_the_end(
    processes: Processes, tmp_path: Path
) -> None:
    config = on_disk(tmp_path / "pool")
    folder = Path(config.state_dir) / "snapshots"
    daemon = ForkedDaemon(processes, config).listening()
    folder.mkdir()
    folder.chmod(0o777)  # as on a full disk, no snapshot is written there until an operator does something
    reason = f"others can enter {folder} (mode 0777): chmod 700 it"

    async def story() -> None:
        async with Pool.connect(daemon.address) as pool:
            while {worker.stage for worker in (await pool.status()).groups[0].workers} != {"ready"}:
                await asyncio.sleep(0.02)  # a worker that is late is no member of the update, and cannot restore its weights
            await publish(daemon.address, 1)
            while True:
                (group,) = (await pool.status()).groups
                if all(worker.detail for worker in group.workers):
                    break
                await asyncio.sleep(0.02)
        for worker in group.workers:
            assert worker.stage == "ready"
            assert worker.detail.startswith(f"no snapshot of version 1 in {folder}/g-") and worker.detail.endswith(
                f": {reason}"
            )

    run(story)
    assert not list(folder.iterdir())
    folder.chmod(0o700)
    assert daemon.end() == 0
    assert len(list(folder.iterdir())) == 1
    assert len([line for line in daemon.lines if "no snapshot of version 1" in line]) == 1
    second = ForkedDaemon(processes, config).listening()

    async def restored() -> None:
        async with Pool.connect(second.address) as pool:
            await pool.ready(PATIENCE_S)
            assert (await pool.status()).groups[0].version == 1

    run(restored)
    assert second.end() == 0
