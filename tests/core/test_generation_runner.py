"""Generations inside an engine: what is generated in one turn of the loop is one message, and each failure is a step."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from enginepool.coordinator.core import events as core
from enginepool.coordinator.shell.decode import worker_event
from enginepool.protocol.columns import split_columns
from enginepool.protocol.frames import encode_header
from enginepool.protocol.messages import (
    MAX_MATCHED,
    MAX_SEQUENCES,
    FrameSpec,
    GenerationProgress,
    Sampling,
    StartGeneration,
)
from enginepool.workers import generation
from enginepool.workers.between_batches import BetweenBatches
from enginepool.workers.engine import Emit, EngineDied, EngineError, GenerationTask, NewTokens, RequestRefused
from enginepool.workers.events import EngineLost, GenerationLeft, RunGeneration, StepsDone, WorkerEvent
from enginepool.workers.generation import GenerationRunner

EPOCH = 3
Plan = Callable[[GenerationTask, Emit], Awaitable[None]]


class Worker:
    """A runner over an engine that does what a test says, and what it reports."""

    def __init__(self, plan: Plan) -> None:
        self.generate = plan
        self.events: list[WorkerEvent] = []
        self.between = BetweenBatches()
        engine: Any = self
        self.runner = GenerationRunner(engine, self.events.append, self.spawn, self.between)

    @staticmethod
    def spawn(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work)

    def run(self, header: StartGeneration, *frames: bytes, unreadable: str = "") -> None:
        self.runner.run(RunGeneration(header, frames, unreadable))

    def start(self, counter: int = 1, tokens: int = 3, epoch: int = EPOCH, **fields: Any) -> None:
        header = StartGeneration((epoch, counter), [FrameSpec("prompt", "int32", (tokens,))], Sampling(), **fields)
        self.run(header, np.arange(tokens, dtype=np.int32).tobytes())

    async def until_left(self, count: int = 1) -> None:
        async with asyncio.timeout(60):
            while sum(isinstance(event, GenerationLeft | EngineLost) for event in self.events) < count:
                await asyncio.sleep(0)

    @property
    def steps(self) -> list[StepsDone]:
        return [event for event in self.events if isinstance(event, StepsDone)]


def told(event: StepsDone) -> list[tuple[int, int, int, int, str]]:
    return [(step.task, step.sequence, step.at, step.count, step.reason) for step in event.steps]


def test_what_of_its_prompt_was_cached_is_told_once_with_the_first_tokens_of_a_task() -> None:
    async def plan(task: GenerationTask, emit: Emit) -> None:
        emit(NewTokens(0, [1], cached=2))
        await asyncio.sleep(0)
        emit(NewTokens(0, [2], reason="stop"))

    async def main() -> Worker:
        worker = Worker(plan)
        worker.start(4)
        await worker.until_left()
        return worker

    assert [(told(event), event.cached) for event in asyncio.run(main()).steps] == [
        ([(4, 0, 0, 1, "")], [(4, 2)]), ([(4, 0, 1, 1, "stop")], []),
    ]  # fmt: skip


async def forever(_: GenerationTask, __: Emit) -> None:
    await asyncio.Event().wait()


def test_what_all_tasks_generate_in_one_turn_is_one_message_that_the_coordinator_reads() -> None:
    emits: list[Emit] = []

    async def plan(task: GenerationTask, emit: Emit) -> None:
        emits.append(emit)
        await asyncio.Event().wait()

    async def main() -> Worker:
        worker = Worker(plan)
        worker.start(1, at=5, n=2)
        worker.start(2)
        await asyncio.sleep(0)
        emits[0](NewTokens(1, [11, 12]))
        emits[1](NewTokens(0, (13,), (-0.5,)))
        emits[0](NewTokens(1, [14], (), "stop", 14))
        await asyncio.sleep(0)
        emits[0](NewTokens(0, [15]))
        await asyncio.sleep(0)
        return worker

    worker = asyncio.run(main())
    first, second = worker.steps
    assert told(first) == [(1, 1, 5, 2, ""), (2, 0, 0, 1, ""), (1, 1, 7, 1, "stop")]
    assert told(second) == [(1, 0, 5, 1, "")]
    header = encode_header(GenerationProgress(EPOCH, 4, first.steps, first.specs))
    read = worker_event(0.0, b"w", [header, *first.frames])
    assert isinstance(read, core.TokensGenerated)
    assert np.frombuffer(read.tokens, np.int32).tolist() == [11, 12, 13, 14]
    logprobs = np.frombuffer(read.logprobs, np.float32).tolist()
    assert [math.isnan(value) for value in logprobs] == [True, True, False, True] and logprobs[2] == -0.5
    assert read.largest == 14
    assert len(second.frames) == 1, "no task asked for logprobs in this turn"


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (EngineError("too\nlong"), "too long"),
        (ValueError("what?"), "ValueError: what?"),
        (EngineError("x" * 999), "x" * MAX_MATCHED),
    ],
)
def test_a_failure_is_one_step_with_one_line_for_a_sequence_that_has_not_ended(error: Exception, why: str) -> None:
    async def plan(task: GenerationTask, emit: Emit) -> None:
        emit(NewTokens(0, [1], (), "length"))
        emit(NewTokens(1, [2]))
        raise error

    async def main() -> Worker:
        worker = Worker(plan)
        worker.start(n=3, at=4)
        await worker.until_left()
        return worker

    worker = asyncio.run(main())
    first, last = worker.steps
    assert told(first) == [(1, 0, 4, 1, "length"), (1, 1, 4, 1, "")]
    assert told(last) == [(1, 1, 5, 0, "error")] and last.steps[0].matched == why
    assert isinstance(worker.events[-1], GenerationLeft), "its steps are told before"


def test_what_the_engine_refuses_is_told_apart_from_its_failures() -> None:
    async def plan(task: GenerationTask, emit: Emit) -> None:
        raise RequestRefused("EBNF parsing error")

    async def main() -> Worker:
        worker = Worker(plan)
        worker.start()
        await worker.until_left()
        return worker

    (last,) = asyncio.run(main()).steps
    assert told(last) == [(1, 0, 0, 0, "refused")] and last.steps[0].matched == "EBNF parsing error"


def test_a_task_that_cannot_be_read_is_a_failure_of_its_own() -> None:
    async def main() -> Worker:
        worker = Worker(forever)
        worker.run(StartGeneration((EPOCH, 1), [], Sampling()), unreadable="what is this?")
        worker.run(StartGeneration((EPOCH, 2), [FrameSpec("prompt", "int32", (3,))], Sampling()), b"1234")
        worker.start(3, tokens=0)
        worker.start(4, n=MAX_SEQUENCES + 1)
        worker.start(5, n=-(1 << 40))
        worker.start(6, at=-1)
        await worker.until_left(6)
        return worker

    worker = asyncio.run(main())
    steps = [step for event in worker.steps for step in event.steps]
    assert sorted(step.task for step in steps) == [1, 2, 3, 4, 5, 6]
    assert {step.reason for step in steps} == {"error"}
    assert steps[0].matched == "what is this?"


def test_an_engine_that_returns_too_early_is_a_failure() -> None:
    async def plan(task: GenerationTask, emit: Emit) -> None:
        emit(NewTokens(0, [1], (), "stop", 1))

    async def main() -> Worker:
        worker = Worker(plan)
        worker.start(n=2)
        await worker.until_left()
        return worker

    _, steps = asyncio.run(main()).steps
    assert told(steps)[-1] == (1, 1, 0, 0, "error")


def test_a_dead_engine_is_told_as_that() -> None:
    async def plan(task: GenerationTask, emit: Emit) -> None:
        raise EngineDied("gone")

    async def main() -> Worker:
        worker = Worker(plan)
        worker.start()
        await worker.until_left()
        return worker

    [event] = asyncio.run(main()).events
    assert isinstance(event, EngineLost) and event.reason == "gone"


def test_a_cancelled_task_is_left_when_its_engine_has_dropped_it_and_late_tokens_are_dropped() -> None:
    async def main() -> list[WorkerEvent]:
        dropped = asyncio.Event()

        async def plan(task: GenerationTask, emit: Emit) -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await dropped.wait()
                emit(NewTokens(0, [1]))
                raise

        worker = Worker(plan)
        worker.start(1)
        worker.start(2)
        await asyncio.sleep(0)
        worker.runner.cancel([(EPOCH, 1)])
        for _ in range(3):
            await asyncio.sleep(0)
        assert worker.events == [] and worker.runner.wanted == 1
        dropped.set()
        await worker.until_left()
        return list(worker.events)

    [event] = asyncio.run(main())
    assert isinstance(event, GenerationLeft) and event.task == (EPOCH, 1)


def test_a_task_that_is_cancelled_before_its_first_turn_leaves_too() -> None:
    async def main() -> Worker:
        worker = Worker(forever)
        worker.start(1)
        worker.runner.cancel([(EPOCH, 1)])
        await worker.until_left()
        return worker

    [event] = asyncio.run(main()).events
    assert isinstance(event, GenerationLeft)


def test_a_task_waits_while_something_is_alone_with_the_engine_and_can_be_cancelled_then() -> None:
    async def main() -> Worker:
        worker = Worker(forever)
        async with worker.between.alone():
            worker.start(1)
            await asyncio.sleep(0)
            worker.runner.cancel([(EPOCH, 1)])
            await worker.until_left()
        async with worker.between.alone():
            return worker

    assert len(asyncio.run(main()).events) == 1


def test_tokens_of_an_epoch_that_ended_are_never_in_a_message_of_the_next() -> None:
    emits: list[Emit] = []

    async def plan(task: GenerationTask, emit: Emit) -> None:
        emits.append(emit)
        await asyncio.Event().wait()

    async def main() -> Worker:
        worker = Worker(plan)
        worker.start(1)
        worker.start(1, epoch=EPOCH + 1)
        await asyncio.sleep(0)
        emits[0](NewTokens(0, [1]))
        emits[1](NewTokens(0, [2]))
        await asyncio.sleep(0)
        return worker

    [steps] = asyncio.run(main()).steps
    assert steps.epoch == EPOCH + 1 and np.frombuffer(steps.frames[0], np.int32).tolist() == [2]


def test_tasks_with_top_logprobs_are_told_apart_from_others_and_prompts_with_the_first_tokens() -> None:
    emits: list[Emit] = []

    async def plan(task: GenerationTask, emit: Emit) -> None:
        emits.append(emit)
        await asyncio.Event().wait()

    async def main() -> Worker:
        worker = Worker(plan)
        worker.start(1, logprobs=True, top_logprobs=2, prompt_logprobs=3)
        worker.start(2, logprobs=True)
        await asyncio.sleep(0)
        row = ((11, 12), (-0.5, -1.5))
        of_prompt = [(-1, -1), (5, 6), (7, 8)], [(math.nan, math.nan), (-1, -2), (-3, -4)]
        emits[0](
            NewTokens(
                0, [11], (-0.5,), cached=0, prompt_logprobs=[math.nan, -1, -2], top_ids=[row[0]], top_logprobs=[row[1]],
                prompt_top_ids=of_prompt[0], prompt_top_logprobs=of_prompt[1],
            )
        )  # fmt: skip
        emits[1](NewTokens(0, [21], (-0.25,)))
        await asyncio.sleep(0)
        return worker

    top, plain = asyncio.run(main()).steps
    assert (told(top), told(plain)) == ([(1, 0, 0, 1, "")], [(2, 0, 0, 1, "")])
    header = encode_header(GenerationProgress(EPOCH, 4, top.steps, top.specs, top.cached, top.prompts))
    read = worker_event(0.0, b"w", [header, *top.frames])
    assert isinstance(read, core.TokensGenerated)
    assert (read.top, read.largest, read.prompts) == (2, 12, [(1, 3)])
    logprobs, ids, values = split_columns(read.logprobs, 2)
    assert np.frombuffer(logprobs, np.float32).tolist() == [-0.5]
    assert (np.frombuffer(ids, np.int32).tolist(), np.frombuffer(values, np.float32).tolist()) == ([11, 12], [-0.5, -1.5])
    first, ids, chances = split_columns(read.prompt_columns, 2)
    np.testing.assert_array_equal(np.frombuffer(first, np.float32), [np.nan, -1, -2])
    assert np.frombuffer(ids, np.int32).tolist() == [-1, -1, 5, 6, 7, 8]
    np.testing.assert_array_equal(np.frombuffer(chances, np.float32), [np.nan, np.nan, -1, -2, -3, -4])
    assert [spec.name for spec in plain.specs] == ["tokens", "logprobs"]


def test_hidden_states_are_in_messages_of_their_own_none_of_which_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "MOST_DETAILS", 2 * 12)
    emits: list[Emit] = []

    async def plan(task: GenerationTask, emit: Emit) -> None:
        emits.append(emit)
        await asyncio.Event().wait()

    async def main() -> Worker:
        worker = Worker(plan)
        worker.start(1, n=4, hidden_states=True)
        worker.start(2)
        await asyncio.sleep(0)
        for i in range(4):
            emits[0](NewTokens(i, [11], hidden_states=np.full((1, 3), i, np.float32)))
        emits[1](NewTokens(0, [21]))
        await asyncio.sleep(0)
        return worker

    full, rest, plain = sorted(asyncio.run(main()).steps, key=lambda event: -len(event.steps) + 9 * (event.steps[0].task == 2))
    assert [len(event.steps) for event in (full, rest, plain)] == [3, 1, 1]
    assert [spec.name for spec in plain.specs] == ["tokens"]
    for event, expected in ((full, [0, 1, 2]), (rest, [3])):
        read = worker_event(0.0, b"w", [encode_header(GenerationProgress(EPOCH, 4, event.steps, event.specs)), *event.frames])
        assert isinstance(read, core.TokensGenerated) and read.hidden == 3
        assert np.frombuffer(read.hidden_states, np.float32).reshape(-1, 3)[:, 0].tolist() == expected


@pytest.mark.parametrize(
    "fields", [{"top_logprobs": 21}, {"top_logprobs": -1}, {"prompt_logprobs": 4}, {"prompt_logprobs": -1}]
)
def test_a_task_that_asks_for_what_cannot_be_is_refused(fields: dict[str, int]) -> None:
    async def plan(task: GenerationTask, emit: Emit) -> None:
        raise AssertionError

    async def main() -> Worker:
        worker = Worker(plan)
        worker.start(1, logprobs=True, **fields)
        await worker.until_left()
        return worker

    [event] = asyncio.run(main()).steps
    assert told(event) == [(1, 0, 0, 0, "error")] and "_logprobs = " in str(event.steps[0].matched)
