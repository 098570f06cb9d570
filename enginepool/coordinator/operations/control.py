"""The operation `control`: a command to all workers of a group, and one answer with the outcome of each."""

from collections.abc import Sequence

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.events import Buffer
from enginepool.coordinator.core.group import Group
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.fleet.fan_out import FanOut, ready_workers
from enginepool.protocol.errors import CODES
from enginepool.protocol.messages import Message, TaskId
from enginepool.protocol.messages.control import Command, Commanded, CommandName, Control, ControlReport, WorkerOutcome


def control(core: Context, fan_out: FanOut, e: ev.ControlAsked) -> None:
    """Give the command to the workers that are ready. Needs no hello, like `status`."""
    group = core.group_of(e.message.group)
    if group is None:
        core.unknown_group(e.link, e.message.id, e.message.group)
        return
    fan_out.ask(e.link, Commands(group, e.message), ready_workers(group), e.now + core.config.timing.update_inspect_s)


class Commands:
    """One command, and the outcome of each worker of the group."""

    answer: type[Message] = Commanded

    def __init__(self, group: Group, message: Control) -> None:
        self.id = message.id
        self._command: CommandName = message.command
        ready = set(ready_workers(group))
        others = [
            WorkerOutcome(worker.name, "pool_down", f"not ready: {worker.stage}")
            for worker in group.workers.values()
            if worker not in ready
        ]
        self._report = ControlReport(message.id, group.name, message.command, others)

    def ask(self, task: TaskId, worker: Worker) -> Message:
        """The command to one worker."""
        return Command(task, self._command)

    def take(self, worker: Worker, answer: Commanded, frames: Sequence[Buffer]) -> None:
        """It is done, or failed."""
        code = answer.code if answer.code in CODES or not answer.code else "engine_error"
        self._report.workers.append(WorkerOutcome(worker.name, code, answer.message))

    def give_up(self, worker: Worker, code: str, message: str) -> None:
        """It is not known whether it was done."""
        self._report.workers.append(WorkerOutcome(worker.name, code, message))

    def report(self) -> tuple[Message, Sequence[Buffer]]:
        """The rows in the order of the workers' names."""
        self._report.workers.sort(key=lambda outcome: outcome.name)
        return self._report, ()
