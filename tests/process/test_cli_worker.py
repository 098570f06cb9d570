"""`enginepool worker`: one command starts workers with their stagers, for a pool that runs elsewhere."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from queue import Queue
from typing import Any

import msgspec
import psutil
import pytest

from enginepool import Pool, WeightPublisher
from enginepool.client.pool import Pool as ClientPool
from enginepool.protocol.messages import WorkerStatus
from tests.process.commands import PROGRAM, ROOT, call
from tests.process.daemons import PATIENCE_S, Daemon, sim_pool
from tests.process.forking import ForkedDaemon, ForkedProcess
from tests.process.processes import Processes
from tests.process.scenes import OPTIONS
from tests.process.weights import TENSORS, some_weights


class Outside:
    """The command as a process, with the lines that it said."""

    def __init__(
        self, processes: Processes, address: str, directory: Path, *options: object, make: Callable[..., Any] = ForkedProcess
    ) -> None:
        command = [*PROGRAM, "worker", "--connect", address, "--state-dir", str(directory), *map(str, options)]
        self.directory = directory
        started = make(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        self.process = processes.keep(started)
        self.said: Queue[str] = Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.put(line)

    def wait_for(self, text: str) -> str:
        while text not in (line := self.said.get(timeout=PATIENCE_S)):
            pass
        return line

    def pids(self, kind: str) -> list[int]:
        """Of its `workers` or `stagers`."""
        return [msgspec.json.decode(path.read_bytes())["pid"] for path in sorted(self.directory.glob(f"{kind}/*.json"))]


Start = Callable[..., Outside]


@pytest.fixture
def daemon(processes: Processes, tmp_path: Path) -> Daemon:
    """A pool that starts no worker."""
    config = sim_pool(tmp_path, workers=0, options={"tensors": TENSORS, "held": "float16"}, silence_s=3.0)
    return ForkedDaemon(processes, config).listening()


@pytest.fixture
def outside(processes: Processes, daemon: Daemon, tmp_path: Path) -> Start:
    def start(*options: object, name: str = "outside", **how: Any) -> Outside:
        return Outside(processes, daemon.workers, tmp_path / name, *options, **how)

    return start


async def ready(pool: ClientPool, count: int, without: int = 0) -> list[WorkerStatus]:
    """Wait for so many ready workers, none of which is process `without`."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            workers = [worker for worker in (await pool.status()).groups[0].workers if worker.stage == "ready"]
            if len(workers) == count and all(worker.pid != without for worker in workers):
                return workers
            await asyncio.sleep(0.02)


def play(daemon: Daemon, scene: Callable[[ClientPool], Any]) -> None:
    async def run() -> None:
        async with Pool.connect(daemon.address) as pool:
            await asyncio.wait_for(scene(pool), 2 * PATIENCE_S)

    asyncio.run(run())


def test_one_command_starts_workers_with_their_stagers_and_they_take_staged_updates(daemon: Daemon, outside: Start) -> None:
    command = outside("--group", "g", "--workers", "2", make=subprocess.Popen)

    async def scene(pool: ClientPool) -> None:
        await ready(pool, 2)
        assert len(command.pids("stagers")) == 2
        async with WeightPublisher(pool, **OPTIONS) as publisher:
            record = await publisher.publish(some_weights(1), 1)
        assert (record.outcome, record.members) == ("committed", 2)
        answer = await pool.score([1, 2], [[3]], label_token_ids=[5])
        assert answer.version == 1

    play(daemon, scene)
    assert call_end(command) == 0


def call_end(command: Outside) -> int:
    """SIGTERM, and its exit code; nothing of it may be left."""
    children = psutil.Process(command.process.pid).children(recursive=True)
    command.process.send_signal(signal.SIGTERM)
    code = command.process.wait(PATIENCE_S)
    assert not psutil.wait_procs(children, PATIENCE_S)[1]
    return code


def test_a_worker_that_is_killed_comes_back_with_the_committed_weights_of_its_stager(daemon: Daemon, outside: Start) -> None:
    command = outside()

    async def scene(pool: ClientPool) -> None:
        [first] = await ready(pool, 1)
        async with WeightPublisher(pool, **OPTIONS) as publisher:
            await publisher.publish(some_weights(1), 1)
        stagers = command.pids("stagers")
        os.kill(first.pid, signal.SIGKILL)
        [second] = await ready(pool, 1, without=first.pid)
        assert (second.version, command.pids("stagers")) == (1, stagers)

    play(daemon, scene)
    command.wait_for("ended: ")


def test_a_stager_that_is_killed_comes_back(daemon: Daemon, outside: Start) -> None:
    command = outside()
    retrying: dict[str, Any] = {**OPTIONS, "retry_timeout": PATIENCE_S}

    async def scene(pool: ClientPool) -> None:
        await ready(pool, 1)
        [before] = command.pids("stagers")
        os.kill(before, signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            while command.pids("stagers") in ([], [before]):
                await asyncio.sleep(0.02)
        async with WeightPublisher(pool, **retrying) as publisher:
            assert (await publisher.publish(some_weights(1), 1)).outcome == "committed"

    play(daemon, scene)


def test_workers_end_with_a_command_that_is_killed(daemon: Daemon, outside: Start) -> None:
    command = outside()

    async def scene(pool: ClientPool) -> None:
        [worker] = await ready(pool, 1)
        process = psutil.Process(worker.pid)
        command.process.kill()
        await asyncio.to_thread(psutil.wait_procs, [process], PATIENCE_S)
        assert not process.is_running()

    play(daemon, scene)
    [stager] = command.pids("stagers")
    os.kill(stager, signal.SIGKILL)


def test_a_command_that_waits_on_tcp_says_that_it_may_be_the_key(processes: Processes, tmp_path: Path) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        command = Outside(processes, f"tcp://127.0.0.1:{bound.getsockname()[1]}", tmp_path / "outside")
        assert "waiting for one; no keys were given, and TCP needs some" in command.wait_for("no coordinator answers")


def test_it_waits_for_a_coordinator_and_outlives_one(processes: Processes, tmp_path: Path) -> None:
    config = sim_pool(tmp_path, workers=0, orphan_s=1.0)
    address = f"ipc://{config.state_dir}/workers.sock"
    command = Outside(processes, address, tmp_path / "outside")
    command.wait_for("no coordinator answers")
    daemon = ForkedDaemon(processes, config).listening()
    pids: list[int] = []

    async def scene(pool: ClientPool) -> None:
        pids.append((await ready(pool, 1))[0].pid)

    play(daemon, scene)
    daemon.kill()
    # Longer than its patience with a coordinator of its own.
    with pytest.raises(psutil.TimeoutExpired):
        psutil.Process(pids[0]).wait(4.0)
    play(ForkedDaemon(processes, config).listening(), scene)
    assert pids[0] == pids[1], "the model was loaded again"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--group", "nobody"], "group: 'nobody' is none of: g"),
        (["--workers", "2", "--gpus", "0"], "groups.g.gpus"),
    ],
)
def test_what_cannot_work_is_said_in_one_line(daemon: Daemon, tmp_path: Path, options: list[str], said: str) -> None:
    code, _, err = call("worker", "--connect", daemon.workers, "--state-dir", tmp_path / "outside", *options)
    assert code in (1, 2) and said in err and err.count("\n") == 1


def test_a_group_that_is_not_named_is_asked_for(processes: Processes, tmp_path: Path) -> None:
    config = sim_pool(tmp_path, workers=0)
    daemon = ForkedDaemon(
        processes, msgspec.structs.replace(config, groups={**config.groups, "h": config.groups["g"]})
    ).listening()
    code, _, err = call("worker", "--connect", daemon.workers, "--state-dir", tmp_path / "outside")
    assert (code, err) == (1, f"enginepool: {daemon.workers}: unknown_group: group: name one of: g, h\n")


def test_the_address_of_clients_is_refused_with_a_hint(daemon: Daemon, tmp_path: Path) -> None:
    code, _, err = call("worker", "--connect", daemon.address, "--state-dir", tmp_path / "outside")
    assert code == 1 and "listen_workers" in err and err.count("\n") == 1


def test_two_commands_do_not_share_a_directory(daemon: Daemon, outside: Start) -> None:
    first = outside()
    first.wait_for("starting worker")
    code, _, err = call("worker", "--connect", daemon.workers, "--state-dir", first.directory)
    assert code == 2 and "in use by another `enginepool worker`" in err


def test_the_state_dir_of_a_pool_is_refused_and_its_workers_live(processes: Processes, tmp_path: Path) -> None:
    daemon = ForkedDaemon(processes, config := sim_pool(tmp_path, workers=1)).listening()

    async def scene(pool: ClientPool) -> None:
        [before] = await ready(pool, 1)
        command = Outside(processes, daemon.workers, Path(config.state_dir))
        said = await asyncio.to_thread(command.said.get, timeout=PATIENCE_S)
        assert said == f"enginepool: state_dir = '{config.state_dir}': the state_dir of a pool; name another one\n"
        assert await asyncio.to_thread(command.process.wait, PATIENCE_S) == 2
        assert [worker.pid for worker in await ready(pool, 1)] == [before.pid]

    play(daemon, scene)


def test_a_worker_without_a_stager_aborts_no_update_and_is_restored_after_it(
    processes: Processes, daemon: Daemon, outside: Start, tmp_path: Path
) -> None:
    outside()
    spec: dict[str, Any] = {
        "endpoint": daemon.workers, "group": "g", "incarnation": "by-hand", "engine": "sim", "model": "sim", "external": True,
        "options": {"tensors": TENSORS, "held": "float16"},
    }  # fmt: skip
    environment = {**os.environ, "ENGINEPOOL_WORKER": json.dumps(spec)}
    with (tmp_path / "by-hand.log").open("wb") as log:
        command = [sys.executable, "-m", "enginepool.workers.main"]
        processes.start(command, env=environment, stdout=log, stderr=log)

    async def scene(pool: ClientPool) -> None:
        before = {worker.pid for worker in await ready(pool, 2)}
        async with WeightPublisher(pool, **OPTIONS) as publisher:
            for version in (1, 2):
                record = await publisher.publish(some_weights(version), version)
                assert (record.outcome, record.members) == ("committed", 1)
                assert record.message == "restored after it: by-hand: no staged transfer: this worker has no stager"
                workers = await ready(pool, 2)
                assert {worker.version for worker in workers} == {version}
                assert {worker.pid for worker in workers} == before, "a model was loaded again"

    play(daemon, scene)


def test_a_pool_without_a_worker_says_so_and_names_the_one_that_it_lost(daemon: Daemon, outside: Start) -> None:
    code, _, err = call("ready", "--connect", daemon.address, "--timeout", "1")
    assert code == 1 and "no worker is connected and the pool starts none" in err
    command = outside()

    async def scene(pool: ClientPool) -> None:
        await ready(pool, 1)
        command.process.kill()
        async with asyncio.timeout(PATIENCE_S):
            while (group := (await pool.status()).groups[0]).no_worker == "":
                await asyncio.sleep(0.02)
        assert [worker.stage for worker in group.workers] == ["lost"]

    play(daemon, scene)
    code, out, _ = call("status", "--connect", daemon.address)
    assert code == 0 and "no worker is connected" in out and " lost " in out
    [stager] = command.pids("stagers")
    os.kill(stager, signal.SIGKILL)
