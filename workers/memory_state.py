"""Which parts of the engine's memory are released, and the commands that change that. Pure, a part of `machine`.

No work may enter the engine while a part sleeps, or while a command to sleep or to wake runs. The coordinator sends none then,
unless it does not know yet: it gave up waiting for the command, or is the successor of the one that sent it. Such work is
refused, and goes elsewhere.
"""

from enginepool.protocol.messages import TaskId
from enginepool.protocol.messages.control import Command, Commanded, MemoryTag
from enginepool.workers.events import CommandDone, RunCommand, SendToCoordinator, WorkerEffect


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

    def take(self, command: Command, epoch: int, stage: str, *, takes_weights: bool) -> WorkerEffect:
        """Run a command, or say why not. One that is delivered twice runs twice: the first answer may be lost with its link."""
        if command.task[0] == epoch and stage == "ready" and not takes_weights:
            if command.command in ("sleep", "wake"):
                self.commanded.add(command.task)
            return RunCommand(command)
        doing = "it takes weights" if stage == "ready" and takes_weights else stage
        return SendToCoordinator(Commanded(command.task, "pool_down", f"not ready: {doing}"))

    def done(self, event: CommandDone) -> None:
        """A command is done, or failed."""
        self.commanded.discard(event.answer.task)
        if event.asleep is not None:
            self.asleep = event.asleep
