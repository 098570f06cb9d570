"""`flush` with whole pools of sim workers: under load, by the command, and by whom."""

import asyncio
from pathlib import Path

from enginepool import BlockingPool, Pool
from tests.process.commands import call
from tests.process.daemons import PATIENCE_S, sim_pool
from tests.process.forking import ForkedDaemon
from tests.process.processes import Processes


async def all_ready(pool: Pool) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while any(worker.stage != "ready" for worker in (await pool.status()).groups[0].workers):
            await asyncio.sleep(0.05)


def test_all_workers_flush_between_batches_while_the_pool_is_busy(processes: Processes, tmp_path: Path) -> None:
    daemon = ForkedDaemon(processes, sim_pool(tmp_path, options={"forward_s": 0.01, "batch_rows": 4}))

    async def main() -> None:
        async with Pool.connect(daemon.address) as pool:
            await all_ready(pool)
            scores = [asyncio.ensure_future(pool.score([i], [[1], [2], [3]], label_token_ids=[5])) for i in range(60)]
            # The sim engine refuses to flush while it runs a batch.
            for report in await asyncio.gather(*(pool.flush() for _ in range(3))):
                assert (report.group, report.command) == ("g", "flush")
                assert [(row.name, row.code, row.message) for row in report.workers] == [("g-0", "", ""), ("g-1", "", "")]
            results = await asyncio.wait_for(asyncio.gather(*scores), PATIENCE_S)
            assert all(set(result.forwards) == {1} for result in results)

    asyncio.run(main())


def test_the_command_says_what_each_worker_did(processes: Processes, tmp_path: Path) -> None:
    daemon = ForkedDaemon(processes, sim_pool(tmp_path))
    with BlockingPool.connect(daemon.address) as pool:
        pool.call(all_ready(pool.pool))
        assert len(pool.flush("g").workers) == 2
    assert call("flush", "--connect", daemon.address) == (0, "g-0: flushed\ng-1: flushed\n", "")
    code, _, err = call("flush", "other", "--connect", daemon.address)
    assert code != 0 and "other" in err
