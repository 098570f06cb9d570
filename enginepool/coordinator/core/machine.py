"""The coordinator's machine: `handle(*events) -> list[Effect]`, and nothing else changes its state.

Pure: no sockets, clocks, randomness or logging. Time comes inside events. The shell performs the effects in order and sends
`Tick` no later than `wake_at`. `requests` is one side; `fleet` (the workers, their slots and their deadlines) is the other;
`scheduling` is where they meet; `state` holds what all of them change.
"""

from collections.abc import Callable
from typing import Any

from enginepool.config import PoolConfig
from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.effects import Drained, Effect, ToClient
from enginepool.coordinator.core.group import Group
from enginepool.coordinator.core.group_holds import GroupHolds, told
from enginepool.coordinator.core.group_weights import GroupWeights
from enginepool.coordinator.core.request import Client
from enginepool.coordinator.core.secondary import SecondaryEvent, WorkerLost, WorkerReturned
from enginepool.coordinator.core.status import report
from enginepool.coordinator.core.transitions import hold, release
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.fleet.deadlines import WorkerDeadlines
from enginepool.coordinator.fleet.fan_out import FanOut
from enginepool.coordinator.fleet.holding import GroupHolding
from enginepool.coordinator.fleet.planned_restarts import PlannedRestarts
from enginepool.coordinator.fleet.registration import Registration
from enginepool.coordinator.fleet.reports import WorkerReports
from enginepool.coordinator.fleet.slots import WorkerSlots
from enginepool.coordinator.fleet.workers import WorkerRegistry
from enginepool.coordinator.operations.control import control
from enginepool.coordinator.requests.admission import Admission
from enginepool.coordinator.requests.clients import ClientRegistry
from enginepool.coordinator.requests.generations import credit, follow
from enginepool.coordinator.requests.lifecycle import RequestLifecycle
from enginepool.coordinator.requests.making_room import empty_reserved, make_room
from enginepool.coordinator.scheduling.batches import pump
from enginepool.coordinator.scheduling.oom_backoff import resume
from enginepool.coordinator.weights.adapter_changes import AdapterChanges
from enginepool.coordinator.weights.inspection import inspect_weights
from enginepool.coordinator.weights.outcomes import UpdateOutcomes
from enginepool.coordinator.weights.publishing import Publishers
from enginepool.coordinator.weights.restoring import Restoring
from enginepool.coordinator.weights.transaction import Transactions
from enginepool.coordinator.weights.verification import inspected
from enginepool.coordinator.weights.worker_adapters import AdapterWorkers
from enginepool.protocol.messages import ErrorReply, Exiting, Idle, Message, Ready, Stage
from enginepool.protocol.messages.adapters import AdapterChanged
from enginepool.protocol.messages.control import Commanded
from enginepool.protocol.messages.weights import Joined, Prepared, Restored, Staged, WeightsLoaded

#: how often silence, stages, slots and kept answers are checked
WATCH_S = 0.25
#: a check of the deadlines that is later than this was delayed by the coordinator itself
STALL_S = 1.0
#: times that a turn makes room for a more urgent generation at most; others wait for the next turn
PREEMPTIONS = 256


class Machine:
    """One coordinator."""

    def __init__(self, config: PoolConfig) -> None:
        self.core = core = Context(config)
        self.requests = requests = RequestLifecycle(core)
        self.admission = admission = Admission(core, requests)
        self.clients = clients = ClientRegistry(core, requests)
        self.slots, self.questions = WorkerSlots(core, requests), FanOut(core)
        self.fleet = fleet = WorkerRegistry(core, requests, self.slots)
        registration, reports = Registration(core, fleet), WorkerReports(core, requests, fleet)
        self.deadlines = WorkerDeadlines(core, fleet, self.slots)
        self.planned, self.holding = PlannedRestarts(core, fleet, self.slots), GroupHolding(core, fleet)
        self.restoring = Restoring(core, requests, fleet)
        self.ending = UpdateOutcomes(core, requests, fleet, self.restoring)
        self.weights = weights = Transactions(core, self.ending)
        publishers = Publishers(core, weights)
        self.adapters = AdapterWorkers(core, fleet, changes := AdapterChanges(core, requests))
        self._next_watch, self._drained, self._killed = 0.0, False, False
        #: an event after this time comes after a stall of the coordinator
        self._punctual_until = self._drain_until = self._kill_at = float("inf")
        self._on: dict[type[ev.Event], Callable[[Any], None]] = {
            ev.Started: self._started,
            ev.Tick: self._tick,
            ev.DrainAsked: self._drain,
            ev.ClientHello: self._hello,
            ev.Submit: admission.submit,
            ev.CancelAsked: requests.cancel,
            ev.Acked: requests.acked,
            ev.CreditGiven: lambda e: credit(requests, e),
            ev.Heard: clients.heard,
            ev.ClientLeft: clients.left,
            ev.LinkCut: clients.link_cut,
            ev.StatusAsked: self._status,
            ev.RestartAsked: self._restart,
            ev.WorkerRegistered: registration.register,
            ev.SettingsAsked: registration.settings,
            ev.WorkerSaid: self._worker_said,
            ev.BatchDone: reports.done,
            ev.TokensGenerated: reports.generated,
            ev.PrefixesReported: reports.prefixes,
            ev.TextTokenized: reports.tokenized,
            ev.WorkerHeard: reports.heard,
            ev.WorkerBroken: fleet.broken,
            ev.WorkerExited: fleet.exited,
            ev.PublishAsked: publishers.publish,
            ev.PublisherSaid: publishers.said,
            ev.JournalChecked: weights.checked,
            ev.JournalWritten: weights.journaled,
            ev.HoldsKept: self._holds_kept,
            ev.WeightsAsked: self._weights_asked,
            ev.WorkerInspected: self._inspected,
            ev.ControlAsked: self._control,
            **changes.handlers,
        }
        self._on_worker = self._worker_messages(reports)

    def _worker_messages(self, reports: WorkerReports) -> dict[type[Message], Callable[[Worker, Any], None]]:
        return {
            Stage: reports.stage,
            Ready: reports.ready,
            Idle: reports.idle,
            ErrorReply: reports.refused,
            Exiting: self.fleet.bye,
            **dict.fromkeys((Prepared, Joined, Staged, WeightsLoaded), self.weights.answered),
            Restored: self.restoring.failed,
            Commanded: self._commanded,
            AdapterChanged: self.adapters.answered,
        }

    def handle(self, *events: ev.Event) -> list[Effect]:
        """What to do about `events`, which came together; their times never go back.

        Work is dispatched once, after all of them: requests that arrive together share a batch instead of the first one
        leaving alone, and of several workers that fall idle together the waiting work finds the best.
        """
        core = self.core
        effects = core.effects = []
        core.busiest = None
        on, unsent = self._on, self.requests.unsent
        for event in events:
            if type(event) is not ev.TokensGenerated:
                unsent.send()
            core.now = event.now
            core.event = event
            if event.now > self._punctual_until:
                self._stood_still()
            on[type(event)](event)
        unsent.send()
        if core.again:
            follow(core)
        core.event = None
        if core.secondary or core.updates:
            self._settle()
        self.adapters.settle()
        if core.secondary:
            self._settle()
        emptied: list[Group] = []
        for group in core.woken:  # which grows meanwhile
            group.woken = False
            if not group.on_hold:
                stuck = pump(core, group)
                for _ in range(PREEMPTIONS):
                    if not stuck or not make_room(self.requests, group):
                        break
                    stuck = pump(core, group)
                # Once for an event: what stops may be before the rows for which it stopped, and be given the worker again.
                if group.reserved_worker is not None and group not in emptied and empty_reserved(self.requests, group):
                    emptied.append(group)
                    pump(core, group)
        core.woken.clear()
        if core.draining:
            self._draining()
        return effects

    def wake_at(self) -> float:
        """When the next `Tick` is due."""
        return min(self._next_watch, self.core.deadlines.next(), self.weights.next(), self.core.dispatch_at)

    def _started(self, e: ev.Started) -> None:
        core = self.core
        core.epoch, core.raises = e.epoch, e.raises
        core.started = e.now
        self._punctual_until = e.now + WATCH_S + STALL_S
        for name, config in core.config.groups.items():
            group = core.groups[name] = Group(name, config, e.weights.get(name, GroupWeights()), e.holds.get(name))
            for line in told(name, GroupHolds(), group.holds):
                core.log(f"{line} (from the journal)")
            group.history.extend(e.history.get(name, ()))
            group.adapters.committed = {one.name: one for one in e.adapters.get(name, ())}
            self.slots.open(group, [worker for worker in e.found if worker.lives])
        self.fleet.ended_before(worker.incarnation for worker in e.found if not worker.lives)
        self.ending.snapshots = e.snapshots

    def _tick(self, e: ev.Tick) -> None:
        core = self.core
        if e.now >= self._next_watch:
            self._next_watch = e.now + WATCH_S
            self._punctual_until = self._next_watch + STALL_S
            self.deadlines.check()
            resume(core)
            self.planned.watch()
            core.watch_room()
            self.clients.expire()
            self.restoring.watch()
            self.questions.watch()
            self.holding.watch()
            self.adapters.watch()
        self.weights.watch()
        self.requests.overdue()
        core.dispatch_due()

    def _stood_still(self) -> None:
        """Every deadline that there is moves by the time of the stall. What is done from here on has deadlines of its own."""
        gap = self.core.now - (self._punctual_until - STALL_S)
        self.core.log(f"the coordinator stood still for {gap:.1f} s: every deadline is moved by that")
        self.deadlines.extend(gap)
        self.weights.extend(gap)
        self.adapters.extend(gap)
        self.questions.extend(gap)
        self._punctual_until += gap

    def _drain(self, e: ev.DrainAsked) -> None:
        core = self.core
        if not core.draining:
            core.draining, core.keep_workers = True, e.keep_workers
            self.weights.drain()
            self._drain_until = e.now + e.within
            if core.keep_workers:
                for group in core.groups.values():
                    hold(core, group)
            self.clients.tell_all("shutting_down", "the coordinator is shutting down; send again what it does not answer")
        elif core.keep_workers and not e.keep_workers:
            core.keep_workers = self._drained = False
            self._drain_until = e.now + e.within
            for group in core.groups.values():
                release(core, group)

    def _draining(self) -> None:
        """Once all is answered, or time is up, the workers end, unless they are kept; once they have, so may the process."""
        core = self.core
        if core.keep_workers:
            busy = bool(core.updates) or any(worker.batches for worker in core.worker_links.values())
            if not self._drained and (not busy or core.now >= self._drain_until):
                self._drained = True
                core.effects.append(Drained(keep_workers=True))
            return
        busy = core.live_rows > 0 or bool(core.updates)
        if busy and core.now >= self._drain_until:
            for group in core.groups.values():
                self.requests.fail_all(group, "shutting_down", "the coordinator ended before this request was answered")
            busy = False
        if busy or self._drained:
            return
        if self._kill_at == float("inf"):
            self._kill_at = core.now + core.config.timing.drain_s
            self.fleet.drain()
        elif core.now >= self._kill_at and not self._killed:
            self._killed = True  # while draining, no slot starts another process
            self.slots.kill_all()
        if self.slots.ended():
            self._drained = True
            core.effects.append(Drained())

    def _status(self, e: ev.StatusAsked) -> None:
        self.clients.spoke(e.link)
        self.core.effects.append(ToClient(e.link, report(self.core, e)))

    def _restart(self, e: ev.RestartAsked) -> None:
        if self.planned.asked(e):
            self._status(e)

    # --- weights -------------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Handle secondary events, and let updates go on, until neither causes more."""
        core = self.core
        while True:
            events, core.secondary = core.secondary, []
            for event in events:
                self._handle_secondary(event)
            self.weights.phases.advance()
            if not core.secondary:
                return

    def _handle_secondary(self, e: SecondaryEvent) -> None:
        if isinstance(e, WorkerLost):
            self.weights.lost(e.worker, e.reason)
            self.questions.lost(e.worker, e.reason)
            self.holding.lost(e.worker)
            self.adapters.lost(e.worker, e.reason)
        elif isinstance(e, WorkerReturned):
            self.weights.returned(e.worker)
            self.restoring.returned(e.worker)
            self.questions.returned(e.worker)
            self.adapters.returned(e.worker)
        elif not e.worker.lost:
            self.weights.phases.restarts.loaded(e.worker)
            self.restoring.loaded(e.worker)
            self.holding.settle(e.worker)

    def _hello(self, e: ev.ClientHello) -> None:
        self.clients.hello(e)
        client = self.core.links.get(e.link)
        if client is not None:
            self.restoring.hello(client)

    def _weights_asked(self, e: ev.WeightsAsked) -> None:
        self.clients.spoke(e.link)
        inspect_weights(self.core, self.questions, e)

    def _control(self, e: ev.ControlAsked) -> None:
        self.clients.spoke(e.link)
        control(self.core, self.questions, self.holding, e)

    def _holds_kept(self, e: ev.HoldsKept) -> None:
        self.holding.journaled(e.number)
        self.questions.journaled(e)

    def _inspected(self, e: ev.WorkerInspected) -> None:
        worker = self.fleet.of(e.link)
        if worker is not None and not inspected(self.core, worker, e.message):
            self.questions.answered(worker, e.message.task, e.message, e.frames)

    def _commanded(self, worker: Worker, message: Commanded) -> None:
        self.questions.answered(worker, message.task, message)
        self.holding.answered(worker, message)

    def _worker_said(self, e: ev.WorkerSaid) -> None:
        worker = self.fleet.of(e.link)
        if worker is not None:
            self._on_worker[type(e.message)](worker, e.message)

    def __repr__(self) -> str:
        core = self.core
        waiting = sum(group.waiting for group in core.groups.values())
        running = sum(group.running for group in core.groups.values())
        clients: dict[bytes, Client] = core.clients
        return f"<Machine epoch={core.epoch} clients={len(clients)} waiting={waiting} running={running}>"
