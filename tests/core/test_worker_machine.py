"""The worker's machine: what it says after `accept`, what it runs, what it answers, and when it ends."""

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

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
    Idle,
    Message,
    Part,
    PartDone,
    Ping,
    Ready,
    Register,
    Stage,
    TaskId,
    Tokenize,
    Tokenized,
)
from enginepool.workers.codec import encode_ids, failed
from enginepool.workers.events import (
    Connected,
    Disconnected,
    DrainWanted,
    EndProcess,
    EngineLost,
    EngineReady,
    EngineStage,
    Exit,
    FromCoordinator,
    LifelineClosed,
    Note,
    RunBatch,
    RunTokenize,
    SendToCoordinator,
    WorkDone,
    WorkerEffect,
    WorkerEvent,
    WorkerTick,
)
from enginepool.workers.ledger import KEPT_ANSWERS, KEPT_BYTES
from enginepool.workers.machine import WorkerMachine
from enginepool.workers.texts import TextIds

CAPABILITIES = Capabilities("causal", 1000, 100, 64, 8, 128, 16)
IDS = [FrameSpec("query", "int32", (1,)), FrameSpec("items", "int32", (1,)), FrameSpec("item_lengths", "uint32", (1,))]


def machine(*, external: bool = False, **kwargs: float) -> WorkerMachine:
    return WorkerMachine("w1", "policy", now=0.0, pid=7, host="here", external=external, **kwargs)


def batch(epoch: int, n: int, parts: int = 1) -> Batch:
    return Batch((epoch, n), [Part(IDS)] * parts)


def run(w: WorkerMachine, *events: WorkerEvent) -> list[WorkerEffect]:
    """The effects of the last event."""
    effects: list[WorkerEffect] = []
    for event in events:
        effects = w.handle(event)
        w.check()
    return effects


def hear(w: WorkerMachine, message: Message, *, now: float | None = None) -> list[WorkerEffect]:
    return run(w, FromCoordinator(w.now if now is None else now, message))


def sent(effects: Sequence[WorkerEffect]) -> list[Message]:
    return [effect.message for effect in effects if isinstance(effect, SendToCoordinator)]


def ready(epoch: int = 5, *, orphan_s: float = 60.0, drain_s: float = 10.0) -> WorkerMachine:
    w = machine(orphan_s=orphan_s, drain_s=drain_s)
    run(w, Connected(0.0), FromCoordinator(0.0, Accept(epoch)), EngineReady(0.0, CAPABILITIES, 3))
    return w


def done(w: WorkerMachine, epoch: int, n: int, frames: tuple[bytes, ...] = ()) -> list[WorkerEffect]:
    return run(w, WorkDone(w.now, (epoch, n), Done((epoch, n), [PartDone()], 3, 1, 10), frames))


# --- registration -------------------------------------------------------------------------------------------------------


def test_registers_on_every_new_link_with_the_last_epoch_heard() -> None:
    w = machine()
    me = Register("policy", "w1", pid=7, host="here")
    assert sent(run(w, Connected(0.0))) == [me]
    hear(w, Accept(5))
    assert sent(run(w, Disconnected(1.0), Connected(1.5))) == [Register("policy", "w1", pid=7, host="here", epoch=5)]


def test_registers_again_when_the_coordinator_asks_but_not_once_for_each_refused_message() -> None:
    w = ready()
    refusal = ErrorReply("hello_required", "who are you?")
    assert [type(m) for m in sent(hear(w, refusal, now=1.0))] == [Register]
    assert hear(w, refusal, now=1.1) == []
    assert [type(m) for m in sent(hear(w, refusal, now=2.1))] == [Register]


def test_an_unanswered_register_is_repeated() -> None:
    w = machine()
    run(w, Connected(0.0))
    said = [t / 4 for t in range(1, 13) if sent(run(w, WorkerTick(t / 4)))]
    assert said == [1.0, 2.0, 3.0]


def test_a_silent_coordinator_is_asked_every_five_seconds() -> None:
    w = ready()
    said = [t / 4 for t in range(1, 49) if sent(run(w, WorkerTick(t / 4)))]
    assert said == [5.0, 10.0]
    assert w.registered, "silence does not make the link unusable"


def test_nothing_is_said_while_the_link_is_down() -> None:
    w = ready()
    run(w, Disconnected(0.0))
    assert all(run(w, WorkerTick(t / 4)) == [] for t in range(1, 40))


def test_a_worker_whose_incarnation_expired_takes_another_one_and_keeps_its_engine() -> None:
    w = ready(5)
    hear(w, batch(5, 1))
    effects = hear(w, Expired("w1", "it was silent for 12.0 s"))
    assert sent(effects) == [Register("policy", "w1+2", pid=7, host="here", epoch=5)]
    assert w.ended is None
    assert sent(hear(w, Accept(5))) == [Idle(5), Ready(CAPABILITIES, 3)]
    assert hear(w, batch(5, 2)) == [], "the engine has the old batch, which would share the budget of the new one"
    assert [type(effect) for effect in done(w, 5, 1)] == [RunBatch], "the old one is not answered"
    assert [message.batch for message in sent(done(w, 5, 2)) if isinstance(message, Done)] == [(5, 2)]


def test_an_expiry_that_comes_twice_costs_one_incarnation() -> None:
    w = ready(5)
    hear(w, Expired("w1"))
    hear(w, Accept(5))
    assert hear(w, Expired("w1")) == []
    assert w.incarnation == "w1+2" and w.registered
    hear(w, Expired("w1+2"))
    assert w.incarnation == "w1+3"


def test_an_external_worker_waits_for_a_coordinator_without_a_limit() -> None:
    w = machine(orphan_s=10.0, external=True)
    run(w, Connected(0.0), FromCoordinator(0.0, Accept(5, orphan_s=10.0)), Disconnected(1.0))
    assert not [effect for t in range(4, 4000) for effect in run(w, WorkerTick(t / 4)) if isinstance(effect, EndProcess)]


@pytest.mark.parametrize(
    ("events", "after_accept"),
    [
        ([], [Idle(9), Stage("starting")]),
        ([EngineStage(0.0, "compiling", "kernels")], [Idle(9), Stage("compiling", "kernels")]),
        ([EngineReady(0.0, CAPABILITIES, 3)], [Idle(9), Ready(CAPABILITIES, 3)]),
        ([FromCoordinator(0.0, Accept(8))], [Idle(9), Stage("starting")]),
        ([FromCoordinator(0.0, Accept(9))], [Idle(9), Stage("starting")]),
        ([EngineReady(0.0, CAPABILITIES, 3), FromCoordinator(0.0, Accept(9))], [Idle(9), Ready(CAPABILITIES, 3)]),
        ([FromCoordinator(0.0, Accept(10))], []),
    ],
)
def test_after_every_accept_comes_idle_then_ready_or_stage(events: list[WorkerEvent], after_accept: list[Message]) -> None:
    w = machine()
    run(w, Connected(0.0), *events)
    assert sent(hear(w, Accept(9))) == after_accept


def test_a_lower_epoch_changes_nothing_and_is_noted() -> None:
    w = ready(epoch=5)
    run(w, Disconnected(0.0), Connected(0.0))
    effects = hear(w, Accept(4))
    assert [type(effect) for effect in effects] == [Note]
    assert (w.epoch, w.registered) == (5, False)


def test_stages_are_reported_only_on_a_registered_link() -> None:
    w = machine()
    assert run(w, Connected(0.0), EngineStage(0.0, "loading", "m")) == []
    hear(w, Accept(5))
    assert sent(run(w, EngineStage(0.0, "compiling", ""))) == [Stage("compiling")]
    assert sent(run(w, EngineReady(0.0, CAPABILITIES, 3))) == [Ready(CAPABILITIES, 3)]


@pytest.mark.parametrize("code", ["superseded", "forbidden", "unauthorized", "protocol_version", "unknown_group"])
def test_a_final_refusal_ends_the_process_at_once(code: str) -> None:
    w = ready()
    (end,) = hear(w, ErrorReply(code, "no"))
    assert isinstance(end, EndProcess)
    assert (end.code, end.close) == (Exit.REFUSED, False)
    assert code in end.reason


def test_another_failure_is_noted() -> None:
    w = ready()
    assert hear(w, ErrorReply("unsupported", "what?")) == [Note("the coordinator reports unsupported: what?")]


# --- work ---------------------------------------------------------------------------------------------------------------


def test_several_batches_run_at_once_and_each_is_answered() -> None:
    w = ready()
    first, second = batch(5, 1), batch(5, 2)
    assert hear(w, first) == [RunBatch(first)]
    assert hear(w, second) == [RunBatch(second)]
    assert sent(done(w, 5, 2)) == [Done((5, 2), [PartDone()], version=3, run_us=10)]
    assert sent(done(w, 5, 1)) == [Done((5, 1), [PartDone()], version=3, run_us=10)]


def test_a_batch_that_comes_again_is_not_run_again() -> None:
    w = ready()
    hear(w, batch(5, 1))
    assert hear(w, batch(5, 1)) == []
    answer = done(w, 5, 1, (b"abcd",))
    assert hear(w, batch(5, 1)) == answer


def test_the_last_answers_are_kept_and_no_more() -> None:
    w = ready()
    for n in range(KEPT_ANSWERS + 1):
        hear(w, batch(5, n))
        done(w, 5, n)
    assert [type(effect) for effect in hear(w, batch(5, 1))] == [SendToCoordinator]
    assert [type(effect) for effect in hear(w, batch(5, 0))] == [RunBatch]


def test_kept_answers_are_bounded_in_bytes() -> None:
    w = ready()
    for n in range(4):
        hear(w, batch(5, n))
        done(w, 5, n, (bytes(KEPT_BYTES // 2),))
    assert list(w.work.answers) == [(5, 2), (5, 3)]
    hear(w, batch(5, 4))
    assert sent(done(w, 5, 4, (bytes(KEPT_BYTES + 1),))), "an answer too large to keep is still sent"
    assert not w.work.answers


@pytest.mark.parametrize("epoch", [4, 6])
def test_work_of_another_epoch_is_refused(epoch: int) -> None:
    w = ready()
    (failure,) = sent(hear(w, batch(epoch, 1)))
    assert isinstance(failure, ErrorReply)
    assert (failure.code, failure.id) == ("hello_required", 1)


def test_work_before_ready_is_refused() -> None:
    w = machine()
    run(w, Connected(0.0), FromCoordinator(0.0, Accept(5)))
    (failure,) = sent(hear(w, batch(5, 1)))
    assert isinstance(failure, ErrorReply)
    assert failure.code == "hello_required"


def test_work_on_a_link_that_was_not_accepted_is_refused_and_registration_repeated() -> None:
    w = machine()
    run(w, Connected(0.0), EngineReady(0.0, CAPABILITIES, 3))
    assert [type(m) for m in sent(hear(w, batch(5, 1), now=1.5))] == [ErrorReply, Register]


def test_a_failed_batch_fails_every_part() -> None:
    answer = failed(batch(5, 1, parts=3), "no", "engine_error", 3)
    assert isinstance(answer, Done) and (answer.version, answer.forwards) == (3, 0)
    assert [(part.code, part.message) for part in answer.parts] == [("engine_error", "no")] * 3


def test_text_comes_back_as_ids_and_a_failure_as_a_code() -> None:
    w = ready()
    task = Tokenize((5, 1), [])
    assert hear(w, task) == [RunTokenize(task)]
    answer, frames = encode_ids((5, 1), TextIds([[1], [2, 3]], 1))
    specs = [FrameSpec("items", "int32", (3,)), FrameSpec("item_lengths", "uint32", (2,))]
    assert [len(frame) for frame in frames] == [12, 8]
    assert run(w, WorkDone(0.0, (5, 1), answer, frames)) == [SendToCoordinator(Tokenized((5, 1), specs, truncated=1), frames)]
    assert failed(Tokenize((5, 2), []), "odd", "malformed", 3) == Tokenized((5, 2), code="malformed", message="odd")


def test_an_answer_that_was_finished_while_the_link_was_down_is_sent_after_accept() -> None:
    w = ready()
    hear(w, batch(5, 1))
    run(w, Disconnected(0.0))
    assert done(w, 5, 1) == []
    run(w, Connected(0.0))
    assert [type(m) for m in sent(hear(w, Accept(5)))] == [Idle, Ready, Done]
    assert [type(m) for m in sent(hear(w, Accept(5)))] == [Idle, Ready]


def test_a_higher_epoch_drops_running_and_finished_work() -> None:
    w = ready()
    for n in (1, 2):
        hear(w, batch(5, n))
    done(w, 5, 1)
    assert sent(hear(w, Accept(6))) == [Idle(6), Ready(CAPABILITIES, 3)]
    assert done(w, 5, 2) == [], "the answer of a dropped batch is dropped"
    assert not w.work.answers


def test_new_work_waits_until_dropped_work_has_left_the_engine() -> None:
    w = ready()
    for n in (1, 2):
        hear(w, batch(5, n))
    hear(w, Accept(6))
    new = [batch(6, 3), batch(6, 4)]
    assert [hear(w, message) for message in new] == [[], []]
    assert hear(w, batch(6, 3)) == [], "held work that comes again is not held twice"
    assert done(w, 5, 1) == []
    assert done(w, 5, 2) == [RunBatch(message) for message in new]


def test_held_work_of_a_dropped_epoch_never_reaches_the_engine() -> None:
    w = ready()
    hear(w, batch(5, 1))
    hear(w, Accept(6))
    hear(w, batch(6, 2))
    hear(w, Accept(7))
    hear(w, batch(7, 3))
    assert done(w, 5, 1) == [RunBatch(batch(7, 3))]


# --- the end ------------------------------------------------------------------------------------------------------------


def test_a_lost_engine_says_why_and_ends_the_process_with_its_code() -> None:
    w = ready()
    hear(w, batch(5, 1))
    bye, end = run(w, EngineLost(0.0, "scheduler exited with -9"))
    assert bye == SendToCoordinator(Exiting("scheduler exited with -9", failed=True))
    assert end == EndProcess(Exit.ENGINE_DIED, "scheduler exited with -9", False)
    assert Exit.ENGINE_DIED == 70


@pytest.mark.parametrize(
    ("stage", "reason", "told"),
    [
        ("ready", "the engine's scheduler failed: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", True),
        ("ready", "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes", True),
        ("compiling", "m: torch.OutOfMemoryError: CUDA out of memory.", True),
        ("loading", "m: torch.OutOfMemoryError: CUDA out of memory.", False),
        ("ready", "the engine's scheduler (pid 5) was killed by SIGKILL (out of memory, or by somebody)", False),
    ],
)
def test_an_engine_that_died_of_a_batch_too_large_for_its_memory_is_told_as_that(stage: str, reason: str, told: bool) -> None:
    w = WorkerMachine("w1", "g", now=0.0)
    run(w, Connected(0.0), FromCoordinator(0.0, Accept(5, halvings=2, staged=True)))
    assert (w.halvings, w.staged) == (2, True)
    run(w, EngineReady(0.0, CAPABILITIES) if stage == "ready" else EngineStage(0.0, stage))
    effects = run(w, EngineLost(0.0, reason))
    (bye,) = [message for message in sent(effects) if isinstance(message, Exiting)]
    assert bye.out_of_memory == told
    (end,) = [effect for effect in effects if isinstance(effect, EndProcess)]
    assert end.code == (Exit.OUT_OF_MEMORY if told else Exit.ENGINE_DIED), "it may be seen before the message"


@pytest.mark.parametrize("ask", [FromCoordinator(0.0, Drain()), DrainWanted(0.0, "SIGTERM")])
def test_an_idle_worker_drains_at_once(ask: WorkerEvent) -> None:
    w = ready()
    effects = run(w, ask)
    assert [type(m) for m in sent(effects)] == [Stage, Exiting]
    assert effects[-1] == w.ended
    assert isinstance(effects[-1], EndProcess)
    assert (effects[-1].code, effects[-1].close) == (0, True)


def test_a_draining_worker_finishes_what_runs_and_refuses_what_is_new() -> None:
    w = ready()
    hear(w, batch(5, 1))
    hear(w, Tokenize((5, 2), []))
    assert sent(run(w, DrainWanted(0.0, "SIGTERM"))) == [Stage("draining", "SIGTERM")]
    assert run(w, DrainWanted(0.0, "SIGTERM")) == []
    (refusal,) = sent(hear(w, batch(5, 3)))
    assert isinstance(refusal, ErrorReply)
    assert refusal.code == "shutting_down"
    assert [type(m) for m in sent(done(w, 5, 1))] == [Done]
    assert [type(m) for m in sent(run(w, WorkDone(0.0, (5, 2), Tokenized((5, 2)))))] == [Tokenized, Exiting]
    assert w.ended is not None


def test_a_drain_ends_at_its_deadline_and_says_what_is_unfinished() -> None:
    w = ready(drain_s=1.0)
    hear(w, batch(5, 1))
    run(w, DrainWanted(0.0, "SIGTERM"))
    assert run(w, WorkerTick(0.9)) == []
    bye, end = run(w, WorkerTick(1.0))
    assert bye == SendToCoordinator(Exiting("drained: SIGTERM; 1 unfinished after 1 s"))
    assert end == w.ended


def test_a_draining_worker_ends_when_a_new_epoch_wants_none_of_its_work() -> None:
    w = ready()
    hear(w, batch(5, 1))
    run(w, DrainWanted(0.0, "SIGTERM"))
    assert [type(m) for m in sent(hear(w, Accept(6)))] == [Idle, Stage, Exiting]
    assert w.ended is not None


def test_a_worker_that_loads_while_it_drains_does_not_become_ready() -> None:
    w = machine()
    run(w, Connected(0.0), FromCoordinator(0.0, Accept(5)), DrainWanted(0.0, "SIGTERM"), EngineReady(0.0, CAPABILITIES, 3))
    assert w.ended is not None


def test_no_word_from_a_coordinator_ends_an_orphan() -> None:
    w = machine(orphan_s=3.0)
    run(w, Connected(0.0))
    ends = [t / 4 for t in range(1, 30) if any(isinstance(effect, EndProcess) for effect in run(w, WorkerTick(t / 4)))]
    assert ends == [3.0]
    assert w.ended is not None
    assert (w.ended.code, w.ended.close) == (Exit.ORPHANED, True)


@pytest.mark.parametrize(("external", "then"), [(True, "keeps its model and waits"), (False, "ends after 60 s of silence")])
def test_a_long_silence_of_the_coordinator_is_one_line_when_it_is_noticed_and_one_at_its_end(external: bool, then: str) -> None:
    w = machine(external=external)
    run(w, Connected(0.0), FromCoordinator(0.0, Accept(5)), Disconnected(1.0))
    notes = [effect for t in range(4, 160) for effect in run(w, WorkerTick(t / 4)) if isinstance(effect, Note)]
    assert notes == [Note(f"no word from a coordinator for 10 s: this worker {then}")]
    back = [effect for effect in [*run(w, Connected(41.0)), *hear(w, Accept(6)), *hear(w, Ping(1))] if isinstance(effect, Note)]
    assert back == [Note("the coordinator speaks again, after 41 s")]


def test_accept_sets_the_time_after_which_a_worker_is_an_orphan() -> None:
    w = machine(orphan_s=1.0)
    run(w, Connected(0.0), FromCoordinator(0.5, Accept(5, orphan_s=4.0)))
    assert [t / 4 for t in range(3, 40) if run(w, WorkerTick(t / 4)) and w.ended] == [4.5]


def test_pings_keep_a_worker_from_being_an_orphan() -> None:
    w = ready()
    w.silence.orphan_s = 3.0
    for t in range(1, 100):
        run(w, WorkerTick(t / 4))
        hear(w, Ping(t), now=t / 4)
    assert w.ended is None


def test_a_stall_of_the_worker_itself_is_not_held_against_the_coordinator() -> None:
    w = ready()
    run(w, WorkerTick(1.0), WorkerTick(1000.0))
    assert w.ended is None
    assert w.silence.heard_at == 999.0


@pytest.mark.parametrize(("before", "after"), [(1.2, 3.4), (1.1227798168435628, 3.3924947949605495)])
def test_after_a_stall_nothing_was_heard_or_asked_later_than_now(before: float, after: float) -> None:
    """`before + (after - before)` is more than `after` by a rounding."""
    w = ready()
    run(w, Connected(before), FromCoordinator(before, Accept(5)), Disconnected(after))
    assert w.silence.heard_at == w.silence.asked_at == w.now == after


def test_a_closed_lifeline_ends_the_process_at_once() -> None:
    w = ready()
    hear(w, batch(5, 1))
    (end,) = run(w, LifelineClosed(0.0))
    assert isinstance(end, EndProcess)
    assert (end.code, end.close) == (Exit.OWNER_GONE, False)


def test_nothing_has_an_effect_after_the_end() -> None:
    w = ready()
    run(w, LifelineClosed(0.0))
    for event in (
        Connected(1.0),
        FromCoordinator(1.0, Accept(9)),
        WorkerTick(99.0),
        EngineLost(1.0, "x"),
        DrainWanted(1.0, "y"),
    ):
        assert run(w, event) == []


def test_the_state_can_be_read() -> None:
    w = ready()
    hear(w, batch(5, 1))
    assert repr(w) == "<WorkerMachine policy/w1 ready epoch=5 registered running=1 held=0 leaving=0 unsent=0>"


# --- any order of events ------------------------------------------------------------------------------------------------


class AnyOrder(RuleBasedStateMachine):
    """A coordinator that restarts, a link that breaks and repeats, and an engine that answers in any order."""

    tasks = Bundle("tasks")

    def __init__(self) -> None:
        super().__init__()
        self.w = machine()
        self.counter = 0
        #: what the engine is computing
        self.engine: list[TaskId] = []
        self.runs: dict[TaskId, int] = {}
        self.works: dict[TaskId, Batch | Tokenize] = {}
        self.accepted: set[TaskId] = set()
        self.answered: dict[TaskId, Message] = {}

    def handle(self, event: WorkerEvent) -> list[WorkerEffect]:
        was_ended = self.w.ended is not None
        epoch = self.w.epoch
        effects = self.w.handle(event)
        self.w.check()
        assert not (was_ended and effects)
        for effect in effects:
            if isinstance(effect, RunBatch | RunTokenize):
                task = effect.batch.batch if isinstance(effect, RunBatch) else effect.task.task
                self.works[task] = effect.batch if isinstance(effect, RunBatch) else effect.task
                assert task[0] == self.w.epoch
                assert not any(other[0] < task[0] for other in self.engine), "two epochs share the engine"
                self.runs[task] = self.runs.get(task, 0) + 1
                assert self.runs[task] == 1, "ran twice"
                self.engine.append(task)
            elif isinstance(effect, SendToCoordinator):
                self.said(effect.message)
            elif isinstance(effect, EndProcess):
                assert effect is effects[-1]
        if (
            isinstance(event, FromCoordinator)
            and isinstance(event.message, Accept)
            and event.message.epoch >= epoch
            and effects
        ):
            kinds = [type(message) for message in sent(effects)]
            assert kinds[0] is Idle
            assert kinds[1] in (Stage, Ready)
        return effects

    def said(self, message: Message) -> None:
        if isinstance(message, Done | Tokenized):
            task = message.batch if isinstance(message, Done) else message.task
            assert self.w.registered
            assert task[0] == self.w.epoch, "an answer of a dropped epoch"
            assert task in self.runs
            assert self.answered.setdefault(task, message) == message, "a repeated answer differs"
        if isinstance(message, Stage | Ready | Idle):
            assert self.w.registered

    @rule(dt=st.sampled_from([0.0, 0.1, 0.25, 1.0, 3.0]))
    def tick(self, dt: float) -> None:
        self.handle(WorkerTick(self.w.now + dt))

    @rule()
    def connect(self) -> None:
        self.handle(Connected(self.w.now))

    @rule()
    def disconnect(self) -> None:
        self.handle(Disconnected(self.w.now))

    @rule(step=st.sampled_from([0, 0, 0, 1, -1]))
    def accept(self, step: int) -> None:
        self.handle(FromCoordinator(self.w.now, Accept(max(1, self.w.epoch + step))))

    @rule()
    def hello_required(self) -> None:
        self.handle(FromCoordinator(self.w.now, ErrorReply("hello_required", "?")))

    @rule()
    def ready(self) -> None:
        if self.w.capabilities is None:
            self.handle(EngineReady(self.w.now, CAPABILITIES, 1))

    @rule(target=tasks, text=st.booleans(), stale=st.sampled_from([0, 0, 0, 1]))
    def work(self, text: bool, stale: int) -> tuple[TaskId, bool]:
        self.counter += 1
        key = (self.w.epoch - stale, self.counter)
        self.deliver((key, text))
        return key, text

    @rule(task=tasks)
    def deliver(self, task: tuple[TaskId, bool]) -> None:
        key, text = task
        if self.counter > KEPT_ANSWERS:
            return
        can = key[0] == self.w.epoch and self.w.stage == "ready" and self.w.ended is None
        self.handle(FromCoordinator(self.w.now, Tokenize(key, []) if text else batch(*key)))
        if can:
            self.accepted.add(key)

    @precondition(lambda self: bool(self.engine))  # pyright: ignore[reportUnknownLambdaType, reportUnknownMemberType, reportUnknownArgumentType]
    @rule(pick=st.integers(0, 1000), fails=st.booleans())
    def engine_answers(self, pick: int, fails: bool) -> None:
        key = self.engine.pop(pick % len(self.engine))
        if fails:
            self.handle(WorkDone(self.w.now, key, failed(self.works[key], "no", "engine_error", 3)))
        elif isinstance(self.works[key], Tokenize):
            self.handle(WorkDone(self.w.now, key, Tokenized(key), (bytes(4), bytes(4))))
        else:
            self.handle(WorkDone(self.w.now, key, Done(key, [PartDone()])))

    @rule(how=st.sampled_from(["drain", "sigterm", "lost", "superseded"]), really=st.integers(0, 9))
    def end(self, how: str, really: int) -> None:
        if really:
            return
        now = self.w.now
        event: WorkerEvent = {
            "drain": FromCoordinator(now, Drain()),
            "sigterm": DrainWanted(now, "SIGTERM"),
            "lost": EngineLost(now, "x"),
            "superseded": FromCoordinator(now, ErrorReply("superseded", "x")),
        }[how]
        self.handle(event)

    @invariant()
    def accepted_work_is_in_one_place(self) -> None:
        """What was taken in the present epoch is held, in the engine, answered, or waits for the link."""
        if self.w.ended is not None:
            return
        for key in self.accepted:
            if key[0] != self.w.epoch:
                continue
            places = [key in self.w.work.held, key in self.engine, key in self.answered or key in self.w.work.unsent]
            assert sum(places) == 1, (key, places)


AnyOrder.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestAnyOrder = AnyOrder.TestCase
