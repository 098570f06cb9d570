"""Engines that generate nothing: their workers are lost, also if their requests end before that."""

import msgspec

from enginepool.coordinator.core import events as ev
from enginepool.protocol.messages.control import Control
from tests.core.generations import CAN, GeneratingPool, generate
from tests.core.machines import Pool, config

FORWARD_S = 2.0


def one_worker() -> tuple[GeneratingPool, bytes, bytes]:
    """A pool, its worker, and a client."""
    settings = config()
    timing = msgspec.structs.replace(settings.timing, forward_s=FORWARD_S)
    pool = GeneratingPool(msgspec.structs.replace(settings, timing=timing))
    return pool, pool.worker(can=CAN), pool.client()


def ask(pool: GeneratingPool, client: bytes, seconds: float, *, timeout: float, every: float, tokens: bool = False) -> float:
    """Ask every so many seconds, for so many. Returns how long the worker was there. `tokens`: it generates some."""
    began, id_ = pool.now, 10
    while pool.now < began + seconds and pool.machine.core.worker_links:
        id_ += 1
        pool.do(ev.WorkerHeard(0, b"w"), ev.Heard(0, client))
        sent = pool.tasks(pool.submit(client, id_, generate(3), timeout=timeout))
        pool.wait(every)
        if tokens and sent and not id_ % 4:
            pool.step(b"w", (sent[0], 0, 0, [1], ""))
    return pool.now - began


def lost(pool: Pool) -> bool:
    return any("was not done in time" in line for line in pool.logged)


def test_newer_requests_that_end_give_the_oldest_no_time() -> None:
    pool, _, client = one_worker()
    pool.submit(client, 1, generate(3))
    assert ask(pool, client, 20.0, timeout=0.5, every=0.25) <= FORWARD_S + 0.5 and lost(pool)


def test_a_worker_that_generates_nothing_is_lost_although_each_of_its_requests_is_stopped_before() -> None:
    for timeout, every in ((0.8, 0.25), (1.2, 0.5), (1.9, 1.0)):
        pool, _, client = one_worker()
        assert ask(pool, client, 20.0, timeout=timeout, every=every) <= 2.5 * FORWARD_S and lost(pool), timeout


def test_a_worker_that_generates_something_stays() -> None:
    pool, _, client = one_worker()
    assert ask(pool, client, 20.0, timeout=0.4, every=0.25, tokens=True) >= 20.0 and not lost(pool)


def test_requests_of_which_a_busy_engine_may_not_have_begun_any_are_no_sign_of_a_fault() -> None:
    pool, _, client = one_worker()
    assert ask(pool, client, 20.0, timeout=0.3, every=0.05) >= 20.0 and not lost(pool)


def test_requests_that_are_stopped_soon_and_leave_nothing_behind_are_no_sign_of_a_fault() -> None:
    pool, _, client = one_worker()
    assert ask(pool, client, 20.0, timeout=0.9, every=1.5) >= 20.0 and not lost(pool)


def test_what_is_stopped_while_an_engine_stands_still_is_no_sign_of_a_fault() -> None:
    pool, worker, client = one_worker()
    pool.submit(client, 1, generate(3))
    pool.do(ev.ControlAsked(0, b"operator", Control(1, "pause", mode="in_place")))
    pool.wait(3.0)
    pool.do(ev.WorkerHeard(0, worker), ev.Heard(0, client), ev.CancelAsked(0, client, 1))
    pool.do(ev.ControlAsked(0, b"operator", Control(2, "resume")))
    pool.submit(client, 2, generate(3))
    pool.wait(1.5)
    assert pool.machine.core.worker_links and not lost(pool)


def test_what_was_taken_back_in_a_pause_is_no_sign_of_a_fault_either() -> None:
    pool, worker, client = one_worker()
    pool.submit(client, 1, generate(3))
    pool.wait(1.5)
    pool.do(ev.ControlAsked(0, b"operator", Control(1, "pause")))
    pool.wait(1.0)
    pool.do(ev.WorkerHeard(0, worker), ev.ControlAsked(0, b"operator", Control(2, "resume")))
    pool.wait(1.5)
    assert pool.machine.core.worker_links and pool.machine.core.groups["g"].running
    pool.wait(1.0)
    assert lost(pool)


def test_a_request_after_some_that_were_stopped_late_has_time_to_begin() -> None:
    """One may have been long itself, or have waited for its own grammar: the next one has all of its time."""
    pool, worker, client = one_worker()
    late = FORWARD_S - 0.05
    pool.submit(client, 1, generate(3), timeout=FORWARD_S - 0.1)
    for end, expected in ((late, False), (late, False), (FORWARD_S / 8, False), (FORWARD_S / 4, True)):
        pool.do(ev.WorkerHeard(0, worker), ev.Heard(0, client))
        pool.wait(end)
        assert lost(pool) == expected
        pool.submit(client, round(100 * pool.now), generate(3), timeout=FORWARD_S - 0.1)


def test_a_request_next_to_one_that_was_stopped_late_has_time_to_begin() -> None:
    pool, worker, client = one_worker()
    pool.submit(client, 1, generate(3), timeout=FORWARD_S - 0.2)
    pool.wait(FORWARD_S - 0.3)
    pool.submit(client, 2, generate(3))
    pool.do(ev.WorkerHeard(0, worker), ev.Heard(0, client))
    pool.wait(FORWARD_S - 0.1)
    assert not lost(pool)
    pool.wait(0.6)
    assert lost(pool)
