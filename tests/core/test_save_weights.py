"""Weights that are saved: which worker does, under which folders, and that a folder appears whole or not at all."""

import asyncio
import json
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from enginepool.client.control import ControlCalls
from enginepool.coordinator.core import events as ev
from enginepool.coordinator.operations import control
from enginepool.errors import BadRequest
from enginepool.protocol.messages import Exiting
from enginepool.protocol.messages.control import Command, Control, ControlReport, WorkerOutcome
from enginepool.workers.engine import EngineError
from enginepool.workers.engine_settings import EngineSettings
from enginepool.workers.engine_weights import LOST_WEIGHTS, NewWeights
from enginepool.workers.saving import RECORD, WeightSaving
from enginepool.workers.sim.engine import SimEngine
from tests.core.machines import Pool, Sent, codes, failures
from tests.core.publishers import Trainer, UpdatePool
from tests.core.test_control import answer, beat, commands, reports
from tests.core.test_worker_sleep import Runner
from tests.core.test_worker_sleep import play as play_runner

ROOT = "/saved"


# --- in the coordinator -------------------------------------------------------------------------------------------------


def save(pool: Pool, path: str = f"{ROOT}/a", worker: str = "") -> list[Sent]:
    return pool.do(ev.ControlAsked(0, b"c", Control(1, "save", worker=worker, path=path)))


def saving(pool: Pool) -> Pool:
    """The pool, whose groups may be saved."""
    for group in pool.machine.core.groups.values():
        group.config = msgspec.structs.replace(group.config, save_roots=[ROOT])
    return pool


def test_one_worker_saves_and_its_outcome_is_the_only_one() -> None:
    pool = saving(Pool())
    for name in ("w1", "w2", "w3"):
        pool.worker(name, ready=name != "w3")
    asked = commands(save(pool))
    [(link, command)] = asked.items()
    assert (command.command, command.path) == ("save", f"{ROOT}/a")
    [report] = reports(answer(pool, link, command, "", "version 0: 3 files, 9 bytes"))
    assert [(row.name, row.message) for row in report.workers] == [(link.decode(), "version 0: 3 files, 9 bytes")]
    assert commands(save(pool, worker="w2")).keys() == {b"w2"}


def test_a_path_elsewhere_an_open_update_and_a_group_without_a_ready_worker_are_refused() -> None:
    pool = saving(Pool())
    for path in ("", "a", "/elsewhere/a", f"{ROOT}x/a", f"{ROOT}/../etc"):
        refused = failures(save(pool, path))[1]
        assert (refused.code, refused.field) == ("bad_request", "path") and "\n" not in refused.message
    assert codes(save(pool)) == ["pool_down"]
    pool.worker("w", ready=False)
    [named] = reports(save(pool, worker="w"))
    assert [(row.name, row.code) for row in named.workers] == [("w", "pool_down")]
    without = Pool()
    without.worker("w")
    assert "its configuration has none" in failures(save(without))[1].message
    updating = UpdatePool()
    saving(updating)
    updating.worker("w")
    trainer = Trainer(updating)
    trainer.publish(1)
    assert codes(save(updating)) == ["publishing"]


def test_a_worker_that_is_lost_or_takes_too_long_ends_the_call_and_the_next_one_has_another_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control, "SAVE_S", 100.0)
    pool = saving(Pool())
    pool.worker("w1")
    assert commands(save(pool)).keys() == {b"w1"}
    [report] = reports(pool.do(ev.WorkerSaid(0, b"w1", Exiting("it crashed", True))))
    assert [(row.name, row.code) for row in report.workers] == [("w1", "engine_error")]
    pool.worker("w2")
    assert commands(save(pool)).keys() == {b"w2"}
    told = [report for _ in range(102) for report in reports(beat(pool, b"w2"))]
    assert [(row.code, row.message) for row in told[0].workers] == [("deadline_exceeded", "no answer in time")]


# --- in the client ------------------------------------------------------------------------------------------------------


def test_a_path_that_is_none_is_told_what_one_is_and_one_that_is_too_long_here_goes_to_the_worker() -> None:
    class Asked(ControlCalls):
        async def _command(self, question: Control, timeout: float | None) -> ControlReport:  # noqa: ASYNC109
            return ControlReport(1, "g", "save", [WorkerOutcome("g-0", "", question.path)])

    for path in ("", 3):
        with pytest.raises(BadRequest, match=r"^path: .*; a new folder on the worker's host, or a URL of Redis$"):
            asyncio.run(Asked().save_weights(path))  # pyright: ignore[reportArgumentType]
    long = f"{ROOT}/{'x' * 300}"
    assert asyncio.run(Asked().save_weights(long)).message == long


# --- in the worker ------------------------------------------------------------------------------------------------------


class Worker:
    """What saves the weights of a sim engine."""

    def __init__(self, root: Path, model: str = "m") -> None:
        tensors = [["w", "float32", [2, 3]]]
        self.engine = SimEngine(EngineSettings(model=model, options={"tensors": tensors}))
        self.saving = WeightSaving(self.engine, [str(root)], "g", model)

    async def save(self, path: Path, number: int = 1) -> str:
        return await self.saving.run(Command((1, number), "save", path=str(path)))


def play(scene: Callable[[Worker], Coroutine[Any, Any, None]], *args: Any) -> None:
    asyncio.run(asyncio.wait_for(scene(Worker(*args)), 20))


def test_the_folder_has_the_files_of_the_model_and_says_which_weights_are_in_it(tmp_path: Path) -> None:
    model = tmp_path / "model"
    (model / "sub").mkdir(parents=True)
    (model / "1_Pooling").mkdir()
    (model / "modules.json").write_text('[{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Normalize"}]')
    for name in ("1_Pooling/config.json", "sub/config.json"):
        (model / name).write_text("{}")
    for name in ("config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json", "old.bin", ".hidden"):
        (model / name).write_text("{}")

    async def scene(worker: Worker) -> None:
        await worker.engine.weights.load_weights(NewWeights(), 7, "d7")
        said = await worker.save(tmp_path / "deep/er/a")
        assert said.startswith("version 7: 6 files, ")
        folder = tmp_path / "deep/er/a"
        found = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
        texts = {"config.json", "tokenizer.json", "modules.json", "1_Pooling/config.json"}
        assert found == {*texts, "model.safetensors", RECORD}
        saved = json.loads((folder / RECORD).read_text())
        expected = {"group": "g", "model": str(model), "version": 7, "digest": "d7", "load_format": "safetensors"}
        assert saved == expected and os.listdir(folder.parent) == ["a"]

    play(scene, tmp_path, str(model))


def test_what_exists_or_lies_elsewhere_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "there").mkdir(parents=True)
    outside.mkdir()
    (root / "link").symlink_to(outside)
    (root / "file").write_text("kept")

    async def scene(worker: Worker) -> None:
        cases = (
            (root / "there", "exists already"),
            (root / "file", "exists already"),
            (root / "file/a", "Not a directory"),
            (root / "link/a", "not under save_roots"),
            (outside / "a", "not under save_roots"),
            (root, "not under save_roots"),
        )
        for number, (path, why) in enumerate(cases):
            with pytest.raises(EngineError, match=why) as refused:
                await worker.save(path, number)
            assert "\n" not in str(refused.value)
        assert not os.listdir(outside) and not os.listdir(root / "there")

    play(scene, root)


def test_a_save_that_fails_leaves_nothing_and_the_next_one_succeeds(tmp_path: Path) -> None:
    async def scene(worker: Worker) -> None:
        weights = worker.engine.weights

        async def other(folder: str) -> str:
            (Path(folder) / "part").write_text("half")
            raise EngineError("not saved: other weights were loaded meanwhile; save again")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(weights, "save", other)
            with pytest.raises(EngineError, match="other weights were loaded meanwhile"):
                await worker.save(tmp_path / "a")
        weights.digest = LOST_WEIGHTS
        with pytest.raises(EngineError, match="the engine has no weights"):
            await worker.save(tmp_path / "a", 2)
        weights.digest = ""
        assert not os.listdir(tmp_path)
        assert (await worker.save(tmp_path / "a", 3)).startswith("version 0: ")

    play(scene, tmp_path)


def test_a_command_that_comes_again_saves_once_and_another_folder_waits_for_none(tmp_path: Path) -> None:
    async def scene(worker: Worker) -> None:
        begun, go_on, real = asyncio.Event(), asyncio.Event(), worker.engine.weights.save

        async def slow(folder: str) -> str:
            begun.set()
            await go_on.wait()
            return await real(folder)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(worker.engine.weights, "save", slow)
            # The second one is of the next coordinator, whose client asked again.
            both = [asyncio.ensure_future(worker.save(tmp_path / "a", number)) for number in (1, 2)]
            await begun.wait()
            with pytest.raises(EngineError, match=r"weights are being saved in .*; one at a time"):
                await worker.save(tmp_path / "b", 3)
            go_on.set()
            first, second = await asyncio.gather(*both)
            assert first == second == await worker.save(tmp_path / "a", 2)
        with pytest.raises(EngineError, match="exists already"):
            await worker.save(tmp_path / "a", 4)

    play(scene, tmp_path)


def test_sleep_waits_for_a_save_and_weights_that_sleep_are_not_saved(tmp_path: Path) -> None:
    async def scene(runner: Runner) -> None:
        seen: list[str] = []
        real, go_on = runner.engine.weights.save, asyncio.Event()

        async def slow(folder: str) -> str:
            await go_on.wait()
            seen.append("saved")
            return await real(folder)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runner.engine.weights, "save", slow)
            saved = asyncio.ensure_future(runner.runner.run(Command((5, 90), "save", path=str(tmp_path / "a"))))
            await asyncio.sleep(0)
            asleep = asyncio.ensure_future(runner.do("sleep"))
            assert await runner.do("flush") == ("", None, False), "other commands do not wait"
            go_on.set()
            await saved
            seen.append((await asleep)[0] or "asleep")
        assert seen == ["saved", "asleep"] and (tmp_path / "a").is_dir()
        await runner.runner.run(Command((5, 91), "save", path=str(tmp_path / "b")))
        [event] = [one for one in runner.said if getattr(one, "answer", None) is not None][-1:]
        assert "weights are asleep" in event.answer.message  # type: ignore[attr-defined]

    play_runner(scene, roots=(str(tmp_path),))
