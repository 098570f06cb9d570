"""Promises about batches: whole, in order, within budget, never an idle worker while work waits."""

from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.operations.base import Work
from enginepool.coordinator.scheduling.cost_model import ForwardCostModel
from enginepool.protocol.messages import Batch, Capabilities, StatusReport
from tests.core.machines import CAN, Pool, Sent, config, results, work
from tests.core.test_packed_batches import shared


def rows(sent: Sent) -> list[int]:
    assert isinstance(sent.message, Batch)
    return [part.frames[-1].shape[0] for part in sent.message.parts]


def test_an_idle_worker_gets_work_at_once() -> None:
    pool = Pool()
    pool.worker()
    client = pool.client()
    sent = pool.submit(client, 1, work(3))
    assert [rows(s) for s in sent] == [[3]]


def test_followers_of_other_callers_fill_what_is_left() -> None:
    pool = Pool()
    a, b = pool.client(), pool.client()
    pool.submit(a, 1, work(3))
    pool.submit(b, 1, work(2))
    pool.submit(a, 2, work(3))
    pool.submit(b, 2, work(1))
    pool.worker()
    # 8 rows to a batch, in turn: three of a, two of b and its next one; three more of a would be nine.
    assert [rows(s) for s in pool.batches] == [[3, 2, 1], [3]]


def test_other_signatures_do_not_share_a_batch() -> None:
    can = CAN.__class__("classifier", 1000, 100, 100, 8, 200, 16, labels=2, hidden=4)
    pool = Pool()
    client = pool.client()
    pool.submit(client, 1, work(1, labels=()))
    pool.submit(client, 2, work(1, labels=(), hidden=True))
    pool.submit(client, 3, work(1, labels=()))
    pool.worker(can=can)
    assert [rows(s) for s in pool.batches] == [[1, 1], [1]]
    hidden = [s.message.parts[0].hidden for s in pool.batches if isinstance(s.message, Batch)]
    assert hidden == [False, True]


@pytest.mark.parametrize(
    ("before", "head", "sent"),
    [
        ((6, 11), (6, 11), []),
        ((6, 11), (6, 10), [[6]]),
        ((7, 8), (1, 60), [[1]]),
        ((6, 11), (11, 10), [[6]]),
        ((6, 11), (8, 12), []),
    ],
    ids=["as large", "fewer tokens", "fewer rows", "cut", "larger"],
)
def test_a_new_head_is_sent_where_the_one_before_found_no_room(
    before: tuple[int, int], head: tuple[int, int], sent: list[list[int]]
) -> None:
    pool = Pool()
    pool.worker()
    client = pool.client()
    for number in range(2):
        pool.submit(client, number, work(5, 14))
    assert pool.submit(client, 2, work(*before)) == [], "60 tokens and 6 rows are left"
    assert [rows(s) for s in pool.submit(client, 3, work(*head), priority=1)] == sent


def test_a_request_that_fits_a_batch_is_never_cut() -> None:
    pool = Pool()
    client = pool.client()
    pool.worker()
    pool.submit(client, 1, work(5))
    pool.submit(client, 2, work(7))
    # 5 rows are in flight and 11 are free: request 2 fits as a whole.
    assert [rows(s) for s in pool.batches] == [[5], [7]]
    pool.submit(client, 3, work(5))
    assert len(pool.batches) == 2, "4 rows are free: request 3 waits instead of being cut"
    pool.finish(pool.batches[0])
    assert [rows(s) for s in pool.batches] == [[7], [5]]


def test_no_request_overtakes_a_head_that_does_not_fit_yet() -> None:
    pool = Pool()
    client = pool.client()
    pool.worker()
    pool.submit(client, 1, work(8))
    pool.submit(client, 2, work(5))
    pool.submit(client, 3, work(8))
    pool.submit(client, 4, work(1))
    assert [rows(s) for s in pool.batches] == [[8], [5]]
    pool.finish(pool.batches[1])
    assert [rows(s) for s in pool.batches] == [[8], [8]]


def test_a_large_request_is_cut_in_row_order_and_put_together_again() -> None:
    pool = Pool()
    client = pool.client()
    pool.worker("a")
    pool.worker("b")
    sent = pool.submit(client, 1, work(21, 10))
    assert [rows(s) for s in sent] == [[7], [7], [7]], "as even as can be: one for each worker, then the last next to the first"
    answers: list[Sent] = []
    while pool.batches:
        answers += [s for s in pool.finish(pool.batches[-1]) if 1 in results([s])]
    (answer,) = answers
    assert results(answers)[1].forwards == [1, 1, 1]
    scores = np.frombuffer(answer.frames[0], np.float32).reshape(21, 2)
    assert scores[:, 0].tolist() == [i * 10 for i in range(21)]


@given(rows=st.integers(9, 80), length=st.integers(1, 30))
def test_a_large_request_is_cut_into_as_few_batches_as_hold_it_and_none_is_small(rows: int, length: int) -> None:
    pool = Pool()
    pool.worker()
    pool.submit(pool.client(), 1, work(rows, length))
    pool.finish_all()
    (answer,) = results(pool.sent).values()
    most = min(CAN.batch_rows, CAN.batch_tokens // length)
    assert len(answer.forwards) == -(-rows // most)
    sizes = [s.message.parts[0].frames[-1].shape[0] for s in pool.sent if isinstance(s.message, Batch)]
    assert sum(sizes) == rows
    assert max(sizes) - min(sizes) <= 1


def test_a_row_over_the_batch_budget_runs_alone() -> None:
    can = CAN.__class__("causal", 1000, 150, 100, 8, 200, 16)
    pool = Pool()
    pool.worker(can=can)
    client = pool.client()
    pool.submit(client, 1, work(3, 120))
    assert [rows(s) for s in pool.batches] == [[1]]
    pool.finish_all()
    assert list(results(pool.sent)) == [1]


def test_batches_of_several_requests_keep_the_pace_of_their_worker() -> None:
    pool = Pool()
    client = pool.client()
    for request in range(1, 8):
        pool.submit(client, request, work(1, 20))
    pool.submit(client, 8, work(8, 11))
    pool.worker(can=msgspec.structs.replace(CAN, pace=45))
    # Two requests and the half of a third are 50 tokens. With two batches inside there is room up to twice 45.
    assert [rows(s) for s in pool.batches] == [[1, 1], [1, 1]]
    pool.finish(pool.batches[0])
    assert [rows(s) for s in pool.batches] == [[1, 1], [1, 1]]
    pool.finish(pool.batches[0])
    pool.wait(0.1)
    assert [rows(s) for s in pool.batches] == [[1, 1], [1]], "the eighth request does not join the seventh"
    pool.finish(pool.batches[0])
    assert [rows(s) for s in pool.batches] == [[1], [8]], "a request of more than the pace stays whole"


def test_no_forward_takes_longer_than_two_at_the_pace_unless_one_row_does() -> None:
    pool = Pool()
    client = pool.client()
    pool.submit(client, 1, work(4, 20))
    pool.submit(client, 2, work(1, 90))
    pool.worker(can=msgspec.structs.replace(CAN, pace=30))
    assert [rows(s) for s in pool.batches] == [[2], [2]], "80 tokens are two forwards of 40; 60 are the most"
    pool.finish(pool.batches[0])
    assert [rows(s) for s in pool.batches] == [[2], [1]]


def test_half_of_the_last_follower_may_be_over_the_pace() -> None:
    pool = Pool()
    client = pool.client()
    for request in range(1, 5):
        pool.submit(client, request, work(1, 20))
    pool.worker(can=msgspec.structs.replace(CAN, pace=50))
    pool.wait(0.1)
    assert [rows(s) for s in pool.batches] == [[1, 1, 1], [1]]


def test_followers_of_a_lower_priority_fill_a_short_forward() -> None:
    pool = Pool()
    client = pool.client()
    for request in range(1, 8):
        pool.submit(client, request, work(1, 15), priority=5 if request > 5 else 0)
    pool.worker(can=msgspec.structs.replace(CAN, pace=90))
    pool.wait(0.1)
    assert by_priority(pool) == [(5, [1, 1]), (0, [1, 1])]


def test_batches_of_a_lower_priority_are_short_while_a_higher_one_comes() -> None:
    pool = Pool()
    client = pool.client()
    for request in range(1, 15):
        pool.submit(client, request, work(1, 15))
    pool.submit(client, 15, work(1, 15), priority=5)
    pool.worker(can=msgspec.structs.replace(CAN, pace=90))
    assert by_priority(pool) == [(5, [1, 1]), (0, [1, 1])]
    pool.finish(pool.batches[0], run_s=0.0083)
    assert by_priority(pool) == [(0, [1, 1]), (0, [1, 1])]
    pool.wait(1.1)
    pool.finish(pool.batches[0], run_s=0.0083)
    assert by_priority(pool) == [(0, [1, 1]), (0, [1] * 6)], "none came for a second"


def test_a_short_forward_is_no_shorter_than_what_every_forward_costs() -> None:
    """Else the engine would do little else, and the higher priority would gain little: packed forwards have no CUDA graphs."""
    for fixed_s, share in ((0.0, 1 / 3), (0.003, 1 / 3), (0.012, 0.9)):
        model, now = ForwardCostModel(1000), 0.0
        assert model.short == 333
        for i in range(500):
            tokens = 200 + 600 * (i % 2)
            now += (seconds := fixed_s + tokens * (0.025 - fixed_s) / 1000)
            model.done(now, 2 * seconds, tokens, 1, fits=True)
        assert abs(model.short / model.tokens - share) < 0.1


def test_a_higher_priority_has_the_whole_pace_next_to_lower_ones() -> None:
    pool = Pool()
    client = pool.client()
    for request in range(1, 13):
        pool.submit(client, request, work(1, 15), priority=5 if request > 3 else 0)
    pool.worker(can=msgspec.structs.replace(CAN, pace=90))
    assert by_priority(pool) == [(5, [1] * 6), (5, [1] * 3)]


def test_where_many_wait_a_forward_is_as_long_as_two() -> None:
    def sizes(waiting: int, workers: int = 1, priority: int = 0) -> list[int]:
        pool = Pool()
        client = pool.client()
        for request in range(1, waiting + 1):
            pool.submit(client, request, work(1, 15))
        pool.submit(client, waiting + 1, work(1, 15), priority=priority)
        for worker in range(workers):
            pool.worker(str(worker), can=msgspec.structs.replace(CAN, pace=30))
        return [len(rows(s)) for s in pool.batches]

    assert sizes(20) == [4, 4], "120 tokens wait and more"
    assert sizes(6) == [2, 2], "less than that"
    assert sizes(20, workers=2) == [4, 4, 2, 2], "less for each of two"
    assert sizes(20, priority=5) == [1, 1], "a higher priority came"


def by_priority(pool: Pool) -> list[tuple[int, list[int]]]:
    return [(s.message.priority, rows(s)) for s in pool.batches if isinstance(s.message, Batch)]


@pytest.mark.parametrize("forwards", [2, 3])
def test_as_many_batches_are_in_flight_as_the_group_says_and_what_comes_meanwhile_joins_one(forwards: int) -> None:
    pool = Pool(config(forwards_in_flight=forwards))
    client = pool.client()
    pool.worker(can=msgspec.structs.replace(CAN, pace=40))
    for request in range(1, forwards + 4):
        pool.submit(client, request, work(1, 15))
        pool.wait(0.1)
    assert [rows(s) for s in pool.batches] == [[1]] * forwards
    pool.finish(pool.batches[0])
    assert [rows(s) for s in pool.batches] == [[1]] * (forwards - 1) + [[1, 1, 1]]


def test_what_is_less_than_a_forward_waits_for_more_while_another_batch_runs() -> None:
    pool = Pool()
    client = pool.client()
    pool.worker(can=msgspec.structs.replace(CAN, pace=100))
    for request in range(1, 5):
        pool.submit(client, request, work(1, 15))
    assert [rows(s) for s in pool.batches] == [[1]], "of 25 ms of a forward, the first takes 4"
    pool.wait(0.002)
    assert [rows(s) for s in pool.batches] == [[1], [1, 1, 1]], "the engine has them before it is done with the first"
    pool.finish(pool.batches[0])
    for request in range(5, 11):
        pool.submit(client, request, work(1, 15))
    assert [rows(s) for s in pool.batches] == [[1, 1, 1]]
    pool.submit(client, 11, work(1, 15))
    assert [rows(s) for s in pool.batches] == [[1, 1, 1], [1] * 6], "a whole forward waits for nothing"


def test_what_waits_for_more_leaves_when_the_batch_before_it_is_done_early() -> None:
    pool = Pool()
    client = pool.client()
    pool.worker(can=msgspec.structs.replace(CAN, pace=100))
    pool.submit(client, 1, work(1, 90))
    pool.submit(client, 2, work(1, 15))
    assert [rows(s) for s in pool.batches] == [[1]]
    pool.finish(pool.batches[0])
    assert [rows(s) for s in pool.batches] == [[1]]


def test_a_pace_may_differ_between_workers() -> None:
    pool = Pool()
    client = pool.client()
    pool.worker("a", can=msgspec.structs.replace(CAN, pace=40))
    pool.worker("b", can=msgspec.structs.replace(CAN, pace=30))
    assert len({s.link for s in pool.submit(client, 1, work(1, 15)) + pool.submit(client, 2, work(1, 15))}) == 2


#: a worker as one with a GPU says that it is: 10,000 tokens, of rows of any length, in 25 ms
FAST = msgspec.structs.replace(
    CAN, context=8_000, batch_tokens=16_000, batch_rows=400, inflight_tokens=32_000, inflight_rows=800, pace=10_000
)
TOKEN_S = 0.025 / 10_000


class Busy:
    """A pool of one worker, before which always more waits than it can do, and whose forwards take what `seconds` says of
    their tokens and rows."""

    def __init__(self, can: Capabilities, content: Work, seconds: Callable[[int, int], float], waiting: int) -> None:
        self.pool = Pool()
        self.client = self.pool.client()
        self.content = content
        self.seconds = seconds
        self.id = 0
        #: seconds of the last forward
        self.last = 0.0
        self.fill(waiting)
        self.pool.worker(can=can)

    def fill(self, waiting: int) -> None:
        """Submit until so many requests wait."""
        while self.pool.machine.core.groups["g"].waiting < waiting:
            self.id += 1
            self.pool.submit(self.client, self.id, self.content)

    def run(self, batches: int, *, waiting: int) -> None:
        """So many batches, one after the other, two of them always at hand."""
        pool = self.pool
        for _ in range(batches):
            self.fill(waiting)
            batch = next(iter(pool.machine.core.groups["g"].workers["w"].batches.values()))
            self.last = self.seconds(batch.cost, batch.rows)
            pool.now += self.last
            pool.finish(pool.batches[0], run_s=self.last + 0.01)

    def rows(self) -> int:
        """Rows of the batch that was sent last."""
        return sum(rows(self.pool.batches[-1]))


def test_a_worker_that_turns_out_half_as_fast_gets_batches_half_as_large() -> None:
    can = msgspec.structs.replace(FAST, pace=4_000)
    busy = Busy(can, work(2, 100), lambda tokens, _: 2 * tokens * 0.025 / 4_000, waiting=120)
    assert busy.rows() == 80, "two forwards in one: so many wait"
    busy.run(150, waiting=120)
    assert 36 <= busy.rows() <= 42
    assert 0.045 <= busy.last <= 0.053


def test_a_worker_that_turns_out_twice_as_fast_gets_batches_twice_as_large() -> None:
    can = msgspec.structs.replace(FAST, pace=2_000)
    busy = Busy(can, work(2, 100), lambda tokens, _: 0.5 * tokens * 0.025 / 2_000, waiting=120)
    assert busy.rows() == 40
    busy.run(150, waiting=120)
    assert 74 <= busy.rows() <= 84


def short_rows_cost(tokens: int, rows: int) -> float:
    """0.5 ms of the host for each row, besides the time of its tokens."""
    return tokens * TOKEN_S + rows * 0.0005


def test_many_short_rows_make_smaller_batches_once_rows_turn_out_to_cost() -> None:
    busy = Busy(FAST, work(5, 20), short_rows_cost, waiting=200)
    assert busy.rows() == 400, "8,000 tokens, less than the pace, and all the rows that may be"
    busy.run(60, waiting=200)
    assert 80 <= busy.rows() <= 95, "50 ms of 0.55 ms a row"
    assert busy.last <= 0.052


def test_a_request_of_many_short_rows_is_cut_once_rows_turn_out_to_cost() -> None:
    busy = Busy(FAST, work(200, 20), short_rows_cost, waiting=10)
    assert busy.rows() == 400
    busy.run(60, waiting=10)
    assert busy.rows() in (66, 67), "200 rows, 91 of them in 50 ms: three batches"
    assert busy.last <= 0.04


def test_packed_rows_are_weighed_as_well() -> None:
    can = msgspec.structs.replace(FAST, max_item=64)
    busy = Busy(can, shared(40, *[10] * 10), short_rows_cost, waiting=100)
    assert busy.rows() == 400
    busy.run(60, waiting=100)
    assert busy.rows() in (80, 90), "whole requests of 10 rows, each row 0.53 ms"
    pool = busy.pool
    pool.finish_all()
    pool.submit(busy.client, 10**6, shared(40, *[10] * 300))
    sizes = [sum(rows(s)) for s in pool.batches]
    assert sizes == [75, 75], "the first two of four, as it is cut by what its rows cost"


def test_rows_that_came_one_at_a_time_do_not_make_batches_small_when_many_come() -> None:
    """A forward takes 12 ms with any content. That is neither the cost of a row nor of its tokens."""
    busy = Busy(FAST, work(1, 200), lambda tokens, _: 0.012 + tokens * TOKEN_S, waiting=2)
    for _ in range(300):
        busy.run(1, waiting=0)
        busy.id += 1
        busy.pool.submit(busy.client, busy.id, busy.content)
        assert busy.rows() == 1
    busy.fill(120)
    busy.run(2, waiting=120)
    assert busy.rows() >= 30, "5 would take 25 ms if it were what a row costs"


def test_a_batch_that_tells_nothing_of_its_forward_changes_no_pace() -> None:
    can = msgspec.structs.replace(FAST, cached_query=100, cached_tokens=16_000)

    def after(content: Work, **how: Any) -> int:
        pool = Pool()
        client = pool.client()
        pool.worker(can=can)
        pool.submit(client, 1, content)
        for id_ in range(2, 20):
            pool.submit(client, id_, content)
            pool.now += 0.5
            pool.finish(pool.batches[0], run_s=1.0, **how)
        pace = pool.machine.core.groups["g"].workers["w"].pace
        assert pace is not None
        return pace.tokens

    plain = work(10, 200)
    assert after(plain) < 10_000 / 2
    assert after(plain, forwards=2) == 10_000
    assert after(plain, error="refused") == 10_000
    assert after(shared(100, *[10] * 20)) == 10_000, "its query was computed ahead, or was not"
    assert after(shared(99, *[10] * 20)) < 10_000 / 2


def test_what_was_learnt_is_kept_while_the_worker_is_and_not_for_its_successor() -> None:
    busy = Busy(FAST, work(5, 20), short_rows_cost, waiting=200)
    busy.run(60, waiting=200)
    pool = busy.pool
    learnt = pool.machine.core.groups["g"].workers["w"].pace
    pool.worker(can=FAST)
    assert learnt is not None and pool.machine.core.groups["g"].workers["w"].pace is learnt
    told = pool.do(ev.StatusAsked(0, busy.client, 1))[0].message
    assert isinstance(told, StatusReport)
    (worker,) = told.groups[0].workers
    assert (worker.pace, worker.forward_row_tokens) == (learnt.tokens, round(learnt.row))
    assert worker.forward_row_tokens > 100, "0.5 ms are 200 tokens of 2.5 us"
    pool.worker("successor", can=FAST)
    fresh = pool.machine.core.groups["g"].workers["successor"].pace
    assert fresh is not None and (fresh.tokens, fresh.row) == (10_000, 0.0)


def test_work_goes_to_the_least_loaded_worker() -> None:
    pool = Pool()
    pool.worker("a")
    pool.worker("b")
    client = pool.client()
    links = [pool.submit(client, i, work(rows, 10))[0].link for i, rows in enumerate([3, 1, 1, 2, 1, 1], start=1)]
    assert links == [b"a", b"b", b"b", b"b", b"a", b"b"], "of two equals the one that changed longest ago"


def test_a_higher_priority_is_dispatched_next() -> None:
    pool = Pool()
    client = pool.client()
    pool.worker()
    for i in range(1, 10):
        pool.submit(client, i, work(8))
    assert len(pool.batches) == 2
    pool.submit(client, 99, work(8), priority=5)
    pool.finish(pool.batches[0])
    message = pool.batches[-1].message
    assert isinstance(message, Batch)
    assert message.priority == 5


def test_strict_order_is_priority_then_arrival() -> None:
    pool = Pool()
    client = pool.client()
    for i, priority in enumerate([0, -3, 4, 0, 4, 1000, -1000], start=1):
        pool.now += 1
        pool.submit(client, i, work(8, 1, first=i), priority=priority)
    pool.worker()
    order: list[int] = []
    while pool.batches:
        order += results(pool.finish(pool.batches[0]))
    assert order == [6, 3, 5, 1, 4, 2, 7]


def test_ageing_lets_nothing_wait_without_end() -> None:
    """One level weighs `ageing_s` seconds: what comes 5 s later with priority 10 does not pass request 3."""
    pool = Pool(config(ageing_s=0.5))
    client = pool.client()
    pool.worker()
    pool.submit(client, 1, work(8, 12))
    pool.submit(client, 2, work(8, 12))
    pool.submit(client, 3, work(8, 12))
    assert len(pool.batches) == 2
    id_ = 10
    waited = 0.0
    while 3 not in results(pool.sent):
        for _ in range(2):
            id_ += 1
            pool.submit(client, id_, work(8, 12), priority=10)
        pool.wait(0.25)
        waited += 0.25
        pool.finish(pool.batches[0])
        assert waited < 12, "request 3 is starved"
    assert waited > 5


def test_strict_priority_does_starve() -> None:
    """The counterpart of the test above: without ageing the same stream keeps request 3 waiting."""
    pool = Pool(config(ageing_s=None))
    client = pool.client()
    pool.worker()
    for i in (1, 2, 3):
        pool.submit(client, i, work(8, 12))
    for i in range(10, 60):
        pool.submit(client, i, work(8, 12), priority=10)
        pool.wait(0.25)
        pool.finish(pool.batches[0])
    assert 3 not in results(pool.sent)


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 40), st.integers(-5, 5)), min_size=1, max_size=25),
    st.integers(1, 3),
    st.randoms(use_true_random=False),
)
def test_every_split_and_merge_gives_each_row_its_own_score(
    requests: list[tuple[int, int, int]], workers: int, random: Random
) -> None:
    """For all sizes and priorities: one answer for each request, rows in order, budgets kept (asserted by `check`)."""
    pool = Pool(ageing_s=1.0)
    client = pool.client()
    for i in range(workers):
        pool.worker(f"w{i}")
    for i, (n, length, priority) in enumerate(requests, start=1):
        pool.submit(client, i, work(n, length, first=i), priority=priority)
    got: dict[int, npt.NDArray[np.float32]] = {}
    while pool.batches:
        batch = random.choice(pool.batches)
        for sent in pool.finish(batch):
            for id_, result in results([sent]).items():
                assert id_ not in got
                got[id_] = np.frombuffer(sent.frames[0], np.float32).reshape(result.usage.items, 2)
    assert sorted(got) == list(range(1, len(requests) + 1))
    for id_, (n, length, _) in enumerate(requests, start=1):
        want = [float((id_ + row * length) % 1000) for row in range(n)]
        assert got[id_][:, 0].tolist() == want
        assert got[id_][:, 1].tolist() == [float(length)] * n


# A worker that computes a query of 20 tokens or more once: 100 tokens to a batch, 200 where a request has such a query.
CACHING = msgspec.structs.replace(CAN, inflight_tokens=400, cached_query=20, cached_tokens=200)


def test_a_request_whose_query_is_computed_once_makes_a_larger_batch() -> None:
    pool = Pool()
    client = pool.client()
    pool.worker(can=CACHING)
    pool.submit(client, 1, shared(20, *[5] * 8))
    pool.submit(client, 2, shared(19, *[5] * 8))
    # 8 x 25 tokens are one batch; the query of 19 is not kept: 8 x 24 are two.
    assert [rows(s) for s in pool.batches] == [[8], [4]]
    assert pool.machine.core.groups["g"].workers["w"].cost == 200 + 96


def test_such_a_request_is_cut_where_all_its_rows_in_full_no_longer_fit() -> None:
    pool = Pool()
    client = pool.client()
    pool.worker(can=CACHING)
    pool.submit(client, 1, shared(45, *[5] * 8))
    assert [rows(s) for s in pool.batches] == [[4], [4]], "no more than 200 of 8 x 50 tokens in a batch, 400 in flight"


def test_no_request_joins_a_batch_that_is_larger_than_others_may_be() -> None:
    pool = Pool()
    client = pool.client()
    pool.submit(client, 1, shared(25, *[5] * 4))
    pool.submit(client, 2, shared(25, *[5] * 2))
    pool.worker(can=CACHING)
    assert [rows(s) for s in pool.batches] == [[4], [2]]


def test_room_for_queries_that_are_gone_is_not_used_for_more_batches() -> None:
    pool = Pool()
    client = pool.client()
    pool.worker(can=CACHING)
    for request in range(1, 5):
        pool.submit(client, request, work(4, 20))
    assert [rows(s) for s in pool.batches] == [[4], [4]], "400 tokens have room, but two batches are enough at hand"
