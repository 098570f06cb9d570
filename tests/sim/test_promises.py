"""Promises about order and time that no single event can show, each in a small world where nothing goes wrong."""

from random import Random

import pytest

from enginepool.config import GroupConfig, Limits, PoolConfig, Timing
from enginepool.protocol.messages import Capabilities
from tests.sim.network import Conditions
from tests.sim.plan import Plan
from tests.sim.simulation import Simulation
from tests.sim.traffic import Call, Mix, make_call
from tests.sim.world import World

FORWARD_S = 0.05


def calm(
    ageing_s: float | None, in_flight: int, fifo: bool, forward_s: float = 5.0, clients: int = 1, limits: Limits | None = None
) -> Simulation:
    """One worker that takes one row a forward, some clients, a good network, and no calls yet."""
    world = World(1)
    plan = Plan(Random(1), 1)
    plan.kinds = {"a": "causal"}
    plan.counts = {"a": 1}
    plan.external = {"a": 0}
    plan.versions = {"a": 0}
    plan.capabilities = {"a": Capabilities("causal", 300, 64, 64, 1, 64 * in_flight, in_flight)}
    plan.config = PoolConfig(
        {"a": GroupConfig("sim", "sim", ageing_s=ageing_s)}, timing=Timing(forward_s=forward_s), limits=limits or Limits()
    )
    plan.conditions = Conditions(0.0005)
    plan.clients = clients
    plan.bounded = limits is not None
    plan.calls = 0
    plan.faults = []
    simulation = Simulation(world, plan)
    profile = simulation.cluster.profiles["a"]
    profile.forward_s, profile.token_s, profile.load_s, profile.load_fails, profile.fifo = FORWARD_S, 0.0, 0.1, 0.0, fifo
    world.at(0.0, simulation.coordinator.start, 1, simulation.journal)
    for client in simulation.clients:
        world.at(0.0, client.start)
    return simulation


def ask(simulation: Simulation, at: float, priority: int, client: int = 0) -> Call:
    """A call of one row."""
    random = Random(5)  # the first call that it makes has one row
    mix = Mix(random)
    mix.text = mix.poison = mix.choking = mix.refused = mix.bad = mix.deadline = mix.cancel = mix.large = mix.impatient = 0.0
    call = Call(len(simulation.oracle.calls), client, at)
    make_call(random, call, "a", simulation.plan.capabilities["a"], mix, False)
    assert len(call.prompts) == 1
    call.score.priority = priority
    simulation.oracle.add(call)
    simulation.world.at(at, simulation.clients[client].submit, call)
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
def test_with_ageing_nothing_waits_without_end(load: float, in_flight: int, fifo: bool) -> None:
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


def refused(simulation: Simulation, client: int) -> int:
    """How often calls of a client that have no answer were answered `busy`."""
    return sum(call.refusals for call in simulation.clients[client].session.calls.by_id.values())


@pytest.mark.parametrize("greedy", [1, 8])
def test_a_full_queue_takes_a_high_priority_at_once_and_a_light_client_too(greedy: int) -> None:
    """Greedy clients send ten times what the queue holds. A call of a higher priority is answered within a few forwards; calls
    of a light client of their own priority are never refused, though each waits behind what is queued."""
    simulation = calm(1.0, 2, True, clients=greedy + 2, limits=Limits(queue_items=40))
    world, high, light = simulation.world, greedy, greedy + 1
    for client in range(greedy):
        for _ in range(400 // greedy):
            ask(simulation, 1.0, 0, client)
    urgent = [ask(simulation, 5.0 + i / 2, 1000, high) for i in range(10)]
    others = [ask(simulation, 5.2 + 2 * i, 0, light) for i in range(3)]
    answered: dict[int, float] = {}
    while world.now < 12.0:
        world.run_until(world.now + FORWARD_S / 5)
        assert not refused(simulation, high), "a high priority was refused"
        assert not refused(simulation, light), "a light client was refused"
        for call in (*urgent, *others):
            if call.outcome and call.uid not in answered:
                answered[call.uid] = world.now - call.arrival
    assert [call.outcome for call in (*urgent, *others)] == ["result"] * 13
    assert max(answered[call.uid] for call in urgent) < 5 * FORWARD_S, answered
    assert max(answered[call.uid] for call in others) < 42 * FORWARD_S, answered
    assert simulation.oracle.counts["result"] > 150, "the greedy ones are served meanwhile"
