"""Promises about plain and packed batches of one worker: what can be packed, when it is, in which order, and at what cost."""

from itertools import count
from random import Random
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.operations.base import Work
from enginepool.coordinator.operations.limits import limits_of
from enginepool.coordinator.operations.score import SCORE, ScoreWork
from enginepool.coordinator.requests.fitting import refusal
from enginepool.coordinator.scheduling.cost_model import ForwardCostModel
from enginepool.coordinator.scheduling.packing_choice import TURN
from enginepool.protocol import packing
from enginepool.protocol.messages import (
    Batch,
    Capabilities,
    FrameSpec,
    GroupLimits,
    Idle,
    Ready,
    Result,
    Score,
    StatusReport,
    Tokenize,
)
from enginepool.workers.codec import decode_batch, encode_ids, encode_outcome
from enginepool.workers.engine import RowBatch
from enginepool.workers.engine_settings import EngineSettings
from enginepool.workers.packed import packed_cost
from enginepool.workers.sim.engine import SimEngine
from enginepool.workers.sim.scores import expected_scores
from enginepool.workers.texts import TextIds
from tests.core.machines import CAN, Pool, Sent, config, results, text
from tests.core.test_sim_engine import work as run
from tests.sim.packing_bounds import BOUNDS, Bounds, bounded

PACKED = msgspec.structs.replace(CAN, max_item=50)


def shared(query: int, *items: int, first: int = 0, labels: tuple[int, ...] = (1, 2), **settings: Any) -> ScoreWork:
    """A query of so many ids and items of so many each; the query's ids are all `first`, the items' count up from it."""
    ids = (np.arange(sum(items), dtype=np.int32) + first) % 1000
    head = np.full(query, first, np.int32)
    specs = [
        FrameSpec("query", "int32", (query,)),
        FrameSpec("items", "int32", (len(ids),)),
        FrameSpec("item_lengths", "uint32", (len(items),)),
    ]
    score = Score(1, specs, labels=list(labels), **settings)
    return SCORE.open(score, [head.tobytes(), ids.tobytes(), np.array(items, np.uint32).tobytes()])


def paired(*rows: tuple[int, int]) -> ScoreWork:
    """A query of its own for each item: (its length, the item's)."""
    queries, items = zip(*rows, strict=True)
    specs = [
        FrameSpec("query", "int32", (sum(queries),)),
        FrameSpec("query_lengths", "uint32", (len(rows),)),
        FrameSpec("items", "int32", (sum(items),)),
        FrameSpec("item_lengths", "uint32", (len(rows),)),
    ]
    lengths = [np.array(queries, np.uint32).tobytes(), np.array(items, np.uint32).tobytes()]
    frames = [np.ones(sum(queries), np.int32).tobytes(), lengths[0], np.ones(sum(items), np.int32).tobytes(), lengths[1]]
    return SCORE.open(Score(1, specs, labels=[1, 2]), frames)


def unpackable(*lengths: int) -> ScoreWork:
    """Rows of these lengths that each have labels of their own."""
    ids = np.ones(sum(lengths), np.int32)
    labels = np.tile(np.array([1, 2], np.int32), (len(lengths), 1))
    specs = [
        FrameSpec("query", "int32", (0,)),
        FrameSpec("items", "int32", ids.shape),
        FrameSpec("item_lengths", "uint32", (len(lengths),)),
        FrameSpec("labels", "int32", labels.shape),
    ]
    return SCORE.open(Score(1, specs), [b"", ids.tobytes(), np.array(lengths, np.uint32).tobytes(), labels.tobytes()])


@pytest.fixture
def behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries are never so short that rows are placed whole."""
    monkeypatch.setattr(packing, "WHOLE_QUERY", 0)


def sizes(**changes: Any) -> Capabilities:
    return msgspec.structs.replace(CAN, **changes)


CAUSAL = st.builds(
    sizes,
    context=st.integers(4, 12),
    page=st.sampled_from([1, 4]),
    inflight_tokens=st.integers(8, 12),
    batch_tokens=st.just(8),
    hidden=st.sampled_from([0, 4]),
    text=st.booleans(),
)
WORK = st.one_of(
    st.builds(
        lambda query, items, **settings: shared(query, *items, first=900, **settings),  # type: ignore[arg-type]
        st.integers(0, 6),
        st.lists(st.integers(1, 8), min_size=1, max_size=3),
        hidden=st.booleans(),
        item_first=st.booleans(),
        labels=st.sampled_from([(), (1, 2), (999,), (1000,)]),
    ),
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=3).map(lambda rows: paired(*rows)),
    st.just(text("a", ["b"])),
)


@given(WORK, CAUSAL, st.integers(0, 8), st.sampled_from(["causal", "classifier"]))
def test_a_request_within_the_limits_that_the_status_names_is_served_and_another_refused(
    work: ScoreWork, can: Capabilities, max_item: int, kind: Any
) -> None:
    can = msgspec.structs.replace(can, kind=kind, labels=2 if kind == "classifier" else 0, max_item=max_item)
    limits = limits_of(can, 1000)
    assert limits is not None
    within = (
        (work.max_label >= 0) == (limits.kind == "causal")
        and max(work.max_label, work.max_id) < limits.vocab
        and (work.text or work.longest <= limits.context)
        and work.part.hidden <= limits.hidden
        and work.text <= limits.text
    )
    assert (refusal(work, can) is None) == within


def test_the_status_names_the_limits_of_a_group_once_they_are_known() -> None:
    pool = Pool(config())
    client = pool.client()

    def limits() -> GroupLimits | None:
        (report,) = [s.message for s in pool.do(ev.StatusAsked(0, client, 1))]
        assert isinstance(report, StatusReport)
        return report.groups[0].limits

    assert limits() is None
    pool.worker("w", can=sizes(inflight_tokens=100, batch_tokens=100, page=8))
    assert limits() == GroupLimits("causal", 1000, 93, 500_000)


def rows(sent: Sent) -> list[int]:
    assert isinstance(sent.message, Batch)
    return [part.frames[-1].shape[0] for part in sent.message.parts]


def who(sent: list[Sent]) -> list[bytes]:
    return [s.link for s in sent if isinstance(s.message, Batch)]


def packs(sent: list[Sent]) -> list[bool]:
    """Of each batch, whether it is packed."""
    return [s.message.packed for s in sent if isinstance(s.message, Batch)]


def ready(**changes: Any) -> tuple[Pool, bytes]:
    """A pool of a worker that packs, and a client."""
    pool = Pool()
    pool.worker("w", can=msgspec.structs.replace(PACKED, **changes))
    return pool, pool.client()


# --- what is packed ----------------------------------------------------------------------------------------------------


def test_a_worker_that_does_not_pack_next_to_others_that_do_is_refused_by_that_and_not_by_its_budgets() -> None:
    pool, _ = ready()
    pool.worker("other", can=msgspec.structs.replace(CAN, batch_rows=CAN.batch_rows // 2))
    assert any("ready with max_item = 0; the group's other workers have 50" in line for line in pool.logged)


def test_one_worker_runs_what_can_be_packed_and_what_cannot() -> None:
    pool, client = ready(inflight_rows=100, inflight_tokens=1000)
    assert packs(pool.submit(client, 1, shared(10, 5, 5))) == [True]
    assert packs(pool.submit(client, 2, paired((3, 4)))) == [True]
    assert packs(pool.submit(client, 3, shared(10, 5, item_first=True))) == [True]
    assert packs(pool.submit(client, 4, shared(0, 5, 5))) == [True]
    assert packs(pool.submit(client, 5, paired((3, 0), (0, 4)))) == [True]
    assert packs(pool.submit(client, 6, shared(3, 0, 5))) == [False], "an empty item behind a query"
    assert packs(pool.submit(client, 7, unpackable(3, 4))) == [False], "labels of their own"
    pool.finish_all()
    assert sorted(results(pool.sent)) == [1, 2, 3, 4, 5, 6, 7]


def test_an_engine_that_does_not_pack_gets_plain_batches() -> None:
    pool = Pool()
    pool.worker()
    assert packs(pool.submit(pool.client(), 1, shared(10, 5, 5))) == [False]


@pytest.mark.usefixtures("behind")
@pytest.mark.parametrize(("query", "item", "packed"), [(40, 50, True), (40, 51, False), (48, 50, True), (49, 50, False)])
def test_the_limits_of_a_row_behind_a_query_are_exact(query: int, item: int, packed: bool) -> None:
    pool, client = ready()
    assert packs(pool.submit(client, 1, shared(query, item))) == [packed]


@pytest.mark.parametrize(
    ("content", "packed"),
    [
        (shared(20, 30), True),
        (shared(20, 31), False),
        (paired((20, 30), (1, 1)), True),
        (paired((1, 1), (20, 31)), False),
        (shared(20, 30, item_first=True), True),
        (shared(20, 31, item_first=True), False),
    ],
)
def test_the_limits_of_a_whole_row_are_exact(content: ScoreWork, packed: bool) -> None:
    """It is an item of 50 tokens at most."""
    pool, client = ready()
    assert packs(pool.submit(client, 1, content)) == [packed]
    pool, client = ready(max_item=100, context=52)
    assert packs(pool.submit(client, 1, content)) == [packed], "two delimiters, too"


def test_hidden_states_are_packed() -> None:
    pool, client = ready(kind="classifier", labels=2, hidden=4)
    assert packs(pool.submit(client, 1, shared(10, 5, labels=(), hidden=True))) == [True]


def test_requests_that_waited_for_the_first_worker_are_packed_once_it_is_ready() -> None:
    pool = Pool()
    client = pool.client()
    pool.submit(client, 1, shared(10, 5, 5))
    pool.submit(client, 2, unpackable(7))
    pool.worker(can=PACKED)
    assert sorted(packs(pool.batches)) == [False, True]


def test_no_batch_mixes_rows_that_are_packed_with_others() -> None:
    pool, client = ready()
    pool.worker("w", can=PACKED)
    for i in range(1, 9):
        pool.submit(client, i, shared(10, 5, first=i) if i % 2 else unpackable(15))
    pool.finish_all()
    assert sorted(results(pool.sent)) == list(range(1, 9))


def test_no_request_overtakes_a_head_that_does_not_fit() -> None:
    pool, client = ready()
    for i in range(1, 5):
        pool.submit(client, i, shared(40, 20, 20, first=i))
    assert pool.submit(client, 6, unpackable(2)) == []
    assert pool.submit(client, 7, shared(1, 1)) == []
    order: list[int] = []
    while pool.batches:
        order += results(pool.finish(pool.batches[0]))
    assert order[:4] == [1, 2, 3, 4]


@pytest.mark.usefixtures("behind")
def test_a_head_that_fits_packed_alone_is_sent_once_so_many_wait_that_it_is_packed() -> None:
    """25 tokens are free. It has 30 plain, as one alone is run, and 23 packed."""
    pool = Pool(config(forwards_in_flight=5))
    client, worker = pool.client(), paced(pool, inflight_tokens=200)
    learn(worker.pace, 0.001, 0.0003)
    learn(worker.packed_pace, 0.0115, 0.0001)
    pool.submit(client, 1, unpackable(95))
    pool.submit(client, 2, unpackable(80))
    assert packs(pool.submit(client, 3, shared(10, 5, 5))) == []
    assert packs([sent for id_ in range(4, 10) for sent in pool.submit(client, id_, shared(10, 5, 5))]) == [True]


def test_a_higher_priority_is_next_whether_it_is_packed_or_not() -> None:
    pool, client = ready()
    for i in range(1, 5):
        pool.submit(client, i, shared(40, 20, 20, first=i))
    pool.submit(client, 98, shared(40, 20, 20, first=98), priority=1)
    pool.submit(client, 99, unpackable(80), priority=2)
    order: list[int] = []
    while pool.batches:
        order += results(pool.finish(pool.batches[0]))
    assert order.index(99) < order.index(98) < order.index(3)


def test_a_suspect_runs_plain() -> None:
    """Where the packed batch was the cause, it has an answer then."""
    pool, client = ready()
    pool.submit(client, 1, shared(10, 5, 5))
    pool.worker("other", can=PACKED)
    pool.batches.clear()
    pool.do(ev.WorkerBroken(0, b"w", "dies"))
    assert packs(pool.batches) == [False]
    assert list(results(pool.finish_all())) == [1]


def answered(pool: Pool, sent: Sent, query: list[int], *items: list[int]) -> list[Sent]:
    """A worker has tokenized a text whose rows all begin with `query`."""
    assert isinstance(sent.message, Tokenize)
    answer, frames = encode_ids(sent.message.task, TextIds([query + item for item in items]), share=sent.message.share)
    return pool.do(ev.TextTokenized(0, sent.link, answer.task, answer.frames, frames))


@pytest.mark.usefixtures("behind")
@pytest.mark.parametrize("item_first", [False, True])
def test_text_is_packed_after_the_tokens_that_its_rows_begin_with(item_first: bool) -> None:
    pool, client = ready()
    content = text("a", ["b", "c", "d"])
    content = msgspec.structs.replace(content, part=msgspec.structs.replace(content.part, item_first=item_first))
    (asked_of,) = pool.submit(client, 1, content)
    (sent,) = answered(pool, asked_of, [1, 2, 3], [4], [5, 6], [7])
    assert isinstance(sent.message, Batch) and sent.message.packed
    assert [spec.shape for spec in sent.message.parts[0].frames] == [(3,), (4,), (3,)]
    assert not sent.message.parts[0].item_first
    assert pool.machine.core.groups["g"].workers["w"].cost == 3 + 1 + 4 + 3
    pool.finish_all()
    assert results(pool.sent)[1].usage.tokens == 3 * 3 + 4


def test_text_whose_rows_begin_with_different_tokens_is_packed_whole() -> None:
    pool, client = ready()
    (asked_of,) = pool.submit(client, 1, text("", ["b", "c"]))
    assert packs(answered(pool, asked_of, [], [4], [5, 6])) == [True]
    assert pool.machine.core.groups["g"].workers["w"].cost == 1 + 2 + 3


# --- batches and costs -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("behind")
def test_callers_with_the_same_query_share_it() -> None:
    """Five requests of 40 + 10 ids: plain, two fill a batch; packed, the query counts once."""
    pool = Pool()
    a, b = pool.client(), pool.client()
    for i in range(1, 6):
        pool.submit(a if i % 2 else b, i, shared(40, 10, first=7))
    pool.worker("packed", can=PACKED)
    (sent,) = pool.batches
    assert rows(sent) == [1, 1, 1, 1, 1]
    assert pool.machine.core.groups["g"].workers["packed"].cost == 40 + 1 + 5 * 11
    pool.finish_all()
    assert sorted(results(pool.sent)) == [1, 2, 3, 4, 5]


@pytest.mark.usefixtures("behind")
def test_callers_with_other_queries_share_a_batch_and_pay_for_each() -> None:
    pool = Pool()
    client = pool.client()
    for i, first in enumerate((1, 2, 1, 3), start=1):
        pool.submit(client, i, shared(20, 5, first=first))
    pool.worker("packed", can=PACKED)
    assert [rows(sent) for sent in pool.batches] == [[1, 1, 1, 1]]
    assert pool.machine.core.groups["g"].workers["packed"].cost == 3 * 27 + 6


def test_what_is_too_large_for_a_plain_batch_stays_together_packed() -> None:
    pool, client = ready()
    sent = pool.submit(client, 1, shared(40, *[6] * 8))
    assert [rows(s) for s in sent] == [[8]], "40 + 1 + 8 × 7 = 97 tokens; 368 plain"


def test_a_large_request_is_cut_where_the_sequences_of_a_batch_end() -> None:
    can = msgspec.structs.replace(PACKED, context=40, batch_tokens=80, batch_rows=20, inflight_tokens=400, inflight_rows=100)
    pool = Pool()
    client = pool.client()
    pool.worker("packed", can=can)
    pool.submit(client, 1, shared(20, *[8] * 10))
    # Sequences of 20 + 1 + 2 × 9 = 39 tokens, two of them in a batch at most: three batches, as even as can be.
    assert [rows(s) for s in pool.batches] == [[4], [3], [3]]
    answer = [s for s in pool.finish_all() if 1 in results([s])]
    assert np.frombuffer(answer[0].frames[0], np.float32).reshape(10, 2)[:, 0].tolist() == [8.0 * i for i in range(10)]


@pytest.mark.usefixtures("behind")
def test_a_row_that_its_page_makes_too_large_to_be_packed_is_run_plain() -> None:
    """Its sequence weighs up to a page more than its tokens: 15 here, besides two delimiters."""
    pool, client = ready(page=16, batch_tokens=100, inflight_tokens=100)
    assert packs(pool.submit(client, 1, shared(44, 40))) == [False]
    pool.finish_all()
    assert packs(pool.submit(client, 2, shared(43, 40))) == [True]
    pool.finish_all()
    assert sorted(results(pool.sent)) == [1, 2]


def test_workers_of_a_group_pack_all_or_none() -> None:
    pool = Pool()
    pool.worker("first", can=PACKED)
    pool.worker("unlike", can=CAN)
    assert list(pool.machine.core.groups["g"].workers) == ["first"]


def test_status_says_which_workers_pack() -> None:
    pool, client = ready()
    (report,) = [s.message for s in pool.do(ev.StatusAsked(0, client, 1))]
    assert [worker.packed for worker in report.groups[0].workers] == [True]  # type: ignore[union-attr]


def half_of_a_request_in_flight() -> tuple[Pool, bytes, bytes]:
    """Six of its twelve rows are with a worker that gets nothing more meanwhile."""
    pool = Pool(config(forwards_in_flight=1))
    client = pool.client()
    link = pool.worker("packed", can=msgspec.structs.replace(PACKED, inflight_tokens=300, pace=210))
    pool.submit(client, 1, shared(10, *[5] * 12))
    assert [rows(sent) for sent in pool.batches] == [[6]]
    return pool, client, link


@pytest.mark.usefixtures("behind")
def test_what_is_left_of_a_cut_request_joins_the_packed_batch_of_another() -> None:
    pool, client, _ = half_of_a_request_in_flight()
    pool.submit(client, 2, shared(10, 5, 5), priority=5)
    pool.finish_all()
    assert [s.message.usage.items for s in pool.sent if isinstance(s.message, Result)] == [2, 12]
    assert sum(group.counts.batches for group in pool.machine.core.groups.values()) == 2


def test_a_suspect_s_old_place_in_the_queue_ends_no_packed_batch() -> None:
    pool, client, link = half_of_a_request_in_flight()
    pool.submit(client, 2, shared(10, 5), priority=5)
    pool.submit(client, 3, shared(10, 5))
    other = pool.worker("other", can=msgspec.structs.replace(PACKED, inflight_tokens=300, pace=150), ready=False)
    pool.do(ev.WorkerSaid(0, other, Ready(msgspec.structs.replace(PACKED, inflight_tokens=300, pace=150), 0)))
    pool.batches.clear()
    pool.do(ev.WorkerBroken(0, link, "dies"))
    pool.do(ev.WorkerSaid(0, other, Idle(7)))
    assert [rows(sent) for sent in pool.batches] == [[1, 1]]


def test_what_followers_may_weigh_depends_on_the_head_of_their_packed_batch_alone() -> None:
    """A head of 51 tokens, and seven others of 12: with it they are many, and none of them alone would be."""
    pool = Pool()
    client = pool.client()
    pool.submit(client, 1, shared(10, *[7] * 5))
    for id_ in range(2, 9):
        pool.submit(client, id_, shared(5, 5, first=id_))
    pool.worker("packed", can=msgspec.structs.replace(PACKED, batch_rows=16, batch_tokens=200, pace=80))
    assert [rows(sent) for sent in pool.batches] == [[5, *[1] * 7]]


# --- the choice --------------------------------------------------------------------------------------------------------


def paced(pool: Pool, name: str = "w", inflight_tokens: int = 20_000) -> Worker:
    """A worker of which both costs matter."""
    can = msgspec.structs.replace(PACKED, inflight_rows=1000, inflight_tokens=inflight_tokens)
    pool.worker(name, can=msgspec.structs.replace(can, pace=100, packed_pace=100))
    return pool.machine.core.groups["g"].workers[name]


def learn(model: ForwardCostModel | None, fixed_s: float, token_s: float) -> None:
    """Forwards take so long from now on: teach a model."""
    assert model is not None
    now = 0.0
    for i in range(400):
        tokens = 20 + 60 * (i % 2)
        seconds = fixed_s + tokens * token_s
        # The first ones follow each other, and the others find the engine idle.
        now += seconds if i < 250 else 1.0
        model.done(now, 2 * seconds if i < 250 else seconds, tokens, 1, fits=True)


def choices(pool: Pool, client: bytes, number: int, at_once: int = 1) -> list[bool]:
    """Whether batches are packed, of as many requests, so many of which come together."""
    found: list[bool] = []
    for i in range(1, number + 1):
        found += packs(pool.submit(client, next(IDS), shared(10, 5, 5, 5, first=i)))
        if not i % at_once:
            while pool.batches:
                found += packs(pool.finish(pool.batches[0]))
    return found


IDS = count(1)


@pytest.mark.parametrize("packed_is_quicker", [True, False])
def test_a_request_that_could_be_either_runs_as_what_takes_less_time(packed_is_quicker: bool) -> None:
    pool = Pool()
    client, worker = pool.client(), paced(pool)
    learn(worker.pace, 0.012 if packed_is_quicker else 0.001, 0.0001)
    learn(worker.packed_pace, 0.001 if packed_is_quicker else 0.012, 0.0001)
    assert choices(pool, client, 20) == [packed_is_quicker] * 20


def test_one_request_alone_runs_plain_and_many_that_wait_are_packed() -> None:
    """A packed forward has a larger fixed part here, and computes less."""
    pool = Pool()
    client, worker = pool.client(), paced(pool)
    learn(worker.pace, 0.001, 0.0003)
    learn(worker.packed_pace, 0.0115, 0.0001)
    assert choices(pool, client, 10) == [False] * 10
    assert any(choices(pool, client, 40, at_once=40)[2:])


def test_requests_that_wait_for_a_later_version_count_as_none_that_wait() -> None:
    """No batch has them: one request at a time is one alone, however many of them there are."""
    pool = Pool()
    client, worker = pool.client(), paced(pool)
    learn(worker.pace, 0.001, 0.0003)
    learn(worker.packed_pace, 0.0115, 0.0001)
    for _ in range(40):
        pool.do(ev.Submit(0, client, next(IDS), shared(10, 5, 5, 5), 0, None, min_version=1))
    assert choices(pool, client, 10) == [False] * 10


def test_requests_that_share_no_batch_with_it_do_not_make_one_request_many() -> None:
    """Rows with labels of their own wait, and are never packed."""
    pool = Pool(config(forwards_in_flight=1))
    client, worker = pool.client(), paced(pool)
    learn(worker.pace, 0.001, 0.0003)
    learn(worker.packed_pace, 0.0115, 0.0001)
    for _ in range(40):
        pool.submit(client, next(IDS), unpackable(60))
    pool.submit(pool.client(), 1, shared(10, 5, 5, 5))
    pool.finish_all()
    assert not any(packs(pool.sent))


def test_the_slower_kind_has_a_turn_now_and_then_so_that_its_costs_stay_known() -> None:
    pool = Pool()
    client, worker = pool.client(), paced(pool)
    learn(worker.pace, 0.001, 0.0003)
    learn(worker.packed_pace, 0.001, 0.00033)
    assert worker.pace is not None and worker.packed_pace is not None
    found = choices(pool, client, 3 * TURN)
    minority = min(found.count(True), found.count(False))
    assert 1 <= minority <= 3


@pytest.mark.parametrize(("pace", "keeps"), [(100, True), (120, True), (80, True), (1000, False), (20, False)])
def test_what_was_learned_survives_the_restart_of_a_worker_on_a_device_like_the_one_before(pace: int, keeps: bool) -> None:
    pool = Pool()
    worker = paced(pool)
    learn(worker.pace, 0.001, 0.0003)
    learn(worker.packed_pace, 0.0115, 0.0001)
    known = repr(worker.pace), repr(worker.packed_pace)
    pool.do(ev.WorkerBroken(0, b"w", "dies"))
    pool.worker("next", can=msgspec.structs.replace(PACKED, pace=pace, packed_pace=pace))
    again = pool.machine.core.groups["g"].workers["next"]
    assert ((repr(again.pace), repr(again.packed_pace)) == known) == keeps
    assert again.pace is not worker.pace
    before = again.pace
    pool.do(ev.WorkerSaid(0, b"next", Ready(again.declared, 0)))  # type: ignore[arg-type]
    assert again.pace is before, "it says so again after it slept"


def test_what_was_learned_of_shorter_forwards_does_not_bind_a_worker_that_needs_longer_ones() -> None:
    """As one that said nothing of its smallest forwards: in 25 ms no fixed part of 60 ms can be learned."""
    pool = Pool()
    can = msgspec.structs.replace(PACKED, pace=100, packed_pace=100)
    for name, fixed_ms in (("before", 0), ("next", 60)):
        pool.worker(name, can=msgspec.structs.replace(can, packed_fixed_ms=fixed_ms))
        if name == "before":
            pool.do(ev.WorkerBroken(0, b"before", "dies"))
    model = pool.machine.core.groups["g"].workers["next"].packed_pace
    learn(model, 0.06, 0.0001)
    assert model is not None and model.fixed_s == pytest.approx(0.06, rel=0.1)


def test_plain_and_packed_batches_teach_only_the_costs_of_their_kind() -> None:
    pool = Pool()
    client, worker = pool.client(), paced(pool)
    assert worker.pace is not None and worker.packed_pace is not None
    plain, packed = worker.pace.tokens, worker.packed_pace.tokens
    pool.submit(client, 1, unpackable(90))
    for i in range(2, 100):
        pool.submit(client, i, unpackable(90))
        pool.wait(0.1)
        pool.finish(pool.batches[0], run_s=0.2)
    assert worker.pace.tokens < plain
    assert worker.packed_pace.tokens == packed


# --- every row its own score -------------------------------------------------------------------------------------------

SHAPES = st.tuples(
    st.sampled_from(["shared", "shared", "shared", "paired", "item_first", "empty"]),
    st.integers(1, 3),
    st.lists(st.integers(1, 12), min_size=1, max_size=14),
    st.integers(-2, 2),
)


def asked(shape: str, first: int, lengths: list[int]) -> tuple[Work, npt.NDArray[np.float32]]:
    """A request, and the scores that it must get."""
    query = [first] * (0 if shape == "empty" else 9 * first)
    items: list[list[int]] = []
    for n in lengths:
        items.append([(first * 31 + len(items) * 7 + i) % 1000 for i in range(n)])
    labels = (first, 5)
    if shape == "paired":
        queries = [query[: 1 + i % len(query)] for i in range(len(items))]
        flat = np.array([token for row in queries for token in row], np.int32)
        heads: list[bytes] = [flat.tobytes(), np.array([len(row) for row in queries], np.uint32).tobytes()]
        specs = [FrameSpec("query", "int32", (len(flat),)), FrameSpec("query_lengths", "uint32", (len(items),))]
    else:
        queries = query
        heads = [np.array(query, np.int32).tobytes()]
        specs = [FrameSpec("query", "int32", (len(query),))]
    tail = np.array([token for item in items for token in item], np.int32)
    specs += [FrameSpec("items", "int32", (len(tail),)), FrameSpec("item_lengths", "uint32", (len(items),))]
    frames = [*heads, tail.tobytes(), np.array(lengths, np.uint32).tobytes()]
    item_first = shape == "item_first"
    work = SCORE.open(Score(1, specs, labels=list(labels), item_first=item_first), frames)
    scores = expected_scores(queries, items, labels=labels, item_first=item_first)["scores"]
    return work, np.asarray(scores, np.float32)


class Engines:
    """A sim engine behind each worker; one that gets what must not be there dies, and the test with it."""

    def __init__(self, pool: Pool, can: dict[str, Capabilities]) -> None:
        self.pool = pool
        self.engines: dict[bytes, SimEngine] = {}
        for name, wanted in can.items():
            options = {key: getattr(wanted, key) for key in ("vocab", "context", "batch_tokens", "batch_rows")}
            options |= {key: getattr(wanted, key) for key in ("inflight_tokens", "inflight_rows")}
            engine = SimEngine(EngineSettings(model="m", options=options, packing="on" if wanted.packs else "off"))
            declared = run(engine.start(lambda _stage, _detail: None))
            self.engines[pool.worker(name, can=declared)] = engine

    def finish(self, sent: Sent) -> list[Sent]:
        assert isinstance(sent.message, Batch)
        self.pool.batches.remove(sent)
        batch: RowBatch = decode_batch(sent.message, tuple(sent.frames))
        if batch.packed:
            worker = self.pool.machine.core.groups["g"].workers[sent.link.decode()]
            assert worker.capabilities is not None
            assert worker.batches[sent.message.batch].cost == packed_cost(batch.parts, worker.capabilities)
        scores = run(self.engines[sent.link].score(batch))
        assert scores.forwards == 1
        answer, frames = encode_outcome(sent.message.batch, scores, 0)
        outcomes: list[ev.Outcome] = []
        at = 0
        for part in answer.parts:
            outcomes.append(ev.Outcome(part.frames, [bytes(f) for f in frames[at : at + len(part.frames)]]))
            at += len(part.frames)
        return self.pool.do(ev.BatchDone(0, sent.link, sent.message.batch, outcomes, 0, scores.forwards, 1000))


@given(
    st.lists(SHAPES, min_size=1, max_size=20),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([45, 60, 100]),
    st.sampled_from(BOUNDS),
    st.randoms(use_true_random=False),
)
def test_packed_or_not_each_row_gets_its_own_score(
    shapes: list[tuple[str, int, list[int], int]],
    workers: int,
    packs: bool,
    context: int,
    bounds: Bounds,
    random: Random,
) -> None:
    """Budgets and order are asserted by `check`; an engine dies of a packed batch that it cannot pack."""
    with bounded(bounds):
        can = {f"w{i}": msgspec.structs.replace(PACKED, max_item=50 * packs, context=context) for i in range(workers)}
        check_scores(shapes, can, random)


def check_scores(shapes: list[tuple[str, int, list[int], int]], can: dict[str, Capabilities], random: Random) -> None:
    """Each row of these requests gets its own score from these workers."""
    pool = Pool(ageing_s=1.0)
    client = pool.client()
    engines = Engines(pool, can)
    want: dict[int, npt.NDArray[np.float32]] = {}
    got: dict[int, npt.NDArray[np.float32]] = {}
    for i, (shape, first, lengths, priority) in enumerate(shapes, start=1):
        content, want[i] = asked(shape, first, lengths)
        pool.submit(client, i, content, priority=priority)
    while pool.batches:
        for sent in engines.finish(random.choice(pool.batches)):
            for id_, result in results([sent]).items():
                got[id_] = np.frombuffer(sent.frames[0], np.float32).reshape(result.usage.items, 2)
    assert sorted(got) == sorted(want)
    for id_, scores in want.items():
        assert got[id_].tolist() == scores.tolist()


def test_a_sim_engine_dies_of_a_packed_batch_that_cannot_be_packed() -> None:
    pool = Pool()
    engines = Engines(pool, {"w": PACKED})
    content = shared(3, 0, 5)
    batch = decode_batch(Batch((7, 1), [content.part], packed=True), tuple(content.frames))
    engine = engines.engines[b"w"]
    with pytest.raises(Exception, match="an item behind a query that packed rows share is empty"):
        run(engine.score(batch))
