"""A coordinator that is stopped on purpose: what it says to clients and workers, and what a client's session makes of it."""

import pytest

from enginepool.client.session.events import AbandonRequest, Abort, Complaint, SessionTick
from enginepool.coordinator.core import events as ev
from enginepool.protocol.messages import Drain, ErrorReply, Ping
from tests.core.machines import Pool, codes, failures, results, work
from tests.core.test_client_session import Driver, result
from tests.core.test_fleet import start


@pytest.fixture
def driver() -> Driver:
    driver = Driver()
    driver.connect()
    return driver


# --- the client --------------------------------------------------------------------------------------------------------


def test_a_request_refused_by_an_ending_coordinator_waits_for_the_next_one(driver: Driver) -> None:
    driver.submit(1)
    driver.refuse("shutting_down", 1)
    assert driver.failed() == []
    driver.pass_time(60.0)
    assert driver.failed() == [] and driver.sent_ids() == []
    driver.welcome(epoch=8)
    assert driver.sent_ids() == [1]
    driver.hear(result(1))
    assert driver.answered() == [1]


def test_nothing_is_sent_to_a_coordinator_that_has_said_that_it_ends(driver: Driver) -> None:
    driver.submit(1)
    driver.refuse("shutting_down")
    driver.submit(2)
    assert driver.sent_ids() == []
    driver.welcome(epoch=7)
    assert driver.sent_ids() == []
    driver.hear(result(1))
    assert driver.answered() == [1]
    driver.submit(3)
    driver.welcome(epoch=8)
    assert driver.sent_ids() == [2, 3]


def test_a_deadline_ends_the_wait_for_the_next_coordinator(driver: Driver) -> None:
    driver.submit(1, timeout=5.0)
    driver.submit(2, timeout=5.0)
    driver.refuse("shutting_down", 1)
    driver.pass_time(4.9)
    assert driver.failed() == []
    driver.pass_time(2.0)
    assert driver.failed() == [(1, "deadline_exceeded"), (2, "deadline_exceeded")]


def test_a_cancelled_request_does_not_wait_for_the_next_coordinator(driver: Driver) -> None:
    driver.submit(1)
    driver.submit(2)
    driver(AbandonRequest(driver.now, 1))
    driver.refuse("shutting_down", 1)
    assert driver.failed() == [(1, "cancelled")]
    driver.refuse("shutting_down", 2)
    driver(AbandonRequest(driver.now, 2))
    assert driver.failed() == [(2, "cancelled")]


def test_a_pool_that_stays_down_ends_what_waits_for_the_next_coordinator(driver: Driver) -> None:
    driver.submit(1)
    driver.refuse("shutting_down", 1)
    driver(Abort(driver.now, ErrorReply("pool_down", "the pool was stopped")))
    assert driver.failed() == [(1, "pool_down")]


def test_the_end_is_announced_once_and_the_next_coordinator_is_looked_for_often(driver: Driver) -> None:
    driver.refuse("shutting_down")
    assert [type(effect) for effect in driver.effects] == [Complaint]
    driver.refuse("shutting_down")
    assert driver.effects == []
    pings = [driver.session.wake_at]
    while pings[-1] < driver.now + 1.0:
        driver(SessionTick(pings[-1]))
        assert any(isinstance(message, Ping) for message in driver.sent())
        pings.append(driver.session.wake_at)
    assert len(pings) >= 4


# --- the coordinator ---------------------------------------------------------------------------------------------------


def test_clients_hear_at_once_that_the_coordinator_ends() -> None:
    pool = Pool(workers=1)
    start(pool)
    links = [pool.client(), pool.client()]
    sent = pool.do(ev.DrainAsked(0, 10))
    told = [s.link for s in sent if isinstance(s.message, ErrorReply) and s.message.code == "shutting_down"]
    assert told == links
    assert list(failures(sent)) == [None]


def test_a_coordinator_that_ends_alone_finishes_batches_in_flight_and_keeps_every_worker() -> None:
    pool = Pool(workers=1)
    start(pool)
    client = pool.client()
    for id_ in range(1, 21):
        pool.submit(client, id_, work(8))
    begun = len(pool.batches)
    assert 0 < begun < 20
    pool.do(ev.DrainAsked(0, 10, keep_workers=True))
    assert codes(pool.submit(client, 21, work())) == ["shutting_down"]
    assert not pool.drained
    sent = pool.finish_all()
    assert len(results(sent)) == begun, "what waits is left to the next coordinator"
    assert pool.drained and pool.kept
    assert not pool.killed
    assert not any(isinstance(s.message, Drain) for s in pool.sent)
    assert len(pool.started) == 1


def test_a_coordinator_that_ends_alone_waits_for_batches_within_its_limit() -> None:
    pool = Pool(workers=1)
    incarnation = start(pool)
    pool.submit(pool.client(), 1, work())
    pool.do(ev.DrainAsked(0, 5, keep_workers=True))
    pool.wait(4.5)
    pool.do(ev.WorkerHeard(0, incarnation.encode()))
    assert not pool.drained
    pool.wait(1.0)
    assert pool.drained and pool.kept and not pool.killed
    assert codes(pool.sent) == ["shutting_down"], "one notice, and no request is failed"


def test_a_coordinator_that_has_finished_and_waits_for_its_clients_may_be_told_to_end_the_pool() -> None:
    pool = Pool(workers=1)
    incarnation = start(pool)
    pool.do(ev.DrainAsked(0, 10, keep_workers=True))
    assert pool.drained and pool.kept
    pool.drained = False
    pool.do(ev.DrainAsked(0, 10))
    assert not pool.drained
    assert [s.link for s in pool.sent if isinstance(s.message, Drain)] == [incarnation.encode()]
    pool.do(ev.WorkerExited(0, incarnation, "exit code 0"))
    assert pool.drained and not pool.kept


def test_a_coordinator_that_was_to_end_alone_may_be_told_to_end_the_pool() -> None:
    pool = Pool(workers=1)
    incarnation = start(pool)
    client = pool.client()
    for id_ in range(1, 4):
        pool.submit(client, id_, work(8))
    pool.do(ev.DrainAsked(0, 10, keep_workers=True))
    pool.do(ev.DrainAsked(0, 10))
    assert sorted(results(pool.finish_all())) == [1, 2, 3]
    assert [s.link for s in pool.sent if isinstance(s.message, Drain)] == [incarnation.encode()]
    pool.do(ev.WorkerExited(0, incarnation, "exit code 0"))
    assert pool.drained and not pool.kept


def test_the_end_of_the_pool_is_not_taken_back() -> None:
    pool = Pool(workers=1)
    incarnation = start(pool)
    pool.do(ev.DrainAsked(0, 10))
    pool.do(ev.DrainAsked(0, 10, keep_workers=True))
    pool.do(ev.WorkerExited(0, incarnation, "exit code 0"))
    assert pool.drained and not pool.kept
