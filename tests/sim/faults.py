"""What goes wrong: each fault strikes a random process, and each heals by itself or when the simulation says so."""

from typing import TYPE_CHECKING

from enginepool.coordinator.core import events as ev
from tests.sim.sim_client import SimClient
from tests.sim.sim_coordinator import SimCoordinator
from tests.sim.sim_publisher import SimPublisher
from tests.sim.sim_worker import SimWorker

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation


class Faults:
    """The bad luck of one simulation."""

    def __init__(self, simulation: "Simulation") -> None:
        self.simulation = simulation
        self.world = simulation.world
        #: when the last fault that lasts is over
        self.last_heals = 0.0

    def strike(self, kind: str) -> None:
        """Let `kind` happen to a random process."""
        room, _, rest = kind.partition("_")
        if room == "worker" or room == "engine":
            workers = [w for w in self.simulation.cluster.workers.values() if w.alive and w.dealer is not None]
            if workers:
                worker = self.world.random.choice(workers)
                (self._worker if room == "worker" else self._engine)(worker, rest)
        elif room == "client":
            clients = [client for client in self.simulation.clients if not client.gone]
            if clients:
                self._client(self.world.random.choice(clients), rest)
        elif room == "coordinator":
            self._coordinator(rest)
        elif kind == "new_weights":
            self._new_weights()
        elif kind == "journal_full":
            self.simulation.coordinator.disk_full = 0.5
        elif room == "publisher":
            publishers = [publisher for publisher in self.simulation.publishers if not publisher.gone]
            if publishers:
                self._publisher(self.world.random.choice(publishers), rest)
        elif room == "operator":
            self._operator()
        elif room in ("stager", "take"):
            self._weights(room, rest)
        else:
            for client in self.simulation.clients:
                client.ask_status()

    def _lasts(self, short: float, long: float) -> float:
        """How long a fault lasts; often short, at times very long."""
        seconds = self.world.between(0, long if self.world.chance(0.3) else short)
        self.last_heals = max(self.last_heals, self.world.now + seconds)
        return seconds

    # --- workers -------------------------------------------------------------------------------------------------------

    def _worker(self, worker: SimWorker, what: str) -> None:
        world = self.world
        dealer = worker.dealer
        assert dealer is not None
        if what == "kill" and world.chance(0.5):
            worker.doomed = True
        elif what == "kill":
            worker.kill()
        elif what == "stop":
            worker.stop()
            seconds = self._lasts(2.0, 12.0)
            worker.trouble(seconds)
            world.after(seconds, worker.kill if world.chance(0.2) else worker.go_on)
        elif what == "block":
            worker.block()
            seconds = self._lasts(2.0, 12.0)
            worker.trouble(seconds)
            world.after(seconds, worker.go_on)
        elif what == "drain":
            worker.drain()
        elif dealer.link is not None:
            if what == "partition":
                seconds = self._lasts(1.0, 10.0)
                worker.trouble(seconds)
                dealer.not_before = world.now + seconds
            if what == "link_cut_by_coordinator":
                self._cut_by_coordinator(dealer.link.id)
            self.simulation.network.cut(dealer.link)

    def _cut_by_coordinator(self, link: bytes) -> None:
        coordinator = self.simulation.coordinator
        if coordinator.alive and not coordinator.stalled and link in coordinator.machine.core.worker_links:
            coordinator.handle(ev.WorkerBroken(self.world.now, link, "it does not read its messages", silent=True))

    def _engine(self, worker: SimWorker, what: str) -> None:
        engine = worker.engine
        if what == "crash":
            engine.crash(engine.by_chance("the engine crashed by itself"))
        elif what == "hang":
            engine.hangs = True
        elif what == "slow":
            engine.slow = self.world.between(1, 20)
            seconds = self._lasts(2.0, 5.0)
            worker.trouble(seconds)
            self.world.after(seconds, setattr, engine, "slow", 1.0)
        else:
            engine.next_fault = what

    def _new_weights(self) -> None:
        """All engines answer from other weights for a while, each from a moment of its own on: answers must not mix the two."""
        back = self.world.now + self._lasts(1.0, 5.0)
        for name, profile in self.simulation.cluster.profiles.items():
            version = profile.version + 1
            self.simulation.oracle.may_answer(name, version)
            for worker in self.simulation.cluster.workers.values():
                if worker.group == name and worker.stage == "ready":
                    self.world.after(self.world.between(0, 0.3), worker.engine.become, version)
                    self.world.at(back + self.world.between(0.3, 0.6), worker.engine.become, profile.version)

    def _weights(self, room: str, what: str) -> None:
        """A stager, or an engine that takes weights, fails."""
        workers = [worker for worker in self.simulation.cluster.workers.values() if worker.alive]
        if not workers:
            return
        worker = self.world.random.choice(workers)
        if room == "take":
            worker.take_fault = what
        elif what == "kill":
            self.world.note(worker.stager.name, "the stager is killed")
            worker.stager.kill()
        else:
            worker.stager.damaged = True

    def _publisher(self, publisher: SimPublisher, what: str) -> None:
        if what == "vanish":
            publisher.vanish()
        elif what == "stall":
            publisher.stall()
            self.world.after(self._lasts(2.0, 8.0), publisher.go_on)
        elif publisher.dealer is not None and publisher.dealer.link is not None:
            self.simulation.network.cut(publisher.dealer.link)

    # --- clients -------------------------------------------------------------------------------------------------------

    def _client(self, client: SimClient, what: str) -> None:
        world = self.world
        dealer = client.dealer
        if what == "vanish":
            client.vanish()
        elif what == "close":
            client.close()
        elif what == "stall":
            if dealer is not None:
                client.stall()
                world.after(self._lasts(2.0, 15.0), client.go_on)
        elif dealer is not None and dealer.link is not None:
            link = dealer.link
            if what == "outbox":
                # The coordinator drops what it holds for a client that does not read; the connection itself stands.
                coordinator = self.simulation.coordinator
                if coordinator.alive and not coordinator.stalled:
                    if self.simulation.plan.generate is None:
                        link.until_out = world.now
                        world.after(0.2, setattr, link, "until_out", float("inf"))
                    else:  # all of it: tokens of a stream have no gaps
                        link.dropped = link.last_out
                    coordinator.handle(ev.LinkCut(world.now, link.id))
                return
            if what == "partition":
                dealer.not_before = world.now + self._lasts(1.0, 15.0)
            self.simulation.network.cut(link)

    def _operator(self) -> None:
        """A worker is restarted, or a retired one revived."""
        coordinator = self.simulation.coordinator
        if coordinator.alive and not coordinator.stalled and not coordinator.machine.core.draining:
            slots = [slot for group in coordinator.machine.core.groups.values() for slot in group.slots]
            if slots:
                slot = self.world.random.choice(slots)
                asked = ev.RestartAsked(self.world.now, b"operator", 1)
                asked.group, asked.worker, asked.incarnation = slot.group.name, slot.name, slot.incarnation
                coordinator.handle(asked)

    # --- the coordinator -----------------------------------------------------------------------------------------------

    def _coordinator(self, what: str) -> None:
        world, coordinator = self.world, self.simulation.coordinator
        if not coordinator.alive or coordinator.network.server is not coordinator:
            return
        if what == "stall":
            coordinator.stall()
            world.after(self._lasts(1.0, 12.0), coordinator.go_on)
        elif what == "set_back":
            self._kill_coordinator()
            self.simulation.set_epoch_back()
        elif what == "stop":
            self._stop_coordinator(coordinator)
        elif what == "raise":
            coordinator.raises = self._kill_coordinator
        elif world.chance(0.5):
            coordinator.doomed = self._kill_coordinator
        else:
            self._kill_coordinator()

    def _stop_coordinator(self, coordinator: SimCoordinator) -> None:
        """It is stopped on purpose, with its workers or alone, and once it has ended a successor starts."""
        if coordinator.stalled:
            return
        within = self.world.between(0.1, 5.0)

        def ended() -> None:
            if coordinator.alive:
                self._kill_coordinator()

        coordinator.when_drained = ended
        self.last_heals = max(self.last_heals, self.world.now + within + coordinator.config.timing.drain_s + 20.0)
        coordinator.drain(within, keep_workers=self.world.chance(0.5))

    def _kill_coordinator(self) -> None:
        self.simulation.coordinator.kill()
        self.world.after(self._lasts(1.0, 10.0), self.simulation.restart_coordinator)

    # --- the end -------------------------------------------------------------------------------------------------------

    def heal(self) -> None:
        """Nothing new goes wrong from here on."""
        world = self.world
        self.simulation.coordinator.doomed = self.simulation.coordinator.raises = None
        self.simulation.coordinator.disk_full = 0.0
        self.simulation.cluster.unstartable = 0.0
        for publisher in self.simulation.publishers:
            publisher.go_on()
        for worker in list(self.simulation.cluster.workers.values()):
            worker.go_on()
            worker.doomed = False
            worker.take_fault = ""
            worker.stager.damaged = False
            worker.profile.load_fails = 0.0
        self.simulation.cluster.unusable = 0.0
        for profile in self.simulation.cluster.profiles.values():
            profile.adapter_fails = 0.0
        self.simulation.network.conditions.flaky = 0.0
        world.note("faults", "all is healed")
