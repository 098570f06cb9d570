"""One schedule, from the first event until nothing is left to do: `simulate(seed, workers)`.

    calls and faults → everything heals → every call has its answer → all is quiet → the pool drains

A failure is raised as `Failed`, which says how to replay it and shows what happened last.
"""

import gc
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from itertools import product
from random import Random
from typing import NamedTuple
from unittest import mock

import msgspec

from enginepool.coordinator.core import request
from enginepool.coordinator.core.group_holds import GroupHolds
from enginepool.coordinator.core.group_weights import AdapterVersion, GroupWeights
from enginepool.protocol.messages import Message
from enginepool.protocol.messages.control import CommandName
from enginepool.protocol.messages.weights import Phase, Published, Restore
from tests.sim.adapting import LATER, first_versions
from tests.sim.cluster import Cluster
from tests.sim.commands import SimCommand
from tests.sim.conversations import Conversations, short_blocks
from tests.sim.faults import Faults
from tests.sim.generating import generate_instead
from tests.sim.network import Network
from tests.sim.offers import Offer
from tests.sim.oracle import Oracle, Weights
from tests.sim.packing_bounds import bounded
from tests.sim.plan import Plan
from tests.sim.sim_client import SimClient
from tests.sim.sim_coordinator import SimCoordinator
from tests.sim.sim_engine import Profile
from tests.sim.sim_publisher import SimPublisher
from tests.sim.sleeping import Wish
from tests.sim.traffic import CALLS, Call, Mix, decode_instead, embed_instead, exact_instead, logprobs_instead, make_call, widen
from tests.sim.world import World, line

#: after all is healed some call has its answer within this, again and again until none is left
PATIENCE_S = 120.0
#: what a caller that gave up waiting has asked for has arrived within this
SETTLED_S = 15.0
#: of the first coordinator, and from each one to the next: more than what a raised epoch is above the one that was heard
FIRST_EPOCH = 1 << 21
#: bytes of long texts of `lengthy` schedules, in which the others are as short
LONG_TEXT = 100


class Failed(AssertionError):
    """A schedule broke a promise."""


class Outcome(NamedTuple):
    """What a schedule did."""

    digest: int
    events: int
    seconds: float
    answers: dict[str, int]
    updates: dict[str, int]
    #: of all groups together
    halvings: int
    #: outcomes of commands at workers, and errors of whole commands, by code
    commands: dict[str, int]
    #: what happened to sequences that were generated, by kind
    streams: dict[str, int]
    #: outcomes of changes of adapters, by code
    changes: dict[str, int]


class Simulation:
    """All parts of one schedule."""

    def __init__(self, world: World, plan: Plan) -> None:
        self.world = world
        self.plan = plan
        self.oracle = Oracle(plan.config.restart.max_attempts, plan.bounded)
        self.oracle.limits = plan.config.limits
        #: what is committed, as on disk
        self.journal = {name: GroupWeights(version) for name, version in plan.versions.items()}
        #: what was stopped, as on disk
        self.holds: dict[str, GroupHolds] = {}
        for name, version in plan.versions.items():
            self.oracle.weights[name] = [Weights(version, version, True)]
        self.adapters: dict[str, list[AdapterVersion]] = {}
        for name in {change.group for change in plan.changes}:
            self.adapters[name] = first_versions()
            self.oracle.adapters.committed(0.0, name, self.adapters[name])
        self.network = Network(world, plan.conditions)
        profiles = {name: Profile(world, can, plan.versions[name]) for name, can in plan.capabilities.items()}
        timing = plan.config.timing
        self.cluster = Cluster(self.network, self.oracle, profiles, timing.orphan_s, timing.drain_s)
        self.cluster.unusable, self.cluster.unstaged = plan.unusable, plan.unstaged
        self.cluster.unloadable, self.cluster.strict = plan.unloadable, plan.strict
        # An engine that runs out of memory takes its update with it, and with engines that do, offers may have flaws.
        self.oracle.gentle = plan.gentle and not plan.memory
        self.oracle.stops = any(kind == "coordinator_stop" for _, kind in plan.faults)
        self.cluster.unstartable = plan.unstartable
        if plan.gentle:
            for profile in profiles.values():
                profile.load_fails = 0.0
        for name, rows in plan.memory.items():
            profiles[name].memory = rows
        for profile in profiles.values():
            profile.only_at_start = plan.only_at_start
            profile.step_s = plan.step_s
            profile.sleep_loses_weights = plan.sleep_loses_weights
            profile.adapter_s, profile.adapter_fails = plan.adapter_s, plan.adapter_fails
        self.clients = [SimClient(self.network, self.oracle, i, plan.settings) for i in range(plan.clients)]
        slowest = max(profile.seconds_in_flight for profile in profiles.values())
        if plan.gentle:
            # A worker that is only slow is none that failed.
            timing = msgspec.structs.replace(timing, forward_s=max(timing.forward_s, 2 * slowest))
            plan.config = msgspec.structs.replace(plan.config, timing=timing)
        conditions, forward_s = plan.conditions, timing.forward_s
        self.prompt = conditions.delay < 0.01 and not conditions.flaky and conditions.notice < 1.0 and slowest < forward_s / 4
        self.publishers = [SimPublisher(self.network, self.oracle, self.cluster.disks, i) for i in range(plan.publishers)]
        self._triggers = list(plan.triggers)
        self.coordinator = self.new_coordinator()
        self.epoch = FIRST_EPOCH
        self.events = 0
        self._set_back = 0
        self.faults = Faults(self)
        self._healed = False
        #: where callers go on after an answer
        self.conversations: Conversations | None = None

    def talk(self, random: Random) -> None:
        """Let callers go on after an answer."""
        self.conversations = talk = Conversations(self, random)
        for client in self.clients:
            client.heard = lambda call, effect: talk.answered(call, effect, go_on=not self._healed)

    def new_coordinator(self) -> SimCoordinator:
        coordinator = SimCoordinator(self.network, self.cluster, self.oracle, self.plan.config, self.plan.turn_s, self.prompt)
        coordinator.base = self.plan.versions
        coordinator.raise_epoch = lambda epoch: self._raise_epoch(coordinator, epoch)
        coordinator.machine.core.header_bytes = self.plan.header_bytes
        coordinator.watch.fair = not self.plan.memory
        if not self.plan.retires:
            coordinator.watch.steadfast = {name: self.plan.unloadable.get(name, 0) for name in self.plan.kinds}
        if self.plan.publishers:
            coordinator.heard = self._phase
            coordinator.watch.only_committed()
            coordinator.watch.goes_on_without(self.cluster.stages)
            kinds = {kind for _, kind in self.plan.faults} | {kind for _, kind, _ in self.plan.triggers}
            coordinator.watch.punctual = "coordinator_stall" not in kinds
        return coordinator

    def set_epoch_back(self) -> None:
        """The epoch in the journal is lost and the clock is set back, for the next coordinator. No epoch comes twice."""
        self._set_back += 1
        self.epoch = self._set_back - FIRST_EPOCH

    def _raise_epoch(self, coordinator: SimCoordinator, epoch: int) -> None:
        if coordinator.alive and not coordinator.machine.core.draining:
            self.epoch = max(self.epoch, epoch)
            coordinator.kill()
            self.world.after(self.world.between(0.1, 1.0), self.restart_coordinator)

    def restart_coordinator(self) -> None:
        """A successor takes over."""
        self.events += self.coordinator.watch.events
        self.epoch += FIRST_EPOCH
        self.coordinator = self.new_coordinator()
        self.coordinator.start(self.epoch, self.journal, self.holds, self.adapters)

    def _phase(self, message: Message) -> None:
        """A publisher is told where its transaction stands: some faults wait for just that."""
        said = message.phase if isinstance(message, Phase) else "published" if isinstance(message, Published) else ""
        for trigger in self._triggers:
            if trigger[0] == said:
                self._triggers.remove(trigger)
                self.world.after(trigger[2], self._strike, trigger[1])
                return

    def _strike(self, kind: str) -> None:
        if not self._healed:
            self.faults.strike(kind)

    # --- the course of events ------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        world, plan = self.world, self.plan
        world.at(world.between(0, 1), self.coordinator.start, self.epoch, self.journal, self.holds, self.adapters)
        for client in self.clients:
            world.at(world.between(0, 1), client.start)
        for name, count in plan.external.items():
            for _ in range(count):
                world.at(world.between(0, 2), self.cluster.dial_in, name)
        self._place_calls()
        self._place_commands()
        for publisher in self.publishers:
            world.at(world.between(0, 1), publisher.start)
        for index, offer in plan.offers:
            world.at(1.0 + offer.at, self.publishers[index].want, offer)
        for time, kind in plan.faults:
            world.at(1.0 + time, self.faults.strike, kind)
        world.run_until(1.0 + max([plan.span, *(time for time, _ in plan.faults)]))
        while world.now < self.faults.last_heals:
            world.run_until(self.faults.last_heals)
        self._healed = True
        self.faults.heal()
        if plan.drain_early:
            self._drain()
        else:
            if plan.sleeps:
                self._wake_all()
            self.settle()
            if self.publishers:
                self._publish_again()
            self._become_quiet()
            if self.conversations is not None:
                self.conversations.hold()
            self._drain()
        events = self.events + self.coordinator.watch.events
        halvings = sum(group.halvings for group in self.coordinator.machine.core.groups.values())
        oracle = self.oracle
        return Outcome(
            world.digest,
            events,
            world.now,
            oracle.counts,
            oracle.updates,
            halvings,
            oracle.commands.counts,
            oracle.streams,
            oracle.adapters.counts,
        )

    def _place_calls(self) -> None:
        world, plan = self.world, self.plan
        random = world.random
        bursts = [1.0 + plan.span * random.random() for _ in range(min(plan.bursts, plan.calls))]
        names = list(plan.kinds)
        for uid in range(min(plan.calls, CALLS)):
            call = Call(uid, random.randrange(len(self.clients)), bursts[uid % len(bursts)])
            name = random.choice(names)
            make_call(random, call, name, plan.capabilities[name], plan.mix, len(names) > 1 or random.random() < 0.5)
            if plan.wide:
                widen(Random(uid), call, plan.capabilities[name], plan.wide)
            if plan.embed and uid % 4 == 3:
                logprobs_instead(call, plan.capabilities[name])
            elif plan.embed:
                embed_instead(Random(uid), call, plan.capabilities[name], plan.embed)
            if plan.generate is not None:
                generate_instead(Random(uid), call, plan.capabilities[name], plan.generate)
            if plan.changes and call.generating is not None and uid % 4:
                call.generating.request.adapter = LATER[uid % len(LATER)]
            if plan.early and call.timeout is not None and random.random() < plan.early:
                call.score.min_version = plan.versions[name] + random.randint(1, 3)
            if plan.offers:
                exact_instead(Random(uid), call, plan.versions[name])
            if uid % 5 == 2 and plan.capabilities[name].token_bytes and call.generating is None:
                decode_instead(call)
            self.oracle.add(call)
            client = self.clients[call.client]
            world.at(call.arrival, client.submit, call)
            if call.cancel_at is not None:
                world.at(call.cancel_at, client.cancel, call)

    def _place_commands(self) -> None:
        for command in self.plan.commands:
            self.oracle.commands.open.append(command)
            self.world.at(command.at, self.clients[command.client].command, command)
        for change in self.plan.changes:
            self.oracle.adapters.open.append(change)
            self.world.at(change.at, self.clients[change.client].change, change)

    def settle(self) -> None:
        """Every call, and every command, has its answer."""
        world = self.world
        end, left = world.now + PATIENCE_S, self._open()
        while left:
            some = [*self.oracle.open.values(), *self.oracle.commands.open, *self.oracle.adapters.open][:5]
            assert world.now < end, f"no answer for {PATIENCE_S:g} s: {left} calls, {some}"
            world.run_until(world.now + 1.0)
            if self._open() < left:
                end, left = world.now + PATIENCE_S, self._open()

    def _wake_all(self) -> None:
        """What was put to sleep is woken, by a client that nothing befalls, when no other command is on its way."""
        world = self.world
        end = world.now + PATIENCE_S
        while self.oracle.commands.open and world.now < end:
            world.run_until(world.now + 1.0)
        world.run_until(world.now + SETTLED_S)
        end = world.now + PATIENCE_S
        while (wrong := self._unlike_wanted()) and world.now < end:
            world.run_until(world.now + 1.0)
        assert not wrong, f"other parts of engines sleep than are to: {wrong}"
        waker = SimClient(self.network, self.oracle, len(self.clients), self.plan.settings)
        waker.start()
        end = world.now + PATIENCE_S
        names: tuple[CommandName, ...] = ("wake", "resume")
        for group, name in product(self.plan.kinds, names):
            while True:
                command = SimCommand(waker.index, group, world.now, None, wish=Wish(name))
                self.oracle.commands.open.append(command)
                waker.command(command)
                while not command.outcome and world.now < end:
                    world.run_until(world.now + 0.1)
                assert world.now < end, f"group {group!r} does not go on: {command}"
                if command.outcome == "reported":
                    break

    def _unlike_wanted(self) -> list[str]:
        """Workers that the coordinator knows, and of whose engines other parts sleep than are to."""
        found: list[str] = []
        for worker in self.cluster.workers.values():
            group = self.coordinator.machine.core.groups[worker.group]
            known = group.workers.get(worker.registers_as)
            if known is not None and worker.stage == "ready" and not worker.engine.stuck:
                asleep, wanted = frozenset(worker.engine.asleep), group.holds.wanted(known.name)
                found += [] if asleep == wanted else [f"{known.name}: {sorted(asleep)}, not {sorted(wanted)}"]
        return found

    def _open(self) -> int:
        """How many calls, commands and changes of adapters have no answer."""
        return len(self.oracle.open) + len(self.oracle.commands.open) + len(self.oracle.adapters.open)

    def _publish_again(self) -> None:
        """Each update has ended, with any outcome, and one more succeeds."""
        world = self.world
        last = SimPublisher(self.network, self.oracle, self.cluster.disks, len(self.publishers))
        last.start()
        end = world.now + PATIENCE_S
        while any(not offer.outcome for _, offer in self.plan.offers) and world.now < end:
            world.run_until(world.now + 0.5)
        left = [offer for _, offer in self.plan.offers if not offer.outcome]
        assert not left, f"updates without an end: {left}"
        for name in self.plan.kinds:
            if name not in self.oracle.down:
                self._ask_for_the_next(name)
            end, transfer = world.now + PATIENCE_S, "checkpoint" if self.plan.only_at_start else "staged"
            while name not in self.oracle.down:
                offer = Offer(world.now, name)
                offer.transfer = transfer
                last.want(offer)
                while not offer.outcome and name not in self.oracle.down and world.now < end:
                    world.run_until(world.now + 0.1)
                assert world.now < end, f"no update of {name!r} succeeds any more: {offer}"
                if offer.outcome == "published":
                    break
                if offer.outcome == "unsupported":
                    transfer = "direct"  # a worker without staging memory could not be restored, as publishers hear
                world.run_until(world.now + 1.0)
        self.settle()
        for publisher in (*self.publishers, last):
            publisher.leave()

    def _ask_for_the_next(self, group: str) -> None:
        """A call that no worker can answer before the next update."""
        client = next((client for client in self.clients if not client.gone), None)
        uid = max(self.oracle.calls, default=-1) + 1
        if client is None or uid >= CALLS:
            return
        call, mix = Call(uid, client.index, self.world.now), Mix(Random(0))
        mix.text = mix.poison = mix.choking = mix.refused = mix.bad = mix.deadline = mix.cancel = mix.large = mix.impatient = (
            0.0
        )
        make_call(Random(uid), call, group, self.plan.capabilities[group], mix, True)
        call.score.min_version = self.oracle.latest(group).version + 1
        self.oracle.add(call)
        client.submit(call)

    def _become_quiet(self) -> None:
        """What the last answers left behind is cleaned up, in the coordinator, the workers and the clients."""
        world, timing = self.world, self.plan.config.timing
        world.run_until(world.now + max(timing.client_silence_s, timing.forward_s) + 3.0)
        # A request that came twice, the second time after its acknowledgement, runs again for no caller; what dies is replaced.
        end = world.now + PATIENCE_S
        while (self.coordinator.watch.busy or self._unknown()) and world.now < end:
            world.run_until(world.now + 1.0)
        self.coordinator.watch.quiet()
        assert not self._unknown(), f"ready, and the coordinator does not know them: {self._unknown()}"
        for worker in self.cluster.workers.values():
            if worker.stage == "ready" and not worker.engine.stuck:
                assert not worker.machine.work.owed and not worker.machine.work.leaving, worker.machine
                assert not worker.engine.inside, worker.engine.inside
                wanted = {one.engine_name for one in self.adapters.get(worker.group, ())}
                known = self.coordinator.machine.core.groups[worker.group].workers.get(worker.registers_as)
                has = worker.engine.adapters
                assert has == wanted or (known is not None and known.missing_weights), f"{worker.name} has {has}, not {wanted}"
        for client in self.clients:
            assert client.gone or not client.session.calls.by_id, client.session.describe()

    def _unknown(self) -> list[str]:
        """Workers whose engine is ready and that get no work."""
        groups = self.coordinator.machine.core.groups.values()
        able = {name for group in groups for name, worker in group.workers.items() if worker.able}
        for group in groups:
            weights = group.weights
            restore = Restore(weights.version, weights.digest, weights.snapshot, weights.path)
            for name, worker in group.workers.items():
                stager = self.cluster.stagers.get(worker.name.partition("+")[0])
                if worker.missing_weights and stager is not None and not stager.has(restore):
                    # It has no work for a good reason, until the next update.
                    able.add(name)
        workers = self.cluster.workers.values()
        return [w.incarnation for w in workers if w.stage == "ready" and not w.engine.hangs and w.registers_as not in able]

    def _drain(self) -> None:
        """The pool ends in time, and leaves no process behind."""
        world = self.world
        while not self.coordinator.alive:  # it starts again under a higher epoch
            world.run_until(world.now + 0.5)
        coordinator = self.coordinator
        self.oracle.draining = True
        self.cluster.external = False
        within = world.between(0.1, 10.0)
        coordinator.when_drained = lambda: None
        coordinator.drain(within)
        end = world.now + within + self.plan.config.timing.drain_s + 5.0
        while not coordinator.drained and world.now < end:
            world.run_until(world.now + 0.5)
        assert coordinator.drained, f"not drained: {coordinator.machine!r}"
        own = [worker for worker in self.cluster.workers.values() if not worker.incarnation.startswith("external")]
        assert not own, f"left behind: {[worker.machine for worker in own]}"
        coordinator.watch.check()


@contextmanager
def one_collection() -> Generator[None]:
    """A schedule that has ended is one large cycle, and it makes few before: garbage is looked for then, among what is new."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.collect(0)
        if enabled:
            gc.enable()


@one_collection()
def simulate(
    seed: int,
    workers: int,
    say: Callable[[str], None] | None = None,
    *,
    packed: bool = False,
    updates: bool = False,
    paced: bool = False,
    unloadable: bool = False,
    restarts: bool = False,
    wide: bool = False,
    external: bool = False,
    stops: bool = False,
    faulty: bool = False,
    crowded: bool = False,
    starved: bool = False,
    embedding: bool = False,
    commanding: bool = False,
    generating: bool = False,
    talking: bool = False,
    sleeping: bool = False,
    adapting: bool = False,
    lengthy: bool = False,
) -> Outcome:
    """Run the schedule of `seed` with so many workers; with `packed`, workers of most groups pack; with `updates`, weights are
    published meanwhile; with `paced`, workers have a pace; with `unloadable`, engines of some places never load;
    with `restarts`, all engines take weights only at their start; with `wide`, headers and answers are large, and bounds are
    tight; with `external`, other programs start most workers, and their links fail; with `stops`, the coordinator is stopped on
    purpose and started again, and its epoch is set back; with `faulty`, the coordinator has internal errors, and an operator
    restarts workers; with `crowded`, clients ask for more than the queue holds; with `starved`, engines run out of memory;
    with `embedding`, workers embed as well, and some calls ask for that; with `commanding`, callers flush groups;
    with `generating`, workers generate as well, and most calls ask for that; with `talking` too, callers go on after
    what was generated; with `sleeping`, callers put engines to sleep and wake them; with `generating` and `adapting`,
    adapters are loaded, replaced and unloaded; with `lengthy`, many texts count as long.

    Raises:
        Failed: a promise was broken; the message says which, how to replay it, and what happened before.
    """
    options = {
        "packed": packed, "updates": updates, "paced": paced, "unloadable": unloadable, "restarts": restarts, "wide": wide,
        "external": external, "stops": stops, "faulty": faulty, "crowded": crowded, "starved": starved, "embedding": embedding,
        "commanding": commanding, "generating": generating, "talking": talking, "sleeping": sleeping,
        "adapting": adapting, "lengthy": lengthy,
    }  # fmt: skip
    world = World(seed, say)
    # Each option draws from a source of its own, so that a seed means the same with and without the others.
    sources = [Random(seed + place) if on else None for place, on in enumerate(options.values())]
    *sources, talks, sleeps, adapts, _ = sources
    plan = Plan(world.random, workers, *sources, sleeping=sleeps)
    if adapts is not None:
        plan.adapt(adapts)
    simulation = Simulation(world, plan)
    if talks is not None:
        simulation.talk(talks)
    try:
        long = mock.patch.object(request, "LONG_TEXT", LONG_TEXT) if lengthy else nullcontext()
        with short_blocks() if talking else nullcontext(), bounded(plan.packing), long:
            return simulation.run()
    except Exception as error:
        recent = "\n".join(line(*entry) for entry in simulation.world.recent)
        chosen = "".join(f" --{name}" for name, on in options.items() if on)
        raise Failed(
            f"{type(error).__name__}: {error}\n\n{recent}\n\n"
            f"{type(error).__name__}: {error}\n"
            f"replay: python -m tests.sim --seed {seed} --workers {workers}{chosen} --trace"
        ) from error
