"""Worker slots: the workers that this pool starts, their restarts, and the errors for requests when no worker is left.

A slot starts its next process only after the whole process group of the last one has ended, and after a backoff that doubles. A
slot is retired in these cases:

- it lost more workers within the window than the policy allows;
- its worker failed in a way that a restart cannot repair;
- its workers failed twice in a row in the same way, and no process of the slot was ever ready.

If the host could not make a process, or a worker failed because a disk has no room, the slot is not retired.
"""

from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.effects import KillWorker, StartWorker
from enginepool.coordinator.core.group import Group
from enginepool.coordinator.core.group_weights import EarlierWorker
from enginepool.coordinator.core.states import SlotState
from enginepool.coordinator.core.transitions import back_off, end_slot, retire, start_slot
from enginepool.coordinator.core.worker_slot import WorkerSlot
from enginepool.coordinator.fleet.failures import lacks_disk_space, signature
from enginepool.coordinator.requests.lifecycle import RequestLifecycle

#: seconds after which a running process resets the backoff of its slot
STEADY_S = 60.0
#: equal failures in a row that retire a slot that was never ready: the next start would fail in the same way
SAME_FAILURES = 2
#: A backoff is doubled at most so many times. Every configured backoff is above its maximum by then, and the float has no
#: overflow.
MOST_DOUBLED = 128


class WorkerSlots:
    """All slots of all groups."""

    def __init__(self, core: Context, requests: RequestLifecycle) -> None:
        self.core = core
        self.requests = requests

    def open(self, group: Group, alive: list[EarlierWorker]) -> None:
        """Make the slots of the group. A process that survived an earlier coordinator gets time to register."""
        core = self.core
        for index in range(group.config.workers):
            slot = WorkerSlot(group, index)
            group.slots.append(slot)
            survivor = next((p for p in alive if p.group == group.name and p.index == index), None)
            if survivor is not None:
                start_slot(slot, survivor.incarnation, core.now, core.now + core.config.timing.silence_s)
                slot.adopted = True
            elif not group.holds.wanted(slot.name):
                self._start(slot)

    def _start(self, slot: WorkerSlot) -> None:
        core, name = self.core, slot.group.name
        core.counter += 1
        incarnation = f"{name}-{slot.index}.{core.epoch:x}.{core.counter}"
        start_slot(slot, incarnation, core.now, core.now + core.config.timing.starting_s)
        slot.previous_end, slot.end_reason, slot.start_failure, slot.unstartable = slot.end_reason, "", "", False
        slot.planned_restart, slot.adopted = "", False
        weights = slot.group.weights if slot.group.weights.restart else None
        if slot.uncommitted_weights is not None:
            slot.on_uncommitted, weights = True, slot.uncommitted_weights
        core.effects.append(StartWorker(name, slot.index, slot.incarnation, weights))

    def end(self, slot: WorkerSlot, reason: str, *, own: bool = False) -> None:
        """Kill the process of a slot; `vacate` follows when it has ended. `own`: the worker itself gave the reason."""
        if slot.state is SlotState.UP:
            end_slot(slot, reason if own else f"stopped by the pool, because {reason}")
            self.core.effects.append(KillWorker(slot.incarnation, slot.end_reason))

    def postpone(self, slot: WorkerSlot) -> None:
        """The host could not make the process of a slot: disk space, memory or descriptors ran out. This does not count as a
        failure of the worker. The slot starts again after the longest backoff."""
        slot.loss_excused, slot.planned_restart = False, ""
        back_off(slot, self.core.now + self.core.config.restart.backoff_max_s)

    def _await_room(self, slot: WorkerSlot) -> None:
        """The process of a slot failed because a disk has no room. This does not count as a failure of the worker, also if the
        worker says that another start cannot help."""
        slot.unstartable = False
        slot.failure_signature, slot.same_failures = "", 0
        slot.restarts += 1
        self.postpone(slot)

    def vacate(self, slot: WorkerSlot, permanent: bool) -> None:
        """The process of a slot has ended: wait and start again, or retire the slot."""
        core, policy = self.core, self.core.config.restart
        planned, slot.planned_restart = slot.planned_restart, ""
        if slot.uncommitted_weights is not None and not slot.on_uncommitted and not core.draining:
            # The coordinator ended the process to start the next one on other weights: it starts at once.
            back_off(slot, core.now)
            slot.loss_excused = False
            return
        if planned and not core.draining:
            # An operator restarts the worker: this end does not count as a loss.
            back_off(slot, core.now)
            slot.loss_excused = slot.unstartable = False
            return
        if slot.uncommitted_weights is not None:
            # The process could not start on weights that are not committed: this does not count against the slot.
            slot.loss_excused = True
        if lacks_disk_space(slot.end_reason) and not core.draining:
            self._await_room(slot)
            return
        if core.now - slot.started_at > STEADY_S:
            slot.short_runs = 0
        slot.loss_times = [at for at in slot.loss_times if core.now - at < policy.window_s]
        if not slot.loss_excused:
            slot.loss_times.append(core.now)
            slot.short_runs += 1
            self._count_failure(slot)
        why = self._why_retired(slot, permanent and not slot.loss_excused)
        slot.loss_excused = False
        if core.draining or why:
            retire(slot, why)
            self._log_retired(slot)
            self._retire_neighbors(slot)
            self.maybe_down(slot.group)
            return
        slot.restarts += 1
        doubled = min(max(0, min(slot.short_runs, len(slot.loss_times)) - 1), MOST_DOUBLED)
        back_off(slot, core.now + min(policy.backoff_max_s, policy.backoff_s * 2.0**doubled))

    def _why_retired(self, slot: WorkerSlot, permanent: bool) -> str:
        """Why a slot whose process has ended is retired, or ""."""
        policy = self.core.config.restart
        if permanent:
            return f"cannot be started: {slot.end_reason}"
        if slot.same_failures >= SAME_FAILURES:
            return f"failed {slot.same_failures} times in the same way before it was ready: {slot.end_reason}"
        if slot.start_failure and slot.same_failures and (other := self._given_up_alike(slot)) is not None:
            return _alike(slot, other)
        if len(slot.loss_times) > policy.max_restarts:
            most, span = policy.max_restarts, policy.window_s
            return f"ended more than {most} times within {span:g} s, the last time: {slot.end_reason}"
        return ""

    def _count_failure(self, slot: WorkerSlot) -> None:
        if slot.start_failure and not slot.was_ready:
            failure = signature(slot.start_failure)
            slot.same_failures = slot.same_failures + 1 if failure == slot.failure_signature else 1
            slot.failure_signature = failure

    def _given_up_alike(self, slot: WorkerSlot) -> WorkerSlot | None:
        """Another slot of the group that was retired after the same failure as the last one of `slot`."""
        for other in slot.group.slots:
            if other is not slot and other.same_failures >= SAME_FAILURES and other.failure_signature == slot.failure_signature:
                return other
        return None

    def _retire_neighbors(self, slot: WorkerSlot) -> None:
        """Retire the slots in backoff whose last failure is the one that retired this slot."""
        if slot.same_failures < SAME_FAILURES:
            return
        for other in slot.group.slots:
            if other.state is SlotState.BACKOFF and other.same_failures and other.failure_signature == slot.failure_signature:
                retire(other, _alike(other, slot))
                self._log_retired(other)

    def _log_retired(self, slot: WorkerSlot) -> None:
        if slot.retired_reason:
            command = f"`enginepool restart {slot.group.name}/{slot.name}`"
            self.core.log(f"worker {slot.name} is given up: {slot.retired_reason}; {command} starts it again")

    def maybe_down(self, group: Group) -> None:
        """Fail the requests of `group` if no worker will ever run there again."""
        if self.core.draining or not group.slots:
            return
        if group.workers or any(slot.state is not SlotState.RETIRED for slot in group.slots):
            return
        group.down = f"group {group.name!r}: no worker is left and none will be restarted: {_why(group.slots)}"
        self.requests.fail_all(group, "pool_down", group.down)

    def watch(self) -> None:
        """Start processes whose backoff is over, and kill processes that did not register in time."""
        now = self.core.now
        for slot in self.core.slots:
            if now < slot.due:
                continue
            if slot.state is SlotState.BACKOFF and not self.core.draining and not slot.group.holds.wanted(slot.name):
                self._start(slot)
            elif slot.state is SlotState.UP and slot.worker is None:
                why = f"its process did not register within {now - slot.started_at:.0f} s"
                self.end(slot, slot.end_reason or why, own=bool(slot.end_reason))

    def extend(self, gap: float) -> None:
        """The coordinator itself was suspended for `gap` seconds: move the deadlines."""
        for slot in self.core.slots:
            slot.due += gap

    def drain(self) -> None:
        """Start no more processes, and end those that have not registered."""
        for slot in self.core.slots:
            if slot.state is SlotState.BACKOFF:
                retire(slot)
            elif slot.worker is None:
                self.end(slot, "the pool ends")

    def kill_all(self) -> None:
        """Kill every worker that this pool started."""
        for slot in self.core.slots:
            self.end(slot, "the pool ends")

    def ended(self) -> bool:
        """Whether no process that this pool started is left."""
        return not any(slot.incarnation for slot in self.core.slots)


def _alike(slot: WorkerSlot, other: WorkerSlot) -> str:
    return f"failed in the same way as {other.name} before it was ready: {slot.end_reason}"


def _why(slots: list[WorkerSlot]) -> str:
    return next((f"{slot.name} {slot.retired_reason}" for slot in slots if slot.retired_reason), "unknown")
