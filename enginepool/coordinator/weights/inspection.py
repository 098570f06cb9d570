"""Questions about weights: what each worker holds, and what is in its engine, put together into one report."""

from collections import Counter
from collections.abc import Sequence

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.effects import ToClient, ToWorker
from enginepool.coordinator.core.events import Buffer, Link
from enginepool.coordinator.core.group import Group
from enginepool.coordinator.core.worker import Worker
from enginepool.protocol.basis import MAX_CHUNK, MAX_FINDINGS, MAX_ID
from enginepool.protocol.manifest import worst
from enginepool.protocol.messages import ErrorReply, TaskId
from enginepool.protocol.updates import Inspect, InspectWeights, WeightsReport, WorkerWeights

#: questions that wait for workers at once; each makes engines read all of their weights
OPEN = 16
#: of them, on one link
OPEN_EACH = 4
#: when one that found no room is better asked again
AGAIN_MS = 1000


class Question:
    """One question, until all workers that were asked have answered."""

    def __init__(self, link: Link, group: Group, message: InspectWeights, until: float) -> None:
        self.link = link
        self.group = group
        self.message = message
        self.until = until
        #: who was asked and has not answered, by task
        self.pending: dict[TaskId, Worker] = {}
        self.report = report_of(group, message.id)


class Inspections:
    """All questions that wait for workers."""

    def __init__(self, core: Context) -> None:
        self.core = core
        self.open: list[Question] = []

    def asked(self, e: ev.WeightsAsked) -> None:
        """A peer asks about weights. Needs no hello, like `status`."""
        core, message = self.core, e.message
        group = core.group_of(message.group)
        if group is None:
            core.unknown_group(e.link, message.id, message.group)
            return
        if message.what == "versions":
            report = report_of(group, message.id)
            report.workers = [_of(worker) for worker in group.workers.values()]
            core.effects.append(ToClient(e.link, report))
            return
        for field in ("offset", "count"):
            if not 0 <= (value := getattr(message, field)) <= MAX_ID:
                core.refuse(e.link, message.id, "bad_request", f"{field}: {value} is outside 0..{MAX_ID}", field=field)
                return
        if not self._make_room(e.link, message.id):
            return
        question = Question(e.link, group, message, e.now + core.config.timing.update_inspect_s)
        ready = [worker for worker in group.workers.values() if worker.capabilities is not None and worker.stage == "ready"]
        if message.what == "tensor":
            ready = [worker for worker in ready if worker.holds][:1] or ready[:1]
        for worker in ready:
            task = core.task_id()
            question.pending[task] = worker
            self._post(question, task, worker)
        self.open.append(question)
        self._close_if_done(question)

    def _make_room(self, link: Link, id: int) -> bool:
        """Whether one more question of `link` may be open. A link with at least two more than that one gives one up."""
        counts = Counter(question.link for question in self.open)
        if counts[link] >= OPEN_EACH:
            self._busy(link, id, OPEN_EACH, f"{OPEN_EACH} questions about weights of this link are open")
            return False
        if len(self.open) < OPEN:
            return True
        other, most = counts.most_common(1)[0]
        if most <= counts[link] + 1:
            self._busy(link, id, OPEN, f"{OPEN} questions about weights are open")
            return False
        newest = next(question for question in reversed(self.open) if question.link == other)
        self.open.remove(newest)
        self._busy(other, newest.message.id, OPEN, f"{OPEN} questions about weights are open, of this link the most")
        return True

    def _busy(self, link: Link, id: int, limit: int, why: str) -> None:
        self.core.effects.append(ToClient(link, ErrorReply("busy", why, id, limit=str(limit), retry_after_ms=AGAIN_MS)))

    def _post(self, question: Question, task: TaskId, worker: Worker) -> None:
        message = Inspect(task, "digest", question.message.name)
        if question.message.what != "versions":
            message.what = question.message.what
        if message.what == "tensor":
            asked, client = question.message, self.core.links.get(question.link)
            # Half of the longest message leaves room for everything else in it.
            most = self.core.config.limits.max_message_bytes if client is None else client.max_message
            message.offset, message.count = asked.offset, min(asked.count or MAX_CHUNK, MAX_CHUNK, most // 8)
        self.core.effects.append(ToWorker(worker.link, message))

    def inspected(self, worker: Worker, e: ev.WorkerInspected) -> None:
        """A worker has answered."""
        message = e.message
        for question in self.open:
            if question.pending.get(message.task) is worker:
                answer = _of(worker)
                answer.digest, answer.findings = message.digest, message.findings
                answer.code, answer.message = message.code, message.message
                report = question.report
                if message.frames:
                    report.dtype, report.frames, report.shape = message.dtype, message.frames, message.shape
                self._answered(question, message.task, answer, e.frames)
                return

    def _answered(self, question: Question, task: TaskId, answer: WorkerWeights, frames: Sequence[Buffer] = ()) -> None:
        del question.pending[task]
        question.report.workers.append(answer)
        self._close_if_done(question, frames)

    def _close_if_done(self, question: Question, frames: Sequence[Buffer] = ()) -> None:
        if not question.pending:
            self.open.remove(question)
            workers = question.report.workers
            if sum(len(worker.findings) for worker in workers) > MAX_FINDINGS:
                for worker in workers:
                    worker.findings = worst(worker.findings, max(1, MAX_FINDINGS // len(workers)))
            self.core.effects.append(ToClient(question.link, question.report, frames))

    def lost(self, worker: Worker, reason: str) -> None:
        """A worker is lost, and answers nothing more."""
        self._give_up(worker, "engine_error", f"lost: {reason}")

    def returned(self, worker: Worker) -> None:
        """A worker is on a new link: what was sent on the old one may be lost with it."""
        for question in self.open:
            for task, asked in question.pending.items():
                if asked is worker:
                    self._post(question, task, worker)

    def watch(self) -> None:
        """Answer without those who took too long."""
        for question in list(self.open):
            if self.core.now >= question.until:
                for worker in list(question.pending.values()):
                    self._give_up(worker, "deadline_exceeded", "no answer in time", question)

    def _give_up(self, worker: Worker, code: str, message: str, only: Question | None = None) -> None:
        for question in list(self.open) if only is None else [only]:
            for task in [task for task, asked in question.pending.items() if asked is worker]:
                answer = _of(worker)
                answer.digest, answer.code, answer.message = "", code, message
                self._answered(question, task, answer)


def report_of(group: Group, id: int) -> WeightsReport:
    """What the coordinator knows by itself."""
    return WeightsReport(id, group.name, group.version, group.weights.digest, history=list(group.history))


def _of(worker: Worker) -> WorkerWeights:
    if worker.capabilities is None:
        return WorkerWeights(worker.name, message=worker.stage)
    why = worker.missing_weights
    return WorkerWeights(worker.name, worker.version, worker.digest, code="needs_weights" if why else "", message=why)
