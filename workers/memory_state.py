"""Which parts of the engine's memory are released, and the commands that change that. Pure, a part of `machine`.

No work may enter the engine while a part sleeps, or while a command to sleep or to wake runs. The coordinator sends none then,
unless it does not know yet: it gave up waiting for the command, or is the successor of the one that sent it. Such work is
refused, and goes elsewhere.
"""

from enginepool.protocol.messages import TaskId
from enginepool.protocol.messages.control import Command, Commanded, MemoryTag
from enginepool.workers.events import CommandDone, RunCommand, SendToCoordinator, WorkerEffect
from enginepool.workers.ledger import TaskLedger
from enginepool.workers.weights.machine import WorkerUpdates


class MemoryState:
    """Of one engine."""

    def __init__(self) -> None:
        #: the parts that are released
        self.asleep: list[MemoryTag] = []
        #: commands to sleep or to wake that are not done
        self.commanded: set[TaskId] = set()

    @property
    def closed(self) -> bool:
        """No work may enter the engine."""
        return bool(self.commanded or self.asleep)

    def takes_weights(self, stage: str) -> bool:
        """Whether the engine is ready, with memory for weights. It says `ready` when it is again."""
        return stage == "ready" and "weights" not in self.asleep

    def take(self, command: Command, epoch: int, stage: str, updates: WorkerUpdates, work: TaskLedger) -> WorkerEffect:
        """Run a command, or say why not. One that is delivered twice runs twice: the first answer may be lost with its link."""
        # Where dropped work is inside, later work waits for it, and would enter an engine that has said that it is paused.
        waits = updates.busy or (bool(work.leaving) and command.mode != "abort")
        if command.task[0] == epoch and (command.command == "resume" or (stage == "ready" and not waits)):
            if command.command in ("sleep", "wake"):
                self.commanded.add(command.task)
            return RunCommand(command)
        doing = stage
        if stage == "ready" and waits:
            doing = "it takes weights" if updates.busy else "dropped work is in its engine"
        return SendToCoordinator(Commanded(command.task, "pool_down", f"not ready: {doing}"))

    def done(self, event: CommandDone) -> None:
        """A command is done, or failed."""
        self.commanded.discard(event.answer.task)
        if event.asleep is not None:
            self.asleep = event.asleep
