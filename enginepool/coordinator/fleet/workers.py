"""Workers: registration, readiness, work, loss.

A lost worker never comes back: its incarnation is refused for ever, its process group is killed, and no successor starts before
the supervisor has seen all of it end. An external worker, which another program started, cannot be killed. It is told to end;
where only its link was silent, it is told to register again under a new incarnation, with the model that it has loaded. `watch`
says when a worker is late enough to be lost.
"""

from collections import deque

import msgspec

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.effects import KeepHistory, ToWorker
from enginepool.coordinator.core.epochs import RAISES_BY_WORKERS, rise_above
from enginepool.coordinator.core.events import Link
from enginepool.coordinator.core.request import Request
from enginepool.coordinator.core.request_state import TEXT
from enginepool.coordinator.core.secondary import WorkerLoaded, WorkerReturned
from enginepool.coordinator.core.states import SlotState
from enginepool.coordinator.core.transitions import confirm_epoch, end_batch, end_text, lose_worker, report_stage
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.fleet.checks import alone_in_class, differs, impossible, misfit, stranger, usual
from enginepool.coordinator.fleet.slots import WorkerSlots
from enginepool.coordinator.requests.lifecycle import RequestLifecycle
from enginepool.coordinator.scheduling.batches import post_batch, post_text
from enginepool.coordinator.scheduling.cost_model import ForwardCostModel
from enginepool.coordinator.scheduling.oom_backoff import halve, shrink
from enginepool.protocol.halving import halved
from enginepool.protocol.messages import Accept, Drain, ErrorReply, Expired, Pong, WorkerSettings

#: how many refused incarnations of workers that dialled in are remembered
REFUSED = 65_536
#: a worker that said goodbye ends within this, or is killed
GOODBYE_S = 30.0


class WorkerRegistry:
    """The workers that have registered."""

    def __init__(self, core: Context, requests: RequestLifecycle, slots: WorkerSlots) -> None:
        self.core = core
        self.requests = requests
        self.slots = slots
        #: incarnations that were given up, and whether only for a silent link
        self._refused: dict[str, bool] = {}
        self._refused_order: deque[str] = deque()
        self._order = 0

    # --- links ---------------------------------------------------------------------------------------------------------

    def register(self, e: ev.WorkerRegistered) -> None:
        """A worker dials in: one of ours, one that somebody else started, or one that comes back on a new link."""
        core = self.core
        group = core.groups.get(e.group)
        if group is None:
            wrong = self._unknown_group(e.link, e.group)
            core.log(f"worker {e.incarnation} of {e.host} is refused: {wrong}", "refused")
            return
        if e.incarnation in self._refused:
            self._give_up(e.link, e.incarnation, "it was given up before")
            core.log(f"worker {e.incarnation} of {e.host} is refused: it was given up before", "refused")
            return
        if e.epoch > core.epoch and not core.draining:
            # It takes no word from this epoch; with the next one, this coordinator accepts its next registration.
            if why := rise_above(core, e.epoch, f"worker {e.incarnation}", RAISES_BY_WORKERS):
                self._refuse(e.link, "superseded", why)
            return
        worker = group.workers.get(e.incarnation)
        before = core.worker_links.get(e.link)
        if before is not None and before is not worker:
            # The link belongs to the new incarnation, which must not be told to end.
            self.lose(before, f"its link registered another incarnation, {e.incarnation}", kill=True, tell=False)
        if worker is not None:
            core.worker_links.pop(worker.link, None)
            worker.link = e.link
        else:
            slot = next((p for p in group.slots if p.incarnation == e.incarnation), None)
            if slot is not None and slot.state is not SlotState.UP:
                self._give_up(e.link, e.incarnation, "its process is being ended")
                return
            self._order += 1
            worker = Worker(e.incarnation, group, e.link, slot, self._order, e.now)
            worker.pid, worker.host = e.pid, e.host
            _forget_lost(worker)
            group.workers[e.incarnation] = worker
        worker.heard = e.now
        if e.epoch == core.epoch:
            # It dropped all older work when it heard this epoch; the Idle that said so may be lost with its link.
            confirm_epoch(core, worker)
        core.wake(group)
        core.worker_links[e.link] = worker
        orphan_s = core.config.timing.orphan_s
        core.effects.append(ToWorker(e.link, Accept(core.epoch, orphan_s=orphan_s, halvings=worker.halvings)))
        # What was sent on the old link may be lost with it; the worker runs a batch id once.
        for batch in worker.batches.values():
            post_batch(core, batch)
        for task, (request, _) in worker.texts.items():
            post_text(core, worker, task, request)
        core.secondary.append(WorkerReturned(worker))

    def settings(self, e: ev.SettingsAsked) -> None:
        """A program that starts workers wants to know with what."""
        group = self.core.group_of(e.group)
        if group is None:
            self._unknown_group(e.link, e.group)
            return
        weights = group.weights if group.weights.restart else ev.GroupWeights()
        settings = msgspec.json.encode(group.config).decode()
        drain_s = self.core.config.timing.drain_s
        answer = WorkerSettings(group.name, settings, drain_s, weights.path, weights.digest, weights.version)
        self.core.effects.append(ToWorker(e.link, answer))

    def _unknown_group(self, link: Link, name: str) -> str:
        """Refuse the message; returns what is wrong with it."""
        wrong = self.core.no_group(name)
        self._refuse(link, "unknown_group", wrong)
        return wrong

    def _refuse(self, link: Link, code: str, message: str) -> None:
        self.core.effects.append(ToWorker(link, ErrorReply(code, message)))

    def _give_up(self, link: Link, incarnation: str, reason: str) -> None:
        """Tell a process that its incarnation does not count any more, and whether it may take another one."""
        if self._refused.get(incarnation):
            self.core.effects.append(ToWorker(link, Expired(incarnation, reason)))
        else:
            self._refuse(link, "superseded", f"incarnation {incarnation} was given up: {reason}")

    def of(self, link: Link) -> Worker | None:
        """The worker on `link`, heard just now; a link that nobody registered is told so."""
        worker = self.core.worker_links.get(link)
        if worker is None:
            self._refuse(link, "hello_required", "this link has not registered with this coordinator")
            return None
        worker.heard = self.core.now
        return worker

    # --- progress ------------------------------------------------------------------------------------------------------

    def stage(self, e: ev.WorkerStage) -> None:
        """A worker says what it does; a new stage has a new deadline."""
        worker = self.of(e.link)
        if worker is None:
            return
        worker.detail = e.detail
        if worker.stage != e.stage:
            report_stage(self.core, worker, e.stage)

    def ready(self, e: ev.WorkerReady) -> None:
        """A worker's engine is ready. The first one of a class sets the limits of that class."""
        worker = self.of(e.link)
        if worker is None:
            return
        group, can = worker.group, e.capabilities
        if not impossible(can):
            if can.halvings > group.halvings:
                # It was halved under a coordinator that is gone.
                shrink(group, can.halvings)
                self.requests.refit(group)
            can = halved(can, group.halvings - can.halvings)
        if wrong := stranger(worker, can):
            _failed(worker, wrong)
            self.lose(worker, f"it does not fit: {wrong}", kill=True)
            return
        alone = alone_in_class(worker, can)
        if worker.capabilities is None:
            where = f"process {worker.pid} on {worker.host}, weight version {e.version}"
            self.log(worker, f"worker {worker.name} is ready: incarnation {worker.incarnation}, {where}")
        worker.declared, worker.capabilities = e.capabilities, can
        forward_s = can.forward_ms / 1000
        if worker.pace is None or (worker.pace.said, worker.pace.forward_s) != (can.pace, forward_s):
            worker.pace = ForwardCostModel(can.pace, forward_s) if can.pace else None
        worker.routing = group.packed_routing if can.packed else group.routing
        worker.version, worker.digest, worker.committed = e.version, e.digest, e.committed
        worker.detail = ""
        report_stage(self.core, worker, "ready")
        known = group.packed if can.packed else group.plain
        if alone:
            if can.packed:
                group.packed = can
            else:
                group.plain = can
        if worker.slot is not None:
            worker.slot.previous_end = ""
            worker.slot.was_ready, worker.slot.same_failures = True, 0
        group.down = ""
        group.retired_classes.pop(worker.class_, None)
        if alone:
            expected = group.expected
            group.expect()
            if known is None or group.expected != expected or differs(known, can):
                self.requests.recheck(group)
        # It may have been the last one of which it was not known that it is no plain worker.
        self.slots.maybe_down(group)
        if not worker.holds:
            # It was taking weights of a coordinator that is gone, and got work meanwhile, which it drops when it restores.
            self.recall(worker)
        self.core.secondary.append(WorkerLoaded(worker))

    def idle(self, e: ev.WorkerIdle) -> None:
        """A worker has dropped everything of earlier epochs."""
        worker = self.of(e.link)
        if worker is not None and e.epoch == self.core.epoch:
            confirm_epoch(self.core, worker)

    # --- work ----------------------------------------------------------------------------------------------------------

    def heard(self, e: ev.WorkerHeard) -> None:
        """A worker is alive."""
        if self.of(e.link) is not None and e.at is not None:
            self.core.effects.append(ToWorker(e.link, Pong(e.at, self.core.epoch)))

    def done(self, e: ev.BatchDone) -> None:
        """A batch is finished. Unknown ids are of an earlier attempt, and dropped."""
        worker = self.of(e.link)
        if worker is None:
            return
        batch = worker.batches.get(e.batch)
        if batch is None:
            return
        if wrong := misfit(batch, e):
            self.lose(worker, f"its answer does not fit: {wrong}", kill=True)
            return
        group = worker.group
        end_batch(self.core, batch)
        worker.done += 1
        group.batches += 1
        group.forwards += e.forwards
        if e.forwards != 1:
            group.split_batches += 1
        if group.first_answer is not None and worker.holds:
            record, since = group.first_answer
            record.phases["first_answer"] = int((e.now - since) * 1e6)
            group.first_answer = None
            self.core.effects.append(KeepHistory(group.name, list(group.history)))
        group.spent_s = 0.9 * group.spent_s + e.run_us / 1e6
        group.spent_tokens = 0.9 * group.spent_tokens + batch.cost
        if worker.pace is not None:
            worker.pace.done(e.now, e.run_us / 1e6, batch.cost, batch.rows, fits=usual(batch, e))
        self.requests.outcome(batch, e)

    def tokenized(self, e: ev.TextTokenized) -> None:
        """A worker answered a tokenizing task."""
        worker = self.of(e.link)
        if worker is not None:
            self.requests.tokenized(worker, e)

    def refused(self, e: ev.WorkerRefused) -> None:
        """A worker did not take a batch or a text: that goes elsewhere, and the worker registers again before it gets more."""
        worker = self.of(e.link)
        if worker is None or e.number is None:
            return
        task = (self.core.epoch, e.number)
        batch = worker.batches.get(task)
        text = end_text(self.core, worker, task)
        if batch is None and text is None:
            return
        report_stage(self.core, worker, "draining" if e.draining else "starting")
        if not e.draining:
            self._refuse(worker.link, "hello_required", "register again: work was refused")
        if batch is not None:
            end_batch(self.core, batch)
            self.requests.returned(batch)
        if text is not None:
            self._text_back(text)

    def recall(self, worker: Worker) -> list[tuple[Request, bool]]:
        """Take back everything from a worker: its late answers have unknown ids. Nobody is suspected, unless it ends of that.

        Returns what it had, and whether that was alone with it.
        """
        found: list[tuple[Request, bool]] = []
        for batch in list(worker.batches.values()):
            found += [(request, batch.trial) for request, _, _ in batch.slices]
            end_batch(self.core, batch)
            self.requests.returned(batch)
        trial = worker.group.trial
        for task in list(worker.texts):
            alone = trial is not None and trial.id == task
            text = end_text(self.core, worker, task)
            if text is not None:
                found.append((text, alone))
                self._text_back(text)
        return found

    def _text_back(self, text: Request) -> None:
        """A text waits for a tokenizer again."""
        if text.state == TEXT:
            text.queue.push(text)

    # --- loss ----------------------------------------------------------------------------------------------------------

    def broken(self, e: ev.WorkerBroken) -> None:
        """A worker said something that no worker says."""
        worker = self.of(e.link)
        if worker is not None:
            self.lose(worker, e.reason, kill=True, silent=e.silent)

    def bye(self, e: ev.WorkerBye) -> None:
        """A worker ends. One that failed is killed with all it started; one that drained has a moment to end by itself."""
        worker = self.of(e.link)
        if worker is None:
            return
        slot = worker.slot
        if e.out_of_memory:
            self._out_of_memory(worker)
        if e.failed:
            _failed(worker, e.reason)
        self.lose(worker, e.reason, kill=e.failed, own=True)
        if slot is not None and not e.failed:
            slot.end_reason = e.reason
            slot.due = e.now + GOODBYE_S
        if slot is not None:
            slot.unstartable = e.permanent

    def _out_of_memory(self, worker: Worker) -> None:
        """The engine of `worker` died of a batch. Where half as much may help, neither requests nor the slot are blamed."""
        if halve(worker):
            worker.group.lost_batches += len(worker.batches)
            self.recall(worker)
            self.requests.refit(worker.group)
            if worker.slot is not None:
                worker.slot.loss_excused = True

    def lose(
        self, worker: Worker, reason: str, *, kill: bool, own: bool = False, silent: bool = False, tell: bool = True
    ) -> None:
        """This incarnation does not come back: its batches are dissolved, its process is killed unless it has ended.

        The reason is a clause on the worker, or, with `own`, what it said of its end. `silent`: only its link failed.
        `tell`: an external worker hears of it.
        """
        core, group = self.core, worker.group
        count = len(worker.batches)
        said = f"incarnation {worker.incarnation}, {count} batch{'' if count == 1 else 'es'}"
        if worker.slot is None:
            said += f", process {worker.pid} on {worker.host}, connected for {core.now - worker.joined:.0f} s"
        planned = (own and not kill) or (worker.slot is not None and worker.slot.planned_restart == "ending")
        self.log(worker, f"worker {worker.name} {'ends' if planned else 'is lost'}: {reason} ({said})")
        lose_worker(core, worker, reason)
        batches = list(worker.batches.values())
        group.lost_batches += len(batches)
        self.requests.texts_lost(worker, reason)
        for batch in batches:
            end_batch(core, batch)
            self.requests.lost(batch, reason)
        self._remember(worker.incarnation, silent=silent and worker.slot is None)
        if worker.slot is None:
            group.lost_external.append((core.now, worker, reason))
            if group.no_worker and not core.draining:
                self.log(worker, f"group {group.name}: {group.no_worker}; requests that wait: {group.waiting}")
            if tell:
                self._give_up(worker.link, worker.incarnation, reason)
            self.slots.maybe_down(group)
        elif kill:
            self.slots.end(worker.slot, reason, own=own)

    def log(self, worker: Worker, text: str) -> None:
        """A line about a worker. An external worker can come and go at will: its lines have a budget of their own."""
        self.core.log(text, "external" if worker.slot is None else "")

    def _remember(self, incarnation: str, *, silent: bool = False) -> None:
        if incarnation in self._refused:
            return
        self._refused[incarnation] = silent
        self._refused_order.append(incarnation)
        if len(self._refused_order) > REFUSED:
            del self._refused[self._refused_order.popleft()]

    def exited(self, e: ev.WorkerExited) -> None:
        """All of a worker's process group has ended; its slot may have a successor."""
        for group in self.core.groups.values():
            for slot in group.slots:
                if slot.incarnation == e.incarnation:
                    worker = group.workers.get(e.incarnation)
                    if e.failed and not slot.start_failure and (worker is None or worker.capabilities is None):
                        slot.start_failure = e.reason
                    if worker is not None:
                        if e.out_of_memory:
                            self._out_of_memory(worker)
                        self.lose(worker, e.reason, kill=False)
                    # What it said last may be read after its end was seen.
                    self._remember(e.incarnation)
                    if not slot.end_reason:
                        slot.end_reason = e.reason
                    if e.unstarted and not self.core.draining:
                        self.slots.postpone(slot)
                    else:
                        self.slots.vacate(slot, e.permanent or slot.unstartable)
                    return

    # --- the end -------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Ask every worker of ours to end."""
        for worker in self.core.worker_links.values():
            if worker.slot is not None:
                self.core.effects.append(ToWorker(worker.link, Drain()))
        self.slots.drain()


def _forget_lost(worker: Worker) -> None:
    """The process of a lost external worker is back, with another incarnation."""
    lost = worker.group.lost_external
    for entry in [entry for entry in lost if (entry[1].host, entry[1].pid) == (worker.host, worker.pid)]:
        lost.remove(entry)


def _failed(worker: Worker, reason: str) -> None:
    """The worker says, or shows, why it will not be ready."""
    if worker.slot is not None and worker.capabilities is None:
        worker.slot.start_failure = reason
