"""`enginepool restart` on whole pools: a healthy worker, all of a group, a retired one, and what cannot be restarted."""

import asyncio
import os
import signal
from pathlib import Path

import msgspec
import pytest

from enginepool import BlockingPool, Pool, errors
from enginepool.config import RestartConfig
from enginepool.protocol.messages import StatusReport
from tests.process.commands import call
from tests.process.daemons import PATIENCE_S, sim_pool
from tests.process.forking import ForkedDaemon
from tests.process.processes import Processes


def pids(report: StatusReport) -> dict[str, int]:
    return {worker.name: worker.pid for worker in report.groups[0].workers}


async def all_ready(pool: Pool) -> StatusReport:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            report = await pool.status()
            if all(worker.stage == "ready" for worker in report.groups[0].workers):
                return report
            await asyncio.sleep(0.05)


def test_a_group_is_restarted_under_load_and_no_call_fails(processes: Processes, tmp_path: Path) -> None:
    daemon = ForkedDaemon(processes, sim_pool(tmp_path, workers=2, options={"forward_s": 0.02})).listening()

    async def main() -> None:
        async with Pool.connect(daemon.address) as pool:
            before = pids(await all_ready(pool))
            over, answers = asyncio.Event(), 0

            async def caller() -> None:
                nonlocal answers
                while not over.is_set():
                    await pool.score([1], [[2], [3]], label_token_ids=[4], timeout=PATIENCE_S)
                    answers += 1

            callers = [asyncio.create_task(caller()) for _ in range(8)]
            lines: list[str] = []
            assert await pool.restart("g", report=lines.append) == ["g-0", "g-1"]
            over.set()
            await asyncio.gather(*callers)
            after = await pool.status()
            assert answers and (after.groups[0].failed, after.groups[0].lost_batches) == (0, 0)
            assert all(pids(after)[name] not in before.values() for name in before)
            assert [worker.restarts for worker in after.groups[0].workers] == [0, 0]
            assert [line.partition(":")[0] for line in lines] == ["g-0", "g-0", "g-1", "g-1"]

    asyncio.run(main())


def test_a_retired_worker_is_revived_by_the_command(processes: Processes, tmp_path: Path) -> None:
    config = msgspec.structs.replace(sim_pool(tmp_path, workers=1), restart=RestartConfig(max_restarts=0))
    daemon = ForkedDaemon(processes, config).listening()
    env = {"ENGINEPOOL_ADDRESS": daemon.address}

    async def retire() -> None:
        async with Pool.connect(daemon.address) as pool:
            os.kill(pids(await all_ready(pool))["g-0"], signal.SIGKILL)
            async with asyncio.timeout(PATIENCE_S):
                while (await pool.status()).groups[0].workers[0].stage != "retired":
                    await asyncio.sleep(0.05)
            with pytest.raises(errors.PoolDown):
                await pool.score([1], [[2]], label_token_ids=[3], timeout=PATIENCE_S)

    asyncio.run(retire())
    code, out, err = call("restart", "g/g-0", env=env)
    assert (code, err) == (0, "") and "g-0: ready after" in out
    with BlockingPool.connect(daemon.address) as pool:
        pool.score([1], [[2]], label_token_ids=[3], timeout=PATIENCE_S)
        assert pool.restart("g") == ["g-0"]
    code, _, err = call("restart", "g/none", env=env)
    assert (code, err) == (1, "enginepool: worker: 'none' is not a worker of group 'g', which has g-0\n")
    code, _, err = call("restart", "none", env=env)
    assert (code, err) == (1, "enginepool: group: 'none' is none of: g\n")


def test_a_worker_that_does_not_come_back_stops_the_restart_of_its_group(processes: Processes, tmp_path: Path) -> None:
    config = sim_pool(tmp_path, workers=2, options={"load_s": 0.5})
    config = msgspec.structs.replace(config, restart=RestartConfig(max_restarts=0))
    daemon = ForkedDaemon(processes, config).listening()

    async def main() -> None:
        async with Pool.connect(daemon.address) as pool:
            before = pids(await all_ready(pool))
            restart = asyncio.create_task(pool.restart("g"))
            async with asyncio.timeout(PATIENCE_S):
                while (pid := pids(await pool.status())["g-0"]) in (0, before["g-0"]):
                    await asyncio.sleep(0.01)
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(errors.PoolDown, match="g-0 did not become ready again: ended more than 0 times"):
                await restart
            assert pids(await pool.status())["g-1"] == before["g-1"]

    asyncio.run(main())
