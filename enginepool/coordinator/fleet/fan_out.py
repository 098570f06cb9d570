"""Questions to several workers at once. The answer is sent when there is one outcome for each worker."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.effects import ToClient, ToWorker
from enginepool.coordinator.core.events import Buffer, HoldsKept, Link
from enginepool.coordinator.core.group import Group
from enginepool.coordinator.core.worker import Worker
from enginepool.protocol.messages import ErrorReply, Message, TaskId

#: limit of the questions that wait for workers at the same time; some questions make engines read all of their weights
OPEN = 16
#: the same limit for one link
OPEN_EACH = 4
#: milliseconds after which a refused question may be asked again
AGAIN_MS = 1000


class Question(Protocol):
    """A question, and the outcomes of the workers so far."""

    #: the client's id of the question
    id: int
    #: the type of the message that answers `ask`
    answer: type[Message]
    #: `settle` may undo something: it has to be waited for
    settles: bool

    def ask(self, task: TaskId, worker: Worker) -> Message:
        """The message that asks `worker`."""
        ...

    def take(self, worker: Worker, answer: Any, frames: Sequence[Buffer]) -> None:
        """Take the answer of `worker`."""
        ...

    def give_up(self, worker: Worker, code: str, message: str) -> None:
        """`worker` will not answer."""
        ...

    def settle(self) -> int:
        """There is an outcome for each worker. Returns the number of the `KeepHolds` that follows from them, or 0."""
        ...

    def report(self) -> tuple[Message, Sequence[Buffer]]:
        """The answer to the client, when there is an outcome for each worker."""
        ...


class OpenQuestion:
    """A question that has no answer yet."""

    def __init__(self, link: Link, question: Question, until: float) -> None:
        self.link = link
        self.question = question
        self.until = until
        #: workers that were asked and have not answered, by task
        self.pending: dict[TaskId, Worker] = {}
        #: the number of the `KeepHolds` that is to be in the journal before the answer is sent; 0: none
        self.unwritten = 0
        #: `settle` was called, which is done once: what it undid may have been asked for again since
        self.settled = False


class FanOut:
    """All questions that wait for workers."""

    def __init__(self, core: Context) -> None:
        self.core = core
        self.open: list[OpenQuestion] = []

    def ask(self, link: Link, question: Question, workers: Iterable[Worker], until: float) -> None:
        """Ask these workers, if there is room for one more question of `link`. A question that is open is not asked again."""
        if not self.is_open(link, question.id) and self.make_room(link, question.id):
            self.begin(link, question, workers, until)

    def is_open(self, link: Link, id: int) -> bool:
        """Whether question `id` of `link` has been asked, and has no answer yet."""
        return any((opened.link, opened.question.id) == (link, id) for opened in self.open)

    def begin(self, link: Link, question: Question, workers: Iterable[Worker], until: float, unwritten: int = 0) -> None:
        """Ask these workers a question that is not open, and for which there is room."""
        opened = OpenQuestion(link, question, until)
        opened.unwritten = unwritten
        for worker in workers:
            task = self.core.task_id()
            opened.pending[task] = worker
            self.core.effects.append(ToWorker(worker.link, question.ask(task, worker)))
        self.open.append(opened)
        self._close_if_done(opened)

    def make_room(self, link: Link, id: int) -> bool:
        """Whether one more question of `link` may be open. If all places are taken, a link with at least two more open
        questions than `link` loses one of them, but none that may have to undo something."""
        counts = Counter(opened.link for opened in self.open)
        if counts[link] >= OPEN_EACH:
            self._busy(link, id, OPEN_EACH, f"{OPEN_EACH} questions to workers of this link are open")
            return False
        if len(self.open) < OPEN:
            return True
        newest = {opened.link: opened for opened in self.open if not opened.question.settles}
        other = max(newest, key=counts.__getitem__, default=link)
        if counts[other] <= counts[link] + 1:
            self._busy(link, id, OPEN, f"{OPEN} questions to workers are open")
            return False
        ended = newest[other]
        self.open.remove(ended)
        self._busy(other, ended.question.id, OPEN, f"{OPEN} questions to workers are open, of this link the most")
        return True

    def _busy(self, link: Link, id: int, limit: int, why: str) -> None:
        self.core.effects.append(ToClient(link, ErrorReply("busy", why, id, limit=str(limit), retry_after_ms=AGAIN_MS)))

    def answered(self, worker: Worker, task: TaskId, answer: Message, frames: Sequence[Buffer] = ()) -> None:
        """A worker has answered. A message that answers another kind of question is dropped, as one with an unknown task is."""
        for opened in self.open:
            if opened.pending.get(task) is worker and type(answer) is opened.question.answer:
                opened.question.take(worker, answer, frames)
                del opened.pending[task]
                self._close_if_done(opened)
                return

    def journaled(self, e: HoldsKept) -> None:
        """The journal has what a question waits for."""
        for opened in [opened for opened in self.open if opened.unwritten == e.number]:
            opened.unwritten = 0
            self._close_if_done(opened)

    def _close_if_done(self, opened: OpenQuestion) -> None:
        if opened.pending or opened.unwritten:
            return
        if not opened.settled:
            opened.settled = True
            opened.unwritten = opened.question.settle()
        if not opened.unwritten:
            self.open.remove(opened)
            message, frames = opened.question.report()
            self.core.effects.append(ToClient(opened.link, message, frames))

    def lost(self, worker: Worker, reason: str) -> None:
        """A worker is lost and will not answer."""
        for opened in list(self.open):
            self._give_up(opened, worker, "engine_error", f"lost: {reason}")

    def returned(self, worker: Worker) -> None:
        """A worker uses a new link: messages that were sent on the old link may be lost."""
        for opened in self.open:
            for task, asked in opened.pending.items():
                if asked is worker:
                    self.core.effects.append(ToWorker(worker.link, opened.question.ask(task, worker)))

    def watch(self) -> None:
        """Answer the questions whose time is over, without the workers that have not answered."""
        for opened in list(self.open):
            if self.core.now >= opened.until:
                opened.unwritten = 0
                for worker in list(opened.pending.values()):
                    self._give_up(opened, worker, "deadline_exceeded", "no answer in time")
                if opened in self.open:  # the journal alone was late
                    self._close_if_done(opened)

    def extend(self, gap: float) -> None:
        """The coordinator stood still for so long."""
        for opened in self.open:
            opened.until += gap

    def _give_up(self, opened: OpenQuestion, worker: Worker, code: str, message: str) -> None:
        for task in [task for task, asked in opened.pending.items() if asked is worker]:
            opened.question.give_up(worker, code, message)
            del opened.pending[task]
            self._close_if_done(opened)


def ready_workers(group: Group) -> list[Worker]:
    """The workers of `group` whose engines can be asked."""
    return [worker for worker in group.workers.values() if worker.capabilities is not None and worker.stage == "ready"]
