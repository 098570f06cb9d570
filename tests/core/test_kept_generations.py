"""Updates during which generations stay in their engines: what the coordinator waits for, and when an engine goes on."""

from typing import Any

import msgspec
import pytest

from enginepool.coordinator.weights.publish_validation import open_publish
from enginepool.protocol.errors import WireError
from enginepool.protocol.messages import Accept, ErrorReply, GenerationProgress, StopGeneration
from enginepool.protocol.messages.weights import (
    Committed,
    LoadWeights,
    Prepare,
    Prepared,
    Publish,
    Published,
    ReleaseWeights,
    WeightsLoaded,
)
from enginepool.workers.events import (
    CancelGenerations,
    Connected,
    Disconnected,
    FreeStopped,
    ResumeEngine,
    RunGeneration,
    RunWeights,
    WeightsAnswered,
    WorkerEffect,
)
from tests.core.generations import CAN, generate, outputs
from tests.core.machines import work
from tests.core.publishers import DIGEST, of_type
from tests.core.test_exact_version import Both, stage
from tests.core.test_worker_generations import EPOCH, Worker, kinds, said, start

MODES = ["in_place", "retract"]
BOTH = msgspec.structs.replace(
    CAN, operations=("generate", "score"), labels=2, sequences=8, sequence_tokens=200, sequence_context=100
)


def to_load(can: Any = CAN, **offer: Any) -> tuple[Both, Any, bytes, Any, list[Any]]:
    """A pool with one worker that generates, an update of it up to what follows `commit`, and its task."""
    pool, trainer, link = stage(can=can)
    pool.submit(trainer.link, 50, generate(3))
    [task] = pool.tasks()
    pool.step(link, (task, 0, 0, [1, 2], ""))
    pool.answer(pool.answer(trainer.publish(1, **offer)))
    trainer.sent()
    pool.stage([link])
    return pool, trainer, link, task, trainer.commit()


# --- the coordinator -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_an_engine_loads_while_generations_stay_in_it_and_spans_change_with_the_commit(mode: str) -> None:
    pool, _, link, task, sent = to_load(in_flight=mode)
    assert len(of_type(sent, LoadWeights)) == 1 and not pool.stopped()
    pool.step(link, (task, 0, 2, [3], ""))  # the last step before the pause
    pool.answer(sent)
    assert len(of_type(pool.written(), Committed)) == 1
    message, rows = outputs(pool.step(link, (task, 0, 3, [4, 5], "stop"), version=1))[50]
    assert (rows, message.spans, pool.stopped()) == ([[1, 2, 3, 4, 5]], [[(0, 3), (1, 2)]], [])


@pytest.mark.parametrize("mode", MODES)
def test_rows_are_waited_for_and_put_back_when_the_time_is_up(mode: str) -> None:
    pool, trainer, _ = stage(can=BOTH)
    pool.submit(trainer.link, 50, generate(3))
    pool.submit(trainer.link, 51, work())
    pool.answer(pool.answer(trainer.publish(1, in_flight=mode, drain_ms=2000)))
    trainer.sent()
    pool.stage([b"w0"])
    assert not of_type(trainer.commit(), LoadWeights)
    assert not of_type(pool.live(1.0), LoadWeights)
    assert len(of_type(pool.live(1.5), LoadWeights)) == 1
    assert pool.update.recalled_batches == 1 and not pool.stopped()


def test_a_drain_is_followed_by_what_was_asked_for() -> None:
    pool, _, link, task, sent = to_load(in_flight="drain", drain_ms=2000, after_drain="in_place")
    assert not of_type(sent, LoadWeights)
    pool.answer(pool.live(2.5))
    assert not pool.stopped() and len(of_type(pool.written(), Published)) == 1
    assert outputs(pool.step(link, (task, 0, 2, [3], "stop"), version=1))[50][0].spans == [[(0, 2), (1, 1)]]


def test_generations_of_a_failed_update_are_stopped_before_their_engines_go_on() -> None:
    pool, _, link, _, sent = to_load(in_flight="in_place")
    pool.answer(sent)
    kinds_sent = [type(one.message) for one in pool.written("the disk is full") if one.link == link]
    assert kinds_sent.index(StopGeneration) == 0


def test_an_engine_that_stands_still_for_a_load_is_not_late_with_what_it_generates() -> None:
    pool, _, link, task, sent = to_load(in_flight="in_place")
    longest = pool.machine.core.config.timing
    assert longest.forward_s < longest.update_load_s
    pool.live(longest.forward_s + 5.0)
    assert pool.machine.core.worker_links
    pool.answer(sent)
    pool.written()
    pool.live(longest.forward_s - 5.0)
    assert pool.machine.core.worker_links, pool.logged
    assert outputs(pool.step(link, (task, 0, 2, [3], "stop"), version=1))[50][1] == [[1, 2, 3]]


@pytest.mark.parametrize(("restart", "said_"), [(False, "does not know that mode"), (True, "only by a restart")])
def test_a_worker_that_does_not_confirm_the_mode_aborts_the_update(restart: bool, said_: str) -> None:
    pool, trainer, link = stage(can=CAN)
    [prepare] = of_type(trainer.publish(1, in_flight="retract"), Prepare)
    assert prepare.generations == "retract"
    [error] = of_type(pool.tell(link, Prepared(prepare.update, restart=restart, digest=DIGEST)), ErrorReply)
    assert (error.code, error.field) == ("unsupported", "in_flight") and said_ in error.message


def test_what_follows_a_drain_goes_with_a_drain_alone() -> None:
    offer = Publish(1, 1, transfer="set_version", in_flight="in_place", after_drain="retract")
    with pytest.raises(WireError, match="after_drain: retract goes with in_flight drain, got in_flight in_place"):
        open_publish(offer, ())


# --- the worker ----------------------------------------------------------------------------------------------------------

UPDATE = (EPOCH, 1)


def loading(mode: str = "in_place", *running: int) -> tuple[Worker, list[WorkerEffect]]:
    """A worker with generations, up to its `load`; what it does then."""
    worker = Worker()
    for counter in running:
        worker.hear(start(counter))
    worker.hear(Prepare(UPDATE, 4, "set_version", generations=mode))  # pyright: ignore[reportArgumentType]
    answered(worker, Prepared(UPDATE, generations=mode))  # pyright: ignore[reportArgumentType]
    return worker, worker.hear(LoadWeights(UPDATE, 4))


def answered(worker: Worker, answer: Any) -> list[WorkerEffect]:
    return worker.do(WeightsAnswered(worker.machine.now, answer))


def versions(effects: list[WorkerEffect]) -> list[int]:
    return [message.version for message in said(effects) if isinstance(message, GenerationProgress)]


@pytest.mark.parametrize("mode", MODES)
def test_generations_stay_during_a_load_and_their_tokens_have_the_version_that_computed_them(mode: str) -> None:
    worker, effects = loading(mode, 1)
    [run] = effects
    assert isinstance(run, RunWeights) and run.running == mode
    assert worker.hear(start(2)) == []  # it waits
    assert versions(worker.steps(1)) == [3]
    loaded = answered(worker, WeightsLoaded(UPDATE, 4, ""))
    assert said(loaded) == [WeightsLoaded(UPDATE, 4, "")] and kinds(loaded)[-1] is RunGeneration
    assert kinds(worker.hear(Committed(UPDATE, 4, ""))) == [RunWeights]
    assert versions(worker.steps(1)) == [4]


def test_an_engine_in_which_nothing_runs_is_not_paused() -> None:
    _, [run] = loading("in_place")
    assert isinstance(run, RunWeights) and run.running is None


def test_what_was_stopped_leaves_before_a_load_and_the_others_stay() -> None:
    worker = Worker()
    worker.hear(start(1))
    worker.hear(start(2))
    worker.hear(Prepare(UPDATE, 4, "set_version", generations="in_place"))
    answered(worker, Prepared(UPDATE, generations="in_place"))
    worker.hear(StopGeneration(EPOCH, [1]))
    assert kinds(worker.hear(LoadWeights(UPDATE, 4))) == [FreeStopped], "also from an engine that a command keeps paused"
    [run] = worker.left(1)
    assert isinstance(run, RunWeights) and run.running == "in_place"


def test_a_release_after_the_load_drops_generations_before_the_engine_goes_on() -> None:
    worker, _ = loading("in_place", 1)
    answered(worker, WeightsLoaded(UPDATE, 4, ""))
    assert kinds(worker.hear(ReleaseWeights(UPDATE))) == [CancelGenerations, RunWeights]


def test_after_another_coordinator_has_taken_over_the_engine_goes_on_with_nothing() -> None:
    worker, _ = loading("in_place", 1)
    answered(worker, WeightsLoaded(UPDATE, 4, ""))
    worker.do(Disconnected(worker.machine.now))
    worker.do(Connected(worker.machine.now))
    assert ResumeEngine in kinds(worker.hear(Accept(EPOCH + 1)))
