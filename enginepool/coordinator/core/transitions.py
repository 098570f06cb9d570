"""The one writer: nothing else changes the state of a worker, a slot or a request, a worker's tasks, or a hold of a group.

Each transition of a worker keeps the routing index right and wakes the queue of its group. `states` has the tables. A
transition that the tables do not have is an internal error.
"""

from msgspec.structs import replace

from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.group import Group
from enginepool.coordinator.core.group_holds import GroupHolds
from enginepool.coordinator.core.group_weights import AdapterVersion, GroupWeights
from enginepool.coordinator.core.request import Request, RunningBatch
from enginepool.coordinator.core.request_state import DONE, NAMES, REQUEST_TRANSITIONS, RUNNING
from enginepool.coordinator.core.secondary import WorkerLost
from enginepool.coordinator.core.states import SLOT_TRANSITIONS, WORKER_TRANSITIONS, SlotState, WorkerState
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.core.worker_slot import WorkerSlot
from enginepool.protocol.messages import TaskId

#: states that no fact about the worker ends, but only a transition of their own
_DECIDED = frozenset({WorkerState.RESTORING, WorkerState.LEAVING, WorkerState.LOST})


# --- workers: how a state is found and entered ---------------------------------------------------------------------------


def _derived(worker: Worker, now: float) -> WorkerState:
    """The state that follows from the facts about a worker."""
    if worker.stage == "draining":
        return WorkerState.DRAINING
    if worker.stage != "ready" or worker.capabilities is None:
        return WorkerState.NOT_READY
    if not worker.epoch_confirmed:
        return WorkerState.SYNCING
    if worker.sleeps:
        return WorkerState.ASLEEP
    if worker.missing_weights:
        return WorkerState.MISSING_WEIGHTS
    if not worker.holds:
        return WorkerState.OTHER_WEIGHTS
    if worker.group.adapters.lacked(worker.adapters.loaded) is not None:
        return WorkerState.MISSING_ADAPTERS
    if any(now > oldest.late for oldest in worker.owed()):
        return WorkerState.LATE
    group = worker.group
    if group.reserved_worker is worker or (group.trial is not None and group.trial.worker is worker):
        return WorkerState.RESERVED
    return WorkerState.READY


def _enter(core: Context, worker: Worker, state: WorkerState) -> None:
    before, group = worker.state, worker.group
    if state is before:
        return
    if state not in WORKER_TRANSITIONS[before]:
        raise AssertionError(f"{worker!r} cannot go from {before} to {state}")
    worker.state = state
    if group.reserved_worker is worker and state is not WorkerState.RESERVED:
        group.reserved_worker = None
    worker.group.routing.update(worker)
    core.wake(group)


def facts_changed(core: Context, worker: Worker) -> None:
    """A fact changed from which the state of a worker follows."""
    if worker.state not in _DECIDED:
        _enter(core, worker, _derived(worker, core.now))


# --- workers: their reports ----------------------------------------------------------------------------------------------


def confirm_epoch(core: Context, worker: Worker) -> None:
    """A worker dropped everything of earlier epochs."""
    worker.epoch_confirmed = True
    facts_changed(core, worker)


def report_stage(core: Context, worker: Worker, stage: str) -> None:
    """A worker reported what its process does. A restore goes on unless the worker ends, or its weights have gone to sleep."""
    worker.stage, worker.since = stage, core.now
    if worker.state is WorkerState.RESTORING and (stage == "draining" or "weights" in worker.asleep):
        _enter(core, worker, _derived(worker, core.now))
    facts_changed(core, worker)


def lose_worker(core: Context, worker: Worker, reason: str) -> None:
    """A worker is given up."""
    _enter(core, worker, WorkerState.LOST)
    del worker.group.workers[worker.incarnation]
    worker.group.prefixes.clear(worker)
    core.worker_links.pop(worker.link, None)
    core.secondary.append(WorkerLost(worker, reason))


# --- workers: their weights ----------------------------------------------------------------------------------------------


def start_restore(core: Context, worker: Worker, due: float) -> None:
    """A worker is told to load the committed weights."""
    worker.restore_due = due
    _enter(core, worker, WorkerState.RESTORING)


def fail_restore(core: Context, worker: Worker, why: str, again_at: float) -> None:
    """A worker could not load the committed weights."""
    worker.missing_weights, worker.restore_due = why, again_at
    _enter(core, worker, _derived(worker, core.now))


def have_weights(core: Context, worker: Worker) -> None:
    """The engine of a worker has the committed weights."""
    worker.missing_weights = ""
    if worker.state is WorkerState.RESTORING:
        _enter(core, worker, _derived(worker, core.now))
    facts_changed(core, worker)


def commit_weights(group: Group, weights: GroupWeights) -> None:
    """Other weights are the committed ones. The group is on hold; `release` finds the states of its workers."""
    group.weights, group.version = weights, weights.version
    group.prefixes.clear()


def commit_adapter(core: Context, group: Group, name: str, adapter: AdapterVersion | None) -> None:
    """Another version of an adapter is the committed one, or none is. Requests may name what is committed."""
    adapters = group.adapters
    adapters.committed.pop(name, None)
    if adapter is not None:
        adapters.committed[name] = adapter
    adapters.stale = True
    if group.capabilities is not None:
        group.capabilities = replace(group.capabilities, adapters=adapters.names)
    for worker in group.workers.values():
        facts_changed(core, worker)


def fall_behind(core: Context, group: Group) -> None:
    """The journal does not have the latest commit: no worker is restored to an older one, or serves it."""
    for worker in group.workers.values():
        if worker.state is WorkerState.RESTORING:
            _enter(core, worker, _derived(worker, core.now))
        facts_changed(core, worker)


# --- workers: what the coordinator decides -------------------------------------------------------------------------------


def leave(core: Context, worker: Worker) -> None:
    """The coordinator is about to end a worker: it finishes its work and gets no more."""
    if worker.state not in (WorkerState.LEAVING, WorkerState.DRAINING, WorkerState.LOST):
        _enter(core, worker, WorkerState.LEAVING)


def stay(core: Context, worker: Worker) -> None:
    """A worker that was about to be ended serves again."""
    if worker.state is WorkerState.LEAVING:
        _enter(core, worker, _derived(worker, core.now))


def reserve(core: Context, worker: Worker) -> None:
    """An open worker is kept free for the next request that runs alone."""
    worker.group.reserved_worker = worker
    _enter(core, worker, WorkerState.RESERVED)


def release_reserved(core: Context, group: Group) -> None:
    """No worker is kept free."""
    if (worker := group.reserved_worker) is not None:
        group.reserved_worker = None
        facts_changed(core, worker)


def hold(core: Context, group: Group) -> None:
    """No new work starts in `group` from here on."""
    group.on_hold = True
    release_reserved(core, group)
    for worker in group.workers.values():
        worker.group.routing.update(worker)


def release(core: Context, group: Group) -> None:
    """Work starts again, unless something else holds the group: the coordinator is about to end without its workers, all
    engines are to sleep, or an open transaction."""
    update = core.update_of(group)
    group.on_hold = core.keep_workers or group.holds.whole or (update is not None and update.holds_group)
    for worker in group.workers.values():
        facts_changed(core, worker)
        worker.group.routing.update(worker)
    core.wake(group)


def set_holds(core: Context, group: Group, holds: GroupHolds) -> None:
    """A publisher stops something in `group`, or lets it go on."""
    group.holds = holds
    if holds.whole:
        hold(core, group)
    else:
        release(core, group)
    for worker in group.workers.values():
        facts_changed(core, worker)


# --- the tasks of a worker -----------------------------------------------------------------------------------------------


def start_batch(batch: RunningBatch) -> None:
    """A worker is given a batch."""
    worker = batch.worker
    worker.batches[batch.id] = batch
    worker.cost += batch.cost
    worker.rows += batch.rows
    if (request := batch.slices[0][0]).generation is not None:
        worker.generations += 1
        worker.sequence_tokens += batch.cost
        worker.sequences += batch.rows
        worker.priorities[request.priority] = worker.priorities.get(request.priority, 0) + 1
    if not batch.trial:
        worker.group.routing.moved(worker)


def end_batch(core: Context, batch: RunningBatch) -> None:
    """A batch is done, lost or taken back."""
    worker = batch.worker
    generates = (request := batch.slices[0][0]).generation is not None
    oldest = generates and worker.oldest()[-1] is batch
    del worker.batches[batch.id]
    worker.cost -= batch.cost
    worker.rows -= batch.rows
    if generates:
        worker.generations -= 1
        worker.sequence_tokens -= batch.cost
        worker.sequences -= batch.rows
        worker.priorities[request.priority] -= 1
        if not worker.priorities[request.priority]:
            del worker.priorities[request.priority]
    if oldest:
        worker.pass_time_on(batch, core.now, core.config.timing.forward_s)
    if batch.trial:
        _end_trial(core, worker)
    elif worker.state is WorkerState.LATE:
        facts_changed(core, worker)
    elif worker.stamp:
        worker.group.routing.moved(worker)
    core.wake(worker.group)


def shrink_batch(core: Context, batch: RunningBatch, cost: int) -> None:
    """One sequence of a task has ended, which cost so much: its slot is free. The task has others."""
    worker = batch.worker
    batch.rows -= 1
    batch.cost -= cost
    worker.rows -= 1
    worker.cost -= cost
    worker.sequences -= 1
    worker.sequence_tokens -= cost
    if worker.stamp:
        worker.group.routing.moved(worker)
    core.wake(worker.group)


def start_text(worker: Worker, task: TaskId, request: Request, due: float) -> None:
    """A worker is given a text to tokenize."""
    worker.texts.add(task, request, due)


def end_text(core: Context, worker: Worker, task: TaskId) -> Request | None:
    """A text is tokenized, lost or taken back; None when the worker does not have it."""
    request = worker.texts.pop(task)
    if request is not None and request.state == DONE:
        request.drop_payload()
    trial = worker.group.trial
    if trial is not None and trial.id == task:
        _end_trial(core, worker)
    core.wake(worker.group)
    return request


def start_trial(trial: RunningBatch) -> None:
    """The reserved worker runs a request alone."""
    group = trial.worker.group
    group.reserved_worker, group.trial = None, trial


def _end_trial(core: Context, worker: Worker) -> None:
    worker.group.trial = None
    facts_changed(core, worker)


# --- requests ------------------------------------------------------------------------------------------------------------


def enter_request(request: Request, state: int) -> None:
    """A request is in another state; its group counts what waits and what runs."""
    before, group = request.state, request.group
    if state not in REQUEST_TRANSITIONS[before]:
        raise AssertionError(f"{request!r} cannot go to {NAMES[state]}")
    request.state = state
    if before == RUNNING:
        group.running -= 1
        group.running_tokens -= request.work.tokens
    else:
        group.waiting -= 1
    if state == RUNNING:
        group.running += 1
        group.running_tokens += request.work.tokens
    elif state != DONE:
        group.waiting += 1


# --- worker slots --------------------------------------------------------------------------------------------------------


def _enter_slot(slot: WorkerSlot, state: SlotState) -> None:
    if state not in SLOT_TRANSITIONS[slot.state]:
        raise AssertionError(f"slot {slot.name} cannot go from {slot.state} to {state}")
    slot.state = state


def start_slot(slot: WorkerSlot, incarnation: str, now: float, due: float) -> None:
    """A slot has a process, which must register before `due`."""
    _enter_slot(slot, SlotState.UP)
    slot.incarnation, slot.started_at, slot.due = incarnation, now, due


def end_slot(slot: WorkerSlot, reason: str) -> None:
    """The process of a slot is killed."""
    _enter_slot(slot, SlotState.ENDING)
    slot.end_reason = reason


def back_off(slot: WorkerSlot, due: float) -> None:
    """A slot has no process, and starts one when `due`."""
    _enter_slot(slot, SlotState.BACKOFF)
    slot.incarnation, slot.due = "", due


def revive(slot: WorkerSlot, now: float) -> None:
    """An operator wants a slot that is retired, or backs off, to start a process now."""
    if slot.state is SlotState.RETIRED:
        _enter_slot(slot, SlotState.BACKOFF)
    slot.retired_reason, slot.due = "", now


def retire(slot: WorkerSlot, reason: str = "") -> None:
    """A slot starts no process again. `reason`: "" when the pool ends."""
    _enter_slot(slot, SlotState.RETIRED)
    slot.incarnation, slot.retired_reason = "", reason
