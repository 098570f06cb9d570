"""The questions for a report, on the pool's status or its weights, that have no answer yet, and when each is asked again.

Part of the pure machine in `machine.py`. A coordinator keeps no question: one that is lost with its link, or is unanswered for
`status_s` (`question_s`, for weights), is asked again under the same id. Every method appends its effects to `out`.
"""

from collections.abc import Sequence
from math import inf

from enginepool.client.session.events import Answer, Ask, Fail, Question, SendMessage, SessionEffect
from enginepool.client.session.link_state import LinkState
from enginepool.client.session.settings import SessionSettings
from enginepool.protocol.frames import Buffer
from enginepool.protocol.messages import ErrorReply, Status, StatusReport
from enginepool.protocol.messages.adapters import AdapterReport, LoadAdapter, UnloadAdapter
from enginepool.protocol.messages.control import Control, ControlReport
from enginepool.protocol.messages.weight_reports import WeightsReport


class PendingQuestion:
    """A question without an answer."""

    __slots__ = ("again_at", "deadline", "frames", "message")

    def __init__(self, message: Question, frames: Sequence[Buffer], deadline: float, again_at: float) -> None:
        self.message = message
        self.frames = frames
        self.deadline = deadline
        #: when it is asked again
        self.again_at = again_at


class PendingQuestions:
    """All questions of one client without an answer. They are sent while its `link` stands."""

    def __init__(self, settings: SessionSettings, link: LinkState) -> None:
        self.settings = settings
        #: when `tick` has something to do
        self.wake_at = inf
        self._link = link
        self.by_id: dict[int, PendingQuestion] = {}

    def ask(self, event: Ask, now: float, out: list[SessionEffect]) -> None:
        message = event.question
        deadline = inf if event.deadline is None else event.deadline
        question = self.by_id[message.id] = PendingQuestion(message, event.frames, deadline, now + self._again_s(message))
        self._time()
        self._send(question, out)

    def abort(self, id_: int) -> bool:
        """The caller no longer wants it; False: `id_` is no question that waits."""
        known = self.by_id.pop(id_, None) is not None
        self._time()
        return known

    def answered(
        self,
        report: StatusReport | WeightsReport | ControlReport | AdapterReport,
        frames: Sequence[Buffer],
        out: list[SessionEffect],
    ) -> None:
        if self.abort(report.id):
            out.append(Answer(report, frames))

    def refused(self, id_: int, failure: ErrorReply, out: list[SessionEffect]) -> bool:
        """An error is the answer; False: `id_` is no question that waits."""
        known = self.abort(id_)
        if known:
            out.append(Fail(id_, failure))
        return known

    def welcome(self, out: list[SessionEffect]) -> None:
        """The link stands: ask everything."""
        for question in self.by_id.values():
            self._send(question, out)

    def tick(self, now: float, out: list[SessionEffect]) -> None:
        for id_, question in list(self.by_id.items()):
            message = question.message
            if now >= question.deadline:
                del self.by_id[id_]
                out.append(Fail(id_, ErrorReply("deadline_exceeded", f"no {_report_of(message)} came in time", id=id_)))
            elif now >= question.again_at:
                question.again_at = now + self._again_s(message)
                self._send(question, out)
        self._time()

    def end(self, failure: ErrorReply, out: list[SessionEffect]) -> None:
        """`failure` is the answer of everything."""
        out.extend(Fail(id_, failure) for id_ in self.by_id)
        self.by_id.clear()
        self._time()

    def _again_s(self, message: Question) -> float:
        if isinstance(message, LoadAdapter):
            return inf  # it may be long, and a link loses nothing
        return self.settings.status_s if isinstance(message, Status) else self.settings.question_s

    def _send(self, question: PendingQuestion, out: list[SessionEffect]) -> None:
        if self._link.stands:
            out.append(SendMessage(question.message, question.frames))

    def _time(self) -> None:
        self.wake_at = min((min(question.deadline, question.again_at) for question in self.by_id.values()), default=inf)


def _report_of(question: Question) -> str:
    """What answers it, for an error."""
    if isinstance(question, LoadAdapter | UnloadAdapter):
        return "adapter report"
    return (
        "status report"
        if isinstance(question, Status)
        else "control report"
        if isinstance(question, Control)
        else "weights report"
    )
