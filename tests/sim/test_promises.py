"""Promises about order and time that no single event can show, each in a small world where nothing goes wrong."""

from random import Random

import pytest

from enginepool.config import GroupConfig, PoolConfig, Timing
from enginepool.protocol.messages import Capabilities
from tests.sim.network import Conditions
from tests.sim.plan import Plan
from tests.sim.simulation import Simulation
from tests.sim.traffic import Call, Mix, make_call
from tests.sim.world import World

FORWARD_S = 0.05


def calm(ageing_s: float | None, in_flight: int, fifo: bool, forward_s: float = 5.0) -> Simulation:
    """One worker that takes one row a forward, one client, a good network, and no calls yet."""
    world = World(1)
    plan = Plan(Random(1), 1)
    plan.kinds = {"a": "causal"}
    plan.counts = {"a": 1}
    plan.external = {"a": 0}
    plan.versions = {"a": 0}
    plan.capabilities = {"a": Capabilities("causal", 300, 64, 64, 1, 64 * in_flight, in_flight)}
    plan.config = PoolConfig({"a": GroupConfig("sim", "sim", ageing_s=ageing_s)}, timing=Timing(forward_s=forward_s))
    plan.conditions = Conditions(0.0005)
    plan.clients = 1
    plan.calls = 0
    plan.faults = []
    simulation = Simulation(world, plan)
    profile = simulation.cluster.profiles["a"]
    profile.forward_s, profile.token_s, profile.load_s, profile.load_fails, profile.fifo = FORWARD_S, 0.0, 0.1, 0.0, fifo
    world.at(0.0, simulation.coordinator.start, 1, simulation.journal)
    world.at(0.0, simulation.clients[0].start)
    return simulation


def ask(simulation: Simulation, at: float, priority: int) -> Call:
    """A call of one row."""
    random = Random(0)
    mix = Mix(random)
    mix.text = mix.poison = mix.choking = mix.refused = mix.bad = mix.deadline = mix.cancel = mix.large = mix.impatient = 0.0
    call = Call(len(simulation.oracle.calls), 0, at)
    while True:
        make_call(random, call, "a", simulation.plan.capabilities["a"], mix, False)
        if len(call.prompts) == 1:
            break
    call.score.priority = priority
    simulation.oracle.add(call)
    simulation.world.at(at, simulation.clients[0].submit, call)
    return call


def wait_of_a_low_one(ageing_s: float | None, load: float, in_flight: int, fifo: bool) -> float:
    """Seconds that one call of priority −10 waits under a steady `load` of priority 10."""
    simulation = calm(ageing_s, in_flight, fifo)
    at = 1.0
    while at < 100.0:
        ask(simulation, at, 10)
        at += FORWARD_S / load
    low = ask(simulation, 5.0, -10)
    while not low.outcome and simulation.world.now < 100.0:
        simulation.world.run_until(simulation.world.now + 0.1)
    assert low.outcome in ("", "result")
    assert simulation.oracle.workers_lost == 0
    return simulation.world.now - 5.0


@pytest.mark.parametrize("fifo", [True, False])
@pytest.mark.parametrize("in_flight", [1, 2, 6])
@pytest.mark.parametrize("load", [0.9, 1.2])
def test_with_ageing_nothing_waits_for_ever(load: float, in_flight: int, fifo: bool) -> None:
    """Twenty levels of priority weigh as much as twenty seconds; overload adds what has piled up in them, and no more."""
    assert wait_of_a_low_one(1.0, load, in_flight, fifo) < 20.0 + 20.0 * max(0.0, load - 1) + 10.0


def test_without_ageing_and_with_too_much_to_do_it_does() -> None:
    assert wait_of_a_low_one(None, 1.2, 2, False) > 90.0


@pytest.mark.parametrize("stall_s", [3.0, 30.0])
def test_a_stall_of_the_coordinator_costs_no_worker_and_no_answer(stall_s: float) -> None:
    simulation = calm(1.0, 2, True)
    at = 1.0
    while at < 20.0:
        ask(simulation, at, 0)
        at += 2 * FORWARD_S
    world = simulation.world
    for time in (5.0, 5.0 + 2 * stall_s):
        world.at(time, simulation.coordinator.stall)
        world.at(time + stall_s, simulation.coordinator.go_on)
    world.run_until(30.0 + 3 * stall_s)
    assert not simulation.oracle.open
    assert set(simulation.oracle.counts) == {"result"}
    assert simulation.oracle.workers_lost == 0
    simulation.coordinator.watch.quiet()


def test_a_worker_that_stands_still_for_less_than_the_silence_is_kept() -> None:
    simulation = calm(1.0, 2, True, forward_s=30.0)
    world = simulation.world
    calls = [ask(simulation, 2.0 + i / 2, 0) for i in range(10)]
    world.run_until(3.0)
    (worker,) = simulation.cluster.workers.values()
    for time, fall in ((3.1, worker.stop), (20.0, worker.block)):
        world.at(time, fall)
        world.at(time + simulation.plan.config.timing.silence_s - 2.0, worker.go_on)
    calls += [ask(simulation, 19.0 + i / 2, 0) for i in range(10)]
    world.run_until(60.0)
    assert [call.outcome for call in calls] == ["result"] * 20
    assert simulation.oracle.workers_lost == 0
