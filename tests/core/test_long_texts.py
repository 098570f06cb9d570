"""A text that takes a tokenizer seconds keeps no other waiting: not at its worker, and not in the queue."""

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.request import LONG_TEXT
from enginepool.coordinator.core.request_state import TEXT
from enginepool.coordinator.core.text_lanes import MOST_TEXTS
from enginepool.coordinator.scheduling.batches import SLOWEST_TEXT
from enginepool.protocol.messages import Tokenize
from tests.core.machines import Pool, Sent, text, texts
from tests.core.test_machine_regressions import lose, tokenize

LONG = text("q", ["x" * LONG_TEXT])
#: the query is tokenized with each item
REPEATED = text("q" * (LONG_TEXT // 100), ["x"] * 100)


def given(pool: Pool, link: bytes = b"a") -> list[bool]:
    """Of each text that a worker was given: whether it is long."""
    return [sent.message.long for sent in texts(pool.sent) if sent.link == link and isinstance(sent.message, Tokenize)]


def test_short_texts_go_to_a_worker_that_has_a_long_one_and_long_ones_wait_for_each_other() -> None:
    pool = Pool()
    client = pool.client()
    pool.worker("a")
    for id_, work in enumerate((LONG, REPEATED, LONG)):
        pool.submit(client, id_, work)
    assert given(pool) == [True]
    for id_ in range(10, 10 + 2 * MOST_TEXTS):
        pool.submit(client, id_, text("q", ["y"]))
    assert given(pool) == [True] + [False] * MOST_TEXTS
    [first, *short] = texts(pool.sent)
    tokenize(pool, short[0])
    assert given(pool) == [True] + [False] * (MOST_TEXTS + 1)
    tokenize(pool, first)
    assert given(pool)[-1], "the next long one"
    pool.worker("b")
    assert given(pool, b"b")[0] or given(pool, b"b")[-1], "the last long one"
    assert given(pool, b"b").count(True) == 1


def test_a_long_text_of_a_higher_priority_is_given_first_and_does_not_keep_a_short_one_waiting() -> None:
    pool = Pool()
    client = pool.client()
    pool.worker("a")
    for id_, priority in ((1, 0), (2, 0), (3, 5)):
        pool.submit(client, id_, LONG, priority=priority)
    pool.submit(client, 4, text("q", ["y"]))
    assert given(pool) == [True, False]
    tokenize(pool, texts(pool.sent)[0])
    [worker] = pool.machine.core.groups["g"].workers.values()
    assert [worker.texts[task].id for task in worker.texts] == [4, 3]


def test_a_worker_that_is_lost_with_both_kinds_leaves_two_suspects() -> None:
    """It was busy with the first short one and with the long one."""
    pool = Pool()
    client = pool.client()
    lost = pool.worker("lost")
    pool.submit(client, 1, LONG)
    for id_ in (2, 3, 4):
        pool.submit(client, id_, text("q", [str(id_)]))
    pool.submit(client, 5, LONG)
    lose(pool, lost)
    group = pool.machine.core.groups["g"]
    assert sorted(request.id for request in group.suspects.waiting() if request.state == TEXT) == [1, 2]
    assert sorted(request.id for request in group.texts.waiting()) == [3, 4]
    assert [request.id for request in group.long_texts.waiting()] == [5]


def test_a_worker_that_has_lost_its_link_is_given_both_kinds_again() -> None:
    pool = Pool()
    client = pool.client()
    pool.worker("a")
    pool.submit(client, 1, LONG)
    pool.submit(client, 2, text("q", ["y"]))
    again = pool.do(ev.WorkerRegistered(0, b"new", "g", "a", 1, "host"))
    assert [sent.message.long for sent in texts(again) if isinstance(sent.message, Tokenize)] == [False, True]


def with_a_long_text() -> tuple[Pool, bytes, float]:
    """A pool whose worker `a` has one, a client, and the seconds that a forward may take."""
    pool = Pool()
    client = pool.client()
    pool.worker("a")
    pool.submit(client, 1, LONG)
    return pool, client, pool.machine.core.config.timing.forward_s


def alive(pool: Pool, seconds: float) -> bool:
    """Let time pass; whether the worker `a`, which says that it lives, was not given up."""
    for _ in range(round(seconds)):
        pool.wait(1.0)
        pool.do(ev.WorkerHeard(0, b"a"))
    return bool(pool.machine.core.groups["g"].workers)


def test_a_short_text_may_wait_for_a_long_one_where_a_tokenizer_does_one_after_the_other() -> None:
    pool, client, forward_s = with_a_long_text()
    pool.submit(client, 2, text("q", ["y"]))
    long, short = texts(pool.sent)
    assert alive(pool, forward_s)
    tokenize(pool, long)
    pool.finish_all()
    assert alive(pool, forward_s - 2)
    tokenize(pool, short)
    pool.finish_all()
    assert alive(pool, 10)


def test_a_long_text_that_is_never_done_is_found_although_short_ones_are() -> None:
    pool, client, forward_s = with_a_long_text()
    done: list[Sent] = []
    for id_ in range(2, 100):
        if not alive(pool, 1):
            break
        pool.submit(client, id_, text("q", ["y"]))
        for sent in texts(pool.sent)[1 + len(done) :]:
            done.append(sent)
            tokenize(pool, sent)
            pool.finish_all()
    assert any("a text was not tokenized in time" in line for line in pool.logged)
    assert forward_s < len(done) < forward_s + LONG.tokens / SLOWEST_TEXT + 5
