"""The worker's half of a weight update: what is given to the shell once, what is said again, when the engine takes weights."""

from typing import Any

import pytest

from enginepool.protocol.layout import layered
from enginepool.protocol.messages import Accept, Batch, Capabilities, Done, Exiting, Idle, Message, Part, Ready, Stage
from enginepool.protocol.messages.weight_reports import Inspect, Inspected
from enginepool.protocol.messages.weights import (
    Committed,
    Join,
    Joined,
    LoadWeights,
    Prepare,
    Prepared,
    ReleaseWeights,
    Restore,
    Restored,
    Staged,
    WeightsLoaded,
)
from enginepool.workers.events import (
    Connected,
    Disconnected,
    EndProcess,
    EngineReady,
    Exit,
    FromCoordinator,
    LoadPrepared,
    RunBatch,
    RunWeights,
    SendToCoordinator,
    SnapshotReported,
    WeightsAnswered,
    WorkDone,
    WorkerEffect,
    WorkerEvent,
)
from enginepool.workers.machine import WorkerMachine

CAN = Capabilities("causal", 100, 64, 64, 8, 128, 16)
UPDATE = (7, 1)
PREPARE = Prepare(UPDATE, 1, "staged")
JOIN = Join("g-1", 3, 1, "host:1", update=UPDATE)
LOAD = LoadWeights(UPDATE, 1)


class Worker:
    """A machine under test that is registered and ready."""

    def __init__(self) -> None:
        self.machine = WorkerMachine("w", "g", now=0.0)
        self.now = 0.0
        self.do(Connected(0))
        self.hear(Accept(7))
        self.do(EngineReady(0, CAN))

    def do(self, event: WorkerEvent) -> list[WorkerEffect]:
        self.now += 0.01
        out = self.machine.handle(event.__class__(*(self.now, *(getattr(event, f) for f in event.__struct_fields__[1:]))))
        self.machine.check()
        return out

    def hear(self, message: Message) -> list[WorkerEffect]:
        return self.do(FromCoordinator(0, message))

    def answer(self, answer: Any) -> list[WorkerEffect]:
        """What the executor reports. Bytes that are staged are loaded from a moment later."""
        if isinstance(answer, Staged):
            assert self.do(LoadPrepared(0, answer.update, 0.0)) == []
        return self.do(WeightsAnswered(0, answer))

    def again(self, epoch: int = 7) -> list[Message]:
        """A new link: what the coordinator hears on it."""
        self.do(Disconnected(0))
        self.do(Connected(0))
        return said(self.hear(Accept(epoch)))

    def to_load(self, **changes: Any) -> list[WorkerEffect]:
        """Up to the hand-over, everything answered."""
        offer: dict[str, Any] = {"transfer": "staged", **changes}
        self.hear(Prepare(UPDATE, 1, **offer))
        self.answer(Prepared(UPDATE, "me"))
        self.hear(JOIN)
        self.answer(Joined(UPDATE))
        self.answer(Staged(UPDATE, "d"))
        return self.hear(LOAD)


def given(effects: list[WorkerEffect]) -> list[Message]:
    """What the shell is to do."""
    return [effect.message for effect in effects if isinstance(effect, RunWeights)]


def said(effects: list[WorkerEffect]) -> list[Message]:
    return [effect.message for effect in effects if isinstance(effect, SendToCoordinator)]


def batch(number: int, epoch: int = 7) -> Batch:
    return Batch((epoch, number), [Part([])])


def test_the_straight_path() -> None:
    worker = Worker()
    assert given(worker.hear(PREPARE)) == [PREPARE]
    assert said(worker.answer(Prepared(UPDATE, "me"))) == [Prepared(UPDATE, "me")]
    assert given(worker.hear(JOIN)) == [JOIN]
    worker.answer(Joined(UPDATE))
    assert said(worker.answer(Staged(UPDATE, "d"))) == [Staged(UPDATE, "d")]
    assert given(worker.hear(LOAD)) == [LOAD]
    assert said(worker.answer(WeightsLoaded(UPDATE, 1, "d"))) == [WeightsLoaded(UPDATE, 1, "d")]
    committed = Committed(UPDATE, 1, "d", "/snapshot")
    assert given(worker.hear(committed)) == [committed]
    assert [m for m in worker.again() if isinstance(m, Ready)] == [Ready(CAN, 1, "d", (0, 1))]


@pytest.mark.parametrize(("question", "answer"), [(PREPARE, Prepared(UPDATE, "me")), (JOIN, Joined(UPDATE))])
def test_what_comes_twice_is_done_once_and_answered_again(question: Message, answer: Message) -> None:
    worker = Worker()
    worker.hear(PREPARE)
    worker.hear(question)
    assert worker.hear(question) == []
    worker.answer(answer)
    assert worker.hear(question) == [SendToCoordinator(answer)]


def test_answers_are_said_again_on_a_new_link() -> None:
    worker = Worker()
    worker.to_load()
    worker.do(Disconnected(0))
    assert said(worker.answer(WeightsLoaded(UPDATE, 1, "d"))) == []
    again = worker.again()
    assert again[-4:] == [Prepared(UPDATE, "me"), Joined(UPDATE), Staged(UPDATE, "d"), WeightsLoaded(UPDATE, 1, "d")]


def test_the_engine_empties_before_it_takes_weights_and_nothing_enters_it() -> None:
    worker = Worker()
    worker.hear(batch(10))
    assert given(worker.to_load()) == []
    assert worker.hear(batch(11)) == []
    done = worker.do(WorkDone(0, (7, 10), Done((7, 10), [])))
    assert said(done) == [], "no call waits for it any more"
    assert given(done) == [LOAD]
    after = worker.answer(WeightsLoaded(UPDATE, 1, "d"))
    assert said(after) == [WeightsLoaded(UPDATE, 1, "d")]
    assert [effect.batch.batch for effect in after if isinstance(effect, RunBatch)] == [(7, 11)]


def test_an_engine_that_kept_its_weights_says_so() -> None:
    worker = Worker()
    worker.to_load()
    failed = WeightsLoaded(UPDATE, code="engine_error", message="no")
    assert said(worker.answer(failed)) == [failed]
    assert (worker.machine.updates.version, worker.machine.updates.digest) == (0, "")


def test_a_part_is_laid_over_what_was_there() -> None:
    worker = Worker()
    worker.to_load(partial=True)
    worker.answer(WeightsLoaded(UPDATE, 1, "d"))
    assert worker.machine.updates.digest == layered("", "d")


def test_a_release_forgets_and_a_late_answer_is_dropped() -> None:
    worker = Worker()
    worker.hear(PREPARE)
    release = ReleaseWeights(UPDATE, "gone")
    assert given(worker.hear(release)) == [release]
    assert worker.answer(Prepared(UPDATE, "me")) == []
    assert given(worker.hear(PREPARE)) == [], "an update that is over does not begin again"
    assert isinstance(said(worker.hear(JOIN))[0], Joined)


def test_another_prepare_gives_up_the_one_before() -> None:
    worker = Worker()
    worker.hear(PREPARE)
    later = Prepare((7, 2), 2, "staged")
    assert given(worker.hear(later)) == [ReleaseWeights(UPDATE, "another update begins"), later]


def test_who_heard_on_a_new_link_that_the_engine_takes_weights_hears_when_it_has() -> None:
    worker = Worker()
    worker.to_load()
    assert Stage("loading", "takes weights") in worker.again()
    heard = said(worker.answer(WeightsLoaded(UPDATE, 1, "d")))
    assert WeightsLoaded(UPDATE, 1, "d") in heard
    assert Ready(CAN, 1, "d") in heard, "it would count as a worker that loads without end"


def test_another_prepare_after_a_load_means_that_it_was_committed() -> None:
    worker = Worker()
    worker.to_load()
    worker.answer(WeightsLoaded(UPDATE, 1, "d"))
    later = Prepare((7, 2), 2, "staged")
    assert given(worker.hear(later)) == [Committed(UPDATE, 1, "d"), later]


def test_a_committed_without_a_name_is_of_the_open_update() -> None:
    worker = Worker()
    worker.to_load()
    worker.answer(WeightsLoaded(UPDATE, 1, "d"))
    assert given(worker.hear(Committed((0, 0), 1, "d", "/s"))) == [Committed(UPDATE, 1, "d", "/s")]
    assert given(worker.hear(Committed((0, 0), 2, "e"))) == [], "it is not what is held here"


def test_a_worker_that_is_not_ready_refuses() -> None:
    worker = Worker()
    worker.machine.stage = "loading"
    (answer,) = said(worker.hear(PREPARE))
    assert isinstance(answer, Prepared) and answer.code == "shutting_down"


def test_a_new_coordinator_ends_the_update() -> None:
    worker = Worker()
    worker.hear(PREPARE)
    worker.answer(Prepared(UPDATE, "me"))
    worker.do(Connected(0))
    effects = worker.hear(Accept(8))
    assert [message.update for message in given(effects) if isinstance(message, ReleaseWeights)] == [UPDATE]
    assert not any(isinstance(message, Prepared) for message in said(effects))
    assert Idle(8) in said(effects)


def test_what_was_handed_over_stays_for_the_new_coordinator_to_judge() -> None:
    worker = Worker()
    worker.to_load()
    worker.answer(WeightsLoaded(UPDATE, 1, "d"))
    worker.do(Connected(0))
    effects = worker.hear(Accept(8))
    assert given(effects) == []
    assert Ready(CAN, 1, "d") in said(effects)


def test_while_it_takes_weights_a_worker_is_not_ready_for_a_new_coordinator() -> None:
    worker = Worker()
    worker.to_load()
    again = worker.again(8)
    assert Stage("loading", "takes weights") in again
    assert not any(isinstance(message, Ready) for message in again)
    after = worker.answer(WeightsLoaded(UPDATE, 1, "d"))
    assert said(after) == [Ready(CAN, 1, "d")]


def test_a_direct_transfer_without_its_coordinator_ends_the_worker() -> None:
    worker = Worker()
    worker.to_load(transfer="direct")
    worker.do(Connected(0))
    effects = worker.hear(Accept(8))
    assert any(isinstance(effect, EndProcess) and effect.code == Exit.ENGINE_DIED for effect in effects)
    assert any(isinstance(message, Exiting) and message.failed for message in said(effects))


def test_a_restore_takes_the_engine_and_ends_in_ready() -> None:
    worker = Worker()
    worker.hear(batch(10))
    restore = Restore(3, "d", "/s")
    assert given(worker.hear(restore)) == []
    assert given(worker.do(WorkDone(0, (7, 10), Done((7, 10), [])))) == [restore]
    assert worker.hear(restore) == [], "it is at it"
    assert said(worker.answer(Restored(3, "", ""))) == [Ready(CAN, 3, "d", (0, 3))]
    assert said(worker.hear(restore)) == [Ready(CAN, 3, "d", (0, 3))], "it has them"


def test_an_engine_that_has_loaded_a_changed_checkpoint_is_not_called_by_the_weights_before() -> None:
    worker = Worker()
    worker.hear(Restore(3, "d", path="/checkpoint"))
    failed = Restored(3, "needs_weights", "/checkpoint no longer holds the committed weights")
    assert said(worker.do(WeightsAnswered(0, failed, found="other"))) == [failed], "it is asked again after a while"
    assert Ready(CAN, 0, "other") in worker.again()


def test_a_restore_that_fails_is_told() -> None:
    worker = Worker()
    worker.hear(Restore(3, "d"))
    failed = Restored(3, "needs_weights", "no snapshot")
    assert said(worker.answer(failed)) == [failed]
    assert given(worker.hear(Restore(3, "d"))) == [Restore(3, "d")], "it tries again"


def test_a_restore_waits_for_the_one_before() -> None:
    worker = Worker()
    worker.hear(Restore(3, "d"))
    assert worker.hear(Restore(4, "e")) == []
    taken = worker.answer(Restored(3, "", ""))
    assert given(taken) == [Restore(4, "e")]
    assert not any(isinstance(message, Ready) for message in said(taken))
    assert said(worker.answer(Restored(4, "", ""))) == [Ready(CAN, 4, "e", (0, 4))]


def test_a_question_is_asked_once_and_answered() -> None:
    worker = Worker()
    question = Inspect((7, 9), "digest")
    assert given(worker.hear(question)) == [question]
    assert worker.hear(question) == []
    assert said(worker.answer(Inspected((7, 9), "d"))) == [Inspected((7, 9), "d")]


def test_a_restore_during_an_update_leaves_it_what_it_has_staged() -> None:
    worker = Worker()
    worker.hear(batch(10))
    restore, committed = Restore(1, "d"), Committed((0, 0), 1, "d")
    worker.hear(restore)
    worker.hear(PREPARE)
    update = worker.machine.updates.update
    worker.answer(Prepared(UPDATE, "me"))
    worker.hear(JOIN)
    worker.answer(Joined(UPDATE))
    worker.answer(Staged(UPDATE, "d"))
    assert worker.do(WorkDone(0, (7, 10), Done((7, 10), [])))[-1] == RunWeights(restore, (), update)
    assert said(worker.answer(Restored(1, "", ""))) == [Ready(CAN, 1, "d", (0, 1))]
    assert worker.hear(committed) == [RunWeights(committed)], "it does not close the update"
    assert worker.hear(LOAD) == [RunWeights(LOAD, (), update)]


def test_what_a_stager_says_of_its_snapshot_is_passed_on_while_the_worker_is_registered() -> None:
    worker, missing = Worker(), Stage("ready", "no snapshot of version 1 in /s/g: No space left on device")
    assert said(worker.do(SnapshotReported(0, missing))) == [missing]
    worker.do(Disconnected(0))
    assert worker.do(SnapshotReported(0, missing)) == []
