"""The journal is lost and the clock is set back, on real processes: the pool goes on with its workers and clients."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from enginepool import Pool
from tests.process.daemons import PATIENCE_S, end_workers
from tests.process.forking import ForkedProcess
from tests.process.processes import Processes
from tests.process.test_faults import until

#: `enginepool serve` where it is so many seconds after 1970. Its coordinators are forked from it, and believe it, too.
SERVE = """
import os, time
from enginepool.cli.main import app
if now := int(os.environ["NOW"]):
    time.time_ns = lambda: now * 10**9
app()
"""


class Served:
    """`enginepool serve`, with the clock right (0) or wrong."""

    def __init__(self, processes: Processes, directory: Path, workers: int) -> None:
        self.processes, self.directory, self.workers = processes, directory, workers
        self.address = f"ipc://{directory}/pool.sock"
        directory.chmod(0o700)
        (directory / "pool.toml").write_text(
            f'listen = "{self.address}"\nstate_dir = "{directory}/state"\n'
            f'[groups.g]\nmodel = "none"\nengine = "sim"\nworkers = {workers}\n'
        )
        self.log = directory / "log"
        processes.then(lambda: end_workers(f"{directory}/state"))

    def start(self, now: int = 0) -> None:
        command = [sys.executable, "-c", SERVE, "serve", "--config", str(self.directory / "pool.toml")]
        with self.log.open("ab") as log:
            process = ForkedProcess(command, env={**os.environ, "NOW": str(now)}, stderr=log)
        self.process = self.processes.keep(process)

    def lose(self) -> None:
        """SIGKILL to both of its processes, and the journal is gone."""
        children = psutil.Process(self.process.pid).children()
        for process in (psutil.Process(self.process.pid), *children):
            process.kill()
        self.process.wait(PATIENCE_S)
        psutil.wait_procs(children, PATIENCE_S)  # the one that runs the pool locks its state until it is gone
        (self.directory / "state" / "journal.json").unlink()


@pytest.mark.parametrize("left", ["workers", "clients"])
def test_a_clock_set_back_with_the_journal_lost_stops_no_peer(processes: Processes, tmp_path: Path, left: str) -> None:
    served = Served(processes, tmp_path, workers=2)

    async def main() -> None:
        served.start()
        async with Pool.connect(served.address, connect_timeout=PATIENCE_S) as pool, asyncio.timeout(PATIENCE_S):
            await pool.ready()
            before = await until(pool, lambda pids: len(pids) == 2)
            epoch = (await pool.status(PATIENCE_S)).epoch
            served.lose()
            if left == "clients":
                end_workers(f"{tmp_path}/state")
            # Calls without a timeout, of a client that has heard the epoch that is lost.
            ids = asyncio.create_task(pool.score([1], [[2]], label_token_ids=[1]))
            text = asyncio.create_task(pool.score("a", ["b"], label_token_ids=[1]))
            served.start(1_000_000_000)
            assert (await ids).scores.shape == (await text).scores.shape == (1, 1)
            after = await until(pool, lambda pids: len(pids) == 2)
            assert (sorted(after) == sorted(before)) == (left == "workers"), "no model is loaded again"
            raised = (await pool.status(PATIENCE_S)).epoch
            assert raised > epoch
        told = served.log.read_text()
        assert "has heard epoch" in told
        # It is written down: the next one starts above it, although the clock is still wrong.
        served.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(served.process.wait, PATIENCE_S) == 0
        served.start(1_000_000_000)
        async with Pool.connect(served.address, connect_timeout=PATIENCE_S) as pool:
            assert (await pool.status(PATIENCE_S)).epoch > raised
        served.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(served.process.wait, PATIENCE_S)
        assert served.log.read_text().count("has heard epoch") == told.count("has heard epoch") == 1

    asyncio.run(main())
