"""A simulated coordinator process: the real machine and the real translation of messages, in a shell of virtual time.

It stands for `coordinator/shell/daemon.py`: what peers said is handled before any timer, a send to a client that is gone is
a cut link, and a stall leaves everything in the sockets until it is over.
"""

from collections.abc import Callable, Sequence

import msgspec

from enginepool.config import PoolConfig
from enginepool.coordinator.core import effects as ef
from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.adapter_events import AdapterStored, AdaptersWritten
from enginepool.coordinator.core.group_holds import GroupHolds
from enginepool.coordinator.core.group_weights import AdapterVersion
from enginepool.coordinator.core.story import story
from enginepool.coordinator.shell.decode import client_event, refusal, worker_event
from enginepool.protocol.errors import WireError
from enginepool.protocol.frames import Buffer
from enginepool.protocol.messages import Accept, ErrorReply, Expired, Message, Welcome
from enginepool.protocol.messages.weights import Phase, Published
from tests.core.checked_machine import CheckedMachine
from tests.sim.cluster import Cluster
from tests.sim.leases import COUNTED
from tests.sim.network import Link, Network
from tests.sim.oracle import Oracle
from tests.sim.sim_stager import content_of
from tests.sim.watch import Watch

#: events in which a peer says which epoch it has heard
GREETINGS = frozenset({ev.WorkerRegistered, ev.ClientHello})


class Planted(Exception):
    """An internal error, as a bug would be one."""


class SimCoordinator:
    """One incarnation of the coordinator."""

    #: the mistake that a test plants: it goes on after an internal error
    goes_on = False

    def __init__(
        self, network: Network, cluster: Cluster, oracle: Oracle, config: PoolConfig, turn_s: float, prompt: bool
    ) -> None:
        self.network = network
        self.world = network.world
        self.cluster = cluster
        self.config = config
        #: longest turn of the loop
        self.turn_s = turn_s
        #: nothing but a fault makes anybody wait for long
        self.prompt = prompt
        #: numbers of the checkpoints' weights
        self.base: dict[str, int] = {}
        self.machine = CheckedMachine(config, self.world.check_every)
        self.watch = Watch(self.machine, oracle, self.world.check_every)
        self.alive = True
        self.drained = False
        #: called once it has ended on purpose
        self.when_drained: Callable[[], None] = lambda: None
        #: called with an epoch that it is to go above
        self.raise_epoch: Callable[[int], None] = lambda _: None
        self.stalled = False
        self._held: list[tuple[Link, Sequence[Buffer]]] = []
        #: what kills it in the middle of its next effects
        self.doomed: Callable[[], None] | None = None
        #: an internal error is due: what kills it then
        self.raises: Callable[[], None] | None = None
        self._ended: set[str] = set()
        self._exits: list[ev.WorkerExited] = []
        #: the messages of one turn of the loop
        self._events: list[ev.Event] = []
        self._timer_at = float("inf")
        #: committed weights, and what was stopped, as on disk; how often it cannot be written
        self.journal: dict[str, ev.GroupWeights] = {}
        self.holds: dict[str, GroupHolds] = {}
        self.disk_full = 0.0
        #: committed adapters, as on disk
        self.adapters: dict[str, list[AdapterVersion]] = {}
        self._last_write = 0.0
        #: called with each `Phase` and `Published` that it says
        self.heard: Callable[[Message], None] = lambda _: None

    def start(
        self,
        epoch: int,
        journal: dict[str, ev.GroupWeights],
        holds: dict[str, GroupHolds] | None = None,
        adapters: dict[str, list[AdapterVersion]] | None = None,
    ) -> None:
        self.world.note("coordinator", f"starts, epoch {epoch}")
        self.network.server = self
        self.journal, self.holds = journal, {} if holds is None else holds
        self.adapters = {} if adapters is None else adapters
        folders = {"memory": "/memory", "disk": "/disk"}
        found = self.cluster.survivors(self)
        started = ev.Started(self.world.now, epoch, dict(journal), found, folders)
        self.handle(msgspec.structs.replace(started, holds=dict(self.holds), adapters=dict(self.adapters)))
        self._tick()

    # --- in ------------------------------------------------------------------------------------------------------------

    def receive(self, link: Link, frames: Sequence[Buffer]) -> None:
        if self.stalled:
            self._held.append((link, frames))
            return
        self.world.mix(frames[0])  # type: ignore[arg-type]
        now = self.world.now
        try:
            if link.worker:
                event = worker_event(now, link.id, frames)
            else:
                event = client_event(now, link.id, frames, self.config.limits.max_message_bytes)
        except WireError as error:
            self.network.send(link.id, refusal(frames[0], error), ())
            return
        self._events.append(event)
        if len(self._events) == 1:
            self.world.after(self.world.between(0, self.turn_s), self._act)

    def _act(self) -> None:
        """Everything that came in together, at once."""
        if self._events and self.alive and not self.stalled:
            events, self._events = self._events, []
            self.handle(*events)

    def exited(self, event: ev.WorkerExited) -> None:
        """A process that this coordinator watches has ended."""
        if self.stalled and self.alive:
            self._exits.append(event)
        elif self.alive:
            self._ended.add(event.incarnation)
            event.now = self.world.now
            self.handle(event)

    def knows(self, group: str, incarnation: str) -> bool:
        """It has this worker, and has not given it up."""
        return incarnation in self.machine.core.groups[group].workers

    def _ahead(self, events: Sequence[ev.Event]) -> set[bytes]:
        """Links of peers that have heard a higher epoch."""
        said = [event for event in events if type(event) is ev.WorkerRegistered or type(event) is ev.ClientHello]
        return {event.link for event in said if event.epoch > self.machine.core.epoch and not self.machine.core.draining}

    def _link_cut(self, link: bytes) -> None:
        if self.alive:
            self.handle(ev.LinkCut(self.world.now, link))

    # --- out -----------------------------------------------------------------------------------------------------------

    def handle(self, *events: ev.Event) -> None:
        """Events through the machine, and their effects."""
        note, came = self.world.note, self.watch.oracle.leases.came
        greeted = False
        for event in events:
            note("coordinator", event)
            kind = type(event)
            if kind in COUNTED:
                came(event)
            greeted = greeted or kind in GREETINGS
        ahead = self._ahead(events) if greeted else ()
        effects = self._effects(events)
        if effects is None:
            return
        if ahead:
            for effect in effects:
                if isinstance(effect, ef.ToClient | ef.ToWorker) and isinstance(effect.message, Accept | Welcome):
                    assert effect.link not in ahead, f"it takes no word from this epoch: {effect}"
        self.watch.after(len(events), effects)
        for event in events if greeted else ():
            if type(event) is ev.WorkerRegistered:
                dead = event.incarnation in self._ended
                assert not (dead and self.knows(event.group, event.incarnation)), f"a dead process is back: {event}"
        for effect in effects:
            if type(effect) is ef.LogLine:
                self.world.note("log", effect.text)
                continue
            if self.doomed and self.world.chance(0.5):
                self.doomed()
                return
            if type(effect) is ef.ToClient:
                self._say(effect.message, effect.link)
                if not self.network.send(effect.link, effect.message, effect.frames):
                    self.world.after(0.0, self._link_cut, effect.link)
            elif type(effect) is ef.ToWorker:
                self._say(effect.message, effect.link)
                if type(effect.message) is Expired and effect.link in self.network.links:
                    self._given_up(self.network.links[effect.link].dealer.owner.name, effect.message.reason)
                if type(effect.message) is ErrorReply and effect.link in self.network.links:
                    said = effect.message.message
                    own = "weight update failed" not in said  # for the silence of another one
                    assert "silent" not in said or not own, f"a worker ends for its link: {said}"
                    self._given_up(self.network.links[effect.link].dealer.owner.name, said)
                self.network.send(effect.link, effect.message, effect.frames)
            elif type(effect) is ef.StartWorker:
                self.watch.oracle.commands.sleep.starts(effect.group, effect.incarnation)
                self.cluster.start(self, effect.group, effect.index, effect.incarnation, effect.weights)
            elif type(effect) is ef.KillWorker:
                self.world.note("coordinator", effect)
                self._given_up(effect.incarnation, effect.reason)
                self.cluster.kill(effect.incarnation)
            elif type(effect) is ef.CheckJournal:
                self._last_write = max(self._last_write, self.world.now) + self.world.between(0.0005, 0.02)
                self.world.at(self._last_write, self._check, effect)
            elif type(effect) is ef.WriteJournal:
                self._last_write = max(self._last_write, self.world.now) + self.world.between(0.0005, 0.02)
                self.world.at(self._last_write, self._write, effect)
            elif type(effect) is ef.KeepHolds:
                self._last_write = max(self._last_write, self.world.now) + self.world.between(0.0005, 0.02)
                self.world.at(self._last_write, self._keep, effect)
            elif type(effect) is ef.StoreAdapter:
                error = "no space left on device" if self.disk_full and self.world.chance(self.disk_full) else ""
                stored = AdapterStored(0.0, effect.change, f"/state/{effect.adapter.engine_name}", error)
                self.world.after(self.world.between(0.0005, 0.05), self._tell_later, stored)
            elif type(effect) is ef.WriteAdapters:
                self._last_write = max(self._last_write, self.world.now) + self.world.between(0.0005, 0.02)
                self.world.at(self._last_write, self._write_adapters, effect)
            elif type(effect) is ef.RaiseEpoch:
                self.world.note("coordinator", effect)
                self.world.after(self.world.between(0.001, 0.02), self.raise_epoch, effect.epoch)
            elif type(effect) is ef.Drained:
                self.drained = True
                self.world.after(0.0, self.when_drained)
        self._set_timer(self.machine.wake_at())

    def _check(self, effect: ef.CheckJournal) -> None:
        """In the same thread."""
        if self.alive:
            error = "no space left on device" if self.disk_full and self.world.chance(self.disk_full) else ""
            self.world.after(self.world.between(0.0, 0.01), self._checked, effect, error)

    def _checked(self, effect: ef.CheckJournal, error: str) -> None:
        if self.alive and self.stalled:
            self.world.after(0.1, self._checked, effect, error)
        elif self.alive:
            self.handle(ev.JournalChecked(self.world.now, effect.update, error))

    def _effects(self, events: Sequence[ev.Event]) -> Sequence[ef.Effect] | None:
        """What the machine decides about `events`; None: an internal error has ended this coordinator meanwhile."""
        end = self.raises
        if end is None or not self.world.chance(0.3):
            return self.machine.handle(*events)
        on = self.machine._on  # pyright: ignore[reportPrivateUsage] (a fault is planted inside)
        kind, halfway = type(self.world.random.choice(events)), self.world.chance(0.5)
        right = on[kind]

        def wrong(event: ev.Event) -> None:
            if halfway:
                right(event)
            raise Planted(kind.__name__)

        on[kind] = wrong
        try:
            self.machine.handle(*events)
        except Planted as error:
            for text in story(error, self.machine.core):
                self.world.note("coordinator", text)
        on[kind] = right
        if self.goes_on:
            self._set_timer(self.machine.wake_at())
        else:
            self.raises = None
            end()
        return None

    def _keep(self, effect: ef.KeepHolds) -> None:
        """In the same thread."""
        if not self.alive:
            return
        if self.disk_full and self.world.chance(self.disk_full):
            self.watch.oracle.commands.sleep.forgotten(effect.group)
        else:
            self.world.note("coordinator", effect)
            self.holds[effect.group] = effect.holds
        self.world.after(self.world.between(0.0, 0.01), self._kept, effect.number)

    def _kept(self, number: int) -> None:
        if self.alive and self.stalled:
            self.world.after(0.1, self._kept, number)
        elif self.alive:
            self.handle(ev.HoldsKept(self.world.now, number))

    def _write(self, effect: ef.WriteJournal) -> None:
        """In a thread of its own: it goes on while the loop stands still, and ends with the process."""
        if not self.alive:
            return
        error = "no space left on device" if self.disk_full and self.world.chance(self.disk_full) else ""
        if not error:
            self.world.note("coordinator", effect)
            self.journal[effect.group] = weights = effect.weights
            content = content_of(weights.digest, self.base[effect.group])
            self.watch.oracle.commit(effect.group, weights.version, content, weights.digest, run=weights.run)
        self.world.after(self.world.between(0.0, 0.01), self._written, effect, error)

    def _written(self, effect: ef.WriteJournal, error: str) -> None:
        if not self.alive:
            return
        if self.stalled:
            self.world.after(0.1, self._written, effect, error)
        else:
            self.handle(ev.JournalWritten(self.world.now, effect.update, error))

    def _write_adapters(self, effect: ef.WriteAdapters) -> None:
        """As `_write`."""
        if not self.alive:
            return
        error = "no space left on device" if self.disk_full and self.world.chance(self.disk_full) else ""
        if not error:
            self.world.note("coordinator", effect)
            self.adapters[effect.group] = list(effect.adapters)
            self.watch.oracle.adapters.committed(self.world.now, effect.group, list(effect.adapters))
        self.world.after(self.world.between(0.0, 0.01), self._tell_later, AdaptersWritten(0.0, effect.change, error))

    def _tell_later(self, event: ev.Event) -> None:
        """A thread has done something."""
        if self.alive and self.stalled:
            self.world.after(0.1, self._tell_later, event)
        elif self.alive:
            event.now = self.world.now
            self.handle(event)

    def _given_up(self, name: str, reason: str) -> None:
        """Where messages and forwards are quick, no healthy worker is given up for being silent or slow."""
        worker = self.cluster.workers.get(name)
        if self.prompt and worker is not None and worker.healthy and "weight" not in reason:
            assert "silent" not in reason and "in time" not in reason, f"{name} is healthy: {reason}"

    def _say(self, message: Message, link: bytes) -> None:
        self.world.note("coordinator", (link, message))
        if type(message) is Published:
            every = (one for weights in self.watch.oracle.weights.values() for one in weights)
            journaled = any(one.committed and one.version == message.version for one in every)
            assert journaled, f"published before it was journaled: {message}"
        if type(message) is Phase or type(message) is Published:
            self.heard(message)

    def _set_timer(self, at: float) -> None:
        if at < self._timer_at:
            self._timer_at = at
            self.world.at(at, self._due, at)

    def _due(self, at: float) -> None:
        if at == self._timer_at and not self.stalled:
            self._tick()

    def _tick(self) -> None:
        if self.alive:
            self._act()
            self._timer_at = float("inf")
            self.handle(ev.Tick(self.world.now))

    # --- what befalls it -----------------------------------------------------------------------------------------------

    def stall(self) -> None:
        """The process stands still."""
        self.world.note("coordinator", "stalls")
        self.stalled = True

    def go_on(self) -> None:
        """The stall is over: sockets and processes first, in either order, then the timers."""
        if not self.alive or not self.stalled:
            return
        self.world.note("coordinator", "goes on")
        self.stalled = False
        for event in self._events:
            # A process that stood still reads its sockets, and then the clock, after that: times never go back.
            event.now = self.world.now
        held, self._held = self._held, []
        exits, self._exits = self._exits, []
        first = self.world.chance(0.5)
        if first:
            for exit_ in exits:
                self.exited(exit_)
        for link, frames in held:
            self.receive(link, frames)
        self._act()
        if not first:
            for exit_ in exits:
                self.exited(exit_)
        self._tick()

    def drain(self, within: float, *, keep_workers: bool = False) -> None:
        """SIGTERM, or SIGUSR1 with `keep_workers`."""
        self.handle(ev.DrainAsked(self.world.now, within, keep_workers))

    def kill(self) -> None:
        """SIGKILL."""
        self.world.note("coordinator", "killed")
        self.alive = False
        self.stalled = False
        self.doomed = self.raises = None
        self.network.stop_server()
