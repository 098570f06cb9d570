"""Promises about fairness: within a priority, clients share by what workers compute for them."""

from typing import Any

import msgspec
import pytest

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.requests import clients
from enginepool.coordinator.scheduling.lanes import QueueClient
from enginepool.coordinator.scheduling.queue import Queue
from enginepool.protocol.messages import Batch, Result
from tests.core.invariants import check_machine
from tests.core.machines import CAN, Pool, Sent, work

#: batches of `machines.CAN` that are in flight at one worker
IN_FLIGHT = 2


def answers(sent: list[Sent], client: bytes) -> int:
    """How many of them are answers to `client`."""
    return sum(one.link == client and isinstance(one.message, Result) for one in sent)


def answered_after(pool: Pool, client: bytes, most: int = 2000) -> int:
    """Finish batches, oldest first, until `client` has an answer; how many were finished."""
    for finished in range(1, most):
        if answers(pool.finish(pool.batches[0]), client):
            return finished
    raise AssertionError(f"no answer in {most} batches")


def test_one_item_waits_for_what_is_in_flight_behind_a_request_of_10_000() -> None:
    pool = Pool()
    pool.worker()
    greedy, light = pool.client(), pool.client()
    pool.submit(greedy, 1, work(10_000))
    pool.submit(light, 1, work(1))
    assert answered_after(pool, light) <= IN_FLIGHT + 1


def test_one_item_waits_for_what_is_in_flight_behind_a_client_with_many_requests() -> None:
    pool = Pool()
    pool.worker()
    greedy, light = pool.client(), pool.client()
    for number in range(200):
        pool.submit(greedy, number, work(8))
    pool.submit(light, 1, work(1))
    assert answered_after(pool, light) <= IN_FLIGHT + 1


@pytest.mark.parametrize("greedy", [1, 8, 64])
def test_a_light_client_waits_for_one_batch_of_each_competing_client(greedy: int) -> None:
    """Its later items as well: it never uses its share."""
    pool = Pool()
    pool.worker()
    links = [pool.client() for _ in range(greedy)]
    light = pool.client()
    for number in range(30):
        for link in links:
            pool.submit(link, number, work(20 if number % 3 else 8))
    for number in range(5):
        pool.submit(light, number, work(1))
        assert answered_after(pool, light) <= IN_FLIGHT + greedy
    for _ in range(2 * greedy):
        pool.finish(pool.batches[0])
    pool.submit(light, 9, work(1))
    assert answered_after(pool, light) <= IN_FLIGHT + greedy


def test_two_busy_clients_get_the_same_for_any_size_of_their_requests() -> None:
    pool = Pool()
    large, small = pool.client(), pool.client()
    pool.submit(large, 1, work(400))
    for number in range(400):
        pool.submit(small, number, work(1))
    pool.worker()
    for _ in range(50):
        pool.finish(pool.batches[0])
    done = answers(pool.sent, small)
    assert 180 <= done <= 220, "of 400 rows that were computed half are its own"


def test_a_client_is_not_charged_for_what_was_never_computed() -> None:
    pool = Pool()
    a, b = pool.client(), pool.client()
    pool.submit(a, 1, work(10_000))
    pool.do(ev.CancelAsked(0, a, 1))
    for number in range(20):
        pool.submit(b, number, work(8))
    pool.submit(a, 2, work(8))
    pool.worker()
    assert answered_after(pool, a) <= IN_FLIGHT + 1


def test_a_client_has_no_credit_for_what_it_did_not_use() -> None:
    pool = Pool()
    pool.worker()
    a, b = pool.client(), pool.client()
    for number in range(100):
        pool.submit(a, number, work(8))
    for _ in range(50):
        pool.finish(pool.batches[0])
    for number in range(40):
        pool.submit(b, number, work(8))
    before = answers(pool.sent, a)
    for _ in range(40):
        pool.finish(pool.batches[0])
    assert answers(pool.sent, a) - before >= 18


def test_a_stream_of_new_clients_does_not_starve_a_busy_one() -> None:
    pool = Pool()
    pool.worker()
    busy = pool.client()
    pool.submit(busy, 1, work(80))
    for _ in range(4):
        pool.submit(pool.client(), 1, work(8))
    finished = 1
    while not answers(pool.finish(pool.batches[0]), busy):
        finished += 1
        pool.submit(pool.client(), 1, work(8))
        assert finished < 10 * 6 * 5, "each of ten parts waits for at most six times as many others as wait with it"


def test_clients_of_several_signatures_have_one_share() -> None:
    can = CAN.__class__("classifier", 1000, 100, 100, 8, 200, 16, labels=2, hidden=4)
    pool = Pool()
    both, one = pool.client(), pool.client()
    for number in range(0, 200, 2):
        pool.submit(both, number, work(8, labels=()))
        pool.submit(both, number + 1, work(8, labels=(), hidden=True))
    for number in range(100):
        pool.submit(one, number, work(8, labels=()))
    pool.worker(can=can)
    for _ in range(60):
        pool.finish(pool.batches[0])
    done = answers(pool.sent, one)
    assert 26 <= done <= 34, "half of what was computed"


def test_a_client_has_one_turn_where_its_requests_have_several_signatures() -> None:
    can = CAN.__class__("classifier", 1000, 100, 100, 8, 200, 16, labels=2, hidden=4)
    pool = Pool()
    both, light = pool.client(), pool.client()
    pool.submit(both, 1, work(8, labels=(), hidden=True))
    pool.submit(both, 2, work(8, labels=()))
    pool.submit(light, 1, work(1, labels=()))
    pool.worker(can=can)
    assert answered_after(pool, light) == 2, "after one batch of the other client, not one of each signature"


def test_a_new_client_has_no_credit_in_a_signature_in_which_a_busy_one_had_no_turn_yet() -> None:
    can = CAN.__class__("classifier", 1000, 100, 100, 8, 200, 16, labels=2, hidden=4)
    pool = Pool()
    busy, light, later = pool.client(), pool.client(), pool.client()
    for number in range(20):
        pool.submit(busy, number, work(8, labels=()))
    pool.submit(busy, 20, work(8, labels=(), hidden=True))
    pool.worker(can=can)
    for _ in range(6):
        pool.finish(pool.batches[0])
    pool.submit(light, 1, work(8, labels=()))
    for number in range(4):
        pool.submit(later, number, work(8, labels=(), hidden=True))
    for _ in range(8):
        pool.finish(pool.batches[0])
    order = [one.link for one in pool.sent if isinstance(one.message, Result) and one.link != busy]
    assert order.index(light) <= 1, "after one batch of the other client at most"


@pytest.mark.parametrize("finished", range(4))
def test_a_cancelled_request_costs_its_client_no_turn_in_another_signature(finished: int) -> None:
    can = CAN.__class__("classifier", 1000, 100, 100, 8, 200, 16, labels=2, hidden=4)
    pool = Pool()
    greedy, light, later = pool.client(), pool.client(), pool.client()
    for number in range(0, 20, 2):
        pool.submit(greedy, number, work(8, labels=()))
        pool.submit(greedy, number + 1, work(8, labels=(), hidden=True))
    pool.worker(can=can)
    for _ in range(finished):
        pool.finish(pool.batches[0])
    pool.submit(light, 1, work(8, labels=()))
    pool.submit(light, 2, work(8, labels=(), hidden=True))
    pool.do(ev.CancelAsked(0, light, 2))
    pool.submit(later, 1, work(8, labels=()))
    for _ in range(4):
        pool.finish(pool.batches[0])
    order = [one.link for one in pool.sent if isinstance(one.message, Result) and one.link != greedy]
    assert order == [light, later]


@pytest.mark.parametrize("max_item", [0, 90])
def test_a_batch_of_short_rows_counts_as_a_whole_batch(max_item: int) -> None:
    pool = Pool()
    short, long = pool.client(), pool.client()
    for number in range(200):
        pool.submit(short, number, work(8, 1, query=1))
        pool.submit(long, number, work(8, 8, query=1))
    pool.worker(can=CAN.__class__("causal", 1000, 100, 100, 8, 200, 16, max_item=max_item))
    for _ in range(100):
        pool.finish(pool.batches[0])
    done = answers(pool.sent, long)
    assert 45 <= done <= 55, "of 100 batches half are its own"


def test_requests_of_a_client_whose_link_was_cut_wait_behind_all_others() -> None:
    pool = Pool()
    pool.worker()
    gone, here = pool.client(), pool.client()
    for number in range(20):
        pool.submit(gone, number, work(8), priority=5)
    pool.do(ev.LinkCut(0, gone))
    for number in range(10):
        pool.submit(here, number, work(8))
    for _ in range(IN_FLIGHT + 10):
        pool.finish(pool.batches[0])
    assert answers(pool.sent, here) == 10
    assert pool.machine.core.groups["g"].counts.answered == IN_FLIGHT + 10
    while pool.batches:
        pool.finish(pool.batches[0])
    assert pool.machine.core.groups["g"].counts.answered == 30, "nothing is thrown away"


def test_a_link_that_two_clients_have_in_turn_moves_so_many_requests_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their requests are where they belong after the next looks."""
    monkeypatch.setattr(clients, "MOVES", 50)
    moved: list[QueueClient] = []

    class Counted(Queue[Any]):
        def move(self, client: QueueClient) -> None:
            moved.append(client)
            super().move(client)

    pool = Pool()
    pool.machine.core.groups["g"].queue = Counted()
    names = b"a" * 16, b"b" * 16
    for name in names:
        pool.client(b"link", client=name)
        for number in range(30):
            pool.submit(b"link", number, work(1))
    for _ in range(50):
        for name in names:
            pool.client(b"link", client=name)
    first, second = (pool.machine.core.clients[name] for name in names)
    assert len(moved) <= 2
    pool.wait(1.0)
    assert (first.away, second.away) == (True, False)
    check_machine(pool.machine)


@pytest.mark.parametrize("packed", [False, True])
def test_batches_stay_full_where_a_small_request_and_a_large_one_take_turns(packed: bool) -> None:
    """Rows of the large request fill what is left of the batch that the small one opens."""
    pool = Pool()
    large, small = pool.client(), pool.client()
    pool.submit(large, 1, work(1000, 8, query=1))
    pool.submit(small, 0, work(1, 8, query=1))
    pool.worker(can=msgspec.structs.replace(CAN, max_item=9) if packed else CAN)
    for number in range(1, 40):
        before = len(pool.sent)
        while not answers(pool.sent[before:], small):
            pool.finish(pool.batches[0])
        pool.submit(small, number, work(1, 8, query=1))
    messages = [one.message for one in pool.sent if isinstance(one.message, Batch)]
    rows = [sum(part.frames[-1].shape[0] for part in message.parts) for message in messages]
    assert min(rows[2:-2]) == CAN.batch_rows, rows
