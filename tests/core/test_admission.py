"""Who gets into a full queue: higher priorities at once, and each client some of it."""

import pytest

from enginepool.config import Limits
from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.text_lanes import MOST_TEXTS
from enginepool.coordinator.requests import lifecycle as requests
from enginepool.coordinator.requests import texts as request_texts
from enginepool.coordinator.requests.memory import NO_MEMORY_MS, charge
from enginepool.protocol.messages import FrameSpec, Tokenize
from tests.core.machines import Pool, codes, config, failures, results, text, texts, work

#: what one item of `work` is charged with
HELD = charge(work(), None)[1]
ROWS = Limits(queue_items=100)
BYTES = Limits(max_message_bytes=100 * HELD, window_bytes=100 * HELD, buffer_bytes=100 * HELD, answers_bytes=HELD)


def fill(pool: Pool, link: bytes, priority: int = 0, rows: int = 1) -> int:
    """Requests of one client until one is refused; how many were admitted."""
    for count in range(10_000):
        if codes(pool.submit(link, 1000 + count, work(rows), priority=priority)):
            return count
    raise AssertionError("the queue is never full")


@pytest.mark.parametrize("limits", [ROWS, BYTES], ids=["items", "bytes"])
def test_one_client_leaves_room_for_the_next(limits: Limits) -> None:
    pool = Pool(config(limits=limits))
    counts = [fill(pool, pool.client()) for _ in range(5)]
    assert counts[:4] == [50, 25, 12, 6], "half of what the others have left"
    assert sum(counts) < 100


@pytest.mark.parametrize("limits", [ROWS, BYTES], ids=["items", "bytes"])
def test_a_high_priority_is_admitted_at_once_to_a_queue_full_of_lower_ones(limits: Limits) -> None:
    pool = Pool(config(limits=limits))
    low = [pool.client() for _ in range(12)]
    admitted = {link: fill(pool, link) for link in low}
    high = pool.client()
    shed: list[tuple[bytes, int | None]] = []
    for id_ in range(40):
        for sent in pool.submit(high, id_, work(), priority=1000):
            (failure,) = failures([sent]).values()
            assert sent.link in admitted, f"the high one was refused: {failure}"
            assert failure.code == "busy" and failure.retry_after_ms, failure
            shed.append((sent.link, failure.id))
    assert len(shed) >= 40 - (100 - sum(admitted.values())), "each made room for one"
    assert len(set(shed)) == len(shed)
    # Those that were shed are as if they had never come.
    pool.worker()
    pool.finish_all()
    link, id_ = shed[0]
    assert id_ is not None
    assert codes(pool.submit(link, id_, work())) == []
    assert id_ in results(pool.finish_all())


def test_the_newest_of_the_lowest_priority_is_shed_first() -> None:
    pool = Pool(config(limits=Limits(queue_items=12)))
    a, b, c, d = (pool.client() for _ in range(4))
    for id_, (link, priority) in enumerate([(a, 1), (b, 0), (a, -1), (b, 0), (a, -1), (a, 1), (b, 0), (c, 0), (c, 0), (c, 1)]):
        assert codes(pool.submit(link, id_, work(), priority=priority)) == []
    shed: list[int | None] = []
    for id_ in range(100, 106):
        shed += failures(pool.submit(d, id_, work(), priority=2))
    assert shed == [4, 2, 8, 7], "two places were free"


def test_what_a_worker_was_given_is_not_shed_and_neither_is_an_equal() -> None:
    pool = Pool(config(limits=Limits(queue_items=32)))
    pool.worker()
    links = [pool.client() for _ in range(8)]
    counts = [fill(pool, link) for link in links]
    waiting = sum(counts) - 16
    high = pool.client()
    shed: list[int | None] = []
    for id_ in range(16):
        for sent in pool.submit(high, id_, work(), priority=5):
            assert sent.link != high
            shed += failures([sent])
    assert shed and len(shed) <= waiting
    assert codes(pool.submit(pool.client(), 1, work(), priority=-5)) == ["busy"], "a lower one sheds nothing"
    flying = len(pool.batches)
    assert len(results(pool.finish_all())) >= 16 and flying


def test_nothing_is_shed_in_vain() -> None:
    pool = Pool(config(limits=Limits(queue_items=40)))
    high, low, other = pool.client(), pool.client(), pool.client()
    assert codes(pool.submit(low, 1, work(2))) == []
    fill(pool, high, priority=5)
    fill(pool, other, priority=5)
    before = pool.machine.core.live_rows
    assert codes(pool.submit(pool.client(), 1, work(20), priority=5)) == ["busy"]
    assert pool.machine.core.live_rows == before, "the low one alone would not make room enough"


@pytest.mark.parametrize("tokenizer", [False, True])
def test_text_is_shed_also_while_a_tokenizer_has_it(tokenizer: bool) -> None:
    pool = Pool(config(limits=Limits(queue_items=4)))
    if tokenizer:
        pool.worker()
    a, b, high = pool.client(), pool.client(), pool.client()
    assert codes(pool.submit(a, 1, text("q", ["x", "y"]))) == []
    assert codes(pool.submit(b, 2, text("q", ["x"]))) == []
    assert list(failures(pool.submit(high, 3, work(2), priority=1))) == [2]


@pytest.mark.parametrize("how", ["shed", "cancelled"])
def test_a_text_without_a_request_leaves_the_count_of_its_worker_when_that_has_tokenized_it(how: str) -> None:
    """The worker has it until then: a client that cancels in a loop does not fill a tokenizer."""
    pool = Pool(config(limits=Limits(queue_items=32)))
    pool.worker()
    low = pool.client()
    for id_ in range(MOST_TEXTS):
        assert codes(pool.submit(low, id_, text("q", ["x"]))) == []
    given = texts(pool.sent)
    (worker,) = pool.machine.core.groups["g"].workers.values()
    if how == "cancelled":
        for id_ in range(MOST_TEXTS):
            assert codes(pool.do(ev.CancelAsked(0, low, id_))) == ["cancelled"]
    else:
        high = [sent for i in range(1, 33) for sent in pool.submit(pool.client(), 1, work(), priority=i)]
        assert {id_ for sent in high if sent.link == low for id_ in failures([sent])} == set(range(MOST_TEXTS))
        pool.finish_all()
    assert pool.machine.core.live_rows == 0
    for id_ in range(100, 100 + 2 * MOST_TEXTS):
        assert codes(pool.submit(low, id_, text("q", ["y"]))) == []
    assert len(worker.texts) == len(given) == len(texts(pool.sent)) == MOST_TEXTS
    specs = [FrameSpec("items", "int32", (1,)), FrameSpec("item_lengths", "uint32", (1,))]
    for count, sent in enumerate(given, 1):
        assert isinstance(sent.message, Tokenize)
        pool.do(ev.TextTokenized(0, sent.link, sent.message.task, specs, [b"\1\0\0\0", b"\1\0\0\0"]))
        assert len(texts(pool.sent)) == MOST_TEXTS + count
    assert {worker.texts[task].id for task in worker.texts} == set(range(100, 100 + MOST_TEXTS))
    assert worker.texts.nbytes == MOST_TEXTS * text("q", ["y"]).nbytes


def test_one_client_may_send_low_ones_and_then_a_high_one() -> None:
    pool = Pool(config(limits=ROWS))
    link = pool.client()
    assert fill(pool, link) == 50
    assert codes(pool.submit(link, 1, work(25), priority=1)) == []
    assert codes(pool.submit(link, 2, work(1), priority=1)) == ["busy"], "three quarters are taken, all by this client"


def test_a_request_of_more_than_half_of_the_queue_is_refused_for_good() -> None:
    pool = Pool(config(limits=ROWS))
    (failure,) = failures(pool.submit(pool.client(), 1, work(51))).values()
    assert (failure.code, failure.limit) == ("bad_request", "50")


def test_a_request_whose_client_is_away_is_shed_and_taken_again_on_the_next_link() -> None:
    pool = Pool(config(limits=Limits(queue_items=4)))
    low = pool.client(b"before", client=b"c" * 16)
    pool.submit(low, 1, work(2))
    pool.do(ev.LinkCut(0, low))
    high = pool.client()
    assert pool.submit(high, 1, work(2), priority=1) == []
    assert pool.submit(high, 2, work(1), priority=1) != [], "no more than half"
    pool.submit(pool.client(), 1, work(1), priority=1)
    back = pool.client(b"after", client=b"c" * 16, incarnation=1)
    pool.worker()
    pool.finish_all()
    assert codes(pool.submit(back, 1, work(2))) == []
    assert 1 in results(pool.finish_all())


def test_an_answer_that_finds_no_memory_is_busy_and_the_next_attempt_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool()
    pool.worker()
    link = pool.client()

    def join(_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(requests, "join_pieces", join)
        assert codes(pool.submit(link, 1, work(20))) == []
        (failure,) = failures(pool.finish_all()).values()
    assert (failure.id, failure.code, failure.retry_after_ms) == (1, "busy", NO_MEMORY_MS)
    assert pool.machine.core.live_bytes == 0
    assert codes(pool.submit(link, 1, work(20))) == []
    assert 1 in results(pool.finish_all())


def test_text_whose_ids_find_no_memory_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool()
    worker = pool.worker()
    link = pool.client()

    def with_ids(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(request_texts, "with_ids", with_ids)
    (asked,) = texts(pool.submit(link, 1, text("q", ["x"])))
    assert isinstance(asked.message, Tokenize)
    sent = pool.do(ev.TextTokenized(0, worker, asked.message.task, [], []))
    assert failures(sent)[1].code == "busy"
    assert pool.machine.core.live_bytes == 0
