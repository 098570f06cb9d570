"""Profiles of whole pools of sim workers: of which worker, by the command, and what a process that dies takes with it."""

import asyncio
import os
import signal
from pathlib import Path

import msgspec
import pytest

from enginepool import Pool, errors
from enginepool.protocol.messages.control import ControlReport
from tests.process.commands import call, end, start
from tests.process.daemons import sim_pool
from tests.process.forking import ForkedDaemon
from tests.process.processes import Processes
from tests.process.test_flush import all_ready


def told(report: ControlReport) -> dict[str, str]:
    return {row.name: f"{row.code} {row.message}".strip() for row in report.workers}


def test_profiles_survive_the_coordinator_and_end_with_their_worker(processes: Processes, tmp_path: Path) -> None:
    config = sim_pool(tmp_path)
    group = msgspec.structs.replace(config.groups["g"], profile_root=str(tmp_path / "profiles"))
    daemon = ForkedDaemon(processes, msgspec.structs.replace(config, groups={"g": group})).listening()

    async def main() -> None:
        async with Pool.connect(daemon.address) as pool:
            await all_ready(pool)
            with pytest.raises(errors.BadRequest, match="seconds: 301"):
                await pool.start_profile(seconds=301)
            started = told(await pool.start_profile(seconds=300))
            folders = {name: Path(folder) for name, folder in started.items()}
            assert folders.keys() == {"g-0", "g-1"} and len({*folders.values()}) == 2
            assert all(folder.is_relative_to(tmp_path / "profiles/g") for folder in folders.values())
            victim = next(worker for worker in (await pool.status()).groups[0].workers if worker.name == "g-1")
            os.kill(victim.pid, signal.SIGKILL)
            await asyncio.to_thread(daemon.kill)
            again = await asyncio.to_thread(daemon.successor)
            while (worker := (await pool.status()).groups[0].workers[1]).pid == victim.pid or worker.stage != "ready":
                await asyncio.sleep(0.05)
            await all_ready(pool)
            ended = told(await pool.stop_profile())
            assert ended["g-0"] == str(folders["g-0"]) and ended["g-1"].startswith("engine_error no profile runs")
            assert os.listdir(folders["g-0"]) == ["sim.trace.json"] and not os.listdir(folders["g-1"])
            # The next one is whole.
            code, out, _ = await asyncio.to_thread(call, "profile", "g/g-1", "--seconds", 0.1, "--connect", daemon.address)
            assert code == 0 and out.startswith(f"g-1: {tmp_path}/profiles/g/")
            assert os.listdir(out.split()[1]) == ["sim.trace.json"]
            command = start(processes, "profile", "g/g-1", "--seconds", 300, "--connect", daemon.address)
            assert command.stderr is not None
            assert "engines record for 300 s" in await asyncio.to_thread(command.stderr.readline)
            command.send_signal(signal.SIGINT)
            code, out, err = await asyncio.to_thread(end, command)
            assert (code, err) == (0, "") and os.listdir(out.split()[1]) == ["sim.trace.json"], "one is ended by Ctrl-C"
            assert await asyncio.to_thread(again.end) == 0

    asyncio.run(main())


def test_without_a_folder_for_profiles_each_worker_says_so(processes: Processes, tmp_path: Path) -> None:
    daemon = ForkedDaemon(processes, sim_pool(tmp_path, workers=1)).listening()

    async def main() -> None:
        async with Pool.connect(daemon.address) as pool:
            await all_ready(pool)

    asyncio.run(main())
    code, out, err = call("profile", "--connect", daemon.address)
    assert code == 1 and "g-0: profile_root of the group is empty" in out and "1 of 1 workers" in err
