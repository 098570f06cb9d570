"""A real coordinator under clients that never read and clients that ask for all they may."""

import asyncio
from pathlib import Path

from bench.crowd import LIMITS, crowd, pool_of
from enginepool import Pool
from tests.process.forking import ForkedDaemon
from tests.process.processes import Processes


def test_a_coordinator_stays_under_its_total_for_any_requests(processes: Processes, tmp_path: Path) -> None:
    daemon = ForkedDaemon(processes, pool_of(tmp_path)).listening()

    async def scene() -> None:
        async with Pool.connect(daemon.address) as pool:
            await pool.ready()
            rows = await asyncio.to_thread(crowd, daemon.address, daemon.process.pid, 3.0, least=1)
            figures = {(row.what, row.who): row.value for row in rows}
            assert figures["coordinator", "peak over that"] * 1e6 < 1.2 * LIMITS.buffer_bytes, rows
            assert figures["answers", "to the greedy"] > 0, "those who read are served"

    asyncio.run(scene())
    assert daemon.process.poll() is None
