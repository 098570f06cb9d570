"""A coordinator that is stopped on purpose and started again, on real processes: with its workers, and without them."""

import asyncio
import signal
import subprocess
from functools import partial
from pathlib import Path

import msgspec
import psutil
import pytest

from bench.upgrade import upgrade
from enginepool import Pool, errors
from enginepool.config import GroupConfig, PoolConfig, Timing
from tests.process import commands
from tests.process.daemons import PATIENCE_S, end_workers, sim_pool
from tests.process.forking import ForkedDaemon
from tests.process.processes import Processes
from tests.process.test_faults import COSTS, Load, run, until
from tests.process.waiting import wait_until

SIM = GroupConfig(model="sim", engine="sim", workers=2, options=COSTS)


def started(config: PoolConfig) -> dict[str, int]:
    """Process ids of workers and stagers, as the pool has written them down."""
    folder = Path(config.state_dir)
    records = [*folder.glob("workers/*.json"), *folder.glob("stagers/*.json")]
    return {f"{path.parent.name}/{path.stem}": msgspec.json.decode(path.read_bytes())["pid"] for path in records}


def runs(pid: int) -> bool:
    """A worker that was adopted is a child of this host's first process, which may not reap it."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGUSR1])
def test_calls_wait_for_the_next_coordinator_when_one_is_stopped_under_load(
    processes: Processes, tmp_path: Path, sign: signal.Signals
) -> None:
    config = sim_pool(tmp_path, options={**COSTS, "tensors": [["w", "float32", [4]]]})

    async def scenario() -> None:
        daemon = ForkedDaemon(processes, config).listening()
        async with Load(config.listen).running() as load, Pool.connect(config.listen) as watcher:
            await until(watcher, lambda pids: len(pids) == 2)
            await watcher.ready()
            before = started(config)
            await load.answers(10)
            daemon.process.send_signal(sign)
            assert await asyncio.to_thread(daemon.process.wait, PATIENCE_S) == 0
            assert all(runs(pid) == (sign == signal.SIGUSR1) for pid in before.values())
            await asyncio.to_thread(ForkedDaemon(processes, config).listening)
            await load.answers(50)
            await until(watcher, lambda pids: len(pids) == 2)
        assert (started(config) == before) == (sign == signal.SIGUSR1), "workers and stagers"

    run(scenario)


def test_a_rolling_upgrade_costs_no_call_and_loads_no_model_again(tmp_path: Path) -> None:
    """`python -m bench.upgrade` is this with 200 calls/s, and says how long calls wait."""
    tmp_path.chmod(0o700)
    signals = (signal.SIGUSR1, signal.SIGUSR1, signal.SIGKILL)
    outcome = asyncio.run(upgrade(tmp_path, stops=6, rate=40.0, signals=signals, every_s=0.5))
    assert outcome.errors == []
    assert len(outcome.waits_s) == outcome.calls > 100
    assert outcome.before == outcome.after, "the same worker processes"


def test_asked_twice_to_end_alone_a_coordinator_ends_at_once_and_its_workers_stay(processes: Processes, tmp_path: Path) -> None:
    config = sim_pool(tmp_path, options={**COSTS, "forward_s": PATIENCE_S}, drain_s=PATIENCE_S)
    daemon = ForkedDaemon(processes, config).listening()

    async def scenario() -> None:
        async with Pool.connect(config.listen) as pool:
            await pool.ready()
            call = asyncio.create_task(pool.score([1], [[2]], label_token_ids=[1]))
            await wait_until(partial(something_runs, pool), call)
            daemon.process.send_signal(signal.SIGUSR1)
            await asyncio.to_thread(daemon.wait_for, "ending without the workers")
            daemon.process.send_signal(signal.SIGUSR1)
            assert await asyncio.to_thread(daemon.process.wait, PATIENCE_S) == 0
            assert not call.done()
            call.cancel()

    run(scenario)
    assert all(psutil.pid_exists(pid) for pid in started(config).values())


def test_a_coordinator_that_ends_alone_may_be_told_to_end_the_pool(processes: Processes, tmp_path: Path) -> None:
    config = sim_pool(tmp_path, options={**COSTS, "forward_s": 1.0}, drain_s=PATIENCE_S)
    daemon = ForkedDaemon(processes, config).listening()

    async def scenario() -> None:
        async with Pool.connect(config.listen) as pool:
            await pool.ready()
            calls = [asyncio.create_task(pool.score([1], [[2]], label_token_ids=[1])) for _ in range(4)]
            while not await something_runs(pool):
                if all(call.done() for call in calls):  # before the pool was looked at
                    await asyncio.gather(*calls)
                    calls = [asyncio.create_task(pool.score([1], [[2]], label_token_ids=[1])) for _ in range(4)]
            daemon.process.send_signal(signal.SIGUSR1)
            await asyncio.to_thread(daemon.wait_for, "ending without the workers")
            daemon.process.send_signal(signal.SIGTERM)
            await asyncio.gather(*calls)
            assert await asyncio.to_thread(daemon.process.wait, PATIENCE_S) == 0

    run(scenario)
    assert started(config) == {}


async def something_runs(pool: Pool) -> bool:
    return bool((await pool.status(PATIENCE_S)).groups[0].running)


# --- a pool that belongs to a program ----------------------------------------------------------------------------------


def test_calls_of_an_embedded_pool_end_with_a_clear_error_when_it_is_stopped_for_good() -> None:
    async def main() -> None:
        slow = msgspec.structs.replace(SIM, options={**COSTS, "forward_s": PATIENCE_S})
        config = PoolConfig(groups={"g": slow}, timing=Timing(drain_s=0.2))
        async with Pool.start(config=config) as pool:
            await pool.ready(PATIENCE_S)
            call = asyncio.create_task(pool.score([1], [[2]], label_token_ids=[1]))
            await wait_until(partial(something_runs, pool), call)
            coordinator_of().send_signal(signal.SIGTERM)
            with pytest.raises(errors.PoolDown, match="the pool was stopped"):
                await call

    asyncio.run(main())


def test_an_embedded_coordinator_that_is_stopped_alone_is_started_again_and_keeps_its_workers() -> None:
    async def main() -> None:
        async with Pool.start(config=PoolConfig(groups={"g": SIM})) as pool:
            await pool.ready(PATIENCE_S)
            before = await until(pool, lambda pids: len(pids) == 2)
            for number in range(6):  # more often than crashes are forgiven
                epoch = (await pool.status(PATIENCE_S)).epoch
                coordinator_of().send_signal(signal.SIGUSR1)
                result = await pool.score([1], [[number]], label_token_ids=[1])
                assert result.scores.shape == (1, 1)
                while (await pool.status(PATIENCE_S)).epoch == epoch:
                    await asyncio.sleep(0.01)
            assert sorted(await until(pool, lambda pids: len(pids) == 2)) == sorted(before)

    asyncio.run(main())


def coordinator_of() -> psutil.Process:
    """The only coordinator that this process has started."""
    (found,) = [child for child in psutil.Process().children() if "enginepool.coordinator.shell.daemon" in child.cmdline()]
    return found


def test_serve_ends_with_a_coordinator_that_is_stopped_alone_and_the_next_one_adopts_the_workers(
    processes: Processes, tmp_path: Path
) -> None:
    file = tmp_path / "pool.toml"
    file.write_text(
        f'listen = "ipc://{tmp_path}/pool.sock"\nstate_dir = "{tmp_path}/state"\n'
        '[groups.g]\nmodel = "none"\nengine = "sim"\nworkers = 2\n'
    )
    processes.then(lambda: end_workers(f"{tmp_path}/state"))
    tmp_path.chmod(0o700)

    async def scenario() -> None:
        serve = commands.start(processes, "serve", "--config", file)
        async with Pool.connect(f"ipc://{tmp_path}/pool.sock", connect_timeout=PATIENCE_S) as pool:
            before = await until(pool, lambda pids: len(pids) == 2)
            await pool.ready()
            serve.send_signal(signal.SIGUSR1)
            call = asyncio.create_task(pool.score([1], [[2]], label_token_ids=[1]))
            code, _, said = await asyncio.to_thread(commands.end, serve)
            assert code == 0, said
            successor = commands.start(processes, "serve", "--config", file)
            assert (await call).scores.shape == (1, 1)
            assert sorted(await until(pool, lambda pids: len(pids) == 2)) == sorted(before)
        successor.send_signal(signal.SIGTERM)
        assert (await asyncio.to_thread(commands.end, successor))[0] == 0
        assert not any(runs(pid) for pid in before)

    run(scenario)


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_counts_also_while_the_coordinator_starts(processes: Processes, tmp_path: Path, sign: signal.Signals) -> None:
    """It has workers to adopt. SIGTERM left them on their GPUs."""
    config = sim_pool(tmp_path, workers=1)
    daemon = ForkedDaemon(processes, config).listening()

    async def until_ready() -> None:
        async with Pool.connect(config.listen) as pool:
            await pool.ready()

    asyncio.run(until_ready())
    daemon.process.send_signal(signal.SIGUSR1)
    assert daemon.process.wait(PATIENCE_S) == 0
    workers = started(config)
    file = tmp_path / "pool.toml"
    group = '[groups.g]\nmodel = "sim"\nengine = "sim"\nworkers = 1\n'
    file.write_text(f'listen = "{config.listen}"\nstate_dir = "{config.state_dir}"\n{group}')
    # As users start it: a process that is forked would start at once.
    serve = processes.start([*commands.PROGRAM, "serve", "--config", str(file)], stderr=subprocess.PIPE, text=True)
    while not psutil.Process(serve.pid).children():
        assert serve.poll() is None
    serve.send_signal(sign)
    code, _, said = commands.end(serve)
    assert code == 0, said
    assert [runs(pid) for pid in workers.values()] == [sign == signal.SIGUSR1] * len(workers), said
