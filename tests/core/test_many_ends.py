"""Many requests that end at the same time: what ends because of one event has a bound, and the rest follows."""

import pytest

from enginepool.coordinator.core import context
from enginepool.coordinator.core import events as ev
from enginepool.coordinator.requests import clients
from enginepool.protocol.messages import Welcome
from tests.core.machines import Pool, failures, work

#: of the coordinator's bound, here
ENDS = 100


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "ENDS", ENDS)
    monkeypatch.setattr(clients, "ENDS", ENDS)


def waiting(pool: Pool) -> int:
    return len(pool.machine.core.groups["g"].live)


def asked(pool: Pool, count: int, timeout: float | None = None) -> bytes:
    """A client with so many requests that wait."""
    client = pool.client()
    for id_ in range(1, count + 1):
        pool.submit(client, id_, work(), timeout=timeout)
    return client


def seen(pool: Pool) -> list[int]:
    """How many requests wait, until none does."""
    found = [waiting(pool)]
    while waiting(pool):
        pool.wait(0.05)
        if waiting(pool) != found[-1]:
            found.append(waiting(pool))
    return found


def test_deadlines_that_pass_at_the_same_time_end_requests_in_parts() -> None:
    pool = Pool()
    asked(pool, 2 * ENDS + 50, timeout=1.0)
    pool.now += 2.0
    for left in (ENDS + 50, 50, 0):
        assert pool.machine.wake_at() <= pool.now, "the next part is due at once"
        pool.do(ev.Tick(0))
        assert waiting(pool) == left
    assert {one.code for one in failures(pool.sent).values()} == {"deadline_exceeded"}


def test_clients_that_leave_at_the_same_time_are_forgotten_in_parts() -> None:
    pool = Pool()
    links = [asked(pool, 60) for _ in range(4)]
    for link in links:
        pool.do(ev.ClientLeft(0, link))
    assert waiting(pool) == 180 and not pool.machine.core.links
    assert seen(pool) == [180, 60, 0]
    assert not pool.machine.core.clients and not pool.logged


def test_a_client_that_left_and_comes_back_begins_anew() -> None:
    pool = Pool()
    first, second = asked(pool, 60), asked(pool, 60)
    for link in (first, second):
        pool.do(ev.ClientLeft(0, link))
    assert waiting(pool) == 60
    name = second.ljust(16, b".")
    stranger = pool.do(ev.ClientHello(0, b"stranger", name, b"x" * 16, 0))
    assert not isinstance(stranger[0].message, Welcome) and waiting(pool) == 60
    pool.client(b"again", client=name)
    assert waiting(pool) == 0 and len(pool.machine.core.clients) == 1
    pool.submit(b"again", 1, work())
    pool.wait(0.3)
    assert waiting(pool) == 1


def test_silent_clients_are_forgotten_in_parts() -> None:
    pool = Pool()
    for _ in range(4):
        asked(pool, 60)
    pool.now += pool.machine.core.config.timing.client_silence_s
    assert seen(pool) == [240, 120, 0]
    assert sum("60 requests are cancelled" in line for line in pool.logged) == 4
