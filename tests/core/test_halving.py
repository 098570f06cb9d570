"""Promises about engines that run out of memory: less at a time from then on, for all of the group; no request is to blame."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginepool.config import RestartConfig
from enginepool.coordinator.core import events as ev
from enginepool.coordinator.fleet.checks import impossible
from enginepool.coordinator.operations.base import Work
from enginepool.coordinator.operations.score import SCORE
from enginepool.protocol.capabilities import MOST_HALVINGS, halved
from enginepool.protocol.messages import Accept, Batch, Capabilities, Exiting, FrameSpec, Score, StartGeneration, Tokenize
from tests.core.generations import CAN as GENERATING
from tests.core.generations import GeneratingPool, generate, outputs
from tests.core.machines import CAN, Pool, accepts, config, failures, results, texts, work


def bye(pool: Pool, link: bytes, *, memory: bool = True) -> None:
    """The worker on `link` says that its engine is lost, and ends."""
    pool.batches = [sent for sent in pool.batches if sent.link != link]
    pool.do(ev.WorkerSaid(0, link, Exiting("OutOfMemoryError", True, False, memory)))


def in_flight(pool: Pool) -> list[tuple[bytes, list[int]]]:
    return [
        (sent.link, [part.frames[-1].shape[0] for part in sent.message.parts])
        for sent in pool.batches
        if isinstance(sent.message, Batch)
    ]


@given(
    page=st.sampled_from([1, 16, 64]),
    pages=st.integers(1, 3000),
    more=st.integers(1, 4),
    rows=st.integers(1, 2048),
    times=st.integers(0, MOST_HALVINGS),
    cached=st.booleans(),
    max_item=st.sampled_from([0, 65_535]),
)
def test_halves_are_possible_budgets_in_whichever_steps_they_are_taken(
    page: int, pages: int, more: int, rows: int, times: int, cached: bool, max_item: int
) -> None:
    batch = page * pages
    can = Capabilities("causal", 1000, batch * more, batch, rows, batch * more, rows * more, page, max_item=max_item)
    if cached:
        can = msgspec.structs.replace(can, cached_query=8, cached_tokens=batch * more)
    once = halved(can, times)
    stepwise = can
    for _ in range(times):
        stepwise = halved(stepwise, 1)
    assert once == stepwise
    assert impossible(once) == ""
    assert once.halvings == times
    assert once.packs == can.packs
    assert once.inflight_rows == max(1, (rows * more) >> times)
    assert once.batch_tokens <= max(page, batch >> times)


def test_a_batch_that_was_too_large_runs_in_halves_and_no_request_is_suspected() -> None:
    pool = Pool()
    client = pool.client()
    pool.worker("a")
    pool.submit(client, 1, work(8, 10))
    bye(pool, b"a")
    pool.worker("b")
    assert in_flight(pool) == [(b"b", [4]), (b"b", [4])]
    assert not pool.machine.core.groups["g"].suspects.size
    assert 1 in results(pool.finish_all())


def test_workers_that_run_are_filled_half_as_much_and_those_that_start_are_told() -> None:
    pool = Pool()
    client = pool.client()
    pool.worker("a")
    pool.worker("b")
    pool.submit(client, 1, work(4, 10))
    pool.submit(client, 2, work(4, 10))
    assert [accept.halvings for accept in told(pool)] == [0, 0]
    bye(pool, b"a")
    assert in_flight(pool) == [(b"b", [4]), (b"b", [4])], "half of 200 tokens and of 16 rows have room for both"
    pool.submit(client, 3, work(1, 10))
    assert len(pool.batches) == 2, "8 rows in flight are enough now"
    pool.worker("c")
    assert [accept.halvings for accept in told(pool)] == [0, 0, 1]
    assert in_flight(pool)[2:] == [(b"c", [1])]
    group = pool.machine.core.groups["g"]
    assert group.capabilities == halved(CAN, 1)
    pool.finish_all()
    assert sorted(results(pool.sent)) == [1, 2, 3]


def told(pool: Pool) -> list[Accept]:
    return [sent.message for sent in accepts(pool.sent) if isinstance(sent.message, Accept)]


def test_workers_that_die_of_the_same_budgets_halve_them_once() -> None:
    pool = Pool()
    client = pool.client()
    pool.worker("a")
    pool.worker("b")
    for request in (1, 2, 3, 4):
        pool.submit(client, request, work(8, 10))
    bye(pool, b"a")
    bye(pool, b"b")
    assert pool.machine.core.groups["g"].halvings == 1
    pool.worker("c")
    bye(pool, b"c")
    assert pool.machine.core.groups["g"].halvings == 2


def test_an_engine_whose_first_batches_are_too_large_starts_again_with_half() -> None:
    pool = Pool(config(workers=2, restart=RestartConfig(max_restarts=0)))
    first, second = (start.incarnation for start in pool.started)
    pool.worker(first, ready=False)
    pool.worker(second, ready=False)
    for name in (first, second):
        bye(pool, name.encode())
        pool.do(ev.WorkerExited(0, name, "exit code 70", False))
    group = pool.machine.core.groups["g"]
    assert group.halvings == 1
    pool.wait(2.0)
    again = [start.incarnation for start in pool.started[2:]]
    assert len(again) == 2, "that was no fault of the worker, which may be started again"
    pool.worker(again[0], can=halved(CAN, 1))
    assert [accept.halvings for accept in told(pool)] == [0, 0, 1]
    assert group.capabilities == halved(CAN, 1)


@pytest.mark.parametrize("first", ["exiting", "exit"])
@pytest.mark.parametrize("ready", [False, True])
def test_the_exit_of_a_worker_says_as_its_last_message_does_that_memory_ran_out(first: str, ready: bool) -> None:
    """Which of the two is read first is up to chance, and the message may be lost with its link."""
    pool = Pool(config(workers=1, restart=RestartConfig(max_restarts=0)))
    (incarnation,) = (start.incarnation for start in pool.started)
    pool.worker(incarnation, ready=ready)
    if ready:
        pool.submit(pool.client(), 1, work(8, 10))
    if first == "exiting":
        bye(pool, incarnation.encode())
    pool.batches.clear()
    pool.do(ev.WorkerExited(0, incarnation, "exit code 71: OutOfMemoryError", failed=True, out_of_memory=True))
    if first == "exit":
        bye(pool, incarnation.encode())
    group = pool.machine.core.groups["g"]
    assert (group.halvings, group.suspects.size, group.down) == (1, 0, "")
    assert group.counts.lost_batches == (1 if ready else 0)
    pool.wait(2.0)
    again = pool.started[-1].incarnation
    assert again != incarnation
    pool.worker(again, can=halved(CAN, 1))
    assert [accept.halvings for accept in told(pool)] == [0, 1]
    assert (1 in results(pool.finish_all())) == ready


def test_what_is_too_large_even_in_small_batches_is_a_loss_like_any_other() -> None:
    pool = Pool()
    client = pool.client()
    pool.submit(client, 1, work(1, 1))
    for life in range(MOST_HALVINGS):
        pool.worker(f"w{life}")
        bye(pool, f"w{life}".encode())
    group = pool.machine.core.groups["g"]
    assert (group.halvings, group.suspects.size) == (MOST_HALVINGS, 0)
    for life in range(3):
        pool.worker(f"x{life}")
        bye(pool, f"x{life}".encode())
    assert group.counts.poisoned == 0
    pool.worker("y")
    bye(pool, b"y")
    assert failures(pool.sent)[1].code == "poisoned"


def test_an_engine_that_had_nothing_to_run_did_not_die_of_a_batch_and_its_loss_counts() -> None:
    pool = Pool(config(workers=1, restart=RestartConfig(max_restarts=0)))
    (incarnation,) = (start.incarnation for start in pool.started)
    pool.worker(incarnation)
    bye(pool, incarnation.encode())
    pool.do(ev.WorkerExited(0, incarnation, "exit code 70"))
    group = pool.machine.core.groups["g"]
    assert group.halvings == 0
    assert "OutOfMemoryError" in group.down


def test_rows_that_no_longer_fit_any_worker_fail_also_while_they_run() -> None:
    pool = Pool()
    client = pool.client()
    can = msgspec.structs.replace(CAN, context=200)
    pool.worker("a", can=can)
    pool.worker("b", can=can)
    pool.submit(client, 1, work(1, 150))
    pool.submit(client, 2, work(1, 20))
    bye(pool, b"b")
    said = failures(pool.sent)
    assert (said[1].field, said[1].limit) == ("items[0]", "100")
    assert 2 not in said
    pool.finish_all()
    assert list(results(pool.sent)) == [2]


def long_row() -> list[tuple[FrameSpec, bytes]]:
    """The frames of one row of 190 ids."""
    items, length = np.arange(190, dtype=np.int32).tobytes(), np.array([190], np.uint32).tobytes()
    return [(FrameSpec("items", "int32", (190,)), items), (FrameSpec("item_lengths", "uint32", (1,)), length)]


def to_truncate(*frames: tuple[FrameSpec, bytes]) -> Work:
    specs, data = zip((FrameSpec("query", frames[0][0].dtype, (0,)), b""), *frames, strict=True)
    return SCORE.open(Score(1, [*specs], labels=[1], truncation="left"), [*data])


LONG = msgspec.structs.replace(CAN, context=200, text=True)


def test_rows_that_are_to_be_truncated_are_cut_to_what_a_smaller_budget_takes_when_they_come_back() -> None:
    pool = Pool()
    pool.worker("a", can=LONG)
    pool.submit(pool.client(), 1, to_truncate(*long_row()))
    assert len(pool.batches) == 1, "it is begun whole"
    bye(pool, b"a")
    pool.worker("b", can=LONG)
    pool.finish_all()
    answer = results(pool.sent)[1]
    assert (answer.truncated, answer.usage.tokens) == (1, 100)


@pytest.mark.parametrize("what", ["running", "text"])
def test_what_is_to_be_truncated_and_cannot_be_any_more_is_sent_again(what: str) -> None:
    pool = Pool()
    client = pool.client()
    for name in ("a", "b"):
        pool.worker(name, can=LONG)
    content = to_truncate(*long_row())
    if what == "text":
        pool.submit(client, 8, work(2, 100))
        pool.submit(client, 9, work(2, 100))
        content = to_truncate((FrameSpec("items", "utf8", (190,)), b"x" * 190), long_row()[1])
    sent = pool.submit(client, 1, content)
    if what == "text":
        [task] = texts(sent)
        assert isinstance(task.message, Tokenize) and task.message.longest == 200
        specs, frames = zip(*long_row(), strict=True)
        pool.do(ev.TextTokenized(0, task.link, task.message.task, [*specs], [*frames]))
    else:
        pool.submit(client, 9, work(2, 100))
    bye(pool, b"b")
    failure = failures(pool.sent)[1]
    assert (failure.code, failure.field, failure.limit, failure.retry_after_ms) == ("busy", "items", "100", 100)
    assert not {8, 9} & failures(pool.sent).keys()
    again = pool.submit(client, 1, content)
    assert not failures(again)
    if what == "text":
        assert [task.message.longest for task in texts(again) if isinstance(task.message, Tokenize)] == [100]


def test_a_worker_that_was_halved_under_another_coordinator_brings_that_along() -> None:
    pool = Pool()
    pool.worker("early")
    pool.worker("halved", can=halved(CAN, 2))
    group = pool.machine.core.groups["g"]
    assert group.halvings == 2
    assert group.capabilities == halved(CAN, 2)
    pool.worker("late", can=CAN)
    assert pool.machine.core.groups["g"].workers["late"].capabilities == halved(CAN, 2)


def test_a_worker_that_is_refused_halves_nothing() -> None:
    pool = Pool()
    client = pool.client()
    pool.worker("a")
    pool.submit(client, 1, work(1, 90))
    pool.worker("halved", can=halved(msgspec.structs.replace(CAN, vocab=5), MOST_HALVINGS))
    group = pool.machine.core.groups["g"]
    assert [worker.name for worker in group.workers.values()] == ["a"]
    assert (group.halvings, group.capabilities) == (0, CAN)
    assert 1 in results(pool.finish_all())


def test_any_other_end_halves_nothing() -> None:
    pool = Pool()
    pool.worker("a")
    pool.submit(pool.client(), 1, work(8, 10))
    bye(pool, b"a", memory=False)
    group = pool.machine.core.groups["g"]
    assert (group.halvings, group.suspects.size) == (0, 1)


# --- sequences ------------------------------------------------------------------------------------------------------------


def started(pool: GeneratingPool) -> list[StartGeneration]:
    return [one.message for one in pool.tasks() if isinstance(one.message, StartGeneration)]


def starved(pool: GeneratingPool, link: bytes) -> None:
    pool.do(ev.WorkerSaid(0, link, Exiting("OutOfMemoryError", True, False, True)))


def test_sequences_go_on_elsewhere_after_a_while_and_fewer_at_a_time() -> None:
    pool = GeneratingPool()
    link = pool.worker("a", can=GENERATING)
    pool.submit(pool.client(), 1, generate(*[3] * 8))
    pool.step(link, (pool.tasks()[0], 0, 0, [7], ""))
    for name, after_s, has in (("b", 0.5, [1, 0, 0, 0]), ("c", 1.0, [1, 0]), ("d", 2.0, [1])):
        starved(pool, link)
        begun = len(pool.tasks())
        link = pool.worker(name, can=GENERATING)
        pool.wait(after_s - 0.01)
        assert len(pool.tasks()) == begun, "too soon"
        pool.wait(0.3)
        assert [one.at for one in started(pool)[begun:]] == has
    group = pool.machine.core.groups["g"]
    assert (group.halvings, group.trial, group.suspects.size) == (3, None, 0)


def test_a_sequence_for_which_memory_runs_out_whenever_it_runs_alone_is_poisoned_with_its_sizes() -> None:
    pool = GeneratingPool()
    client = pool.client()
    pool.submit(client, 1, generate(5, max_new_tokens=20))
    for i, after_s in enumerate((0.5, 1.0, 2.0, 0.0)):
        link = pool.worker(f"a{i}", can=GENERATING)
        assert len(pool.tasks()) == i + 1
        pool.step(link, (pool.tasks()[-1], 0, i, [7], ""))
        starved(pool, link)
        pool.wait(after_s + 0.3)
    failure = failures(pool.sent)[1]
    assert (failure.code, len(failure.evidence)) == ("poisoned", 3)
    assert failure.message == (
        "workers died 3 times while this request ran alone: 1 sequences after prompts of up to 5 tokens, with up to 4 of 20"
        " tokens; a worker is given 4 with 100 tokens at once"
    )
    assert pool.machine.core.groups["g"].halvings == 1, "others are given less only once"
    pool.worker("b", can=GENERATING)
    pool.submit(client, 2, generate(3, max_new_tokens=1))
    pool.wait(3.0)
    pool.step(b"b", (pool.tasks()[-1], 0, 0, [7], "length"))
    assert outputs(pool.sent).keys() == {2}


def test_the_longest_sequence_of_an_engine_that_generates_stays_while_its_budgets_are_halved() -> None:
    can = halved(GENERATING, MOST_HALVINGS)
    assert (can.context, can.inflight_tokens, can.inflight_rows) == (100, 100, 1)
    assert impossible(can) == ""
    paged = halved(msgspec.structs.replace(GENERATING, page=64, inflight_tokens=640, batch_tokens=640), 4)
    assert (paged.context, paged.inflight_tokens) == (100, 128)
