"""Weights that whole pools of sim workers save: loaded again, and what a process that dies leaves behind."""

import asyncio
import json
import os
import re
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from enginepool import Pool, errors
from tests.process.commands import call
from tests.process.daemons import Daemon, sim_pool
from tests.process.forking import ForkedDaemon
from tests.process.processes import Processes
from tests.process.test_flush import all_ready
from tests.process.test_restarts import checkpoint
from tests.process.waiting import wait_until


def pool_in(processes: Processes, directory: Path, take_s: float = 0.0) -> Daemon:
    config = sim_pool(directory, options={"tensors": [["w", "float32", [20, 30]]], "take_s": take_s})
    roots = {"save_roots": [str(directory / "saved")], "checkpoint_roots": [str(directory)]}
    group = msgspec.structs.replace(config.groups["g"], **roots)
    return ForkedDaemon(processes, msgspec.structs.replace(config, groups={"g": group})).listening()


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.exists() else []


def something_in(folder: Path, name: str = "") -> Callable[[], Coroutine[Any, Any, bool]]:
    """Looks whether there is something of this name; "": anything."""

    async def look() -> bool:
        return name in names(folder) if name else bool(names(folder))

    return look


def test_what_is_saved_can_be_published_again_and_says_its_version(processes: Processes, tmp_path: Path) -> None:
    daemon, saved = pool_in(processes, tmp_path), tmp_path / "saved"

    async def main() -> None:
        async with Pool.connect(daemon.address) as pool:
            await all_ready(pool)
            await pool.publish_checkpoint(checkpoint(tmp_path / "trained-1", 1), 1)
            digest, tensor = (await pool.weights()).digest, await pool.weight("w")
            row = await pool.save_weights(saved / "step-1", worker="g-1")
            assert row.name == "g-1" and row.message.startswith("version 1: 2 files, ")
            said: dict[str, Any] = json.loads((saved / "step-1/enginepool.json").read_text())
            assert (said["group"], said["version"], said["digest"]) == ("g", 1, digest)
            await pool.publish_checkpoint(checkpoint(tmp_path / "trained-2", 2), 2)
            assert (await pool.weight("w")).tolist() != tensor.tolist()
            record = await pool.publish_checkpoint(saved / "step-1", 3)
            assert (record.version, record.committed) == (3, 2)
            assert (await pool.weight("w")).tolist() == tensor.tolist()
            with pytest.raises(errors.EngineFailed, match=r"g-\d: .*step-1: exists already"):
                await pool.save_weights(saved / "step-1")
            with pytest.raises(errors.BadRequest, match="save_roots") as refused:
                await pool.save_weights(tmp_path / "elsewhere")
            assert refused.value.field == "path"

    asyncio.run(main())
    code, out, err = call("weights", "save", saved / "again", "--connect", daemon.address)
    assert (code, err) == (0, "") and out.startswith("g-") and "version 3: 2 files" in out
    assert names(saved) == ["again", "step-1"]


def test_a_worker_that_is_killed_leaves_no_folder_of_that_name_and_the_next_save_succeeds(
    processes: Processes, tmp_path: Path
) -> None:
    daemon, saved = pool_in(processes, tmp_path, take_s=0.5), tmp_path / "saved"

    async def main() -> None:
        async with Pool.connect(daemon.address) as pool:
            await all_ready(pool)
            work = asyncio.ensure_future(pool.save_weights(saved / "a", worker="g-0"))
            await wait_until(something_in(saved), work)
            os.kill((await pool.status()).groups[0].workers[0].pid, signal.SIGKILL)
            with pytest.raises(errors.EngineFailed, match="g-0: lost"):
                await work
            assert all(name.endswith(".partial") for name in names(saved))
            assert (await pool.save_weights(saved / "a", worker="g-1")).name == "g-1"
            assert "a" in names(saved)

    asyncio.run(main())


def test_a_coordinator_that_is_killed_is_asked_again_and_the_folder_is_whole(processes: Processes, tmp_path: Path) -> None:
    daemon, saved = pool_in(processes, tmp_path, take_s=1.0), tmp_path / "saved"

    async def main() -> None:
        async with Pool.connect(daemon.address) as pool:
            await all_ready(pool)
            work = asyncio.ensure_future(pool.save_weights(saved / "a", worker="g-0"))
            await wait_until(something_in(saved), work)
            daemon.kill()
            again = await asyncio.to_thread(daemon.successor)
            [outcome] = await asyncio.gather(work, return_exceptions=True)
            # The worker goes on. It may not have registered again when it was asked, or have ended before.
            assert re.search("version 0|exists already|not ready|is not a worker", str(outcome)), outcome
            await wait_until(something_in(saved, "a"))
            assert names(saved) == ["a"] and len(names(saved / "a")) == 2
            assert await asyncio.to_thread(again.end) == 0

    asyncio.run(main())


def test_a_caller_that_is_gone_leaves_the_folder_and_nothing_else(processes: Processes, tmp_path: Path) -> None:
    daemon, saved = pool_in(processes, tmp_path, take_s=0.3), tmp_path / "saved"

    async def main() -> None:
        async with Pool.connect(daemon.address) as pool:
            await all_ready(pool)
            with pytest.raises(errors.DeadlineExceeded):
                await pool.save_weights(saved / "a", timeout=0.1)
        async with Pool.connect(daemon.address) as pool:
            await wait_until(something_in(saved, "a"))

            async def saves() -> bool:
                try:
                    return (await pool.save_weights(saved / "b")).message.startswith("version 0: ")
                except errors.EngineFailed as error:
                    if "one at a time" not in str(error):
                        raise
                    # The folder has its name a moment before the worker takes the next command.
                    return False

            await wait_until(saves)
        assert names(saved) == ["a", "b"]

    asyncio.run(main())
