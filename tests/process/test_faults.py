"""Nothing lost: under load, workers are killed and stopped, the coordinator is killed and restarted, clients are cut off."""

import asyncio
import errno
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest

from enginepool import Pool
from enginepool.config_loader import encode_config
from enginepool.coordinator.shell.log import say
from enginepool.errors import EnginepoolError, RequestCancelled
from enginepool.host.child_process import created_at, lives
from enginepool.protocol.messages import GroupStatus, StatusReport
from enginepool.workers.sim.scores import expected_scores
from tests.process.daemons import PATIENCE_S, Daemon, end_workers, sim_pool
from tests.process.forking import ForkedDaemon, ForkedProcess
from tests.process.processes import Processes

COSTS = {"forward_s": 0.01, "batch_tokens": 400, "batch_rows": 8, "inflight_tokens": 800, "inflight_rows": 16}
LABELS = [5, 6]


@pytest.fixture
def daemon(processes: Processes, tmp_path: Path) -> Daemon:
    return ForkedDaemon(processes, sim_pool(tmp_path, options=COSTS, silence_s=3.0)).listening()


class Load:
    """Clients that ask without pause until told to stop; every answer is compared with what the sim engine must say."""

    def __init__(self, address: str, clients: int = 3, seed: int = 0) -> None:
        self.address = address
        self.clients = clients
        self.random = random.Random(seed)
        self.asked = self.answered = 0
        self.stop = asyncio.Event()
        self._more = asyncio.Condition()
        self._failures: list[Exception] = []

    async def one(self, pool: Pool) -> None:
        rng = self.random
        query = [rng.randrange(1000) for _ in range(rng.randrange(1, 10))]
        items = [[rng.randrange(1000) for _ in range(rng.randrange(1, 30))] for _ in range(rng.randrange(1, 25))]
        self.asked += 1
        result = await pool.score(query, items, label_token_ids=LABELS, priority=rng.randrange(-5, 6))
        want = expected_scores(query, items, labels=LABELS)["scores"]
        np.testing.assert_array_equal(result.scores, want)
        assert set(result.forwards) == {1}
        self.answered += 1
        async with self._more:
            self._more.notify_all()

    async def answers(self, more: int) -> None:
        """Wait until so many more answers have come."""
        goal = self.answered + more
        async with self._more:
            await asyncio.wait_for(self._more.wait_for(lambda: self.answered >= goal or self._failures), PATIENCE_S)
        assert not self._failures, self._failures

    async def caller(self, pool: Pool) -> None:
        try:
            while not self.stop.is_set():
                await self.one(pool)
        except Exception as error:
            self._failures.append(error)
            async with self._more:
                self._more.notify_all()
            raise

    @asynccontextmanager
    async def running(self) -> AsyncGenerator["Load"]:
        """Load for as long as the block runs; afterwards every call has its one answer."""
        pools = [await Pool.connect(self.address) for _ in range(self.clients)]
        callers = [asyncio.create_task(self.caller(pool)) for pool in pools for _ in range(4)]
        try:
            await self.answers(20)
            yield self
            await self.answers(50)
            self.stop.set()
            await asyncio.wait_for(asyncio.gather(*callers), PATIENCE_S)
        finally:
            for caller in callers:
                caller.cancel()
            for pool in pools:
                await pool.close()
        assert self.answered == self.asked


async def worker_pids(pool: Pool) -> list[int]:
    return [w.pid for group in (await pool.status(PATIENCE_S)).groups for w in group.workers if w.pid]


async def until(pool: Pool, wanted: Callable[[list[int]], bool]) -> list[int]:
    """Wait until the workers that are there are as wanted."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            pids = await worker_pids(pool)
            if wanted(pids):
                return pids
            # The status has no subscription: ask again a little later.
            await asyncio.sleep(0.05)


async def all_ready(pool: Pool) -> list[int]:
    """Wait until two workers serve."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            workers = (await pool.status(PATIENCE_S)).groups[0].workers
            if [worker.stage for worker in workers] == ["ready", "ready"]:
                return [worker.pid for worker in workers]
            await asyncio.sleep(0.05)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(2 * PATIENCE_S):
            await scenario()

    asyncio.run(bounded())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_workers_that_are_killed_or_stopped_under_load_lose_nothing(daemon: Daemon, number: int) -> None:
    async def scenario() -> None:
        async with Pool.connect(daemon.address) as watcher, Load(daemon.address).running() as load:
            for _ in range(3):
                # One that is not ready has nothing to lose.
                victim = (await all_ready(watcher))[0]
                os.kill(victim, number)
                await load.answers(30)
                await until(watcher, lambda pids, victim=victim: len(pids) == 2 and victim not in pids)
        report = await status(daemon.address)
        assert report.groups[0].lost_batches > 0
        assert report.groups[0].split_batches == 0

    run(scenario)


async def status(address: str) -> StatusReport:
    async with Pool.connect(address) as pool:
        return await pool.status(PATIENCE_S)


def test_a_coordinator_that_is_killed_under_load_loses_nothing(processes: Processes, daemon: Daemon) -> None:
    """Clients resend to its successor, which adopts the workers that still run."""

    async def scenario() -> None:
        async with Load(daemon.address).running() as load:
            async with Pool.connect(daemon.address) as watcher:
                before = await until(watcher, lambda pids: len(pids) == 2)
                epoch = (await watcher.status(PATIENCE_S)).epoch
            daemon.kill()
            await asyncio.to_thread(lambda: ForkedDaemon(processes, daemon.config).listening())
            await load.answers(50)
            async with Pool.connect(daemon.address) as watcher:
                after = await until(watcher, lambda pids: len(pids) == 2)
                assert sorted(after) == sorted(before), "the workers are the same processes"
                assert (await watcher.status(PATIENCE_S)).epoch > epoch

    run(scenario)


def test_records_of_workers_that_a_crash_has_torn_keep_no_coordinator_from_starting(
    processes: Processes, tmp_path: Path
) -> None:
    config = sim_pool(tmp_path, workers=1)
    records = Path(config.state_dir) / "workers"
    Path(config.state_dir).mkdir(mode=0o700)
    records.mkdir()
    torn = [records / "g-0-empty.json", records / "g-0-cut.json"]
    for path, text in zip(torn, ("", '{"group":"g","ind'), strict=True):
        path.write_text(text)
    daemon = ForkedDaemon(processes, config).listening()
    assert not any(path.exists() for path in torn)
    assert daemon.end() == 0


def test_workers_without_a_coordinator_end_themselves(processes: Processes, tmp_path: Path) -> None:
    config = sim_pool(tmp_path, orphan_s=1.0)
    daemon = ForkedDaemon(processes, config).listening()
    fds: list[int] = []

    async def scenario() -> None:
        async with Pool.connect(daemon.address) as pool:
            fds.extend(os.pidfd_open(pid) for pid in await until(pool, lambda pids: len(pids) == 2))
        daemon.kill()
        loop = asyncio.get_running_loop()
        for fd in fds:
            ended = loop.create_future()
            loop.add_reader(fd, ended.set_result, None)
            await asyncio.wait_for(ended, PATIENCE_S)
            loop.remove_reader(fd)
            os.close(fd)

    run(scenario)


CLIENT = """
import asyncio, sys
from enginepool import Pool

async def main():
    pool = await Pool.connect(sys.argv[1])
    calls = [asyncio.create_task(pool.score([1], [[i]] * 20, label_token_ids=[1])) for i in range(1, 500)]
    await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    print("busy", flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


def test_a_client_that_is_cut_off_harms_no_other_and_leaves_nothing_behind(processes: Processes, tmp_path: Path) -> None:
    config = sim_pool(tmp_path, options=COSTS, client_silence_s=3.0)
    daemon = ForkedDaemon(processes, config).listening()

    async def scenario() -> None:
        async with Load(daemon.address).running() as load:
            victim = processes.keep(ForkedProcess([sys.executable, "-c", CLIENT, daemon.address], stdout=subprocess.PIPE))
            assert victim.stdout is not None
            assert await asyncio.to_thread(victim.stdout.readline) == b"busy\n"
            victim.kill()
            victim.wait()
            await load.answers(100)
        async with Pool.connect(daemon.address) as pool, asyncio.timeout(PATIENCE_S):
            while True:
                report = await pool.status(PATIENCE_S)
                if report.clients == 1 and not report.groups[0].queued and not report.groups[0].running:
                    break
                await asyncio.sleep(0.1)

    run(scenario)


def test_a_cancelled_call_is_taken_back(processes: Processes, tmp_path: Path) -> None:
    # So slow that this process may stand still, and there are calls to cancel all the same.
    daemon = ForkedDaemon(processes, sim_pool(tmp_path, options={**COSTS, "forward_s": 0.2})).listening()

    async def scenario() -> None:
        async with Pool.connect(daemon.address) as pool:
            await pool.ready()
            calls = [asyncio.create_task(pool.score([1], [[i]] * 20, label_token_ids=[1])) for i in range(1, 200)]
            await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            for call in calls:
                call.cancel()
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            assert any(isinstance(o, asyncio.CancelledError) for o in outcomes)
            assert not any(isinstance(o, EnginepoolError) and not isinstance(o, RequestCancelled) for o in outcomes)
            async with asyncio.timeout(PATIENCE_S):
                while (group := (await pool.status(PATIENCE_S)).groups[0]).queued or group.running:
                    await asyncio.sleep(0.05)

    run(scenario)


def test_sigterm_answers_what_was_begun_and_leaves_no_process(processes: Processes, tmp_path: Path) -> None:
    config = sim_pool(tmp_path, options={**COSTS, "forward_s": 0.2})
    daemon = ForkedDaemon(processes, config).listening()

    async def scenario() -> None:
        async with Pool.connect(daemon.address) as pool:
            pids = await until(pool, lambda pids: len(pids) == 2)
            await pool.ready()
            calls = [asyncio.create_task(pool.score([1], [[i]], label_token_ids=LABELS)) for i in range(1, 30)]
            await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            await pool.status(PATIENCE_S)  # asked after them on the same link: all of them have come in
            daemon.process.send_signal(signal.SIGTERM)
            for i, result in enumerate(await asyncio.gather(*calls), start=1):
                np.testing.assert_array_equal(result.scores, expected_scores([1], [[i]], labels=LABELS)["scores"])
        assert await asyncio.to_thread(daemon.process.wait, PATIENCE_S) == 0
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)

    run(scenario)


#: a coordinator that is sent a signal when it has just started its first worker, and says which process that is
SIGNALLED_EARLY = """
import os, sys
from enginepool.config_loader import decode_config
from enginepool.coordinator.launchers.local import LocalLauncher
from enginepool.coordinator.shell import daemon
class EarlySignal(LocalLauncher):
    def start(self, *arguments):
        started = super().start(*arguments)
        [worker] = self._workers.values()
        print(worker.process.pid, flush=True)
        os.kill(os.getpid(), int(sys.argv[1]))
        return started
sys.exit(daemon.run(decode_config(os.environ["ENGINEPOOL_CONFIG"].encode()), EarlySignal))
"""


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_in_the_middle_of_the_start_leaves_no_worker(
    processes: Processes, tmp_path: Path, sign: signal.Signals
) -> None:
    config = sim_pool(tmp_path, workers=1)
    processes.then(lambda: end_workers(config.state_dir))
    process = processes.start(
        [sys.executable, "-c", SIGNALLED_EARLY, str(int(sign))],
        env={**os.environ, "ENGINEPOOL_CONFIG": encode_config(config).decode()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    with pytest.raises(ProcessLookupError):
        os.kill(int(out), 0)


def test_a_closed_terminal_lets_begun_work_finish_however_often_it_says_so(processes: Processes, tmp_path: Path) -> None:
    daemon = ForkedDaemon(processes, sim_pool(tmp_path, options={**COSTS, "forward_s": 0.5})).listening()

    async def scenario() -> None:
        async with Pool.connect(daemon.address) as pool:
            await all_ready(pool)  # both, so that all calls have begun
            calls = [asyncio.create_task(pool.score([1], [[i]], label_token_ids=LABELS)) for i in range(1, 30)]
            await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            await pool.status(PATIENCE_S)
            daemon.process.send_signal(signal.SIGHUP)
            await asyncio.to_thread(daemon.wait_for, "draining")
            daemon.process.send_signal(signal.SIGHUP)
            for i, result in enumerate(await asyncio.gather(*calls), start=1):
                np.testing.assert_array_equal(result.scores, expected_scores([1], [[i]], labels=LABELS)["scores"])
        assert await asyncio.to_thread(daemon.process.wait, PATIENCE_S) == 0

    run(scenario)


def test_a_coordinator_that_was_told_to_ignore_hangups_does(processes: Processes, tmp_path: Path) -> None:
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        daemon = ForkedDaemon(processes, sim_pool(tmp_path, workers=0)).listening()
    finally:
        signal.signal(signal.SIGHUP, ignored)

    async def scenario() -> None:
        async with Pool.connect(daemon.address) as pool:
            daemon.process.send_signal(signal.SIGHUP)
            await pool.status(PATIENCE_S)  # by then it has seen the signal
            assert not (await pool.status(PATIENCE_S)).draining

    run(scenario)
    assert daemon.end() == 0


def test_asked_twice_a_coordinator_ends_at_once_and_leaves_neither_worker_nor_traceback(
    processes: Processes, tmp_path: Path
) -> None:
    config = sim_pool(tmp_path, options={"faults": [{"kind": "block_on_load", "seconds": PATIENCE_S}]}, drain_s=PATIENCE_S)
    daemon = ForkedDaemon(processes, config).listening()
    pids = [msgspec.json.decode(path.read_bytes())["pid"] for path in Path(config.state_dir).glob("workers/*.json")]
    assert len(pids) == 2

    async def workers_load() -> None:
        """A worker that is not connected yet would be ended at once."""
        async with Pool.connect(daemon.address) as pool, asyncio.timeout(PATIENCE_S):
            while {worker.stage for worker in (await pool.status(PATIENCE_S)).groups[0].workers} != {"loading"}:
                await asyncio.sleep(0.05)

    run(workers_load)
    daemon.process.send_signal(signal.SIGTERM)
    daemon.wait_for("draining")
    assert daemon.end() == 1
    assert [line for line in daemon.lines if " enginepool: " not in line] == []
    end = time.monotonic() + PATIENCE_S
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
        assert time.monotonic() < end, "a worker runs on"
        time.sleep(0.01)


def test_a_coordinator_whose_log_is_not_read_still_drains(processes: Processes, tmp_path: Path) -> None:
    config = sim_pool(tmp_path, workers=1)
    process = processes.start(
        [sys.executable, "-m", "enginepool.coordinator.shell.daemon"],
        env={**os.environ, "ENGINEPOOL_CONFIG": encode_config(config).decode()},
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    while b"listening" not in process.stderr.readline():
        assert process.poll() is None
    process.stderr.close()
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 0


def test_a_coordinator_whose_log_is_full_and_not_read_serves_and_drains(processes: Processes, tmp_path: Path) -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    with suppress(BlockingIOError):
        while True:
            os.write(write, b"x")
    os.set_blocking(write, True)
    config = sim_pool(tmp_path, workers=1)
    process = processes.start(
        [sys.executable, "-m", "enginepool.coordinator.shell.daemon"],
        env={**os.environ, "ENGINEPOOL_CONFIG": encode_config(config).decode()},
        stderr=write,
    )
    processes.then(lambda: os.close(read))
    os.close(write)

    async def scenario() -> None:
        async with Pool.connect(config.listen) as pool:
            result = await pool.score([1], [[2]], label_token_ids=LABELS)
            np.testing.assert_array_equal(result.scores, expected_scores([1], [[2]], labels=LABELS)["scores"])

    run(scenario)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 0


def test_a_coordinator_goes_on_with_its_log_when_the_disk_has_room_again(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        say("lost")
    say("written")
    assert capfd.readouterr().err == "enginepool: written\n"


def test_engines_that_run_out_of_memory_get_less_at_a_time_and_lose_nothing(processes: Processes, tmp_path: Path) -> None:
    """At first what may be in flight is too much, and later a batch."""
    # Which batches are full is up to chance; whichever is the first from the fifth on.
    later: list[dict[str, object]] = [{"kind": "out_of_memory", "rows": 3, "at_batch": batch} for batch in range(5, 300)]
    faults = [{"kind": "out_of_memory", "rows": 9}, *later]
    config = sim_pool(tmp_path, options=COSTS | {"faults": faults})
    config = msgspec.structs.replace(config, restart=msgspec.structs.replace(config.restart, max_restarts=0))
    daemon = ForkedDaemon(processes, config).listening()

    async def scenario() -> GroupStatus:
        async with Pool.connect(daemon.address) as pool:
            await pool.ready(timeout=PATIENCE_S)
            assert (await pool.status(PATIENCE_S)).groups[0].halvings == 1, "both died of the same"
            async with Load(daemon.address).running() as load:
                async with asyncio.timeout(PATIENCE_S):
                    while (await pool.status(PATIENCE_S)).groups[0].halvings == 1:
                        await load.answers(1)
                await load.answers(50)
            return (await pool.status(PATIENCE_S)).groups[0]

    group = asyncio.run(scenario())
    assert group.halvings in (2, 3), "the other worker had batches of 4 rows as well"
    assert group.poisoned == group.failed == 0
    assert group.down == ""


def test_a_successor_with_fewer_places_ends_the_workers_that_have_none(processes: Processes, tmp_path: Path) -> None:
    config = sim_pool(tmp_path, options=COSTS)
    (group,) = config.groups.values()
    config = msgspec.structs.replace(config, groups={"g": msgspec.structs.replace(group, gpus=["0", "1"])})
    smaller = msgspec.structs.replace(config, groups={"g": msgspec.structs.replace(group, workers=1, gpus=["0"])})

    async def workers(daemon: Daemon) -> dict[str, int]:
        end = time.monotonic() + PATIENCE_S
        async with Pool.connect(daemon.address) as pool:
            while True:
                found = (await pool.status(PATIENCE_S)).groups[0].workers
                if all(worker.stage == "ready" for worker in found):
                    return {worker.name: worker.pid for worker in found}
                assert time.monotonic() < end, found
                await asyncio.sleep(0.02)

    daemon = ForkedDaemon(processes, config).listening()
    before = asyncio.run(workers(daemon))
    made = created_at(before["g-1"])
    daemon.kill()
    successor = ForkedDaemon(processes, smaller).listening()
    assert asyncio.run(workers(successor)) == {"g-0": before["g-0"]}
    end = time.monotonic() + PATIENCE_S
    while lives(before["g-1"], made):
        assert time.monotonic() < end
        time.sleep(0.02)
