"""Bugs of the coordinator's machine, found by the simulator or by reading: each test is as small as it gets."""

import msgspec
import pytest

from enginepool.config import RestartConfig, Timing
from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.effects import ToWorker
from enginepool.coordinator.core.request_state import TEXT
from enginepool.coordinator.core.text_lanes import MOST_TEXTS, TEXT_BYTES
from enginepool.protocol.messages import Batch, Capabilities, FrameSpec, Idle, Ready, Stage, Tokenize
from tests.core.machines import CAN, EPOCH, Pool, Sent, codes, config, failures, results, text, texts, work


def lose(pool: Pool, link: bytes) -> None:
    """The worker on `link` is lost with all that it has."""
    pool.batches = [sent for sent in pool.batches if sent.link != link]
    pool.do(ev.WorkerBroken(0, link, "dies"))


def tokenize(pool: Pool, task: Sent) -> list[Sent]:
    """The worker turns the one row of a text into the id 1."""
    assert isinstance(task.message, Tokenize)
    specs = [FrameSpec("items", "int32", (1,)), FrameSpec("item_lengths", "uint32", (1,))]
    return pool.do(ev.TextTokenized(0, task.link, task.message.task, specs, [b"\1\0\0\0", b"\1\0\0\0"]))


def one_suspect_and_two_busy_workers() -> tuple[Pool, Sent, Sent]:
    """Request 1 is a suspect; worker a has less to do than b and is kept free for it. Returns what a and b run."""
    pool = Pool()
    client = pool.client()
    pool.worker("a")
    pool.submit(client, 10, work(length=50))
    pool.worker("b")
    pool.submit(client, 11, work(length=100))
    lost = pool.worker("lost")
    pool.submit(client, 1, work())
    first, second, last = pool.batches
    assert [sent.link for sent in (first, second, last)] == [b"a", b"b", lost]
    lose(pool, lost)
    kept = pool.machine.core.groups["g"].reserved_worker
    assert kept is not None and kept.link == b"a"
    return pool, first, second


# --- deadlines of the first batches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [True, False])
def test_the_first_forward_of_a_slow_worker_may_take_what_the_worker_measured_at_its_start(said: bool) -> None:
    """Its row takes 50 s: no hang where the worker said so, and one where it said nothing."""
    slow = msgspec.structs.replace(CAN, pace=2, forward_ms=1000) if said else CAN
    pool = Pool()
    client = pool.client()
    link = pool.worker("a", can=slow)
    pool.submit(client, 1, work(1, 100))
    for _ in range(50):
        pool.wait(1)
        pool.do(ev.WorkerHeard(0, link))
        pool.do(ev.Heard(0, client, 0))
    pool.finish_all()
    assert list(results(pool.sent)) == ([1] if said else [])


# --- trials ------------------------------------------------------------------------------------------------------------


def test_a_suspect_takes_the_first_worker_that_falls_idle_not_only_the_one_kept_for_it() -> None:
    pool, _, second = one_suspect_and_two_busy_workers()
    (trial,) = [sent for sent in pool.finish(second) if isinstance(sent.message, Batch)]
    assert trial.link == b"b"
    assert pool.machine.core.groups["g"].reserved_worker is None


def test_a_worker_that_is_kept_for_a_trial_stays_so_next_to_one_that_only_has_text() -> None:
    pool, first, second = one_suspect_and_two_busy_workers()
    (task,) = texts(pool.submit(b"client1", 2, text("q", ["x"])))
    pool.finish(second)
    kept = pool.machine.core.groups["g"].reserved_worker
    assert (task.link, kept and kept.link) == (b"b", b"a")
    assert [sent.link for sent in pool.finish(first) if isinstance(sent.message, Batch)] == [b"a"]


def test_a_trial_goes_to_an_idle_worker_rather_than_to_one_that_has_text() -> None:
    pool = Pool()
    client = pool.client()
    lost = pool.worker("lost")
    pool.submit(client, 1, work())
    pool.worker("a")
    pool.worker("b")
    tasks = [texts(pool.submit(client, id_, text("q", ["x"])))[0] for id_ in (2, 3, 4)]
    assert sorted(task.link for task in tasks) == [b"a", b"b", lost]
    (task,) = [task for task in tasks if task.link == b"b"]
    assert isinstance(task.message, Tokenize)
    pool.do(ev.TextTokenized(0, task.link, task.message.task, [], [], "no tokenizer"))
    lose(pool, lost)
    assert [sent.link for sent in pool.batches] == [b"b"]


def test_no_trial_is_sent_to_a_worker_that_began_to_drain_while_it_was_kept() -> None:
    pool, first, second = one_suspect_and_two_busy_workers()
    pool.do(ev.WorkerSaid(0, b"a", Stage("draining", "")))
    assert not [sent for sent in pool.finish(first) if isinstance(sent.message, Batch)]
    assert [sent.link for sent in pool.finish(second) if isinstance(sent.message, Batch)] == [b"b"]


def test_a_suspect_starts_when_what_stood_before_it_has_left_in_the_same_moment() -> None:
    pool = Pool()
    client = pool.client()
    lost = pool.worker("lost")
    pool.submit(client, 1, work())
    lose(pool, lost)
    pool.worker("a", ready=False)
    pool.worker("b", ready=False)
    together = [ev.WorkerSaid(0, link, said) for link in (b"a", b"b") for said in (Idle(EPOCH), Ready(CAN, 0))]
    effects = pool.machine.handle(*together, ev.Submit(0, client, 2, work(), 5, None))
    sent = [effect.link for effect in effects if isinstance(effect, ToWorker) and isinstance(effect.message, Batch)]
    assert sorted(sent) == [b"a", b"b"]


def test_a_worker_kept_for_a_trial_is_free_again_when_all_suspects_are_gone_at_once() -> None:
    roomy = Capabilities("causal", 1000, 100, batch_tokens=10_000, batch_rows=100, inflight_tokens=20_000, inflight_rows=200)
    pool = Pool()
    staying, leaving = pool.client(), pool.client()
    lost = pool.worker("lost", can=roomy)
    for id_ in range(65):
        pool.submit(leaving, id_, work())
    lose(pool, lost)
    busy = pool.worker("a", can=roomy)
    assert len(pool.batches) == 1, "a trial"
    pool.worker("b", can=roomy)
    pool.submit(staying, 1, work(), priority=1)
    lose(pool, busy)
    assert pool.machine.core.groups["g"].reserved_worker is not None
    pool.do(ev.ClientLeft(0, leaving))
    pool.finish_all()
    pool.submit(staying, 2, work())
    pool.finish_all()
    assert sorted(results(pool.sent)) == [1, 2]


# --- text --------------------------------------------------------------------------------------------------------------


def test_text_that_came_during_a_trial_is_tokenized_after_it() -> None:
    pool = Pool()
    client = pool.client()
    lost = pool.worker("lost")
    pool.submit(client, 1, work())
    lose(pool, lost)
    pool.worker("a")
    (trial,) = pool.batches
    assert not texts(pool.submit(client, 2, text("q", ["x"])))
    assert [task.link for task in texts(pool.finish(trial))] == [b"a"]


def test_an_urgent_text_waits_behind_a_few_and_not_behind_all_that_came_before_it() -> None:
    pool = Pool()
    client = pool.client()
    pool.worker("a")
    for id_ in range(1000):
        pool.submit(client, id_, text("q", ["x"]))
    pool.submit(client, 1000, text("q", ["urgent"]), priority=100)
    done = 0
    while not any(task.frames[1] == b"urgent" for task in texts(pool.sent)):
        tokenize(pool, texts(pool.sent)[done])
        done += 1
    before = next(i for i, task in enumerate(texts(pool.sent)) if task.frames[1] == b"urgent")
    assert before == MOST_TEXTS and done == 1


def test_long_texts_are_with_a_worker_two_at_a_time() -> None:
    pool = Pool()
    client = pool.client()
    pool.worker("a")
    for id_ in range(10):
        pool.submit(client, id_, text("q", ["x" * TEXT_BYTES]))
    assert len(texts(pool.sent)) == 2
    tokenize(pool, texts(pool.sent)[0])
    assert len(texts(pool.sent)) == 3


def test_only_the_text_that_was_tokenized_is_suspected_of_a_loss() -> None:
    pool = Pool()
    client = pool.client()
    lost = pool.worker("lost")
    for id_ in range(1, 6):
        pool.submit(client, id_, text("q", [str(id_)]))
    tokenize(pool, texts(pool.sent)[0])
    lose(pool, lost)
    group = pool.machine.core.groups["g"]
    assert [request.id for request in group.suspects.waiting() if request.state == TEXT] == [2]
    assert sorted(request.id for request in group.texts.waiting()) == [3, 4, 5]


def test_text_that_kills_its_worker_is_found_and_its_neighbors_are_tokenized() -> None:
    """Four texts are with a worker together. The first one is suspected, and the next time what was behind it."""
    pool = Pool(config(restart=RestartConfig(max_attempts=2)))
    client = pool.client()
    for id_ in range(1, 5):
        pool.submit(client, id_, text("q", ["bad" if id_ % 2 else "good"]))
    deaths = 0
    for _ in range(2 + 2 * 2 + 1):
        seen = len(pool.sent)
        link = pool.worker(f"w{deaths}")
        while tasks := texts(pool.sent[seen:]):
            seen = len(pool.sent)
            if any(task.frames[1] == b"bad" for task in tasks):
                deaths += 1
                lose(pool, link)
                break
            for task in tasks:
                tokenize(pool, task)
            pool.finish_all()
    assert deaths == 2 + 2 * 2
    assert {id_: failure.code for id_, failure in failures(pool.sent).items() if id_} == {1: "poisoned", 3: "poisoned"}
    assert sorted(results(pool.sent)) == [2, 4]


# --- workers -----------------------------------------------------------------------------------------------------------


def test_a_worker_whose_idle_was_lost_with_its_link_gets_work() -> None:
    """It heard our epoch, so it says no second time that it holds nothing older."""
    pool = Pool()
    client = pool.client()
    pool.do(ev.WorkerRegistered(0, b"a", "g", "a", 1, "h"))
    pool.do(ev.WorkerRegistered(0, b"a2", "g", "a", 1, "h", epoch=EPOCH))
    pool.do(ev.WorkerSaid(0, b"a2", Ready(CAN, 0)))
    pool.submit(client, 1, work())
    pool.finish_all()
    assert list(results(pool.sent)) == [1]


def test_what_a_dead_process_said_last_does_not_bring_it_back() -> None:
    """Its end may be seen before its last messages are read."""
    pool = Pool(config(workers=1))
    (start,) = pool.started
    pool.do(ev.WorkerExited(0, start.incarnation, "signal 9"))
    assert codes(pool.do(ev.WorkerRegistered(0, b"a", "g", start.incarnation, 1, "h"))) == ["superseded"]
    assert not pool.machine.core.groups["g"].workers


def test_the_pool_is_down_when_the_last_external_worker_is_lost_after_all_slots_retired() -> None:
    pool = Pool(config(workers=1))
    client = pool.client()
    other = pool.worker("other")
    pool.do(ev.WorkerExited(0, pool.started[0].incarnation, "cannot work", permanent=True))
    pool.submit(client, 1, work())
    assert not failures(pool.sent)
    lose(pool, other)
    assert failures(pool.sent)[1].code == "pool_down"


def test_a_group_without_places_waits_for_the_next_worker_that_dials_in() -> None:
    pool = Pool()
    client = pool.client()
    other = pool.worker("other")
    pool.submit(client, 1, work())
    lose(pool, other)
    pool.worker("next")
    pool.finish_all()
    assert list(results(pool.sent)) == [1]


@pytest.mark.parametrize("shape", [(1, 1), (1, 3)])
def test_a_worker_that_answers_other_columns_than_were_asked_is_lost(shape: tuple[int, int]) -> None:
    pool = Pool()
    client = pool.client()
    pool.worker("a")
    pool.submit(client, 1, work())
    (batch,) = pool.batches
    assert isinstance(batch.message, Batch)
    outcome = ev.Outcome([FrameSpec("scores", "float32", shape)], [bytes(4 * shape[1])])
    pool.do(ev.BatchDone(0, b"a", batch.message.batch, [outcome], 0, 1, 1))
    assert not pool.machine.core.groups["g"].workers and not results(pool.sent)


def test_a_worker_with_a_late_batch_gets_nothing_more_until_it_is_done() -> None:
    """Newer work of a higher priority could keep its engine from the old batch, and the deadline would cost it its life."""
    pool = Pool()
    client = pool.client()
    pool.worker("a")
    pool.submit(client, 1, work(), priority=-1)
    (old,) = pool.batches
    for second in range(int(Timing().forward_s / 2) + 1):
        pool.wait(1)
        pool.do(ev.WorkerHeard(0, b"a"))
        pool.do(ev.Heard(0, client, 0))
        pool.submit(client, second + 2, work(), priority=1)
    newer = pool.batches[1:]
    assert 0 < len(newer) < 16
    for sent in newer:
        pool.finish(sent)
    assert pool.batches == [old], "a request after half of its time waits"
    pool.finish(old)
    assert len(pool.batches) == 1


def test_text_that_was_cancelled_while_no_worker_was_there_does_not_stay_in_memory() -> None:
    pool = Pool()
    client = pool.client()
    for id_ in range(100):
        pool.submit(client, id_, text("q", ["x"]))
        pool.do(ev.CancelAsked(0, client, id_))
    pool.submit(client, 100, text("q", ["x"]))
    assert [request.id for request in pool.machine.core.groups["g"].texts.waiting()] == [100]
