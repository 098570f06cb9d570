"""Pauses during which generations stay in their engines: who is told, what is late, what undoes them, and what ends them."""

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest

from enginepool.coordinator.core import events as ev
from enginepool.protocol.messages import Accept, Sampling, StopGeneration, TaskId
from enginepool.protocol.messages.control import Command, Commanded, Control, ControlReport
from enginepool.protocol.messages.weights import LoadWeights, Prepare, Prepared, RunningGenerations
from enginepool.workers.between_batches import BetweenBatches
from enginepool.workers.commands import CommandRunner
from enginepool.workers.engine import Emit, GenerationTask, NewTokens
from enginepool.workers.engine_pauses import EnginePauses
from enginepool.workers.engine_settings import EngineSettings
from enginepool.workers.events import (
    CancelGenerations,
    CommandDone,
    FreeStopped,
    GenerationLeft,
    RunCommand,
    RunGeneration,
    RunWeights,
    StepsDone,
    WorkerEvent,
)
from enginepool.workers.generation import GenerationRunner
from enginepool.workers.profiling import Profiling
from enginepool.workers.saving import WeightSaving
from enginepool.workers.sim.engine import SimEngine
from tests.core.generations import CAN, GeneratingPool, generate, outputs
from tests.core.machines import Pool, Sent, failures
from tests.core.publishers import of_type
from tests.core.test_exact_version import stage
from tests.core.test_kept_generations import answered, loading
from tests.core.test_sleeping import commands, done, kept, obey, rows, say
from tests.core.test_worker_generations import EPOCH, Worker, kinds, said, start

MODES = ["in_place", "retract"]


def pause(pool: Pool, mode: RunningGenerations, id: int = 1) -> list[Sent]:
    return pool.do(ev.ControlAsked(0, b"c", Control(id, "pause", mode=mode)))


def begun(*lengths: int, timeout: float | None = None) -> tuple[GeneratingPool, list[bytes], list[Sent]]:
    """Two workers, and requests that have one token each."""
    pool = GeneratingPool()
    links = [pool.worker("w1", can=CAN), pool.worker("w2", can=CAN)]
    client = pool.client()
    for i, length in enumerate(lengths, 1):
        pool.submit(client, i, generate(length), timeout=timeout)
    tasks = pool.tasks()
    for task in tasks:
        pool.step(task.link, (task, 0, 0, [7], ""))
    return pool, links, tasks


# --- the coordinator -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_generations_stay_where_they_are_are_not_late_and_go_on(mode: RunningGenerations) -> None:
    pool, links, [task] = begun(3)
    asked = pause(pool, mode)
    assert [command.mode for command in commands(asked).values()] == [mode, mode] and not of_type(asked, StopGeneration)
    assert pool.holds[0].holds.mode == mode
    assert rows(obey(pool, asked)) == [("w1", ""), ("w2", "")]
    pool.submit(pool.client(b"other"), 9, generate(4))
    for _ in range(int(pool.machine.core.config.timing.forward_s) + 5):
        pool.do(*(ev.WorkerHeard(0, link) for link in links), *(ev.Heard(0, link) for link in (b"client1", b"other")))
        pool.wait(1.0)
    assert len(pool.machine.core.worker_links) == 2, pool.logged
    resumed = say(pool, "resume", id=2)
    assert {command.command for command in commands(resumed).values()} == {"resume"} and len(pool.tasks(resumed)) == 1
    obey(pool, resumed)
    pool.do(*(ev.WorkerHeard(0, link) for link in links), *(ev.Heard(0, link) for link in (b"client1", b"other")))
    pool.wait(1.0)
    assert len(pool.machine.core.worker_links) == 2, "the time that they stood still does not count"
    assert outputs(pool.step(task.link, (task, 0, 1, [8], "stop")))[1][1] == [[7, 8]]


def test_the_timeouts_of_requests_count_in_a_pause() -> None:
    pool, links, [task] = begun(3, timeout=5.0)
    obey(pool, pause(pool, "in_place"))
    pool.do(*(ev.WorkerHeard(0, link) for link in links), *(ev.Heard(0, link) for link in (b"client1", b"other")))
    ended = pool.wait(6.0)
    assert failures(ended)[1].code == "deadline_exceeded" and [
        one.link for one in ended if isinstance(one.message, StopGeneration)
    ]
    assert task.link in links


def test_if_one_worker_cannot_all_go_on_and_the_answer_waits_for_the_journal() -> None:
    pool, _, [task] = begun(3)
    (first, one), (second, two) = commands(pause(pool, "in_place")).items()
    kept(pool)
    pool.do(ev.WorkerSaid(0, first, Commanded(one.task)))
    undone = pool.do(ev.WorkerSaid(0, second, Commanded(two.task, "engine_error", "pause in_place: not with that")))
    assert {command.command for command in commands(undone).values()} == {"resume"} and len(commands(undone)) == 2
    assert not of_type(undone, ControlReport) and not pool.machine.core.groups["g"].holds.paused
    assert rows(kept(pool)) == [("w1", ""), ("w2", "engine_error")]
    assert outputs(pool.step(task.link, (task, 0, 1, [8], "stop")))[1][1] == [[7, 8]]


def test_a_pause_that_fails_in_a_paused_group_leaves_it_paused_as_it_was() -> None:
    pool, _, _ = begun(3)
    obey(pool, pause(pool, "in_place"))
    asked = commands(pause(pool, "retract", id=2))
    kept(pool)
    said_ = [pool.do(ev.WorkerSaid(0, link, Commanded(one.task, "engine_error", "no"))) for link, one in asked.items()][-1]
    assert not commands(said_) and (pool.holds[0].holds.paused, pool.holds[0].holds.mode) == (True, "in_place")
    assert rows(kept(pool)) == [("w1", "engine_error"), ("w2", "engine_error")]


def test_a_pause_that_was_undone_with_another_one_is_not_confirmed() -> None:
    pool, _, _ = begun(3)
    first, second = commands(pause(pool, "in_place")), commands(pause(pool, "in_place", id=2))
    kept(pool)
    for link, one in first.items():
        pool.do(ev.WorkerSaid(0, link, Commanded(one.task, "engine_error" if link == b"w1" else "", "no")))
    kept(pool)
    assert not pool.machine.core.groups["g"].holds.paused
    sent = [one for link, asked in second.items() for one in pool.do(ev.WorkerSaid(0, link, Commanded(asked.task)))]
    assert rows(sent) == [("w1", "busy"), ("w2", "busy")]
    assert rows(obey(pool, pause(pool, "in_place", id=3))) == [("w1", ""), ("w2", "")]


@pytest.mark.parametrize("order", [(1, 2), (2, 1), (1, 3, 2), (3, 2, 1), (2, 3, 1), (3, 1, 2)])
def test_pauses_of_several_modes_that_overlap_and_all_fail_leave_the_group_as_it_was(order: tuple[int, ...]) -> None:
    pool, _, [task] = begun(3)
    modes: list[RunningGenerations] = ["in_place", "retract", "in_place"]
    asked = {id_: commands(pause(pool, modes[id_ - 1], id=id_)) for id_ in sorted(order)}
    kept(pool)
    resumed: list[Command] = []
    for id_ in order:
        sent = [
            one
            for link, command in asked[id_].items()
            for one in pool.do(ev.WorkerSaid(0, link, Commanded(command.task, "engine_error", "no")))
        ]
        resumed += commands(sent).values()
        assert rows([*sent, *kept(pool)]) == [("w1", "engine_error"), ("w2", "engine_error")]
    assert not pool.machine.core.groups["g"].holds.paused
    assert [one.command for one in resumed] == ["resume"] * 2, "once, at each worker"
    assert outputs(pool.step(task.link, (task, 0, 1, [8], "stop")))[1][1] == [[7, 8]]


def test_a_pause_is_not_confirmed_while_one_before_it_may_still_be_undone() -> None:
    pool, _, _ = begun(3)
    first, second = pause(pool, "in_place"), pause(pool, "in_place", id=2)
    assert not done(pool, first, "engine_error") and not done(pool, second), "the journal has not been written"
    reports = {one.id: one for one in of_type(kept(pool), ControlReport)}
    assert [{row.code for row in reports[id_].workers} for id_ in (1, 2)] == [{"engine_error"}, {"busy"}]
    assert not pool.machine.core.groups["g"].holds.paused


@pytest.mark.parametrize("late", [False, True], ids=["refused", "unanswered"])
def test_a_pause_that_failed_does_not_undo_one_that_is_asked_while_the_journal_writes(late: bool) -> None:
    pool, links, _ = begun(3)
    first = commands(pause(pool, "in_place"))
    kept(pool)
    if late:
        while pool.machine.core.groups["g"].holds.paused:
            pool.do(*(ev.WorkerHeard(0, link) for link in links), ev.Heard(0, b"client1"))
            pool.wait(0.25)
    else:
        for link, one in first.items():
            pool.do(ev.WorkerSaid(0, link, Commanded(one.task, "engine_error", "no")))
    second = pause(pool, "in_place", id=2)
    undone = pool.wait(0.3) if late else pool.do(ev.HoldsKept(0, pool.holds.pop(0).number))
    assert {code for _, code in rows(undone)} == {"deadline_exceeded" if late else "engine_error"}
    assert rows(obey(pool, second)) == [("w1", ""), ("w2", "")]
    assert pool.machine.core.groups["g"].holds.paused and not pool.tasks(pool.submit(b"client1", 9, generate(3)))


def test_generations_of_a_worker_that_is_lost_in_a_pause_wait_in_the_queue() -> None:
    pool, links, [task] = begun(3)
    [other] = [link for link in links if link != task.link]
    obey(pool, pause(pool, "in_place"))
    assert not pool.tasks(pool.do(ev.WorkerBroken(0, task.link, "its link is gone")))
    [again] = pool.tasks(say(pool, "resume", id=2))
    assert again.link == other and len(again.frames[0]) == 4 * 4


def test_sleep_and_a_pause_of_another_mode_take_them_back() -> None:
    for command in ("sleep", "pause"):
        pool, _, [task] = begun(3)
        obey(pool, pause(pool, "in_place"))
        asked = say(pool, command, id=2)
        kinds = [type(one.message) for one in asked if one.link == task.link]
        assert kinds == [StopGeneration, Command], command


def test_a_mode_goes_with_a_pause_alone() -> None:
    pool, _, _ = begun()
    [refused] = failures(pool.do(ev.ControlAsked(0, b"c", Control(1, "flush", mode="retract")))).values()
    assert (refused.code, refused.field, refused.message) == ("bad_request", "mode", "mode: retract goes with pause, got flush")


def test_an_update_does_not_wait_for_generations_that_stand_still() -> None:
    pool, trainer, link = stage(can=CAN)
    pool.submit(trainer.link, 50, generate(3))
    [task] = pool.tasks()
    pool.step(link, (task, 0, 0, [1, 2], ""))
    obey(pool, pause(pool, "in_place"))
    pool.answer(pool.answer(trainer.publish(1, in_flight="drain")))
    trainer.sent()
    pool.stage([link])
    sent = trainer.commit()
    assert len(of_type(sent, LoadWeights)) == 1 and len(of_type(sent, StopGeneration)) == 1
    pool.answer(sent)
    assert not pool.tasks(pool.written()), "the group is still paused"


# --- the worker's machine ------------------------------------------------------------------------------------------------


def test_a_pause_is_refused_while_dropped_work_is_inside_and_a_resume_never_is() -> None:
    worker, _ = loading("abort", 1)
    refused = said(worker.hear(Command((EPOCH, 90), "pause", mode="in_place")))
    assert refused == [Commanded((EPOCH, 90), "pool_down", "not ready: it takes weights")]
    assert kinds(worker.hear(Command((EPOCH, 91), "resume"))) == [RunCommand]
    later = Worker()
    later.hear(start(1))
    later.hear(Accept(EPOCH + 1))
    refused = said(later.hear(Command((EPOCH + 1, 2), "pause", mode="in_place")))
    assert refused == [Commanded((EPOCH + 1, 2), "pool_down", "not ready: dropped work is in its engine")]
    later.left(1)
    assert kinds(later.hear(Command((EPOCH + 1, 3), "pause", mode="in_place"))) == [RunCommand]


def test_what_is_stopped_in_a_paused_engine_leaves_it_where_new_weights_wait() -> None:
    worker = Worker()
    for counter in (1, 2, 3):
        worker.hear(start(counter))
    worker.hear(Prepare((EPOCH, 1), 4, "set_version", generations="in_place"))
    answered(worker, Prepared((EPOCH, 1), generations="in_place"))
    assert kinds(worker.hear(StopGeneration(EPOCH, [1]))) == [CancelGenerations], "it may stay"
    assert kinds(worker.hear(LoadWeights((EPOCH, 1), 4))) == [FreeStopped]
    assert kinds(worker.hear(StopGeneration(EPOCH, [2]))) == [CancelGenerations, FreeStopped]
    assert [kinds(worker.left(counter)) for counter in (1, 2)] == [[FreeStopped], [RunWeights]]


# --- the runner ----------------------------------------------------------------------------------------------------------


class Runner:
    """A worker's commands and generations on a sim engine."""

    def __init__(self, *operations: str) -> None:
        options = {"vocab": 1000, "end_every": 0}
        self.engine = SimEngine(EngineSettings(model="m", operations=operations, options=options))
        self.said: list[WorkerEvent] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.between, self.rows = BetweenBatches(), BetweenBatches()
        self.generations = GenerationRunner(self.engine, self.said.append, self.spawn, self.between)
        pauses = EnginePauses(self.engine)
        others = Profiling(self.engine, "", ("g", "w"), self.spawn), WeightSaving(self.engine, (), "g", "m")
        doors = self.between, self.generations, self.rows, pauses
        self.runner = CommandRunner(self.engine, self.said.append, *doors, *others)

    def spawn(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        return task

    def generate(self, counter: int) -> None:
        message = msgspec.structs.replace(start(counter), sampling=Sampling(max_new_tokens=100_000, ignore_eos=True))
        self.generations.run(RunGeneration(message, (np.arange(3, dtype=np.int32).tobytes(),)))

    @property
    def steps(self) -> int:
        return sum(isinstance(event, StepsDone) for event in self.said)

    @property
    def left(self) -> list[TaskId]:
        return [event.task for event in self.said if isinstance(event, GenerationLeft)]

    async def more(self) -> None:
        """The engine generates."""
        before = self.steps
        while self.steps < before + 3:
            await asyncio.sleep(0)

    async def stands_still(self) -> bool:
        before = self.steps
        for _ in range(30):
            await asyncio.sleep(0)
        return self.steps == before

    async def do(self, name: Any, mode: RunningGenerations = "abort") -> str:
        await self.runner.run(Command((1, 1), name, mode=mode))
        return next(event.answer.message for event in reversed(self.said) if isinstance(event, CommandDone))


def play(scene: Any, operation: str = "generate") -> None:
    async def main() -> None:
        runner = Runner(operation)
        await runner.engine.start(lambda _, __: None)
        await scene(runner)
        for task in runner.tasks:
            task.cancel()

    asyncio.run(asyncio.wait_for(main(), 20))


@pytest.mark.parametrize("mode", MODES)
def test_an_engine_stands_still_after_its_rows_until_it_is_resumed(mode: RunningGenerations) -> None:
    async def scene(runner: Runner) -> None:
        runner.generate(1)
        await runner.more()
        async with runner.rows.batch():
            paused = asyncio.ensure_future(runner.do("pause", mode))
            await runner.more()
            assert not paused.done()
        assert await paused == "" and isinstance(runner.said[-1], CommandDone), "tokens come before the answer"
        assert await runner.stands_still()
        assert await runner.do("resume") == ""
        await runner.more()

    play(scene)


@pytest.mark.parametrize("command", ["pause", "sleep"])
def test_an_engine_in_which_nothing_is_wanted_goes_on(command: str) -> None:
    async def scene(runner: Runner) -> None:
        runner.generate(1)
        await runner.more()
        assert await runner.do("pause", "in_place") == ""
        runner.generations.cancel([(EPOCH, 1)])
        assert await runner.do(command) == "", "it became empty"

    play(scene)


def test_an_engine_whose_last_generation_ended_with_the_step_before_its_pause_goes_on() -> None:
    async def scene(runner: Runner) -> None:
        resume, ends, goes_on = runner.engine.resume, asyncio.Event(), asyncio.Event()

        async def go_on() -> None:
            await resume()
            goes_on.set()

        async def end(task: GenerationTask, emit: Emit) -> None:
            await ends.wait()
            emit(NewTokens(0, [7], reason="stop"))

        runner.engine.generate, runner.engine.resume = end, go_on
        runner.generate(1)
        await asyncio.sleep(0)
        assert await runner.do("pause", "in_place") == ""
        assert not goes_on.is_set()
        ends.set()
        async with asyncio.timeout(5):
            await goes_on.wait()
        assert runner.left == [(EPOCH, 1)]

    play(scene)


def test_what_was_cancelled_leaves_a_paused_engine_when_that_is_wanted_and_the_rest_stands_still() -> None:
    async def scene(runner: Runner) -> None:
        for counter in (1, 2):
            runner.generate(counter)
        await runner.more()
        assert await runner.do("pause", "in_place") == ""
        runner.generations.cancel([(EPOCH, 1)])
        await runner.runner.cancelled()
        assert await runner.stands_still() and not runner.left
        await runner.runner.free_stopped()
        assert await runner.stands_still() and runner.left == [(EPOCH, 1)]
        await runner.do("resume")
        await runner.more()

    play(scene)


def test_a_resume_is_answered_while_what_was_cancelled_waits_for_it() -> None:
    async def scene(runner: Runner) -> None:
        goes_on = asyncio.Event()
        generate, resume = runner.engine.generate, runner.engine.resume

        async def leave_late(task: GenerationTask, emit: Emit) -> None:
            try:
                await generate(task, emit)
            finally:
                await goes_on.wait()

        async def go_on() -> None:
            await resume()
            goes_on.set()

        runner.engine.generate, runner.engine.resume = leave_late, go_on
        for counter in (1, 2):
            runner.generate(counter)
        await runner.more()
        assert await runner.do("pause", "in_place") == ""
        runner.generations.cancel([(EPOCH, 1)])
        freed = asyncio.ensure_future(runner.runner.free_stopped())
        assert await runner.stands_still() and not freed.done()
        try:
            async with asyncio.timeout(5):
                assert await runner.do("resume") == ""
        finally:
            goes_on.set()
        await freed
        assert runner.left == [(EPOCH, 1)]

    play(scene)


def test_an_engine_that_does_not_generate_says_so() -> None:
    async def scene(runner: Runner) -> None:
        assert (await runner.do("pause", "in_place")).startswith("pause in_place: this engine runs score")

    play(scene, "score")
