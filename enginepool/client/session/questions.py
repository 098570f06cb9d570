"""The questions for a report, on the pool's status or its weights, that have no answer yet, and when each is asked again.

Part of the pure machine in `machine.py`. A coordinator keeps no question: one that is lost with its link, or is unanswered for
`status_s` (`question_s`, for weights), is asked again under the same id. Every method appends its effects to `out`.
"""

from collections.abc import Sequence
from math import inf

from enginepool.client.session.events import Ask, ControlAnswer, Fail, Report, SendMessage, SessionEffect, WeightsAnswer
from enginepool.client.session.settings import SessionSettings
from enginepool.protocol.frames import Buffer
from enginepool.protocol.messages import ErrorReply, RestartWorker, Status, StatusReport
from enginepool.protocol.messages.control import Control, ControlReport
from enginepool.protocol.messages.weight_reports import InspectWeights, WeightsReport

Question = Status | RestartWorker | InspectWeights | Control


class PendingQuestions:
    """All questions of one client without an answer."""

    def __init__(self, settings: SessionSettings) -> None:
        self.settings = settings
        #: when `tick` has something to do
        self.wake_at = inf
        #: the link stands: questions may be sent
        self._open = False
        #: id -> (deadline, when to ask again)
        self._waiting: dict[int, tuple[float, float]] = {}
        self._questions: dict[int, Question] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def ask(self, event: Ask, now: float, out: list[SessionEffect]) -> None:
        id_ = event.question.id
        self._questions[id_] = event.question
        self._waiting[id_] = (inf if event.deadline is None else event.deadline, self._again(id_, now))
        self._time()
        self._send(id_, out)

    def abort(self, id_: int) -> bool:
        """The caller no longer wants it; False: `id_` is no question that waits."""
        known = self._waiting.pop(id_, None) is not None
        self._questions.pop(id_, None)
        self._time()
        return known

    def answered(
        self, report: StatusReport | WeightsReport | ControlReport, frames: Sequence[Buffer], out: list[SessionEffect]
    ) -> None:
        if self.abort(report.id):
            if isinstance(report, StatusReport):
                out.append(Report(report.id, report))
            elif isinstance(report, ControlReport):
                out.append(ControlAnswer(report.id, report))
            else:
                out.append(WeightsAnswer(report.id, report, frames))

    def refused(self, id_: int, failure: ErrorReply, out: list[SessionEffect]) -> bool:
        """An error is the answer; False: `id_` is no question that waits."""
        known = id_ in self._waiting
        if known:
            self.abort(id_)
            out.append(Fail(id_, failure))
        return known

    def welcome(self, out: list[SessionEffect]) -> None:
        """The link stands: ask everything."""
        self._open = True
        for id_ in self._waiting:
            self._send(id_, out)

    def shelve(self) -> None:
        """The link is lost."""
        self._open = False

    def tick(self, now: float, out: list[SessionEffect]) -> None:
        for id_, (deadline, again) in list(self._waiting.items()):
            if now >= deadline:
                question = self._questions[id_]
                what = "status" if isinstance(question, Status) else "control" if isinstance(question, Control) else "weights"
                out.append(Fail(id_, ErrorReply("deadline_exceeded", f"no {what} report came in time", id=id_)))
                del self._waiting[id_], self._questions[id_]
            elif now >= again:
                self._waiting[id_] = (deadline, self._again(id_, now))
                self._send(id_, out)
        self._time()

    def end(self, failure: ErrorReply, out: list[SessionEffect]) -> None:
        """`failure` is the answer of everything."""
        out.extend(Fail(id_, failure) for id_ in self._waiting)
        self._waiting.clear()
        self._questions.clear()
        self._open = False
        self._time()

    def _again(self, id_: int, now: float) -> float:
        settings = self.settings
        return now + (settings.status_s if isinstance(self._questions[id_], Status) else settings.question_s)

    def _send(self, id_: int, out: list[SessionEffect]) -> None:
        if self._open:
            out.append(SendMessage(self._questions[id_]))

    def _time(self) -> None:
        self.wake_at = min((min(times) for times in self._waiting.values()), default=inf)

    def check(self, welcomed: bool) -> None:
        """Raise AssertionError when the state contradicts itself, or what the session knows of the link."""
        assert self._open == welcomed, "questions are asked on a standing link, and then always"
        assert bool(self._waiting) == (self.wake_at < inf), "questions have a time"
        assert self._waiting.keys() == self._questions.keys(), "times are those of questions"
