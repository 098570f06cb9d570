"""Generations of a low priority stop for a higher one, and go on after their last token."""

from typing import Any

import pytest
from msgspec.structs import replace

from enginepool.coordinator.core import events as ev
from enginepool.protocol.messages import Capabilities, StartGeneration
from tests.core.generations import CAN, GeneratingPool, generate, outputs
from tests.core.machines import Sent, config

#: two slots, and room for 60 tokens
SMALL = Capabilities(
    "causal", 1000, 100, batch_tokens=60, batch_rows=2, inflight_tokens=60, inflight_rows=2, operations=("generate",),
    features=("grammar", "stop_text"),
)  # fmt: skip
LOW, HIGH = 0, 5


def full(*, can: Capabilities = SMALL, ageing_s: float | None = None, **low: Any) -> tuple[GeneratingPool, bytes, list[Sent]]:
    """A worker that has two low generations, of requests 1 and 2: the first has a token."""
    pool = GeneratingPool(config(ageing_s=ageing_s))
    client = pool.client()
    pool.worker("w", can=can)
    pool.submit(client, 1, generate(3, **low), priority=LOW)
    pool.submit(client, 2, generate(3, **low), priority=LOW)
    tasks = pool.tasks()
    pool.step(b"w", (tasks[0], 0, 0, [7], ""))
    return pool, client, tasks


def counters(tasks: list[Sent]) -> list[int]:
    return [one.message.task[1] for one in tasks if isinstance(one.message, StartGeneration)]


def test_a_higher_priority_gets_the_slot_of_the_newest_low_one_which_goes_on_later() -> None:
    pool, client, tasks = full()
    pool.step(b"w", (tasks[1], 0, 0, [8], ""))
    started = pool.tasks(pool.submit(client, 3, generate(4), priority=HIGH))
    assert pool.stopped() == [(b"w", [counters(tasks)[1]])]
    assert [one.message.priority for one in started if isinstance(one.message, StartGeneration)] == [HIGH]
    again = pool.tasks(pool.step(b"w", (started[0], 0, 0, [1, 2], "stop")))
    [resumed] = [one.message for one in again if isinstance(one.message, StartGeneration)]
    assert (resumed.at, resumed.priority) == (1, LOW)
    pool.step(b"w", (again[0], 0, 1, [9], "stop"))
    assert outputs(pool.sent)[2][1] == [[8, 9]]


def test_the_stop_is_sent_before_the_start_that_takes_its_slot() -> None:
    pool, client, _ = full()
    kinds = [type(one.message).__name__ for one in pool.submit(client, 3, generate(4), priority=HIGH)]
    assert kinds == ["StopGeneration", "StartGeneration"]


@pytest.mark.parametrize("priority", [LOW, LOW - 1])
def test_no_generation_stops_for_an_equal_or_a_lower_priority(priority: int) -> None:
    pool, client, _ = full()
    assert not pool.tasks(pool.submit(client, 3, generate(4), priority=priority)) and not pool.stopped()


def test_no_generation_stops_for_one_that_it_goes_before_by_what_it_has_waited() -> None:
    pool, client, _ = full(ageing_s=1.0)
    pool.wait(HIGH + 1.0)
    assert not pool.tasks(pool.submit(client, 3, generate(4), priority=HIGH)) and not pool.stopped()
    assert len(pool.tasks(pool.submit(client, 4, generate(4), priority=10 * HIGH))) == 1


@pytest.mark.parametrize("low", [{"regex": "a+"}, {"partial": True}])
def test_what_could_not_go_on_exactly_keeps_its_slot_once_it_has_tokens(low: dict[str, Any]) -> None:
    pool, client, tasks = full(**low)
    started = pool.tasks(pool.submit(client, 3, generate(4), priority=HIGH))
    assert len(started) == 1 and pool.stopped() == [(b"w", [counters(tasks)[1]])], "the one without tokens"
    assert not pool.tasks(pool.submit(client, 4, generate(4), priority=HIGH)) and len(pool.stopped()) == 1
    assert not outputs(pool.sent), "and none ends early"


def test_as_many_stop_as_the_tokens_of_the_higher_one_need_and_none_where_that_is_not_enough() -> None:
    pool, client, tasks = full(max_new_tokens=20)
    pool.submit(client, 3, generate(30, max_new_tokens=20), priority=HIGH)
    assert pool.stopped() == [(b"w", counters(tasks)[::-1])], "50 of 60 tokens"
    assert len(pool.tasks()) == 3
    pool.submit(client, 4, generate(30, max_new_tokens=20), priority=HIGH + 1)
    assert len(pool.stopped()) == 2, "also of a priority that is high itself"
    before = len(pool.stopped())
    pool.submit(client, 5, generate(3, max_new_tokens=50), priority=HIGH)
    assert len(pool.stopped()) == before, "the one that runs is more urgent"


def test_each_sample_of_a_higher_priority_gets_a_slot() -> None:
    can = replace(CAN, batch_rows=4, inflight_rows=4)
    pool = GeneratingPool(config(ageing_s=None))
    client = pool.client()
    pool.worker("w", can=can)
    for id_ in range(1, 5):
        pool.submit(client, id_, generate(3), priority=LOW)
    low = counters(pool.tasks())
    started = pool.tasks(pool.submit(client, 9, generate(4, n=3), priority=HIGH))
    assert sum(one.message.n for one in started if isinstance(one.message, StartGeneration)) == 3
    assert sorted(task for _, tasks in pool.stopped() for task in tasks) == low[1:]
    # Those that stopped wait, and no longer count for the worker.
    [worker] = pool.machine.core.worker_links.values()
    assert worker.priorities == {LOW: 1, HIGH: len(started)}


def test_a_free_slot_is_used_also_at_a_worker_that_has_more_tokens() -> None:
    pool, client = two_workers()
    started = pool.tasks(pool.submit(client, 4, generate(3), priority=HIGH))
    assert [one.link for one in started] == [b"a"], "b has fewer tokens, and no slot"


def test_a_higher_priority_takes_a_slot_at_any_worker() -> None:
    pool, client = two_workers()
    pool.submit(client, 4, generate(3), priority=HIGH)
    started = pool.tasks(pool.submit(client, 5, generate(3), priority=HIGH))
    assert [link for link, _ in pool.stopped()] == [b"a"], "the generation of a low priority is there"
    assert [one.link for one in started] == [b"a"]


def two_workers() -> tuple[GeneratingPool, bytes]:
    """Worker a has a long low generation, and one slot more; worker b has two short high ones."""
    pool = GeneratingPool(config(ageing_s=None))
    client = pool.client()
    for name in ("a", "b"):
        pool.worker(name, can=SMALL)
    pool.submit(client, 1, generate(20), priority=LOW)
    for id_ in (2, 3):
        pool.submit(client, id_, generate(3), priority=HIGH)
    assert [one.link for one in pool.tasks()] == [b"a", b"b", b"b"]
    return pool, client


def test_a_higher_priority_takes_a_slot_while_a_suspect_waits_for_a_worker_of_its_own() -> None:
    pool = GeneratingPool(config(ageing_s=None))
    client = pool.client()
    for name in ("x", "y"):
        pool.worker(name, can=SMALL)
        if name == "x":
            pool.submit(client, 1, generate(3), priority=LOW)
        pool.do(ev.WorkerBroken(0, name.encode(), "it broke"))
    group = pool.machine.core.groups["g"]
    assert [request.id for request in group.suspects.waiting()] == [1], "after two losses"
    for id_ in range(2, 6):
        pool.submit(client, id_, generate(3), priority=LOW + 1)
    for name in ("a", "b"):
        pool.worker(name, can=SMALL)
    assert [request.id for request in group.suspects.waiting()] == [1] and group.routing.least() is not None
    before = len(pool.stopped())
    started = pool.tasks(pool.submit(client, 9, generate(4), priority=HIGH))
    assert [one.message.priority for one in started if isinstance(one.message, StartGeneration)] == [HIGH]
    assert len(pool.stopped()) == before + 1
