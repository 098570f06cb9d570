"""Promises about plain and packed workers of one group: who serves what, in which order, at what cost, and who is refused."""

from random import Random
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginepool.config import GroupConfig, Limits, PoolConfig
from enginepool.config_loader import check_config
from enginepool.coordinator.core import events as ev
from enginepool.coordinator.operations.base import Work
from enginepool.coordinator.operations.limits import limits_of
from enginepool.coordinator.operations.score import SCORE, ScoreWork
from enginepool.coordinator.scheduling.worker_kinds import PACKED as PACKED_CLASS
from enginepool.coordinator.scheduling.worker_kinds import PLAIN, classes_of
from enginepool.errors import ConfigError
from enginepool.protocol.messages import (
    Batch,
    Capabilities,
    Exiting,
    FrameSpec,
    GroupLimits,
    Idle,
    Ready,
    Result,
    Score,
    Stage,
    StatusReport,
    Tokenize,
)
from enginepool.workers.codec import decode_batch, encode_ids, encode_outcome
from enginepool.workers.engine import RowBatch
from enginepool.workers.engine_settings import EngineSettings
from enginepool.workers.sim.engine import SimEngine
from enginepool.workers.sim.scores import expected_scores
from enginepool.workers.texts import TextIds
from tests.core.machines import CAN, Pool, Sent, codes, config, failures, results, text, texts
from tests.core.test_sim_engine import work as run

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


@given(WORK, CAUSAL, st.none() | st.integers(1, 8), st.booleans(), st.sampled_from(["causal", "classifier"]))
def test_a_request_within_the_limits_that_the_status_names_is_served_and_another_refused(
    work: ScoreWork, can: Capabilities, max_item: int | None, beside: bool, kind: Any
) -> None:
    can = msgspec.structs.replace(can, kind=kind, labels=2 if kind == "classifier" else 0)
    packed = None if max_item is None else msgspec.structs.replace(can, max_item=max_item, hidden=0)
    plain = can if packed is None or beside else None
    expected = PLAIN * (plain is not None) | PACKED_CLASS * (packed is not None)
    limits = limits_of(plain, packed, 1000, plain_expected=bool(expected & PLAIN))
    assert limits is not None
    within = (
        (work.max_label >= 0) == (limits.kind == "causal")
        and max(work.max_label, work.max_id) < limits.vocab
        and (work.text or work.longest <= limits.context)
        and work.part.hidden <= limits.hidden
        and work.text <= limits.text
        and (work.text or not limits.max_item or (work.shared > 0 and work.longest - work.shared <= limits.max_item))
    )
    served = isinstance(classes_of(work, plain, packed, expected), int)
    assert served or not within
    if not (plain and packed) and not (work.text and work.part.hidden):
        assert served == within


def test_the_status_names_the_limits_of_a_group_once_they_are_known() -> None:
    pool = Pool(config())
    client = pool.client()

    def limits() -> GroupLimits | None:
        (report,) = [s.message for s in pool.do(ev.StatusAsked(0, client, 1))]
        assert isinstance(report, StatusReport)
        return report.groups[0].limits

    assert limits() is None
    pool.worker("p", can=PACKED)
    pool.worker("w", can=sizes(inflight_tokens=100, batch_tokens=100, page=8))
    assert limits() == GroupLimits("causal", 1000, 93, 500_000)


def rows(sent: Sent) -> list[int]:
    assert isinstance(sent.message, Batch)
    return [part.frames[-1].shape[0] for part in sent.message.parts]


def priority_of(sent: Sent) -> int:
    assert isinstance(sent.message, Batch)
    return sent.message.priority


def who(sent: list[Sent]) -> list[bytes]:
    return [s.link for s in sent if isinstance(s.message, Batch)]


def both(**changes: Any) -> tuple[Pool, bytes]:
    """A pool of a plain and a packed worker, and a client."""
    pool = Pool()
    pool.worker("plain")
    pool.worker("packed", can=msgspec.structs.replace(PACKED, **changes))
    return pool, pool.client()


# --- who serves what ---------------------------------------------------------------------------------------------------


def test_what_can_be_packed_goes_to_the_packed_worker_and_the_rest_to_the_plain_one() -> None:
    pool, client = both()
    assert who(pool.submit(client, 1, shared(10, 5, 5))) == [b"packed"]
    assert who(pool.submit(client, 2, paired((3, 4)))) == [b"plain"]
    assert who(pool.submit(client, 3, shared(10, 5, item_first=True))) == [b"plain"]
    assert who(pool.submit(client, 4, shared(0, 5, 5))) == [b"plain"], "no query, nothing to share"
    assert who(pool.submit(client, 5, shared(3, 5, 0))) == [b"plain"], "an empty item"


@pytest.mark.parametrize(
    ("query", "item", "link"),
    [(40, 50, b"packed"), (40, 51, b"plain"), (48, 50, b"packed"), (49, 50, b"plain")],
)
def test_the_limits_of_a_packed_row_are_exact(query: int, item: int, link: bytes) -> None:
    pool, client = both()
    assert who(pool.submit(client, 1, shared(query, item))) == [link]


def test_hidden_states_are_packed_where_the_engine_gives_them() -> None:
    head = msgspec.structs.replace(CAN, kind="classifier", labels=2, hidden=4)
    for hidden, link in ((0, b"plain"), (4, b"packed")):
        pool = Pool()
        pool.worker("plain", can=head)
        pool.worker("packed", can=msgspec.structs.replace(head, max_item=50, hidden=hidden))
        assert who(pool.submit(pool.client(), 1, shared(10, 5, labels=(), hidden=True))) == [link]


def test_a_plain_worker_serves_packable_work_rather_than_stand_idle() -> None:
    pool, client = both()
    sent = [pool.submit(client, i, shared(40, 20, 20, first=i))[0].link for i in range(1, 5)]
    assert sent == [b"packed", b"packed", b"plain", b"plain"], "two fill the packed worker"
    assert pool.submit(client, 5, shared(40, 20, 20, first=5)) == []
    pool.finish(pool.batches[0])
    assert who(pool.batches)[-1] == b"packed"


def test_packed_work_does_not_wait_for_work_that_needs_a_plain_worker() -> None:
    """An earlier request of a higher priority, which only the full plain worker can serve, does not hold the packed one."""
    pool, client = both()
    for i in (1, 2, 3):
        pool.submit(client, i, paired((40, 40)), priority=5)
    assert who(pool.submit(client, 4, shared(40, 20))) == [b"packed"]
    assert who(pool.batches).count(b"plain") == 2


def test_no_request_overtakes_a_head_at_a_worker_that_could_serve_it() -> None:
    pool, client = both()
    for i in range(1, 5):
        pool.submit(client, i, shared(40, 20, 20, first=i))
    pool.submit(client, 5, shared(40, 20, 20, first=5))
    assert pool.submit(client, 6, paired((1, 1))) == [], "the plain worker has room for it, and not for what is first"
    assert pool.submit(client, 7, shared(1, 1)) == []
    order: list[int] = []
    while pool.batches:
        order += results(pool.finish(pool.batches[0]))
    assert order.index(5) < order.index(7)


def test_a_higher_priority_is_next_whichever_class_serves_it() -> None:
    pool, client = both()
    for i in range(1, 8):
        pool.submit(client, i, shared(40, 20, 20, first=i))
    pool.submit(client, 98, shared(40, 20, 20, first=98), priority=1)
    pool.submit(client, 99, paired((40, 40)), priority=2)
    finished = next(sent for sent in pool.batches if sent.link == b"packed")
    (sent,) = [s for s in pool.finish(finished) if isinstance(s.message, Batch)]
    assert (sent.link, priority_of(sent)) == (b"packed", 1)
    finished = next(sent for sent in pool.batches if sent.link == b"plain")
    (sent,) = [s for s in pool.finish(finished) if isinstance(s.message, Batch)]
    assert (sent.link, priority_of(sent)) == (b"plain", 2)


def answered(pool: Pool, sent: Sent, query: list[int], *items: list[int]) -> list[Sent]:
    """A worker has tokenized a text whose rows all begin with `query`."""
    assert isinstance(sent.message, Tokenize)
    answer, frames = encode_ids(sent.message.task, TextIds([query + item for item in items]), share=sent.message.share)
    return pool.do(ev.TextTokenized(0, sent.link, answer.task, answer.frames, frames))


@pytest.mark.parametrize("plain", [True, False])
def test_text_is_packed_after_the_tokens_that_its_rows_begin_with(plain: bool) -> None:
    """Also in a group of packed workers alone, and where the item comes first."""
    for item_first in (False, True):
        pool = Pool()
        client = pool.client()
        pool.worker("packed", can=PACKED)
        if plain:
            pool.worker("plain")
        content = text("a", ["b", "c", "d"])
        content = msgspec.structs.replace(content, part=msgspec.structs.replace(content.part, item_first=item_first))
        (asked_of,) = pool.submit(client, 1, content)
        (sent,) = answered(pool, asked_of, [1, 2, 3], [4], [5, 6], [7])
        assert sent.link == b"packed" and isinstance(sent.message, Batch)
        assert [spec.shape for spec in sent.message.parts[0].frames] == [(3,), (4,), (3,)]
        assert not sent.message.parts[0].item_first
        assert pool.machine.core.groups["g"].workers["packed"].cost == 3 + 1 + 4 + 3
        pool.finish_all()
        assert results(pool.sent)[1].usage.tokens == 3 * 3 + 4


def test_text_whose_rows_begin_with_different_tokens_is_for_plain_workers() -> None:
    for alone in (False, True):
        pool = Pool()
        client = pool.client()
        pool.worker("packed", can=PACKED)
        if not alone:
            pool.worker("plain")
        (asked_of,) = pool.submit(client, 1, text("", ["b", "c"]))
        sent = answered(pool, asked_of, [], [4], [5, 6])
        if alone:
            assert (failures(sent)[1].field, failures(sent)[1].code) == ("query", "bad_request")
        else:
            assert who(sent) == [b"plain"]


# --- batches and costs -------------------------------------------------------------------------------------------------


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


def test_callers_with_other_queries_share_a_batch_and_pay_for_each() -> None:
    pool = Pool()
    client = pool.client()
    for i, first in enumerate((1, 2, 1, 3), start=1):
        pool.submit(client, i, shared(20, 5, first=first))
    pool.worker("packed", can=PACKED)
    assert [rows(sent) for sent in pool.batches] == [[1, 1, 1, 1]]
    assert pool.machine.core.groups["g"].workers["packed"].cost == 3 * 27 + 6


def test_what_is_too_large_for_a_plain_batch_stays_together_packed() -> None:
    pool, client = both()
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


# --- who is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "field", "limit"),
    [
        (paired((3, 4)), "query_lengths", ""),
        (shared(10, 5, item_first=True), "item_first", "false"),
        (shared(0, 5), "query", "1"),
        (shared(5, 5, 0), "items[1]", "50"),
        (shared(5, 5, 51), "items[1]", "50"),
        (shared(60, 5, 5, 39), "items[2]", "38"),
        (shared(10, 5, labels=(1000,)), "labels", "1000"),
        (shared(10, 5, hidden=True), "hidden", "0"),
    ],
)
def test_a_group_of_packed_workers_alone_refuses_what_cannot_be_packed(content: ScoreWork, field: str, limit: str) -> None:
    pool = Pool()
    early, late = pool.client(), pool.client()
    pool.submit(early, 1, content)
    pool.worker("packed", can=PACKED)
    pool.submit(late, 1, content)
    told = [s.message for s in pool.sent if 1 in failures([s])]
    assert [(f.code, f.field, f.limit) for f in told] == [("bad_request", field, limit)] * 2  # type: ignore[union-attr]


def test_a_row_that_its_page_makes_too_large_for_an_engine_is_refused_and_does_not_block_others() -> None:
    """Its sequence weighs up to a page more than its tokens: 15 here, besides two delimiters."""
    pool = Pool(packing_config(1, 1))
    client = pool.client()
    start(pool, 0, msgspec.structs.replace(PACKED, page=16, batch_tokens=100, inflight_tokens=100))
    pool.submit(client, 1, shared(44, 40))
    assert failures(pool.sent)[1].limit == "39"
    pool.submit(client, 2, shared(43, 40))
    assert list(results(pool.finish_all())) == [2]


def packing_config(workers: int, packed: int) -> PoolConfig:
    return PoolConfig({"g": GroupConfig("m", engine="sim", workers=workers, packed_workers=packed, ageing_s=None)})


def start(pool: Pool, index: int, can: Capabilities) -> bytes:
    """The process of a place of the pool comes up."""
    place = pool.machine.core.groups["g"].slots[index]
    link = b"link%d" % index
    pool.do(ev.WorkerRegistered(0, link, "g", place.incarnation, 1, "host"))
    pool.do(ev.WorkerSaid(0, link, Idle(7)))
    pool.do(ev.WorkerSaid(0, link, Ready(can, 0)))
    return link


def test_what_needs_a_plain_worker_waits_for_one_that_is_still_loading() -> None:
    pool = Pool(packing_config(2, 1))
    client = pool.client()
    start(pool, 1, PACKED)
    assert pool.submit(client, 1, paired((3, 4))) == []
    assert pool.submit(client, 2, shared(10, 5, item_first=True)) == []
    start(pool, 0, CAN)
    assert [(sent.link, rows(sent)) for sent in pool.batches] == [(b"link0", [1, 1])]


def test_a_worker_of_the_wrong_class_for_its_slot_is_lost() -> None:
    pool = Pool(packing_config(2, 1))
    start(pool, 0, PACKED)
    start(pool, 1, CAN)
    assert len(pool.killed) == 2
    assert not pool.machine.core.groups["g"].workers


def test_status_knows_a_packed_worker_before_it_is_ready() -> None:
    pool = Pool(PoolConfig({"g": GroupConfig("m", "sim", workers=2, packed_workers=1)}))
    for place in pool.started:
        pool.worker(place.incarnation, ready=False)
    (report,) = [s.message for s in pool.do(ev.StatusAsked(0, pool.client(), 1))]
    assert [worker.packed for worker in report.groups[0].workers] == [False, True]  # type: ignore[union-attr]


def test_workers_of_two_classes_may_differ_in_budget_and_not_in_model() -> None:
    pool = Pool()
    pool.worker("plain")
    pool.worker("roomy", can=msgspec.structs.replace(PACKED, batch_rows=4, context=50))
    pool.worker("other", can=msgspec.structs.replace(PACKED, vocab=999))
    pool.worker("unlike", can=PACKED)
    assert sorted(pool.machine.core.groups["g"].workers) == ["plain", "roomy"]


def test_once_no_plain_worker_will_come_back_what_needs_one_is_told_so() -> None:
    pool = Pool(packing_config(2, 1))
    client = pool.client()
    plain = start(pool, 0, CAN)
    start(pool, 1, PACKED)
    pool.submit(client, 1, paired((3, 4)))
    place = pool.machine.core.groups["g"].slots[0]
    incarnation = place.incarnation
    pool.do(ev.WorkerSaid(0, plain, Exiting("no such kernel", True, True)))
    pool.do(ev.WorkerExited(0, incarnation, "exit code 78", True))
    assert codes(pool.sent) == ["pool_down"]
    pool.submit(client, 2, paired((3, 4)))
    assert codes(pool.sent) == ["pool_down", "pool_down"]
    pool.submit(client, 3, shared(10, 5))
    pool.finish_all()
    assert list(results(pool.sent)) == [3]
    assert "no plain worker is left" in failures(pool.sent)[1].message
    assert "no such kernel" in failures(pool.sent)[1].message


def test_text_whose_hidden_states_no_packed_worker_gives_does_not_wait_for_a_plain_one_that_never_comes() -> None:
    """How large they are is not known then. A guess fits no window, and the caller would be told to come back without end."""
    limits = Limits(window_bytes=10_000)
    pool = Pool(msgspec.structs.replace(packing_config(2, 1), limits=limits))
    client = pool.client()
    start(pool, 1, PACKED)
    pool.submit(client, 1, text("q", ["a"], hidden=True))
    assert codes(pool.sent) == ["busy"], "the plain worker is still loading"
    pool.do(ev.WorkerExited(0, pool.machine.core.groups["g"].slots[0].incarnation, "exit code 78", True))
    pool.submit(client, 1, text("q", ["a"], hidden=True))
    assert codes(pool.sent) == ["busy", "pool_down"]


def test_once_no_packed_worker_will_come_back_what_only_fits_one_is_told_so() -> None:
    pool = Pool(packing_config(2, 1))
    client = pool.client()
    plain = start(pool, 0, msgspec.structs.replace(CAN, batch_tokens=60, inflight_tokens=60))
    packed = start(pool, 1, PACKED)
    pool.submit(client, 1, shared(50, 30))
    assert who(pool.batches) == [packed]
    incarnation = pool.machine.core.groups["g"].slots[1].incarnation
    pool.machine.core.groups["g"].slots[0].end_reason = "another story"
    pool.do(ev.WorkerSaid(0, packed, Exiting("no such mask", True, True)))
    pool.do(ev.WorkerExited(0, incarnation, "exit code 78", True))
    failure = failures(pool.sent)[1]
    assert failure.code == "pool_down"
    assert "no packed worker is left" in failure.message and "no such mask" in failure.message
    assert who(pool.submit(client, 2, paired((3, 4)))) == [plain]


def test_a_packed_worker_that_still_loads_is_no_hope_for_what_needs_a_plain_one() -> None:
    """One of the pool's own, and one that dials in and says only when it is ready what it is."""
    for dials_in in (False, True):
        pool = Pool(packing_config(2, 1))
        client = pool.client()
        plain = start(pool, 0, CAN)
        group = pool.machine.core.groups["g"]
        own, loading = group.slots[0].incarnation, group.slots[1].incarnation
        name = "dialled" if dials_in else loading
        pool.do(ev.WorkerRegistered(0, b"loading", "g", name, 1, "host"))
        pool.do(ev.WorkerSaid(0, b"loading", Idle(7)))
        pool.submit(client, 1, paired((3, 4)))
        pool.do(ev.WorkerSaid(0, plain, Exiting("no such kernel", True, True)))
        pool.do(ev.WorkerExited(0, own, "exit code 78", True))
        assert codes(pool.sent) == ([] if dials_in else ["pool_down"])
        pool.do(ev.WorkerSaid(0, b"loading", Ready(PACKED, 0)))
        assert codes(pool.sent) == ["pool_down"]


def test_once_no_slot_has_a_worker_a_request_that_no_external_worker_serves_fails() -> None:
    pool = Pool(packing_config(1, 0))
    client = pool.client()
    plain = start(pool, 0, CAN)
    packed = pool.worker("dialled", can=PACKED)
    own = pool.machine.core.groups["g"].slots[0].incarnation
    pool.submit(client, 1, paired((3, 4)))
    pool.do(ev.WorkerSaid(0, plain, Exiting("no such kernel", True, True)))
    pool.do(ev.WorkerExited(0, own, "exit code 78", True))
    failure = failures(pool.sent)[1]
    assert failure.code == "pool_down"
    assert "no plain worker is left" in failure.message and "no such kernel" in failure.message
    pool.batches.clear()
    assert who(pool.submit(client, 2, shared(40, 20, 20))) == [packed]
    pool.do(ev.WorkerSaid(0, packed, Exiting("it ends", True)))
    pool.submit(client, 3, shared(40, 20, 20))
    assert "no worker is left" in failures(pool.sent)[3].message


def test_when_the_packed_workers_are_gone_plain_ones_serve_all() -> None:
    pool, client = both()
    for i in range(1, 6):
        pool.submit(client, i, shared(40, 20, 20, first=i))
    pool.do(ev.WorkerSaid(0, b"packed", Exiting("it ends", True)))
    pool.batches = [sent for sent in pool.batches if sent.link != b"packed"]
    pool.finish_all()
    assert sorted(results(pool.sent)) == [1, 2, 3, 4, 5]


def test_a_suspect_is_tried_on_a_worker_that_can_serve_it() -> None:
    pool, client = both()
    pool.submit(client, 1, paired((40, 40)))
    pool.submit(client, 2, paired((40, 40)))
    pool.do(ev.WorkerSaid(0, b"plain", Exiting("died", True)))
    pool.batches.clear()
    assert not pool.batches, "the packed worker is idle, and no worker for them"
    pool.worker("plain2")
    assert who(pool.batches) == [b"plain2"]
    pool.finish_all()
    assert sorted(results(pool.sent)) == [1, 2]


def half_of_a_request_in_flight() -> tuple[Pool, bytes, bytes]:
    """Six of its twelve rows are with a packed worker that gets nothing more meanwhile."""
    pool = Pool(config(forwards_in_flight=1))
    client = pool.client()
    link = pool.worker("packed", can=msgspec.structs.replace(PACKED, inflight_tokens=300, pace=150))
    pool.submit(client, 1, shared(10, *[5] * 12))
    assert [rows(sent) for sent in pool.batches] == [[6]]
    return pool, client, link


def test_what_is_left_of_a_cut_request_joins_the_packed_batch_of_another() -> None:
    pool, client, _ = half_of_a_request_in_flight()
    pool.submit(client, 2, shared(10, 5), priority=5)
    pool.finish_all()
    assert [s.message.usage.items for s in pool.sent if isinstance(s.message, Result)] == [1, 12]
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


def a_suspect_beside_busy_workers(*names: str, others: tuple[Work, ...] = ()) -> tuple[Pool, bytes]:
    """Request 1, which either class can serve, is a suspect, `others` are so as well; these workers are busy, and of them only
    the first is open."""
    pool = Pool()
    client = pool.client()
    for number, name in enumerate(names):
        link = pool.worker(name, can=PACKED if "packed" in name else CAN)
        pool.submit(client, 10 + number, shared(10, 5))
        pool.do(ev.WorkerSaid(0, link, Stage("loading", "")))
    assert who(pool.batches) == [name.encode() for name in names]
    lost = pool.worker("lost")
    for number, content in enumerate((shared(10, 5), *others), 1):
        pool.submit(client, number, content)
        assert pool.batches.pop().link == lost
    pool.do(ev.WorkerSaid(0, names[0].encode(), Stage("ready", "")))
    pool.do(ev.WorkerBroken(0, lost, "dies"))
    return pool, client


def kept(pool: Pool) -> bytes | None:
    worker = pool.machine.core.groups["g"].reserved_worker
    return worker and worker.link


@pytest.mark.parametrize("names", [("plain", "packed"), ("packed", "plain"), ("plain", "plain2")])
def test_a_worker_that_is_kept_for_a_trial_stays_so_while_others_are_busy(names: tuple[str, str]) -> None:
    pool, _ = a_suspect_beside_busy_workers(*names)
    assert kept(pool) == names[0].encode()
    pool.do(ev.WorkerSaid(0, names[1].encode(), Stage("ready", "")))
    assert kept(pool) == names[0].encode()


def test_a_suspect_takes_an_idle_worker_of_the_other_class_than_the_one_that_is_kept_for_it() -> None:
    pool, _ = a_suspect_beside_busy_workers("plain")
    pool.worker("packed", can=PACKED)
    assert (who(pool.batches), kept(pool)) == ([b"plain", b"packed"], None)


def test_a_worker_that_was_kept_for_one_suspect_is_not_given_another_that_it_cannot_serve() -> None:
    pool, client = a_suspect_beside_busy_workers("packed", others=(paired((3, 4)),))
    assert kept(pool) == b"packed"
    pool.do(ev.CancelAsked(0, client, 1))
    assert kept(pool) is None
    pool.finish_all()
    assert not pool.batches
    pool.worker("plain")
    assert who(pool.batches) == [b"plain"]


def test_an_idle_worker_of_the_other_class_does_not_run_what_waits_behind_text() -> None:
    pool = Pool()
    client = pool.client()
    lost = pool.worker("lost")
    pool.submit(client, 1, paired((3, 4)))
    pool.worker("plain")
    pool.worker("packed", can=PACKED)
    tasks = [task for id_ in (2, 3) for task in texts(pool.submit(client, id_, text("q", ["x"])))]
    assert sorted(task.link for task in tasks) == [b"packed", b"plain"]
    packed, plain = sorted(tasks, key=lambda task: task.link)
    assert isinstance(packed.message, Tokenize) and isinstance(plain.message, Tokenize)
    pool.do(ev.TextTokenized(0, packed.link, packed.message.task, [], [], "no tokenizer"))
    pool.batches.clear()
    pool.do(ev.WorkerBroken(0, lost, "dies"))
    assert (who(pool.batches), kept(pool)) == ([], b"plain")
    pool.do(ev.TextTokenized(0, plain.link, plain.message.task, [], [], "no tokenizer"))
    assert who(pool.batches) == [b"plain"]


def test_what_runs_is_held_to_the_limits_of_a_class_that_comes_later() -> None:
    """Else it would be given, once its worker is lost, to one whose context it does not fit."""
    pool = Pool(packing_config(2, 1))
    client = pool.client()
    large = msgspec.structs.replace(PACKED, context=200, batch_tokens=200)
    packed = start(pool, 1, large)
    incarnation = pool.machine.core.groups["g"].slots[1].incarnation
    pool.submit(client, 1, shared(100, 40))
    start(pool, 0, CAN)
    pool.do(ev.WorkerSaid(0, packed, Exiting("died", True)))
    pool.do(ev.WorkerExited(0, incarnation, "exit code 70"))
    assert who(pool.sent) == [packed]
    pool.wait(2.0)
    again = start(pool, 1, large)
    assert who(pool.sent) == [packed, again]
    assert list(results(pool.finish(pool.batches[-1]))) == [1]


@pytest.mark.parametrize("packed", [-1, 3])
def test_more_packed_workers_than_workers_are_refused_by_name(packed: int) -> None:
    with pytest.raises(ConfigError, match=r"groups\.g\.packed_workers = .*: 0 to workers, which is 2"):
        check_config(packing_config(2, packed), where="test")


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
            engine = SimEngine(EngineSettings(model="m", options=options, packed=wanted.packed))
            declared = run(engine.start(lambda _stage, _detail: None))
            self.engines[pool.worker(name, can=declared)] = engine

    def finish(self, sent: Sent) -> list[Sent]:
        assert isinstance(sent.message, Batch)
        self.pool.batches.remove(sent)
        batch: RowBatch = decode_batch(sent.message, tuple(sent.frames))
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
    st.integers(1, 2),
    st.integers(0, 2),
    st.sampled_from([45, 60, 100]),
    st.randoms(use_true_random=False),
)
def test_with_any_split_over_classes_each_row_gets_its_own_score(
    shapes: list[tuple[str, int, list[int], int]], plain: int, packed: int, context: int, random: Random
) -> None:
    """Budgets, order and classes are asserted by `check`; an engine that packs dies of what it must not get."""
    pool = Pool(ageing_s=1.0)
    client = pool.client()
    can = {f"plain{i}": CAN for i in range(plain)}
    can |= {f"packed{i}": msgspec.structs.replace(PACKED, context=context) for i in range(packed)}
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


def test_a_packed_sim_engine_dies_of_what_cannot_be_packed() -> None:
    pool = Pool()
    engines = Engines(pool, {"packed": PACKED})
    content, _ = asked("item_first", 1, [3])
    batch = decode_batch(Batch((7, 1), [content.part]), tuple(content.frames))
    engine = engines.engines[b"packed"]
    with pytest.raises(Exception, match="one query for all rows, before the items"):
        run(engine.score(batch))
