"""Profiles: who may ask for one, where a worker writes it, and that each one ends."""

import asyncio
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.shell.decode import client_event
from enginepool.coordinator.shell.peers import Peer
from enginepool.protocol.errors import WireError
from enginepool.protocol.frames import encode_header
from enginepool.protocol.messages import TaskId
from enginepool.protocol.messages.control import Command, CommandName, Control
from enginepool.protocol.roles import INCLUDES
from enginepool.workers.engine import EngineError
from enginepool.workers.engine_settings import EngineSettings
from enginepool.workers.profiling import Profiling
from enginepool.workers.sim.engine import SimEngine
from tests.core.machines import EPOCH, Pool
from tests.core.test_control import answer, commands, reports

LONG_S = 300.0


class Worker:
    """The profiles of a sim engine."""

    def __init__(self, root: str, group: str = "g", worker: str = "g-0.1a") -> None:
        self.engine = SimEngine(EngineSettings(model="m"))
        self.ends: list[asyncio.Task[None]] = []
        self.profiling = Profiling(self.engine, root, (group, worker), self.spawn)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.ends.append(asyncio.ensure_future(work))

    async def start(self, number: int, seconds: float = LONG_S) -> str:
        return await self.profiling.start(Command((1, number), "start_profile", seconds=seconds))

    async def stop(self, number: int) -> str:
        return await self.profiling.stop(Command((1, number), "stop_profile"))


def play(scene: Callable[[Worker], Coroutine[Any, Any, None]], *args: Any) -> None:
    async def main() -> None:
        worker = Worker(*args)
        await scene(worker)
        for end in worker.ends:
            end.cancel()

    asyncio.run(asyncio.wait_for(main(), 20))


def traces(folder: str) -> list[str]:
    return sorted(os.listdir(folder))


def test_a_profile_lies_in_a_folder_of_its_worker_once_it_is_stopped(tmp_path: Path) -> None:
    async def scene(worker: Worker) -> None:
        folder = await worker.start(1)
        assert Path(folder).parent == tmp_path / "g/g-0.1a" and not traces(folder)
        assert await worker.stop(2) == folder and traces(folder) == ["sim.trace.json"]
        assert Path(await worker.start(3)).parent == Path(folder).parent

    play(scene, str(tmp_path))


def test_profiles_that_begin_within_one_second_have_a_folder_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def now(form: str) -> str:
        return "now"

    monkeypatch.setattr("time.strftime", now)

    async def scene(worker: Worker) -> None:
        folders = list[str]()
        for number in range(3):
            folders.append(await worker.start(2 * number + 1))
            await worker.stop(2 * number + 2)
        assert [Path(folder).name for folder in folders] == ["now", "now-2", "now-3"]
        assert all(traces(folder) == ["sim.trace.json"] for folder in folders)

    play(scene, str(tmp_path))


def test_a_second_profile_and_a_stop_without_one_are_refused_and_copies_of_commands_are_not(tmp_path: Path) -> None:
    async def scene(worker: Worker) -> None:
        with pytest.raises(EngineError, match="no profile runs"):
            await worker.stop(1)
        folder = await worker.start(2)
        assert await worker.start(2) == folder, "delivered twice, it begins once"
        with pytest.raises(EngineError, match="a profile runs already"):
            await worker.start(3)
        assert await worker.stop(4) == await worker.stop(4) == folder
        with pytest.raises(EngineError, match="no profile runs"):
            await worker.stop(5)

    play(scene, str(tmp_path))


def test_a_profile_that_no_caller_stops_ends_and_the_next_stop_is_told_of_it(tmp_path: Path) -> None:
    async def scene(worker: Worker) -> None:
        folder = await worker.start(1, seconds=0.001)
        await worker.ends[0]
        assert traces(folder) == ["sim.trace.json"]
        assert await worker.stop(2) == folder
        await worker.start(3)
        await worker.stop(4)
        later = await worker.start(5)
        await worker.ends[0]
        assert not traces(later), "the end of an earlier profile leaves it alone"
        with pytest.raises(EngineError, match="a profile runs already"):
            await worker.start(6)

    play(scene, str(tmp_path))


def test_an_engine_that_cannot_write_its_traces_says_so_once_and_takes_the_next_profile(tmp_path: Path) -> None:
    async def scene(worker: Worker) -> None:
        async def fail() -> None:
            raise EngineError("no space left")

        await worker.start(1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(worker.engine.profiler, "stop", fail)
            for seconds in (LONG_S, 0.001):
                if seconds != LONG_S:
                    await worker.start(3, seconds)
                    await worker.ends[1]
                with pytest.raises(EngineError, match=r"the profile in .* failed: no space left"):
                    await worker.stop(4)
                with pytest.raises(EngineError, match="no profile runs"):
                    await worker.stop(5)
        folder = await worker.start(6)
        assert await worker.stop(7) == folder

    play(scene, str(tmp_path))


def test_nothing_is_written_outside_the_configured_folder(tmp_path: Path) -> None:
    async def refused(worker: Worker, why: str) -> None:
        with pytest.raises(EngineError, match=why) as wrong:
            await worker.start(1)
        assert "\n" not in str(wrong.value)

    play(lambda worker: refused(worker, "profile_root of the group is empty"), "")
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (root / "g").symlink_to(outside)
    play(lambda worker: refused(worker, "not under profile_root"), str(root))
    (root / "file").write_text("")
    play(lambda worker: refused(worker, "Not a directory|File exists"), str(root / "file"))

    async def named(worker: Worker) -> None:
        assert Path(await worker.start(1)).parent == root / "_./_._etc"

    play(named, str(root), "..", "../etc")


def test_a_profile_is_an_operator_s_and_has_bounds() -> None:
    def decode(asked: Control, role: Any = "admin") -> ev.Event:
        return client_event(0, b"l", [encode_header(asked)], 1 << 20, Peer(INCLUDES[role]))

    names: tuple[CommandName, ...] = ("start_profile", "stop_profile")
    for name in names:
        assert isinstance(decode(Control(1, name)), ev.ControlAsked)
        with pytest.raises(WireError, match=f"command: {name} needs the role admin"):
            decode(Control(1, name), "publisher")
    bounds: dict[str, tuple[float, ...]] = {"seconds": (0.0, -1.0, 301.0, float("nan")), "steps": (-1, 10_001)}
    for field, values in bounds.items():
        for value in values:
            with pytest.raises(WireError, match=f"^{field}: ") as wrong:
                decode(msgspec.structs.replace(Control(1, "start_profile"), **{field: value}))
            assert (wrong.value.code, wrong.value.field) == ("bad_request", field)


def test_each_worker_is_told_how_long_and_its_folder_is_in_the_report() -> None:
    pool = Pool()
    first, second = pool.worker("w1"), pool.worker("w2")
    asked = commands(pool.do(ev.ControlAsked(0, b"c", Control(1, "start_profile", seconds=2.5, steps=7))))
    assert [(one.command, one.seconds, one.steps) for one in asked.values()] == [("start_profile", 2.5, 7)] * 2
    answer(pool, first, asked[first], "", "/p/g/w1/x")
    [report] = reports(answer(pool, second, asked[second], "engine_error", "a profile runs already"))
    assert [(row.code, row.message) for row in report.workers] == [
        ("", "/p/g/w1/x"), ("engine_error", "a profile runs already"),
    ]  # fmt: skip
    tasks: set[TaskId] = {one.task for one in asked.values()}
    assert len(tasks) == 2 and all(epoch == EPOCH for epoch, _ in tasks)
