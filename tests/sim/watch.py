"""What must hold in the coordinator, read off its state from outside.

`CheckedMachine` checks what its turns were about; this adds what no entity can know of itself. After every turn: the order of
dispatch, fair shares, no idle worker next to waiting work. On every few turns, and where an update enters a phase: the members
of updates, workers that leave, windows. Every 1,000 events: the whole machine.
"""

from array import array
from collections.abc import Callable, Sequence

from enginepool.coordinator.core.effects import Effect, ToClient, ToWorker
from enginepool.coordinator.core.group import Group
from enginepool.coordinator.core.group_weights import GroupWeights
from enginepool.coordinator.core.machine import Machine
from enginepool.coordinator.core.request import Request, RunningBatch
from enginepool.coordinator.core.request_state import DONE, QUEUED, TEXT
from enginepool.coordinator.core.states import WorkerState
from enginepool.coordinator.core.text_lanes import LEAST_TEXTS, TEXT_BYTES
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.requests.reply_cache import OVERHEAD
from enginepool.coordinator.scheduling.queue import Queue
from enginepool.coordinator.weights.update import Update
from enginepool.protocol import messages as m
from enginepool.protocol.frames import Buffer, encode_header
from tests.core.invariants import check_machine, check_update
from tests.sim.admitting import watch_admission
from tests.sim.commands import CommandWatch
from tests.sim.deadlines import watch_deadlines
from tests.sim.oracle import Oracle
from tests.sim.scores import prompts_of
from tests.sim.shares import Shares
from tests.sim.standstill import StandstillWatch
from tests.sim.traffic import TEXT_OFFSET, uid_of

#: all invariants are checked every so many events
EVERY = 1000
#: client, priority, whether they may be packed, and signature of requests of which the oldest runs first
Flow = tuple[bytes, int, bool, int]


class Watch:
    """Looks at one machine after each event."""

    def __init__(self, machine: Machine, oracle: Oracle, check_every: int) -> None:
        self.machine = machine
        watch_admission(machine)
        watch_deadlines(machine)
        self.commands = CommandWatch(machine, machine.core.config.timing.update_inspect_s)
        self.standstill = StandstillWatch(machine)
        self.oracle = oracle
        self.events = 0
        self._check_every = check_every
        self._turns = 0
        #: by group: the phase of its update
        self._phases: dict[str, str] = {}
        self._sent: set[m.TaskId] = set()
        #: whose tasks were started, and not taken back
        self._generations: dict[m.TaskId, Request] = {}
        self._trials: dict[str, tuple[RunningBatch, int]] = {}
        self._shares = Shares()
        #: budgets stay what they are: what a worker had that ran out of memory is sent again first, in smaller batches
        self.fair = True
        #: a hold must end in time: the coordinator itself never stands still
        self.punctual = False
        #: of a group, the first slot whose workers can always be started again, as those after it
        self.steadfast: dict[str, int] = {}

    def after(self, events: int, effects: Sequence[Effect]) -> None:
        """So many events were handled together, with these effects."""
        before = self.events
        self.events += events
        self._turns += 1
        due = self._turns % self._check_every == 0
        core = self.machine.core
        #: batches of rows and tasks that generate
        new: list[RunningBatch] = []
        texts: list[tuple[Worker, Request]] = []
        #: came back in this turn, perhaps to make room after others had their turn
        back: set[Request] = set()
        for effect in effects:
            if type(effect) is ToClient:
                self.commands.sent(effect)
                continue
            if type(effect) is not ToWorker:
                continue
            message = effect.message
            if type(message) is m.Tokenize and message.task not in self._sent:
                self._sent.add(message.task)
                worker = core.worker_links[effect.link]
                texts.append((worker, worker.texts[message.task]))
            elif type(message) is m.Batch and message.batch not in self._sent:
                self._sent.add(message.batch)
                header = len(encode_header(message))
                assert header <= core.header_bytes + 150 or len(message.parts) == 1, f"a header of {header} bytes"
                new.append(core.worker_links[effect.link].batches[message.batch])
            elif type(message) is m.StartGeneration and message.task in core.worker_links[effect.link].batches:
                new.append(core.worker_links[effect.link].batches[message.task])
                self._generations[message.task] = new[-1].slices[0][0]
            elif type(message) is m.StopGeneration:
                stopped = [(message.epoch, counter) for counter in message.tasks]
                back.update(self._generations.pop(task) for task in stopped if task in self._generations)
        self.commands.after(effects)
        self.standstill.after()
        for group in core.groups.values():
            self._no_idle_worker(group)
            if group.trial is not self._trials.get(group.name, (None, 0))[0]:
                self._trial(group)
            mine = [batch for batch in new if batch.worker.group is group] if new else new
            if self.fair:
                self._shares.after(group, mine)
            if mine and not group.on_hold:
                self._in_order(group, mine, back)
            if group.down:
                self.oracle.down.add(group.name)
            if group.weights_lost:
                self.oracle.needed.add(group.name)
            update = core.update_of(group) if core.updates else None
            phase = "" if update is None else update.phase
            if due or phase != self._phases.get(group.name, ""):
                self._phases[group.name] = phase
                self._members(group, update)
            held = core.keep_workers or group.holds.whole or (update is not None and update.holds_group)
            assert group.on_hold == held, group.name
        for batch in new:
            update = core.update_of(batch.worker.group)
            assert batch.worker.holds, f"{batch} is for weights that are not committed: {batch.worker}"
            assert update is None or not update.loading, f"{batch} was sent during a hand-over"
            assert update is None or not update.holds_group, f"{batch} was sent although its group is held"
        for worker, request in texts:
            self._text_in_order(worker, request)
        if due and self.oracle.bounded:
            self.within_windows()
        if self.events // EVERY > before // EVERY:
            self.check()

    def within_windows(self) -> None:
        """What clients will be sent for the requests that they have fits their windows, counted here by itself."""
        limits, total = self.oracle.limits, 0
        for client in self.machine.core.clients.values():
            works = [request.work for request in client.live.values()]
            real = sum(work.nbytes + 4 * work.rows * len(work.part.labels) for work in works)
            assert real <= limits.window_bytes, f"{client} may be sent {real} bytes"
            total += real
        assert total <= limits.buffer_bytes, f"all clients may be sent {total} bytes"
        core = self.machine.core
        kept = core.answers.nbytes
        guessed = any(request.group.capabilities is None for c in core.clients.values() for request in c.live.values())
        # The end of an update is kept without room for it: its publisher asks for it again.
        most = limits.buffer_bytes + OVERHEAD * len(core.groups)
        assert guessed or core.live_bytes + kept <= most, (core.live_bytes, kept)

    def only_committed(self) -> None:
        """From now on an answer is of the weights that are committed when it is given."""
        real = self.machine.requests._answer  # pyright: ignore[reportPrivateUsage]

        def answer(request: Request, version: int, specs: Sequence[m.FrameSpec], frames: Sequence[Buffer]) -> None:
            assert version == request.group.version, f"{request}: answered on {version}, {request.group.version} is committed"
            real(request, version, specs, frames)

        self.machine.requests._answer = answer  # pyright: ignore[reportPrivateUsage]
        blame = self.machine.requests.blame

        def count(recalled: list[tuple[Request, bool]], reason: str) -> None:
            for request, alone in recalled:
                if alone and request.state != DONE:
                    self._count(_uid(request))
            blame(recalled, reason)

        self.machine.requests.blame = count

    def goes_on_without(self, stages: Callable[[str], bool]) -> None:
        """From now on a member without staging memory aborts an update only where no other one has some, where the update is
        partial, or where it has the weights now and no snapshot would bring it the next ones. `stages`: whether the worker of
        this name has some."""
        real, commit = self.machine.ending.abort, self.machine.ending.commit

        def abort(update: Update, code: str, reason: str, field: str = "", limit: str = "") -> None:
            if "has no stager" in reason and not update.offer.partial:
                workers = [member.worker for member in update.members.values()]
                lost = update.group.config.snapshot == "none" and any(w.holds for w in workers if not stages(w.name))
                assert lost or not any(stages(worker.name) for worker in workers), f"aborted: {update}: {reason}"
            real(update, code, reason, field, limit)

        def committed(update: Update, weights: GroupWeights) -> None:
            left = [w for w in update.group.workers.values() if w.name in update.left_members and w.holds]
            assert weights.snapshot or not left, f"nothing can restore {left} after {update}"
            commit(update, weights)

        self.machine.ending.abort, self.machine.ending.commit = abort, committed

    def _members(self, group: Group, update: Update | None) -> None:
        """The members of an update, and the workers that leave."""
        if update is not None:
            check_update(update)
            self._in_time(update)
        for worker in [worker for worker in group.workers.values() if worker.state is WorkerState.LEAVING]:
            member = update.members.get(worker.incarnation) if update is not None else None
            planned = worker.slot is not None and worker.slot.planned_restart == "draining"
            assert planned or (member is not None and member.restart == "leaving"), f"{worker} leaves"

    def _in_time(self, update: Update) -> None:
        members = [member.worker for member in update.members.values()]
        assert update.phase != "hold" or any(w.batches or w.texts for w in members), f"held for nothing in flight: {update}"
        moving = [member for member in update.members.values() if member.restart in ("leaving", "starting")]
        assert len(moving) <= 1 or update.at_once, f"several workers are restarted at the same time: {update}"
        if self.punctual and update.phase == "hold":
            waited = self.machine.core.now - update.phase_began
            assert waited < update.offer.drain_ms / 1000 + 1.0, f"held for {waited:.1f} s: {update}"

    def _no_idle_worker(self, group: Group) -> None:
        if group.resume_at:
            return  # an engine of it ran out of memory
        if not any(queue.size for queue in group.queues):
            return
        worker = group.routing.least() if group.routing.open else None
        if worker is None:
            return
        for queue, long in ((group.texts, False), (group.long_texts, True)):
            first = queue.head()
            assert first is None or not worker.texts.takes(long=long), f"a text waits, but {worker} is free"
        if worker.batches or worker.texts:
            return
        first = group.queue.head()
        assert first is None, f"{worker} is idle while {first} waits"
        assert group.trial is not None or group.suspects.head() is None, f"{worker} is idle while a suspect waits"

    def _text_in_order(self, worker: Worker, request: Request) -> None:
        """A text was given to a worker: what that has is bounded, and no text of a higher priority waits."""
        texts, group = worker.texts, request.group
        others = texts.nbytes - request.work.nbytes
        assert request.long_text or len(texts.short) <= LEAST_TEXTS or others < 2 * TEXT_BYTES, (
            f"{worker} has {texts.nbytes} bytes"
        )
        assert len(texts.long) <= 1, f"{worker} has several long texts"
        if group.config.ageing_s is None and not request.suspect:
            queue = group.long_texts if request.long_text else group.texts
            first = min(queue.waiting(), key=_rank, default=request)
            assert _rank(request) <= _rank(first), f"the text of {request} was given to a worker before that of {first}"

    def _in_order(self, group: Group, batches: Sequence[RunningBatch], back: set[Request]) -> None:
        """No request was passed over by a later one of its client, and where priority is strict, by a lower one."""
        waiting = [request for request in group.queue.waiting() if request not in back]
        clients = {request.client for batch in batches for request, _, _ in batch.slices}
        oldest: dict[Flow, Request] = {}
        for request in waiting:
            if request.client in clients:
                flow = _flow(request)
                before = oldest.get(flow)
                if before is None or request.seq < before.seq:
                    oldest[flow] = request
        #: in a mixed group of rows or of sequences: these have room of their own
        firsts: dict[bool, Request | None] = {}
        for batch in batches:
            slices = batch.slices
            assert not batch.packed or all(request.packs for request, _, _ in slices), f"{batch} cannot be packed"
            if batch.trial:
                assert len(slices) == 1 and len(batch.worker.batches) == 1 and not batch.worker.texts, batch
                continue
            for request, _, _ in slices:
                first = oldest.get(_flow(request), request)
                assert first.seq >= request.seq, f"{batch} passed over {first}, which is of the client of {request}"
            if group.config.ageing_s is None:
                mixed = group.mixed
                sequences = mixed and slices[0][0].generation is not None
                if sequences not in firsts:
                    others = (one for one in waiting if not mixed or (one.generation is not None) is sequences)
                    firsts[sequences] = min(others, key=_rank, default=None)
                first = firsts[sequences]
                assert first is None or _rank(slices[0][0]) <= _rank(first), f"{batch} was sent before {first}"

    def _trial(self, group: Group) -> None:
        """The trial of a group is another one: count the workers that were lost in a trial, by call."""
        before = self._trials.get(group.name)
        if before is not None:
            trial, uid = before
            if trial.worker.lost:
                self._count(uid)
            del self._trials[group.name]
        if group.trial is not None:
            self._trials[group.name] = group.trial, _uid(group.trial.slices[0][0])

    def _count(self, uid: int) -> None:
        self.oracle.trials_lost[uid] = self.oracle.trials_lost.get(uid, 0) + 1

    def check(self) -> None:
        """Everything."""
        machine, core = self.machine, self.machine.core
        check_machine(machine)
        live = sum(len(client.live) for client in core.clients.values())
        assert core.live_rows <= core.config.limits.queue_items, core.live_rows
        limits = core.config.limits
        guessed = any(request.group.capabilities is None for c in core.clients.values() for request in c.live.values())
        for client in core.clients.values():
            assert len(client.live) <= limits.window_requests, client
            assert guessed or client.nbytes <= limits.window_bytes, client
        assert len(core.deadlines) <= 2 * live + 128, f"{len(core.deadlines)} deadlines for {live} requests"
        for group in core.groups.values():
            for slot in group.slots[self.steadfast.get(group.name, len(group.slots)) :]:
                assert core.draining or not slot.retired_reason, f"given up: {slot.name} {slot.retired_reason}"
            for queue in group.queues:
                _bounded(queue)
            for queue, long in ((group.texts, False), (group.long_texts, True)):
                assert all(r.state == TEXT and r.long_text == long for r in queue.waiting()), queue.waiting()
            waiting = [r for client in core.clients.values() for r in client.live.values() if r.state == QUEUED]
            listed = {id(r) for queue in (group.queue, group.suspects, group.version_queue) for r in queue.waiting()}
            assert all(id(r) in listed for r in waiting if r.group is group), "a request waits in no queue"

    @property
    def busy(self) -> bool:
        """A call waits, or a worker still runs work that no call waits for, or changes its adapters."""
        core = self.machine.core
        workers = [worker for group in core.groups.values() for worker in group.workers.values()]
        adapting = any(w.adapters.task is not None for w in workers) or bool(self.machine.adapters.changes.open)
        return adapting or any(client.live for client in core.clients.values()) or any(w.batches or w.texts for w in workers)

    def quiet(self) -> None:
        """Nothing is left to do, and nothing is left over."""
        self.check()
        core = self.machine.core
        assert not self.busy, core.clients
        self.commands.quiet()
        assert core.live_rows == core.live_bytes == 0
        for group in core.groups.values():
            assert group.waiting == group.running == group.tokens == 0, group.name
            assert core.update_of(group) is None and not group.on_hold, core.updates
            assert group.trial is None and group.reserved_worker is None, (group.trial, group.reserved_worker)
            for worker in group.workers.values():
                assert not worker.batches and not worker.texts and worker.cost == worker.rows == 0, worker
                assert worker.state is not WorkerState.RESERVED, worker


def _rank(request: Request) -> tuple[bool, int]:
    """Smaller ones run first, where priority is strict: clients without a link are last, with any priority."""
    return (False, -request.priority) if request.client.link is not None else (True, 0)


def _flow(request: Request) -> Flow:
    """Requests of which the oldest runs first."""
    return request.client.id, request.priority, request.packs, request.work.signature


def _uid(request: Request) -> int:
    work = request.work
    if work.text:
        return uid_of(array("i", [byte + TEXT_OFFSET for byte in bytes(work.frames[-2])[:2]]).tobytes())
    return uid_of(prompts_of(work.part, work.frames)[0])


def _bounded(queue: Queue[Request]) -> None:
    waiting = len(queue.waiting())
    assert queue.size - waiting <= max(66, queue.size // 2 + 1), f"{queue.size} entries for {waiting} that wait"
    assert queue.size == 0 or waiting <= queue.size
