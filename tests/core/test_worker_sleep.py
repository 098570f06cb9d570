"""Sleep and wake in the worker: no work enters an engine that sleeps, also when the coordinator does not know."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from enginepool.protocol.messages import Accept, ErrorReply, Ready, Stage
from enginepool.protocol.messages.control import Command, Commanded, CommandName, MemoryTag
from enginepool.protocol.messages.weights import Restore
from enginepool.workers import commands
from enginepool.workers.between_batches import BetweenBatches
from enginepool.workers.commands import CommandRunner
from enginepool.workers.engine import EngineDied, EngineError
from enginepool.workers.engine_pauses import EnginePauses
from enginepool.workers.engine_settings import EngineSettings
from enginepool.workers.events import (
    CommandDone,
    Connected,
    EngineLost,
    FromCoordinator,
    RunBatch,
    RunCommand,
    RunWeights,
    WorkerEvent,
)
from enginepool.workers.generation import GenerationRunner
from enginepool.workers.profiling import Profiling
from enginepool.workers.saving import WeightSaving
from enginepool.workers.sim.engine import SimEngine
from tests.core.test_worker_machine import batch, hear, ready, run, sent

EVERY: list[MemoryTag] = ["cuda_graph", "kv_cache", "weights"]


def command(n: int, name: CommandName = "sleep", epoch: int = 5) -> Command:
    return Command((epoch, n), name)


def done(n: int, asleep: list[MemoryTag] | None, *, lost: bool = False, epoch: int = 5) -> CommandDone:
    return CommandDone(0.0, Commanded((epoch, n)), asleep, lost)


def test_ready_says_what_sleeps_before_the_answer() -> None:
    w = ready()
    assert [type(effect) for effect in hear(w, command(1))] == [RunCommand]
    first, second = sent(run(w, done(1, EVERY)))
    assert isinstance(first, Ready) and first.asleep == EVERY and (first.version, first.digest) == (3, "")
    assert second == Commanded((5, 1))
    again = sent(run(w, Connected(1.0), FromCoordinator(1.0, Accept(5))))
    assert isinstance(again[1], Ready) and again[1].asleep == EVERY


def test_a_restore_that_meets_sleeping_weights_is_left_to_the_next_ready() -> None:
    """The coordinator sent it before it heard that they sleep. No engine can take it."""
    for early in (True, False):
        w = ready()
        hear(w, command(1))
        effects = hear(w, Restore(4, "d")) if early else []
        effects += run(w, done(1, EVERY))
        effects += [] if early else hear(w, Restore(4, "d"))
        assert not [effect for effect in effects if isinstance(effect, RunWeights)]
        assert [type(effect) for effect in hear(w, command(2, "wake"))] == [RunCommand]
        [told, _] = sent(run(w, done(2, [])))
        assert isinstance(told, Ready) and not told.asleep
        assert [effect.message for effect in hear(w, Restore(4, "d")) if isinstance(effect, RunWeights)] == [Restore(4, "d")]
        w.check()


def test_weights_that_are_lost_are_told_by_a_digest_that_no_weights_have() -> None:
    w = ready()
    hear(w, command(1))
    first = sent(run(w, done(1, EVERY, lost=True)))[0]
    assert isinstance(first, Ready) and (first.version, first.digest) == (0, "lost")


def test_work_that_comes_while_the_engine_sleeps_is_refused_and_goes_elsewhere() -> None:
    w = ready()
    hear(w, command(1))
    [refused] = [one for one in sent(hear(w, batch(5, 2))) if isinstance(one, ErrorReply)]
    assert (refused.code, refused.id) == ("hello_required", 2) and "asleep" in refused.message
    run(w, done(1, EVERY))
    assert not any(isinstance(effect, RunBatch) for effect in hear(w, batch(5, 3)))
    hear(w, command(4, "wake"))
    assert not any(isinstance(effect, RunBatch) for effect in run(w, done(4, [])))
    assert [type(effect) for effect in hear(w, batch(5, 5))] == [RunBatch]


def test_a_successor_of_the_coordinator_gets_no_ready_while_the_engine_goes_to_sleep() -> None:
    w = ready()
    hear(w, command(1))
    assert [type(message) for message in sent(hear(w, Accept(6)))][1:] == [Stage]
    [told, _] = sent(run(w, done(1, EVERY)))
    assert isinstance(told, Ready) and told.asleep == EVERY


def test_a_command_that_fails_opens_the_engine_again() -> None:
    w = ready()
    hear(w, command(1))
    hear(w, Accept(6))
    failed = CommandDone(0.0, Commanded((5, 1), "engine_error", "it refused"))
    assert isinstance(sent(run(w, failed))[0], Ready)
    assert [type(effect) for effect in hear(w, batch(6, 2))] == [RunBatch]


def test_weights_are_not_loaded_while_the_engine_goes_to_sleep_and_the_other_way_round() -> None:
    w = ready()
    hear(w, command(1))
    assert not [effect for effect in hear(w, Restore(4, "d")) if isinstance(effect, RunWeights)]
    assert [effect for effect in run(w, done(1, ["kv_cache"])) if isinstance(effect, RunWeights)]
    [refused] = sent(hear(w, command(2, "wake")))
    assert refused == Commanded((5, 2), "pool_down", "not ready: it takes weights")


def test_an_engine_that_ends_when_it_takes_memory_back_did_not_run_a_batch_too_large() -> None:
    w = ready()
    hear(w, command(1))
    run(w, done(1, EVERY))
    hear(w, command(2, "wake"))
    [bye] = sent(run(w, EngineLost(0.0, "CUDA error: out of memory")))
    assert msgspec.to_builtins(bye).get("out_of_memory") is None


# --- the runner ----------------------------------------------------------------------------------------------------------


class Runner:
    """A command runner of a sim engine, and what it said."""

    def __init__(self, roots: tuple[str, ...] = (), **options: Any) -> None:
        self.engine = SimEngine(EngineSettings(model="m", options=options))
        self.said: list[WorkerEvent] = []
        self.between = BetweenBatches()
        self.tasks: set[asyncio.Task[None]] = set()
        generations = GenerationRunner(self.engine, self.said.append, self.spawn, self.between)
        self.saving = WeightSaving(self.engine, roots, "g", "m")
        doors = self.between, generations, BetweenBatches(), EnginePauses(self.engine)
        others = Profiling(self.engine, "", ("g", "w"), self.spawn), self.saving
        self.runner = CommandRunner(self.engine, self.said.append, *doors, *others)
        self.count = 0

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        return task

    async def do(self, name: CommandName, *tags: MemoryTag) -> tuple[str, list[MemoryTag] | None, bool]:
        self.count += 1
        await self.runner.run(Command((5, self.count), name, list(tags)))
        event = self.said.pop()
        assert isinstance(event, CommandDone)
        return event.answer.message, event.asleep, event.lost_weights


def play(scene: Callable[[Runner], Coroutine[Any, Any, None]], **options: Any) -> None:
    async def main() -> None:
        runner = Runner(**options)
        await runner.engine.start(lambda _, __: None)
        await scene(runner)

    asyncio.run(asyncio.wait_for(main(), 20))


def test_what_sleeps_is_not_released_again_and_what_is_awake_is_not_taken_back() -> None:
    """The engine would end."""

    async def scene(runner: Runner) -> None:
        assert await runner.do("wake") == ("", None, False)
        assert await runner.do("sleep", "weights", "weights") == ("", ["weights"], True)
        assert await runner.do("sleep", "weights") == ("", None, False)
        assert await runner.do("sleep", "weights", "kv_cache") == ("", ["kv_cache", "weights"], False)
        assert await runner.do("flush") == ("", None, False)
        assert await runner.do("wake", "kv_cache", "cuda_graph") == ("", ["weights"], False)
        assert await runner.do("wake") == ("", [], False)

    play(scene, sleep_loses_weights=True)


def test_commands_that_come_together_run_in_their_order_after_the_batches_inside() -> None:
    async def scene(runner: Runner) -> None:
        async with runner.between.batch():
            both = [asyncio.ensure_future(runner.do(name)) for name in ("sleep", "wake")]
            await asyncio.sleep(0)
        assert [asleep for _, asleep, _ in await asyncio.gather(*both)] == [EVERY, []]

    play(scene)


def test_an_engine_that_refuses_says_so_and_one_that_hangs_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(runner: Runner) -> None:
        async def refuse(_: object) -> bool:
            raise EngineError("engine option enable_memory_saver is false")

        async def hang(_: object) -> bool:
            return await asyncio.Event().wait()

        monkeypatch.setattr(runner.engine, "sleep", refuse)
        assert await runner.do("sleep") == ("engine option enable_memory_saver is false", None, False)
        monkeypatch.setattr(runner.engine, "sleep", hang)
        monkeypatch.setattr(commands, "MEMORY_S", 0.01)
        await runner.runner.run(Command((5, 9), "sleep"))
        end = runner.said.pop()
        assert isinstance(end, EngineLost) and "the engine hangs: it did not release or take back memory" in end.reason

    play(scene)


def test_the_sim_engine_ends_where_it_is_given_work_while_it_sleeps() -> None:
    async def scene(runner: Runner) -> None:
        await runner.engine.sleep(["kv_cache"])
        with pytest.raises(EngineDied, match="given work while it sleeps: kv_cache"):
            await runner.engine.score(None)  # type: ignore[arg-type]

    play(scene)
