"""Questions to several workers at once: each worker is asked, each has one outcome, and then the one answer goes out."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.effects import ToClient, ToWorker
from enginepool.coordinator.core.events import Buffer, Link
from enginepool.coordinator.core.group import Group
from enginepool.coordinator.core.worker import Worker
from enginepool.protocol.messages import ErrorReply, Message, TaskId

#: questions that wait for workers at once; some make engines read all of their weights
OPEN = 16
#: of them, on one link
OPEN_EACH = 4
#: when one that found no room is better asked again
AGAIN_MS = 1000


class Question(Protocol):
    """What is asked, and the answer as it grows."""

    #: the client's
    id: int

    def ask(self, task: TaskId, worker: Worker) -> Message:
        """The message to `worker`."""
        ...

    def take(self, worker: Worker, answer: Any, frames: Sequence[Buffer]) -> None:
        """The message of `worker` that answers."""
        ...

    def give_up(self, worker: Worker, code: str, message: str) -> None:
        """There is no answer of `worker`."""
        ...

    def report(self) -> tuple[Message, Sequence[Buffer]]:
        """The answer, once there is an outcome of each worker."""
        ...


class OpenQuestion:
    """A question until it is answered."""

    def __init__(self, link: Link, question: Question, until: float) -> None:
        self.link = link
        self.question = question
        self.until = until
        #: who was asked and has not answered, by task
        self.pending: dict[TaskId, Worker] = {}


class FanOut:
    """All questions that wait for workers."""

    def __init__(self, core: Context) -> None:
        self.core = core
        self.open: list[OpenQuestion] = []

    def ask(self, link: Link, question: Question, workers: Iterable[Worker], until: float) -> None:
        """Ask these workers, if there is room for one more question of `link`."""
        if not self._make_room(link, question.id):
            return
        opened = OpenQuestion(link, question, until)
        for worker in workers:
            task = self.core.task_id()
            opened.pending[task] = worker
            self.core.effects.append(ToWorker(worker.link, question.ask(task, worker)))
        self.open.append(opened)
        self._close_if_done(opened)

    def _make_room(self, link: Link, id: int) -> bool:
        """Whether one more question of `link` may be open. A link with at least two more than that one gives one up."""
        counts = Counter(opened.link for opened in self.open)
        if counts[link] >= OPEN_EACH:
            self._busy(link, id, OPEN_EACH, f"{OPEN_EACH} questions to workers of this link are open")
            return False
        if len(self.open) < OPEN:
            return True
        other, most = counts.most_common(1)[0]
        if most <= counts[link] + 1:
            self._busy(link, id, OPEN, f"{OPEN} questions to workers are open")
            return False
        newest = next(opened for opened in reversed(self.open) if opened.link == other)
        self.open.remove(newest)
        self._busy(other, newest.question.id, OPEN, f"{OPEN} questions to workers are open, of this link the most")
        return True

    def _busy(self, link: Link, id: int, limit: int, why: str) -> None:
        self.core.effects.append(ToClient(link, ErrorReply("busy", why, id, limit=str(limit), retry_after_ms=AGAIN_MS)))

    def answered(self, worker: Worker, task: TaskId, answer: Message, frames: Sequence[Buffer] = ()) -> None:
        """A worker has answered."""
        for opened in self.open:
            if opened.pending.get(task) is worker:
                opened.question.take(worker, answer, frames)
                del opened.pending[task]
                self._close_if_done(opened)
                return

    def _close_if_done(self, opened: OpenQuestion) -> None:
        if not opened.pending:
            self.open.remove(opened)
            message, frames = opened.question.report()
            self.core.effects.append(ToClient(opened.link, message, frames))

    def lost(self, worker: Worker, reason: str) -> None:
        """A worker is lost, and answers nothing more."""
        for opened in list(self.open):
            self._give_up(opened, worker, "engine_error", f"lost: {reason}")

    def returned(self, worker: Worker) -> None:
        """A worker is on a new link: what was sent on the old one may be lost with it."""
        for opened in self.open:
            for task, asked in opened.pending.items():
                if asked is worker:
                    self.core.effects.append(ToWorker(worker.link, opened.question.ask(task, worker)))

    def watch(self) -> None:
        """Answer without those who took too long."""
        for opened in list(self.open):
            if self.core.now >= opened.until:
                for worker in list(opened.pending.values()):
                    self._give_up(opened, worker, "deadline_exceeded", "no answer in time")

    def _give_up(self, opened: OpenQuestion, worker: Worker, code: str, message: str) -> None:
        for task in [task for task, asked in opened.pending.items() if asked is worker]:
            opened.question.give_up(worker, code, message)
            del opened.pending[task]
            self._close_if_done(opened)


def ready_workers(group: Group) -> list[Worker]:
    """Those whose engines can be asked."""
    return [worker for worker in group.workers.values() if worker.capabilities is not None and worker.stage == "ready"]
