"""A group is asked to pause, to sleep or to change an adapter, and the caller, a worker or the coordinator is lost meanwhile.

A group is paused or sleeps as soon as it was asked to, and goes on as soon as it was asked to. An adapter is changed in all
workers or in none. After each fault the next call succeeds, and calls that waited have their tokens.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import pytest

from enginepool import Generations, Pool, errors
from enginepool.protocol.messages import GroupStatus
from enginepool.protocol.messages.control import ControlReport
from tests.process.daemons import PATIENCE_S, Daemon, sim_pool
from tests.process.forking import ForkedDaemon, ForkedProcess
from tests.process.processes import Processes
from tests.process.test_adapters import OPTIONS, check, folder
from tests.process.test_generate import Streams, all_ready, prompt, workers_of

Who = Literal["caller killed", "worker killed", "worker stopped", "coordinator killed", "coordinator stopped"]
WHO: tuple[Who, ...] = get_args(Who)
SILENCE_S = 2.0
#: of workers, in the report of a command meanwhile: one that was lost, or is not back at the next coordinator, or ended while
#: it slept, and starts again when it is woken
CODES: dict[Who, set[str]] = {
    "caller killed": {""},
    "worker killed": {"", "engine_error", "pool_down"},
    "worker stopped": {"", "engine_error", "pool_down"},
    "coordinator killed": {"", "engine_error", "pool_down"},
    "coordinator stopped": {""},
}
LONG: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 300}
#: a program that asks for one thing, and says when the coordinator has heard that
CALLER = """
import asyncio, sys
from enginepool import Pool

async def main():
    async with Pool.connect(sys.argv[1]) as pool:
        asked = asyncio.ensure_future(eval(sys.argv[2], {"pool": pool}))
        await asyncio.sleep(0)  # it is sent ahead of the status
        await pool.status()
        print("there", flush=True)
        await asked

asyncio.run(main())
"""


class Shared:
    """One pool for all cases, with the coordinator that it has now."""

    def __init__(self, processes: Processes, directory: Path) -> None:
        self.processes, self.root = processes, directory / "root"
        config = sim_pool(directory, options={**OPTIONS, "adapter_s": 0.3}, generates=True, silence_s=SILENCE_S)
        roots = {"adapter_roots": [str(self.root)], "save_roots": [str(self.root)]}
        group = msgspec.structs.replace(config.groups["g"], **roots)
        config = msgspec.structs.replace(config, groups={"g": group})
        self.daemon: Daemon = ForkedDaemon(processes, config).listening()

    async def struck(self, pool: Pool, call: str, who: Who, begun: Callable[[GroupStatus], bool]) -> Any:
        """What becomes of a call that is under way when a process is lost: its answer, or None where its caller is lost.

        One worker stands still, so that the call is under way until then.
        """
        victim = workers_of(self.daemon)[0]
        os.kill(victim, signal.SIGSTOP)
        program: Any = None
        asked: asyncio.Task[Any] | None = None
        if who == "caller killed":
            command = [sys.executable, "-c", CALLER, self.daemon.address, call]
            program = self.processes.keep(ForkedProcess(command, stdout=subprocess.PIPE, text=True), first=signal.SIGKILL)
            assert await asyncio.to_thread(program.stdout.readline) == "there\n"
        else:
            asked = asyncio.ensure_future(eval(call, {"pool": pool}))
            await asyncio.sleep(0)  # it is sent ahead of the status
        while not begun((await pool.status()).groups[0]) and (asked is None or not asked.done()):
            if program:
                assert program.poll() is None, "the caller has ended"
            await asyncio.sleep(0.01)
        if who == "caller killed":
            program.kill()
            await asyncio.to_thread(program.wait, PATIENCE_S)
        elif who == "worker killed":
            os.kill(victim, signal.SIGKILL)
        elif who == "coordinator killed":
            await asyncio.to_thread(self.daemon.kill)
            self.daemon = await asyncio.to_thread(self.daemon.successor)
        elif who == "coordinator stopped":
            self.daemon.process.send_signal(signal.SIGSTOP)
        if who in ("caller killed", "coordinator killed", "coordinator stopped"):
            os.kill(victim, signal.SIGCONT)
        if who == "coordinator stopped":
            await asyncio.sleep(1.25 * SILENCE_S)
            self.daemon.process.send_signal(signal.SIGCONT)
        answer = await asked if asked is not None else None
        assert who != "coordinator stopped" or victim in workers_of(self.daemon), "no worker is given up for that"
        return answer


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    with Processes() as processes:
        yield Shared(processes, tmp_path_factory.mktemp("pool"))


def run(shared: Shared, scene: Callable[[Pool], Awaitable[None]]) -> None:
    async def main() -> None:
        async with Pool.connect(shared.daemon.address) as pool, asyncio.timeout(PATIENCE_S):
            await all_ready(pool, shared.daemon)
            await scene(pool)
            await all_ready(pool, shared.daemon)
            [[one]] = await pool.generate(prompt(0), max_new_tokens=3)
            assert len(one.token_ids) == 3

    asyncio.run(main())


async def until(pool: Pool, there: Callable[[GroupStatus], bool]) -> None:
    while not there((await pool.status()).groups[0]):
        await asyncio.sleep(0.01)


def codes_of(report: ControlReport) -> set[str]:
    return {row.code for row in report.workers}


def held(group: GroupStatus) -> bool:
    return group.paused or bool(group.asleep)


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize(("hold", "end"), [("pause", "resume"), ("sleep", "wake")])
def test_a_group_is_held_and_goes_on_when_a_process_is_lost(shared: Shared, hold: str, end: str, who: Who) -> None:
    async def struck(pool: Pool, call: str, there: Callable[[GroupStatus], bool]) -> None:
        report = await shared.struck(pool, f"pool.{call}()", who, there)
        assert there((await pool.status()).groups[0]), "it lasts"
        assert report is None or codes_of(report) <= CODES[who], report

    async def scene(pool: Pool) -> None:
        begun = Streams(pool, 4, LONG)
        await begun.until(4 * 10)
        await struck(pool, hold, held)
        later = Streams(pool, 1, LONG)
        # On a busy machine some may have ended before they were held.
        await until(pool, lambda group: not group.running and group.queued == len(begun.left() + later.left()))
        await struck(pool, end, lambda group: not held(group))
        await begun.check()
        await later.check()

    run(shared, scene)


@pytest.mark.parametrize("who", WHO)
def test_a_flush_has_a_row_for_each_worker_when_a_process_is_lost(shared: Shared, who: Who) -> None:
    async def scene(pool: Pool) -> None:
        report = await shared.struck(pool, "pool.flush()", who, lambda _: True)
        assert report is None or (len(report.workers) == 2 and codes_of(report) <= CODES[who]), report
        await all_ready(pool, shared.daemon)
        assert codes_of(await pool.flush()) == {""}

    run(shared, scene)


def test_weights_are_saved_while_the_coordinator_stands_still(shared: Shared) -> None:
    async def scene(pool: Pool) -> None:
        victim = workers_of(shared.daemon)[0]
        [name] = [one.name for one in (await pool.status()).groups[0].workers if one.pid == victim]
        path = shared.root / "saved"
        row = await shared.struck(
            pool, f"pool.save_weights({str(path)!r}, worker={name!r})", "coordinator stopped", lambda _: True
        )
        assert (row.name, row.code) == (name, "") and [one.name for one in shared.root.glob("saved*")] == ["saved"]

    run(shared, scene)


@pytest.mark.parametrize("who", WHO)
def test_an_adapter_is_changed_or_not_when_a_process_is_lost(shared: Shared, who: Who) -> None:
    name = who.replace(" ", "-")

    def loads(group: GroupStatus) -> bool:
        return any(f"{name}@2" in one.detail for one in group.workers)

    async def scene(pool: Pool) -> None:
        await pool.load_adapter(name, folder(shared.root / name / "1", 1))
        path = folder(shared.root / name / "2", 2)
        change = shared.struck(pool, f"pool.load_adapter({name!r}, {str(path)!r}, version=2)", who, loads)
        version = 1 if who.startswith("worker") else 2
        if version == 1:
            with pytest.raises(errors.UpdateAborted, match="was lost"):
                await change
        else:
            await change
        await until(pool, lambda group: (name, version) in [(one.name, one.version) for one in group.adapters])
        assert await generated(pool, name) == {version}
        assert (await pool.load_adapter(name, path, version=3)).version == 3
        assert await generated(pool, name) == {3}

    run(shared, scene)


@pytest.mark.parametrize("who", WHO)
def test_an_adapter_is_unloaded_when_a_process_is_lost(shared: Shared, who: Who) -> None:
    def gone(group: GroupStatus) -> bool:
        return all(one.name != "x" for one in group.adapters)

    async def scene(pool: Pool) -> None:
        path = folder(shared.root / "x" / who, 1)
        await pool.load_adapter("x", path)
        await shared.struck(pool, "pool.unload_adapter('x')", who, gone)
        with pytest.raises(errors.BadRequest, match="adapter"):
            await generated(pool, "x")
        await pool.load_adapter("x", path)
        assert await generated(pool, "x") == {1}
        await pool.unload_adapter("x")

    run(shared, scene)


async def generated(pool: Pool, name: str) -> set[int]:
    found: Generations = await pool.generate([prompt(1)] * 4, max_new_tokens=5, temperature=0.0, adapter=name)
    return {version for [one] in found for version in check(1, name, one)}
