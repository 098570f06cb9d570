"""What callers of two priorities get of an engine in simulated time, whose costs are those of one H200 (bench/README.md)."""

import pytest

from tests.core.two_stages import HIGH, Costs, Seen, Simulation

#: 16.7 ms for one request, 148 requests a second at most; measured: 16.2 to 17.2, and 143 to 147
PLAIN = Costs(batch_s=0.0035, row_s=0.00045, token_s=2.23e-6)
#: 27 ms for one request, of which 14 are there for any content of its forward, as no CUDA graph launches it; measured: 30 to 34
PACKED = Costs(batch_s=0.006, row_s=0.0001, token_s=1.75e-6, forward_s=0.014, packed=True)
#: requests of one priority that keep an engine full
MANY = 64
SEEDS = (0, 1, 2)


def alone_s(costs: Costs) -> float:
    """Median of a request's time when there is no other."""
    return Simulation(costs, 1.0).run()[0].at(0.5)


def most(costs: Costs) -> float:
    """Requests a second of a full engine."""
    return Simulation(costs, 4.0, in_flight=MANY).run()[0].in_time / 4.0


def mixed(costs: Costs, seconds: float, seed: int = 0) -> tuple[Seen, Seen]:
    """A high priority and a low one at 120 % of what the engine can do, a fifth of it high."""
    found = Simulation(costs, seconds, rate=1.2 * most(costs), high_share=0.2, seed=seed).run()
    return found[HIGH], found[0]


@pytest.mark.parametrize("costs", [PLAIN, PACKED], ids=["plain", "packed"])
def test_a_full_engine_computes_all_the_time(costs: Costs) -> None:
    assert most(costs) >= 0.95 * 10 / costs.gpu_s(10)


@pytest.mark.parametrize("seed", SEEDS)
def test_on_an_overloaded_gpu_a_high_priority_waits_for_little(seed: int) -> None:
    high, low = mixed(PLAIN, 15.0, seed)
    assert high.at(0.99) <= 4 * alone_s(PLAIN), "the benchmark's bound; forwards half as long as the pace were over it"
    assert low.in_time / 15.0 >= 0.4 * most(PLAIN)


def test_where_every_forward_costs_much_both_priorities_go_on() -> None:
    high, low = mixed(PACKED, 6.0)
    assert high.at(0.99) <= 3 * alone_s(PACKED)
    assert low.in_time / 6.0 >= 0.1 * most(PACKED)


def test_at_half_of_what_an_engine_can_do_few_requests_wait_long() -> None:
    found = Simulation(PLAIN, 20.0, rate=0.47 * most(PLAIN)).run()[0]
    assert found.at(0.5) <= 1.5 * alone_s(PLAIN)
    assert found.at(0.99) <= 4 * alone_s(PLAIN)
