"""Stagers in a real pool: one for each worker; it outlives its worker and its coordinator, and not its pool."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil
import pytest

from enginepool.config import PoolConfig
from enginepool.config_loader import encode_config
from enginepool.host.folders import snapshot_folders
from tests.process.daemons import PATIENCE_S, Daemon, sim_pool
from tests.process.forking import ForkedDaemon, ForkedProcess, file_command
from tests.process.processes import Processes

MODEL = [["a", "float32", [4, 4]]]
PLACES = ["g.0", "g.1"]


def lives(pid: int) -> bool:
    """It may end while it is looked at."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def pids(directory: Path, what: str) -> dict[str, int]:
    """Of the living, by the names of their records."""
    found: dict[str, int] = {}
    for path in (directory / "state" / what).glob("*.json"):
        try:
            pid = msgspec.json.decode(path.read_bytes())["pid"]
        except FileNotFoundError:
            continue
        if lives(pid):
            found[path.stem] = pid
    return found


def until(true: Callable[[], bool]) -> None:
    """A test is not told when a process has started another one."""
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def gone(*processes: int) -> bool:
    return not any(lives(pid) for pid in processes)


@pytest.fixture
def config(tmp_path: Path) -> PoolConfig:
    return sim_pool(tmp_path, options={"tensors": MODEL})


def test_a_path_too_long_for_a_stagers_socket_is_said_before_anything_starts(processes: Processes, tmp_path: Path) -> None:
    config = sim_pool(tmp_path, options={"tensors": MODEL})
    config = msgspec.structs.replace(config, groups={"g" * 64: config.groups["g"]})
    daemon = ForkedDaemon(processes, config)
    assert "too long for the group's name" in daemon.wait_for("state_dir = ")
    assert daemon.process.wait(PATIENCE_S) == 2
    assert pids(tmp_path, "workers") == {}


def started(processes: Processes, config: PoolConfig, directory: Path) -> tuple[Daemon, dict[str, int]]:
    daemon = ForkedDaemon(processes, config).listening()
    until(lambda: sorted(pids(directory, "stagers")) == PLACES)
    until(lambda: all((directory / "state" / "stagers" / f"{place}.sock").exists() for place in PLACES))
    return daemon, pids(directory, "stagers")


def connected(directory: Path) -> dict[str, int]:
    """The stagers to which a process holds a connection."""
    found: dict[str, int] = {}
    for name, pid in pids(directory, "stagers").items():
        with suppress(psutil.NoSuchProcess):
            ends = [str(end.laddr) for end in psutil.Process(pid).net_connections("unix")]
            if ends.count(str(directory / "state" / "stagers" / f"{name}.sock")) > 1:  # one more than the one that listens
                found[name] = pid
    return found


def test_a_stager_outlives_its_worker_and_a_dead_coordinator_and_ends_with_the_pool(
    processes: Processes, config: PoolConfig, tmp_path: Path
) -> None:
    daemon, stagers = started(processes, config, tmp_path)
    for name, pid in pids(tmp_path, "workers").items():
        os.kill(pid, signal.SIGKILL)
        daemon.wait_for(f"worker {name} ended")
    until(lambda: len(pids(tmp_path, "workers")) == 2)
    assert pids(tmp_path, "stagers") == stagers
    daemon.kill()
    successor = ForkedDaemon(processes, config).listening()
    assert pids(tmp_path, "stagers") == stagers
    assert successor.end() == 0
    until(lambda: gone(*stagers.values()))


def test_a_stager_that_was_killed_is_started_again_and_the_log_says_so(
    processes: Processes, config: PoolConfig, tmp_path: Path
) -> None:
    daemon, stagers = started(processes, config, tmp_path)
    os.kill(stagers["g.0"], signal.SIGKILL)
    daemon.wait_for("the stager of worker g-0 ended: ended by SIGKILL; it is started again after 0.5 s")
    until(lambda: pids(tmp_path, "stagers").get("g.0", stagers["g.0"]) != stagers["g.0"])
    assert pids(tmp_path, "stagers")["g.1"] == stagers["g.1"]


def test_stagers_whose_coordinator_stays_dead_end_by_themselves(processes: Processes, tmp_path: Path) -> None:
    daemon = ForkedDaemon(processes, sim_pool(tmp_path, options={"tensors": MODEL}, orphan_s=1.0)).listening()
    # One whose owner is slow to connect has been an orphan, and another one stands in its place.
    until(lambda: sorted(connected(tmp_path)) == PLACES)
    stagers = connected(tmp_path)
    time.sleep(1.5)  # longer than an orphan lives: the connection of its owner keeps each alive
    assert pids(tmp_path, "stagers") == stagers
    daemon.kill()
    until(lambda: gone(*stagers.values()))


def test_workers_that_take_no_updates_have_no_stager(processes: Processes, tmp_path: Path) -> None:
    daemon = ForkedDaemon(processes, sim_pool(tmp_path)).listening()
    until(lambda: len(pids(tmp_path, "workers")) == 2)
    assert pids(tmp_path, "stagers") == {}
    assert daemon.end() == 0


EMBEDDED = """
import asyncio, sys, torch
from enginepool import Pool, WeightPublisher
from enginepool.config_loader import decode_config

async def main():
    config = decode_config(sys.argv[-1].encode())
    async with Pool.start(config=config) as pool, WeightPublisher(pool, device="cpu") as publisher:
        await pool.ready(60)
        await publisher.publish({"a": torch.ones(4, 4)}, 1)
        print("published", flush=True)
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""


@pytest.mark.parametrize("end", ["closed", "killed"])
def test_an_embedded_pool_leaves_no_weights_in_memory(
    processes: Processes, config: PoolConfig, tmp_path: Path, end: str
) -> None:
    file = tmp_path / "program.py"
    file.write_text(EMBEDDED)
    command = [*file_command(file), encode_config(config).decode()]
    program = processes.keep(ForkedProcess(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    assert program.stdout.readline() == "published\n"
    stagers = pids(tmp_path, "stagers")
    assert sorted(stagers) == PLACES
    kept = Path(snapshot_folders(tmp_path / "state")["memory"])
    until(lambda: kept.is_dir() and any(kept.iterdir()))
    if end == "closed":
        program.stdin.close()
        assert program.wait(PATIENCE_S) == 0
    else:
        program.kill()
    until(lambda: gone(*stagers.values()) and not kept.exists())
