"""Generations in the worker's machine: what it gives to the engine, what it cancels there, and whose tokens it sends."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from enginepool.protocol.messages import (
    Accept,
    Batch,
    Capabilities,
    Done,
    Drain,
    ErrorReply,
    Exiting,
    Expired,
    FrameSpec,
    GenerationProgress,
    Idle,
    Message,
    Part,
    PartDone,
    Ready,
    Sampling,
    Stage,
    StartGeneration,
    Step,
    StopGeneration,
    TaskId,
)
from enginepool.protocol.messages.weights import Restore, Restored
from enginepool.workers.codec import name_task
from enginepool.workers.events import (
    CancelGenerations,
    Connected,
    Disconnected,
    DrainWanted,
    EndProcess,
    EngineReady,
    FreeStopped,
    FromCoordinator,
    GenerationLeft,
    RunBatch,
    RunGeneration,
    RunWeights,
    SendToCoordinator,
    StepsDone,
    WeightsAnswered,
    WorkDone,
    WorkerEffect,
    WorkerEvent,
    WorkerTick,
)
from enginepool.workers.machine import WorkerMachine

CAN = Capabilities("causal", 1000, 100, 64, 8, 128, 16, operations=("generate", "score"))
EPOCH = 7


class Worker:
    """A machine under test that is registered and ready on version 3; invariants are checked after each event."""

    def __init__(self, drain_s: float = 10.0) -> None:
        self.machine = WorkerMachine("w", "g", now=0.0, drain_s=drain_s)
        self.do(Connected(0.0))
        self.hear(Accept(EPOCH))
        self.do(EngineReady(0.0, CAN, 3))

    def do(self, event: WorkerEvent) -> list[WorkerEffect]:
        effects = self.machine.handle(event)
        self.machine.check()
        return effects

    def hear(self, message: Message) -> list[WorkerEffect]:
        return self.do(FromCoordinator(self.machine.now, message))

    def steps(self, *counters: int, epoch: int = EPOCH) -> list[WorkerEffect]:
        """A token for the first sequence of each of these tasks."""
        return self.do(steps(self.machine.now, epoch, *counters))

    def left(self, counter: int, epoch: int = EPOCH) -> list[WorkerEffect]:
        return self.do(GenerationLeft(self.machine.now, (epoch, counter)))


def start(counter: int, epoch: int = EPOCH) -> StartGeneration:
    return StartGeneration((epoch, counter), [FrameSpec("prompt", "int32", (3,))], Sampling())


def steps(now: float, epoch: int, *counters: int) -> StepsDone:
    tokens = np.arange(len(counters), dtype=np.int32).tobytes()
    specs = [FrameSpec("tokens", "int32", (len(counters),))]
    return StepsDone(now, epoch, [Step(counter, 0, 0, 1) for counter in counters], specs, (tokens,))


def restored(now: float, version: int) -> WeightsAnswered:
    return WeightsAnswered(now, Restored(version, "", ""))


def said(effects: list[WorkerEffect]) -> list[Message]:
    return [effect.message for effect in effects if isinstance(effect, SendToCoordinator)]


def kinds(effects: list[WorkerEffect]) -> list[type]:
    return [type(effect) for effect in effects]


def test_tokens_of_all_tasks_are_sent_as_one_message_with_the_version_of_the_weights() -> None:
    worker = Worker()
    assert worker.hear(start(1)) == [RunGeneration(start(1))]
    worker.hear(start(2))
    [sent] = worker.steps(1, 2)
    assert isinstance(sent, SendToCoordinator) and isinstance(sent.message, GenerationProgress)
    assert (sent.message.epoch, sent.message.version) == (EPOCH, 3)
    assert [step.task for step in sent.message.steps] == [1, 2] and len(sent.frames[0]) == 8
    assert worker.left(1) == [] and not worker.machine.ended


def test_a_task_that_is_delivered_twice_runs_once_also_after_its_end() -> None:
    worker = Worker()
    worker.hear(start(4))
    assert worker.hear(start(4)) == []
    worker.left(4)
    assert worker.hear(start(4)) == []
    worker.hear(start(5))
    worker.hear(StopGeneration(EPOCH, [5]))
    assert worker.hear(start(5)) == []


@pytest.mark.parametrize("epoch", [EPOCH - 1, EPOCH + 1])
def test_a_task_of_another_epoch_is_refused(epoch: int) -> None:
    [refusal] = said(Worker().hear(start(1, epoch)))
    assert isinstance(refusal, ErrorReply) and (refusal.code, refusal.id) == ("hello_required", 1)


def test_tokens_are_not_sent_while_the_link_is_down_and_not_afterwards() -> None:
    worker = Worker()
    worker.hear(start(1))
    worker.do(Disconnected(0.0))
    assert worker.steps(1) == []
    worker.do(Connected(0.0))
    assert worker.steps(1) == []
    assert [type(message) for message in said(worker.hear(Accept(EPOCH)))] == [Idle, Ready]


@pytest.mark.parametrize("event", [Disconnected(0.0), Connected(0.0)], ids=["lost", "new"])
def test_tasks_end_with_the_link_on_which_they_came(event: WorkerEvent) -> None:
    worker = Worker()
    worker.hear(start(1))
    worker.hear(Batch((EPOCH, 2), [Part([])]))
    assert [one for one in worker.do(event) if isinstance(one, CancelGenerations)] == [CancelGenerations([(EPOCH, 1)])]
    assert worker.machine.work.running == {(EPOCH, 2)}, "the answer to a batch is kept for the next link"


def test_tasks_of_an_earlier_link_end_when_the_next_one_is_accepted_and_later_ones_go_on() -> None:
    worker = Worker()
    worker.do(Disconnected(0.0))
    worker.do(Connected(0.0))
    worker.hear(start(3))  # it was on its way when the link broke
    assert CancelGenerations([(EPOCH, 3)]) in worker.hear(Accept(EPOCH, counter=5))
    assert worker.hear(start(4)) == worker.hear(start(5)) == []
    assert worker.hear(start(6)) == [RunGeneration(start(6))]
    assert CancelGenerations not in kinds(worker.hear(Accept(EPOCH, counter=5))), "a copy of it comes late"


def test_a_stopped_task_is_cancelled_and_holds_up_no_other_work() -> None:
    worker = Worker()
    for counter in (1, 2):
        worker.hear(start(counter))
    assert worker.hear(StopGeneration(EPOCH, [1, 99])) == [CancelGenerations([(EPOCH, 1)])]
    assert worker.hear(StopGeneration(EPOCH, [1])) == [], "it is cancelled once"
    assert kinds(worker.hear(start(3))) == [RunGeneration]
    assert kinds(worker.hear(Batch((EPOCH, 4), [Part([])]))) == [RunBatch]
    assert worker.left(1) == []
    assert kinds(worker.steps(2)) == [SendToCoordinator]


@pytest.mark.parametrize("epoch", [EPOCH - 1, EPOCH + 1])
def test_tasks_of_another_epoch_are_not_stopped(epoch: int) -> None:
    worker = Worker()
    worker.hear(start(1))
    assert worker.hear(StopGeneration(epoch, [1])) == []


def test_a_batch_is_not_stopped() -> None:
    worker = Worker()
    worker.hear(Batch((EPOCH, 1), [Part([])]))
    assert worker.hear(StopGeneration(EPOCH, [1])) == []
    [done] = said(worker.do(WorkDone(0.0, (EPOCH, 1), Done((EPOCH, 1), [PartDone()]))))
    assert isinstance(done, Done)


def test_a_new_epoch_cancels_all_tasks_and_new_work_waits_until_they_have_left() -> None:
    worker = Worker()
    for counter in (1, 2):
        worker.hear(start(counter))
    effects = worker.hear(Accept(EPOCH + 1))
    assert effects[0] == CancelGenerations([(EPOCH, 1), (EPOCH, 2)])
    assert [type(message) for message in said(effects)] == [Idle, Ready]
    assert worker.steps(1) == [], "late tokens of an old epoch"
    assert worker.hear(start(1, EPOCH + 1)) == []
    assert worker.left(1) == []
    assert worker.left(2) == [RunGeneration(start(1, EPOCH + 1))]


def test_a_held_task_that_is_stopped_never_reaches_the_engine() -> None:
    worker = Worker()
    worker.hear(start(1))
    worker.hear(Accept(EPOCH + 1))
    worker.hear(start(1, EPOCH + 1))
    worker.hear(start(2, EPOCH + 1))
    assert worker.hear(StopGeneration(EPOCH + 1, [1])) == []
    assert worker.left(1) == [RunGeneration(start(2, EPOCH + 1))]


def test_an_expired_incarnation_drops_its_tasks() -> None:
    worker = Worker()
    worker.hear(start(1))
    assert worker.hear(Expired("w"))[0] == CancelGenerations([(EPOCH, 1)])


@pytest.mark.parametrize("stopped", [False, True])
def test_weights_load_once_the_cancelled_generations_have_left(stopped: bool) -> None:
    worker = Worker()
    for counter in (1, 2):
        worker.hear(start(counter))
    if stopped:
        worker.hear(StopGeneration(EPOCH, [1, 2]))
    cancelled = [effect for effect in worker.hear(Restore(5, "")) if isinstance(effect, CancelGenerations)]
    assert cancelled == ([] if stopped else [CancelGenerations([(EPOCH, 1), (EPOCH, 2)])])
    assert worker.hear(start(3)) == [], "work waits for the weights"
    assert kinds(worker.left(1)) == ([FreeStopped] if stopped else [])
    assert kinds(worker.left(2)) == [RunWeights]
    assert worker.steps(1)[0].message.version == 3  # type: ignore[attr-defined]
    effects = worker.do(restored(0.0, 5))
    assert RunGeneration(start(3)) in effects
    assert worker.steps(3)[0].message.version == 5  # type: ignore[attr-defined]


def test_a_draining_worker_finishes_its_generations_and_takes_no_more() -> None:
    worker = Worker()
    worker.hear(start(1))
    worker.hear(start(2))
    assert said(worker.do(DrainWanted(0.0, "SIGTERM"))) == [Stage("draining", "SIGTERM")]
    [refusal] = said(worker.hear(start(3)))
    assert isinstance(refusal, ErrorReply) and refusal.code == "shutting_down"
    assert kinds(worker.steps(1)) == [SendToCoordinator]
    assert worker.left(1) == []
    [bye] = said(worker.left(2))
    assert isinstance(bye, Exiting) and worker.machine.ended is not None


def test_a_drain_ends_when_the_last_generation_is_stopped_and_at_its_limit() -> None:
    worker = Worker()
    worker.hear(start(1))
    worker.hear(Drain())
    assert kinds(worker.hear(StopGeneration(EPOCH, [1]))) == [CancelGenerations, SendToCoordinator, EndProcess]
    worker = Worker(drain_s=1.0)
    worker.hear(start(1))
    worker.hear(Drain())
    [bye] = said(worker.do(WorkerTick(1.0)))
    assert bye == Exiting("drained: the coordinator asked for it; 1 unfinished after 1 s")


def test_a_task_whose_header_cannot_be_read_is_known_by_its_id() -> None:
    header = msgspec.msgpack.encode({"type": "start", "task": [EPOCH, 3], "frames": "?", "sampling": {"heat": 1}})
    assert name_task(header) == StartGeneration((EPOCH, 3), [], Sampling())


# --- any order of events ------------------------------------------------------------------------------------------------


class Generations(RuleBasedStateMachine):
    """Generations that start, stop, end late and lose their tokens, with links, epochs and weights that change."""

    def __init__(self) -> None:
        super().__init__()
        self.w = Worker().machine
        self.counter = 0
        #: in the engine; the part of them that was cancelled
        self.engine: set[TaskId] = set()
        self.cancelled: set[TaskId] = set()
        self.loading = False
        self.started: set[TaskId] = set()
        self.wanted: set[TaskId] = set()

    def handle(self, event: WorkerEvent) -> list[WorkerEffect]:
        effects = self.w.handle(event)
        self.w.check()
        for effect in effects:
            self.perform(effect)
        return effects

    def perform(self, effect: WorkerEffect) -> None:
        if isinstance(effect, RunGeneration):
            task = effect.message.task
            assert task not in self.started, "ran twice"
            assert task[0] == self.w.epoch and not self.loading
            assert not any(other[0] < task[0] for other in self.engine - self.w.work.stopped), "two epochs share the engine"
            self.started.add(task)
            self.engine.add(task)
        elif isinstance(effect, CancelGenerations):
            assert set(effect.tasks) <= self.engine - self.cancelled
            self.cancelled |= set(effect.tasks)
        elif isinstance(effect, RunWeights):
            assert not self.engine, "weights are loaded during work"
            self.loading = True

    @rule(dt=st.sampled_from([0.0, 0.25, 3.0]))
    def tick(self, dt: float) -> None:
        self.handle(WorkerTick(self.w.now + dt))

    @rule(up=st.booleans())
    def link(self, up: bool) -> None:
        self.handle(Connected(self.w.now) if up else Disconnected(self.w.now))

    @rule(step=st.sampled_from([0, 0, 1]))
    def accept(self, step: int) -> None:
        self.handle(FromCoordinator(self.w.now, Accept(self.w.epoch + step)))

    @rule(copies=st.integers(1, 2), back=st.sampled_from([0, 0, 0, 1]))
    def start(self, copies: int, back: int) -> None:
        self.counter += 1
        task = (self.w.epoch - back, self.counter)
        for _ in range(copies):
            self.handle(FromCoordinator(self.w.now, start(self.counter, task[0])))
        if self.w.stage == "ready" and not back:
            self.wanted.add(task)

    @rule(counters=st.lists(st.integers(1, 40), max_size=4))
    def stop(self, counters: list[int]) -> None:
        self.handle(FromCoordinator(self.w.now, StopGeneration(self.w.epoch, counters)))
        self.wanted -= {(self.w.epoch, counter) for counter in counters}

    @rule(version=st.integers(1, 5))
    def restore(self, version: int) -> None:
        self.handle(FromCoordinator(self.w.now, Restore(version, "")))

    @precondition(lambda self: self.loading)  # pyright: ignore[reportUnknownLambdaType, reportUnknownMemberType, reportUnknownArgumentType]
    @rule()
    def loaded(self) -> None:
        self.loading = False
        self.handle(restored(self.w.now, 0))

    @precondition(lambda self: bool(self.engine))  # pyright: ignore[reportUnknownLambdaType, reportUnknownMemberType, reportUnknownArgumentType]
    @rule(pick=st.integers(0, 1000), ends=st.booleans())
    def engine_steps(self, pick: int, ends: bool) -> None:
        task = sorted(self.engine)[pick % len(self.engine)]
        effects = self.handle(steps(self.w.now, task[0], task[1]))
        sent = [effect.message for effect in effects if isinstance(effect, SendToCoordinator)]
        assert bool(sent) == (self.w.registered and task[0] == self.w.epoch)
        if ends:
            self.engine.remove(task)
            self.cancelled.discard(task)
            self.wanted.discard(task)
            self.handle(GenerationLeft(self.w.now, task))

    @invariant()
    def every_task_is_wanted_or_leaves(self) -> None:
        """A task of this epoch is held, in the engine, or was cancelled there; nothing else is in the engine."""
        if self.w.ended is not None:
            return
        work = self.w.work
        assert self.engine == (work.generating - work.held.keys()) | work.leaving | work.stopped
        assert self.cancelled == work.leaving | work.stopped
        assert work.generating <= {task for task in self.wanted if task[0] == self.w.epoch}


Generations.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestGenerations: Any = Generations.TestCase
