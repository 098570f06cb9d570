"""The LoRA adapters that the engine has loaded since it started, and the changes of them. Pure, a part of `machine`."""

from enginepool.protocol.messages import TaskId
from enginepool.protocol.messages.adapters import AdapterChanged, ChangeAdapter
from enginepool.workers.events import CommandDone, RunCommand, SendToCoordinator, WorkerEffect


class AdapterState:
    """Of one engine."""

    def __init__(self) -> None:
        #: by the engine's names
        self.loaded: tuple[str, ...] = ()
        #: the latest change, and its answer
        self._change: TaskId | None = None
        self._answer: AdapterChanged | None = None

    def take(self, message: ChangeAdapter, epoch: int, stage: str) -> list[WorkerEffect]:
        """Make a change, or say why not. One that is delivered twice is made once."""
        if message.task == self._change:
            return [] if self._answer is None else [SendToCoordinator(self._answer)]
        if message.task[0] == epoch and stage == "ready":
            self._change, self._answer = message.task, None
            return [RunCommand(message)]
        return [SendToCoordinator(AdapterChanged(message.task, code="pool_down", message=f"not ready: {stage}"))]

    def forget(self) -> None:
        """The coordinator that asked for changes has ended, or has given this worker up: it waits for no answer."""
        self._change = self._answer = None

    def done(self, event: CommandDone) -> bool:
        """A command is done. Returns whether it was a change for whose answer no coordinator waits: the present one heard
        before what is loaded."""
        if event.adapters is None or not isinstance(event.answer, AdapterChanged):
            return False
        self.loaded = event.adapters
        if event.answer.task != self._change:
            return True
        self._answer = event.answer
        return False
