"""Restarts that an operator asks for: of a worker that serves, of a worker that starts, and of a slot that was retired.

A worker that serves gets no new work, finishes its work within `drain_s`, and ends. Its slot starts the next worker at once.
The restart does not count as a loss. If the group has an open transaction, the worker ends after the transaction,
also one that starts on the weights of that transaction.
"""

from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.events import RestartAsked
from enginepool.coordinator.core.group import Group
from enginepool.coordinator.core.states import SlotState
from enginepool.coordinator.core.transitions import leave, revive
from enginepool.coordinator.core.worker_slot import WorkerSlot
from enginepool.coordinator.fleet.slots import WorkerSlots
from enginepool.coordinator.fleet.workers import WorkerRegistry

#: names of workers that an error lists
_LISTED = 8
_WHY = "an operator restarts it"


class PlannedRestarts:
    """All restarts that an operator asked for, until the next worker is started."""

    def __init__(self, core: Context, fleet: WorkerRegistry, slots: WorkerSlots) -> None:
        self.core = core
        self.fleet = fleet
        self.slots = slots

    def asked(self, e: RestartAsked) -> bool:
        """Begin a restart, unless the named worker has ended already. Returns False if the message was refused."""
        core = self.core
        if core.draining:
            core.refuse(e.link, e.id, "shutting_down", "the coordinator is draining")
            return False
        group = core.group_of(e.group)
        if group is None:
            core.unknown_group(e.link, e.id, e.group)
            return False
        slot = next((slot for slot in group.slots if slot.name == e.worker), None)
        if slot is None:
            self._refuse(e, group)
            return False
        # The second of two equal messages names a worker that has ended.
        if slot.incarnation == e.incarnation and not slot.planned_restart:
            self._begin(slot)
        return True

    def _refuse(self, e: RestartAsked, group: Group) -> None:
        if e.worker in group.workers:
            text = f"worker: {e.worker!r} was not started by this pool; restart it on its own host"
            self.core.refuse(e.link, e.id, "unsupported", text, field="worker")
            return
        names = ", ".join(slot.name for slot in group.slots[:_LISTED]) or "no worker"
        more = ", ..." if len(group.slots) > _LISTED else ""
        text = f"worker: {e.worker!r} is not a worker of group {group.name!r}, which starts {names}{more}"
        self.core.refuse(e.link, e.id, "bad_request", text, field="worker")

    def _begin(self, slot: WorkerSlot) -> None:
        worker = slot.worker
        if slot.state in (SlotState.BACKOFF, SlotState.RETIRED):
            self._revive(slot)
        elif slot.state is SlotState.UP and ((worker is not None and worker.stage == "ready") or self._in_update(slot)):
            slot.planned_restart = "draining"
            slot.due = self.core.now + self.core.config.timing.drain_s
            self._drain(slot)
        else:
            self._end(slot)

    def _in_update(self, slot: WorkerSlot) -> bool:
        """Whether its worker is one of an open transaction, or starts on the weights of it."""
        update, worker = self.core.update_of(slot.group), slot.worker
        return slot.on_uncommitted or (update is not None and worker is not None and worker.incarnation in update.members)

    def watch(self) -> None:
        """Advance the restarts of workers that finish their work."""
        for slot in self.core.slots:
            if slot.planned_restart == "draining":
                self._drain(slot)

    def _drain(self, slot: WorkerSlot) -> None:
        """Advance the restart of one worker that finishes its work."""
        core, worker = self.core, slot.worker
        if worker is None or core.update_of(slot.group) is not None:
            return  # a worker that has ended is reported to its slot; a worker in an open transaction ends after it
        leave(core, worker)
        if not worker.busy or core.now >= slot.due:
            self._end(slot)

    def _end(self, slot: WorkerSlot) -> None:
        slot.planned_restart = "ending"
        worker = slot.worker
        if worker is None:
            self.slots.end(slot, _WHY)
        else:
            self.fleet.recall(worker)
            self.fleet.lose(worker, _WHY, kill=True)

    def _revive(self, slot: WorkerSlot) -> None:
        """Clear the backoff or retirement of a slot: it starts a process at the next check of the slots."""
        group = slot.group
        revive(slot, self.core.now)
        slot.loss_times, slot.short_runs, slot.same_failures, slot.failure_signature = [], 0, 0, ""
        slot.start_failure, slot.unstartable = "", False
        group.down = ""
