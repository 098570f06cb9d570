"""Where nothing but links breaks an update may fail for its lease alone, and only if nothing of it came for so long."""

from random import Random

import pytest

from enginepool.coordinator.core import events as ev
from enginepool.protocol.messages.weights import Publish, Renew
from tests.sim.leases import Leases
from tests.sim.plan import Plan
from tests.sim.simulation import Failed, simulate

CLIENT = b"c" * 16


def hello(now: float, link: bytes, incarnation: int) -> ev.Event:
    return ev.ClientHello(now, link, CLIENT, b"t" * 16, incarnation)


def publish(now: float, link: bytes) -> ev.Event:
    return ev.PublishAsked(now, link, Publish(1, 1, lease_ms=2500), [], (), 0)


def renew(now: float, link: bytes) -> ev.Event:
    return ev.PublisherSaid(now, link, Renew(1, 0))


BEGUN = [hello(0.0, b"1", 1), publish(1.0, b"1")]


@pytest.mark.parametrize(
    ("then", "lapses"),
    [
        ([], 3.5),
        ([renew(3.0, b"1")], 5.5),
        # A link that has not said hello, an older one, and one that is cut say nothing for anybody.
        ([renew(3.0, b"2")], 3.5),
        ([hello(2.0, b"2", 2), renew(3.0, b"1")], 3.5),
        ([hello(2.0, b"2", 2), renew(3.0, b"2")], 5.5),
        ([hello(2.0, b"2", 0), renew(3.0, b"1")], 5.5),
        ([ev.LinkCut(2.0, b"1"), renew(3.0, b"1")], 3.5),
        ([hello(2.0, b"2", 2), publish(3.0, b"2")], 5.5),
    ],
)
def test_a_lease_lapses_when_nothing_counted_for_so_long(then: list[ev.Event], lapses: float) -> None:
    leases = Leases()
    for event in (*BEGUN, *then):
        leases.came(event)
    assert not leases.lapsed(lapses - 0.01, CLIENT, 1)
    assert leases.lapsed(lapses, CLIENT, 1)
    assert not leases.lapsed(100.0, CLIENT, 2), "another transaction of the same client"


def test_what_came_too_late_does_not_undo_it() -> None:
    leases = Leases()
    for event in (*BEGUN, renew(3.5, b"1")):
        leases.came(event)
    assert leases.lapsed(3.6, CLIENT, 1)


def test_a_publisher_whose_links_break_again_and_again_may_be_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the schedules in which nothing but links breaks, and often, some need the exception for leases, and pass with it."""
    only_links = Plan._only_links  # pyright: ignore[reportPrivateUsage]

    def only_links_and_often(plan: Plan) -> None:
        only_links(plan)
        plan.faults = sorted([*plan.faults, *((plan.span * i / 40, "publisher_link") for i in range(40))])

    def never(*_: object) -> bool:
        return False

    monkeypatch.setattr(Plan, "_only_links", only_links_and_often)
    why, seed, workers = "", 0, 0
    for seed in range(1, 600):
        workers = 1 + seed % 8
        if not Plan(Random(seed), workers, updates=Random(seed + 1)).gentle:
            continue
        with monkeypatch.context() as patch:
            patch.setattr(Leases, "lapsed", never)
            try:
                simulate(seed, workers, updates=True)
            except Failed as failed:
                why = str(failed)
                break
    assert "its publisher was silent for 2500 ms" in why
    assert simulate(seed, workers, updates=True).updates["update_aborted"] >= 1
