"""Faults of the state directory and its disk, on real processes: no worker dies of them, and no commit is lost."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from enginepool import Pool, errors
from enginepool.config import PoolConfig, RestartConfig
from enginepool.protocol.messages import WorkerStatus
from tests.process.commands import PROGRAM
from tests.process.daemons import PATIENCE_S, Daemon, sim_pool
from tests.process.forking import ForkedDaemon
from tests.process.processes import Processes
from tests.process.test_internal_errors import Served

#: a tmpfs of its own over the state directory, which no other process sees
ON_A_SMALL_DISK = ["unshare", "-Urm", "sh", "-c", 'mount -t tmpfs -o size=256k,mode=700 tmpfs "$1" && shift && exec "$@"', "sh"]


def can_mount() -> bool:
    try:
        return subprocess.run(["unshare", "-Urm", "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


needs_mounts = pytest.mark.skipif(not can_mount(), reason="needs user and mount namespaces (unshare -Urm)")


def seen_by(daemon: Daemon, path: Path) -> Path:
    """A path as the mount namespace of the coordinator has it."""
    return Path(f"/proc/{daemon.process.pid}/root{path}")


def mount(daemon: Daemon | Served, *options: str) -> None:
    """A command, such as `mount`, in the mount namespace of the coordinator."""
    enter = ["nsenter", "-t", str(daemon.process.pid), "-U", "-m", "--preserve-credentials"]
    subprocess.run([*enter, *options], check=True)


def pool_of(tmp_path: Path, orphan_s: float = 60.0) -> PoolConfig:
    return sim_pool(tmp_path, workers=2, orphan_s=orphan_s)


def run(story: Callable[[], Awaitable[None]]) -> None:
    async def within_time() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await story()

    asyncio.run(within_time())


async def pids(pool: Pool) -> dict[str, int]:
    """The processes of the workers, by name."""
    return {worker.name: worker.pid for worker in (await pool.status()).groups[0].workers}


async def until(true: Callable[[], Awaitable[Any]]) -> None:
    while not await true():
        await asyncio.sleep(0.05)


async def both_serve(pool: Pool, version: int) -> dict[str, int]:
    """Wait until both workers are ready on this version; their processes."""

    async def ready() -> bool:
        workers = (await pool.status()).groups[0].workers
        return [(worker.stage, worker.version) for worker in workers] == [("ready", version)] * 2

    await until(ready)
    assert (await pool.score([1], [[2]], label_token_ids=[3])).version == version
    return await pids(pool)


def remove(folder: str) -> None:
    """A folder that others write to."""
    while Path(folder).exists():
        with contextlib.suppress(OSError):  # a file was written meanwhile
            shutil.rmtree(folder)


def test_a_state_directory_that_is_removed_costs_no_worker_and_no_commit(processes: Processes, tmp_path: Path) -> None:
    config = pool_of(tmp_path)
    daemon = ForkedDaemon(processes, config).listening()

    async def story() -> None:
        async with Pool.connect(daemon.address) as pool:
            await both_serve(pool, 0)
            await pool.set_version(3)
            before = await both_serve(pool, 3)
            remove(config.state_dir)
            with contextlib.suppress(errors.UpdateAborted):
                await pool.set_version(11)
            version = (await pool.status()).groups[0].version
            assert version is not None
            assert await both_serve(pool, version) == before
            # A worker that ends can be started again, and what is committed from now on is found by a successor.
            os.kill(before["g-0"], signal.SIGKILL)

            async def replaced() -> bool:
                return (await pids(pool)).get("g-0") not in (0, before["g-0"])

            await until(replaced)
            await pool.set_version(12)
            now = await both_serve(pool, 12)
            assert now["g-1"] == before["g-1"]
            await asyncio.to_thread(daemon.kill)
            await asyncio.to_thread(ForkedDaemon(processes, config).listening)
            assert await both_serve(pool, 12) == now

    run(story)


@pytest.mark.parametrize("what", ["renamed", "replaced", "folder_renamed"])
def test_what_is_committed_after_the_journal_was_renamed_is_found_by_a_successor(
    processes: Processes, tmp_path: Path, what: str
) -> None:
    config = pool_of(tmp_path)
    daemon = ForkedDaemon(processes, config).listening()
    state = Path(config.state_dir)
    journal = state / "journal.json"

    async def story() -> None:
        async with Pool.connect(daemon.address) as pool:
            await both_serve(pool, 0)
            await pool.set_version(3)
            before = await both_serve(pool, 3)
            if what == "folder_renamed":
                os.rename(state, tmp_path / "old")
            else:
                os.rename(journal, tmp_path / "old.json")
            if what == "replaced":
                shutil.copy(tmp_path / "old.json", journal)
            await pool.set_version(11)
            assert await both_serve(pool, 11) == before
            await asyncio.to_thread(daemon.kill)
            await asyncio.to_thread(ForkedDaemon(processes, config).listening)
            assert await both_serve(pool, 11) == before

    run(story)


@pytest.mark.parametrize("version", [11, 12])
def test_workers_that_hold_more_than_a_lost_journal_wait_for_an_operator(
    processes: Processes, tmp_path: Path, version: int
) -> None:
    config = pool_of(tmp_path)
    daemon = ForkedDaemon(processes, config).listening()

    async def story() -> None:
        async with Pool.connect(daemon.address) as pool:
            await both_serve(pool, 0)
            await pool.set_version(11)
            before = await both_serve(pool, 11)
            await asyncio.to_thread(daemon.kill)
            os.rename(f"{config.state_dir}/journal.json", tmp_path / "old.json")
            successor = ForkedDaemon(processes, config)
            line = await asyncio.to_thread(successor.wait_for, "the journal is behind")
            assert "the committed weight version 11 of group 'g', and the journal knows version 0" in line
            with pytest.raises(errors.NeedsWeights, match="the journal is behind"):
                await pool.score([1], [[2]], label_token_ids=[3])

            async def wait() -> bool:
                group = (await pool.status()).groups[0]
                assert "the journal is behind" in group.needs_weights
                return {worker.stage for worker in group.workers} == {"restoring"}

            await until(wait)
            with pytest.raises(errors.VersionBackwards, match="11"):
                await pool.set_version(10)
            await pool.set_version(version)
            assert await both_serve(pool, version) == before

    run(story)


@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_the_history_of_updates_survives_the_coordinator(processes: Processes, tmp_path: Path, end: str) -> None:
    config = pool_of(tmp_path)
    daemon = ForkedDaemon(processes, config).listening()
    journal = f"{config.state_dir}/journal.json"
    history = Path(config.state_dir, "updates.json")

    async def story() -> None:
        async with Pool.connect(daemon.address) as pool:
            await both_serve(pool, 0)
            await pool.set_version(3)
            await both_serve(pool, 3)
            os.unlink(journal)
            os.mkdir(journal)
            with pytest.raises(errors.UpdateAborted, match=f"{config.state_dir}/journal"):
                await pool.set_version(4)
            os.rmdir(journal)
            await pool.set_version(5)
            await both_serve(pool, 5)
            before = (await pool.weights()).history
            assert [(one.version, one.outcome) for one in before] == [
                (3, "committed"), (4, "update_aborted"), (5, "committed"),
            ]  # fmt: skip

            async def written() -> bool:
                text = await asyncio.to_thread(history.read_bytes)
                return text.count(b"first_answer") == 2

            await until(written)
            await asyncio.to_thread(daemon.kill if end == "killed" else daemon.end)
            await asyncio.to_thread(ForkedDaemon(processes, config).listening)
            assert (await pool.weights()).history == before

    run(story)


@needs_mounts
def test_a_disk_without_room_retires_no_worker_and_is_said_once_by_the_name_of_the_file(
    processes: Processes, tmp_path: Path
) -> None:
    config = pool_of(tmp_path, orphan_s=5.0)
    config = msgspec.structs.replace(config, restart=RestartConfig(backoff_s=1.0, backoff_max_s=1.0, max_restarts=2))
    state = Path(config.state_dir)
    state.mkdir(mode=0o700)
    daemon = Daemon(processes, config, [*ON_A_SMALL_DISK, config.state_dir]).listening()

    async def story() -> None:
        async with Pool.connect(daemon.address) as pool:
            before = await both_serve(pool, 0)
            fill(seen_by(daemon, state))
            # What is on the disk can be written over, so that updates go on.
            await pool.set_version(3)
            assert await both_serve(pool, 3) == before
            os.kill(before["g-0"], signal.SIGKILL)
            await asyncio.to_thread(daemon.wait_for, "ended by SIGKILL")
            fill(seen_by(daemon, state))  # its record is gone, and has left some room
            await asyncio.to_thread(daemon.wait_for, "No space left on device")
            loop = asyncio.get_running_loop()
            five_tries = loop.time() + 5.5

            async def tried_often() -> bool:
                slot = await slot_of(pool)
                assert slot.stage in ("backoff", "starting"), slot
                return loop.time() > five_tries

            await until(tried_often)
            (seen_by(daemon, state) / "fill").unlink()
            now = await both_serve(pool, 3)
            assert now["g-1"] == before["g-1"]
            assert int((await slot_of(pool)).incarnation.rpartition(".")[2]) > 6, "one number for each try"
            said = [line for line in daemon.lines if "No space left on device" in line and "worker" in line]
            assert len(said) == 1 and f"{config.state_dir}/" in said[0], said

    run(story)
    assert daemon.end() == 0


async def slot_of(pool: Pool) -> WorkerStatus:
    """The status of the worker g-0."""
    [slot] = [worker for worker in (await pool.status()).groups[0].workers if worker.name == "g-0"]
    return slot


def fill(folder: Path) -> None:
    """Take all the room that is left there."""
    with contextlib.suppress(OSError), open(folder / "fill", "ab", buffering=0) as file:
        for size in (4096, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)):
                    continue


@needs_mounts
def test_serve_waits_for_room_on_the_disk_and_its_workers_stay(processes: Processes, tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    served = Served(processes, tmp_path, [*ON_A_SMALL_DISK, str(state), *PROGRAM], make=subprocess.Popen)
    disk = Path(f"/proc/{served.process.pid}/root{state}")

    async def story() -> None:
        async with Pool.connect(served.address) as pool:
            before = await both_serve(pool, 0)
            fill(disk)
            served.coordinator().kill()
            call = asyncio.create_task(pool.score([1], [[2]], label_token_ids=[3]))

            async def tried_twice() -> bool:
                return (await asyncio.to_thread(served.log.read_text)).count("it is tried again every 5 s") > 1

            await until(tried_twice)
            (disk / "fill").unlink()
            assert (await call).version == 0
            assert await both_serve(pool, 0) == before

    run(story)
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(PATIENCE_S) == 0
    assert f"state_dir = '{state}': cannot be written: No space left on device" in served.log.read_text()


@needs_mounts
@pytest.mark.parametrize(
    ("fault", "mended", "reason"),
    [
        ('head -c 1M /dev/zero >"$1/fill"', 'rm "$0/fill"', "No space left on device"),
        ('mount -o remount,ro "$1"', 'mount -o remount,rw "$0"', "Read-only file system"),
    ],
)
def test_a_serve_that_begins_on_a_disk_that_cannot_be_written_waits_for_it(
    processes: Processes, tmp_path: Path, fault: str, mended: str, reason: str
) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    broken = [*ON_A_SMALL_DISK, str(state), "sh", "-c", f'{fault} 2>"$1.said"; shift && exec "$@"', "sh", str(state)]
    served = Served(processes, tmp_path, [*broken, *PROGRAM], make=subprocess.Popen)

    async def story() -> None:
        async def waits() -> bool:
            assert served.process.poll() is None, served.log.read_text()
            return "it is tried again every 5 s" in await asyncio.to_thread(served.log.read_text)

        await until(waits)
        mount(served, "sh", "-c", mended, str(state))
        async with Pool.connect(served.address, connect_timeout=PATIENCE_S) as pool:
            await both_serve(pool, 0)

    run(story)
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(PATIENCE_S) == 0
    assert f"state_dir = '{state}': cannot be written: {reason}" in served.log.read_text()


def test_a_serve_whose_lock_cannot_be_made_for_another_reason_ends_with_2(processes: Processes, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    (tmp_path / "state" / "lock").mkdir()
    served = Served(processes, tmp_path, PROGRAM, make=subprocess.Popen)
    assert served.process.wait(PATIENCE_S) == 2
    assert f"state_dir = '{tmp_path}/state': Is a directory" in served.log.read_text()


@needs_mounts
def test_a_read_only_disk_retires_no_worker_and_refuses_no_service(processes: Processes, tmp_path: Path) -> None:
    config = pool_of(tmp_path, orphan_s=5.0)
    config = msgspec.structs.replace(config, restart=RestartConfig(backoff_s=0.1, backoff_max_s=0.3, max_restarts=2))
    Path(config.state_dir).mkdir(mode=0o700)
    daemon = Daemon(processes, config, [*ON_A_SMALL_DISK, config.state_dir]).listening()

    async def story() -> None:
        async with Pool.connect(daemon.address) as pool:
            before = await both_serve(pool, 0)
            mount(daemon, "mount", "--bind", config.state_dir, config.state_dir)
            mount(daemon, "mount", "-o", "remount,ro,bind", config.state_dir)
            os.kill(before["g-0"], signal.SIGKILL)
            assert "/logs/g-0" in await asyncio.to_thread(daemon.wait_for, "Read-only file system")
            assert (await pool.score([1], [[2]], label_token_ids=[3])).version == 0
            mount(daemon, "umount", config.state_dir)
            now = await both_serve(pool, 0)
            assert now["g-1"] == before["g-1"]
            await pool.set_version(3)
            assert await both_serve(pool, 3) == now

    run(story)
    assert daemon.end() == 0


@needs_mounts
def test_an_update_is_refused_by_the_name_of_the_file_when_the_disk_was_unmounted(processes: Processes, tmp_path: Path) -> None:
    """What is written below a mount point is hidden when the disk is back."""
    config = pool_of(tmp_path, orphan_s=5.0)
    Path(config.state_dir).mkdir(mode=0o700)
    daemon = Daemon(processes, config, [*ON_A_SMALL_DISK, config.state_dir]).listening()

    async def story() -> None:
        async with Pool.connect(daemon.address) as pool:
            before = await both_serve(pool, 0)
            mount(daemon, "umount", "-l", config.state_dir)
            with pytest.raises(errors.UpdateAborted, match=rf"{config.state_dir}: it is on another file system"):
                await pool.set_version(3)
            assert await both_serve(pool, 0) == before
            assert os.listdir(config.state_dir) == []

    run(story)


def test_an_update_is_refused_by_the_name_of_the_file_when_the_parent_is_gone(processes: Processes, tmp_path: Path) -> None:
    config = msgspec.structs.replace(pool_of(tmp_path), state_dir=str(tmp_path / "parent" / "state"))
    daemon = ForkedDaemon(processes, config).listening()

    async def story() -> None:
        async with Pool.connect(daemon.address) as pool:
            before = await both_serve(pool, 0)
            (tmp_path / "parent").rename(tmp_path / "moved")
            with pytest.raises(errors.UpdateAborted, match=rf"{config.state_dir}: No such file or directory"):
                await pool.set_version(3)
            assert await both_serve(pool, 0) == before
            (tmp_path / "moved").rename(tmp_path / "parent")
            await pool.set_version(3)
            assert await both_serve(pool, 3) == before

    run(story)
