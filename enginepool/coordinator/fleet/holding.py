"""Groups that are paused, and engines that sleep: parts of their memory are released until they are woken. Pure.

A group that is paused starts no work: its requests wait in the queue, and their deadlines count. Its workers finish the batches
that they have, which takes a moment. With the mode `abort` its generations go back to the queue, as when one worker gives them
up: they go on after their last token, and those whose callers want parts (`partial`) end with what they have. With `in_place`
and `retract` they stay at their workers, each of which pauses its engine. Those of a worker that is lost, or on a new link, go
back to the queue, and so do all of them with a new epoch: what the mode says then is about nothing any more.

What is to sleep is a fact of the group, which the coordinator keeps on disk (`GroupHolds`). What sleeps is a fact of each
worker, which its `ready` says. A worker of which one of the two is not empty is ASLEEP and gets no work. Where the two differ
when a worker says `ready`, the worker is told again: it has been started since, or has missed a command with its link. So is a
worker that refused a command, as it took weights.

A group that sleeps starts no work either. When one worker sleeps its requests go elsewhere.

A slot whose worker is to sleep starts no process: the publisher that put it to sleep uses the GPU.
"""

from collections import Counter

from msgspec.structs import replace

from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.effects import KeepHolds, ToWorker
from enginepool.coordinator.core.group import Group
from enginepool.coordinator.core.group_holds import GroupHolds, told
from enginepool.coordinator.core.request import Request
from enginepool.coordinator.core.transitions import set_holds
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.fleet.fan_out import ready_workers
from enginepool.coordinator.fleet.workers import WorkerRegistry
from enginepool.coordinator.requests.exact_version import end_with_tokens
from enginepool.protocol.messages.control import Command, Commanded, CommandName, MemoryTag
from enginepool.protocol.messages.weights import RunningGenerations


class GroupHolding:
    """Pauses groups, puts engines to sleep, and lets them go on."""

    def __init__(self, core: Context, fleet: WorkerRegistry) -> None:
        self.core = core
        self.fleet = fleet
        #: by group, how many pauses were undone
        self.undone = Counter[str]()
        #: by group, the number of the latest `KeepHolds` that is not in the journal yet
        self._unwritten: dict[str, int] = {}
        #: workers that refused a command: they take weights, or dropped work is in their engines
        self._refused: dict[Worker, None] = {}

    def sleep(self, group: Group, worker: str, tags: frozenset[MemoryTag]) -> int:
        """These parts of the engine of `worker`, or of all engines, are to sleep. Their generations are taken back.

        Returns the number of the `KeepHolds` that says so, or 0.
        """
        number = self._set(group, group.holds.with_sleep(worker, tags))
        for one in list(group.workers.values()):
            if group.holds.wanted(one.name):
                self.fleet.recall_streams(one)
        return number

    def wake(self, group: Group, worker: str, tags: frozenset[MemoryTag]) -> int:
        """These parts are to be awake again. A worker gets work once it says that nothing of its engine sleeps.

        Returns the number of the `KeepHolds` that says so, or 0.
        """
        return self._set(group, group.holds.without_sleep(worker, tags))

    def pause(self, group: Group, mode: RunningGenerations) -> int:
        """No work starts from here on. With `abort` generations are taken back. Returns as `sleep`."""
        number = self._set(group, replace(group.holds, paused=True, mode=mode))
        for worker in list(group.workers.values()):
            if not group.holds.keeps:
                self.fleet.recall_streams(worker)
        return number

    def resume(self, group: Group) -> int:
        """Work starts again, unless the group sleeps. Returns as `sleep`."""
        return self._unpause(group, GroupHolds())

    def undo_pause(self, group: Group, mode: RunningGenerations, before: GroupHolds) -> int:
        """A worker could not pause its engine so: the group is paused as it was `before`. Returns as `sleep`."""
        if (group.holds.paused, group.holds.mode) != (True, mode):
            return 0  # something else was asked for since
        self.undone[group.name] += 1
        number = self._unpause(group, before)
        for worker in () if group.holds.keeps else ready_workers(group):
            self.core.effects.append(ToWorker(worker.link, Command(self.core.task_id(), "resume")))
        return number

    def _unpause(self, group: Group, to: GroupHolds) -> int:
        for worker in group.workers.values() if group.holds.keeps else ():
            self.fleet.give_time(worker)
        return self._set(group, replace(group.holds, paused=to.paused, mode=to.mode))

    def abort(self, ended: list[Request], why: str) -> int:
        """End these requests: generations with their tokens, the others as cancelled. Returns how many."""
        requests = self.fleet.requests
        for request in ended:
            if not end_with_tokens(requests, request):
                requests.fail(request, "cancelled", why)
            self.core.wake(request.group)
        if ended:
            self.core.log(f"requests ended by an operator: {len(ended)}: {why}", "update")
        return len(ended)

    def lost(self, worker: Worker) -> None:
        """A worker is lost. The name of an external one never comes back."""
        holds = worker.group.holds
        if worker.slot is None and worker.name in holds.asleep:
            self._set(worker.group, holds.without_sleep(worker.name, holds.asleep[worker.name]))

    def _set(self, group: Group, holds: GroupHolds) -> int:
        if holds == group.holds:
            return self._unwritten.get(group.name, 0)  # what was asked before is waited for
        for line in told(group.name, group.holds, holds):
            self.core.log(line, "update")
        set_holds(self.core, group, holds)
        _, number = self.core.task_id()
        self._unwritten[group.name] = number
        self.core.effects.append(KeepHolds(number, group.name, holds))
        return number

    def journaled(self, number: int) -> None:
        """The journal has taken what `KeepHolds` of this number said, or could not."""
        for name in [name for name, latest in self._unwritten.items() if latest == number]:
            del self._unwritten[name]

    def answered(self, worker: Worker, message: Commanded) -> None:
        """A worker has answered a command."""
        if message.code == "pool_down":
            self._refused[worker] = None

    def watch(self) -> None:
        """Who refused a command may carry it out by now."""
        refused, self._refused = self._refused, {}
        for worker in refused:
            self.settle(worker)

    def settle(self, worker: Worker) -> None:
        """A worker has said what sleeps in its engine. It is told again what is to sleep, if that is something else."""
        wanted = worker.group.holds.wanted(worker.name)
        if worker.lost or worker.stage != "ready" or worker.asleep == wanted:
            return
        differences: dict[CommandName, frozenset[MemoryTag]] = {
            "sleep": wanted - worker.asleep,
            "wake": worker.asleep - wanted,
        }
        for command, tags in differences.items():
            if tags:
                self.core.effects.append(ToWorker(worker.link, Command(self.core.task_id(), command, sorted(tags))))
        self.fleet.recall_streams(worker)
