"""The weight updates of a client's session: each is one transaction, from `publish` to its one final answer.

Part of the pure machine in `machine.py`. An update is in one place:

    open ──published, error──► gone
     │ ▲
     │ └─ link lost, same epoch: everything is said again
     └─ coordinator of a new epoch ──► asking ──weights_report──► gone: committed or aborted

A coordinator keeps no transaction over its own end, but its journal has committed the update or it has not. So after a restart
one question decides: the history or the journal names this client and this update as the publisher of committed weights, or
the update is aborted. One that was not both sent and allowed to commit cannot be committed, and needs no question.

While an update is open its lease is renewed; every one ends by its deadline, with or without a coordinator. Every method
appends to `out` what is to be done.
"""

from math import inf
from typing import Literal

from enginepool.client.session.events import Answer, Fail, SendMessage, SessionEffect, UpdateAbort, UpdateBegin, UpdateStep
from enginepool.client.session.settings import SessionSettings
from enginepool.protocol.messages import ErrorReply
from enginepool.protocol.messages.weight_reports import InspectWeights, UpdateRecord, WeightsReport, publisher_of
from enginepool.protocol.messages.weights import AbortUpdate, Commit, Join, MemoryRegion, Phase, Published, Renew, Sent

#: Transfers in which the publisher broadcasts nothing, so that it has no digest to tell.
_UNSENT = ("checkpoint", "set_version")


class PublishedUpdate:
    """A transaction that has no final answer yet."""

    __slots__ = (
        "abort", "commit", "deadline", "frames", "heard_at", "id", "place", "publish", "refused", "renew_at", "said", "sent",
        "sent_bytes",
    )  # fmt: skip

    def __init__(self, event: UpdateBegin) -> None:
        self.id = event.publish.id
        self.publish = event.publish
        self.frames = event.frames
        self.deadline = inf if event.deadline is None else event.deadline
        self.place: Literal["open", "asking"] = "open"
        #: times that it was opened with a coordinator: one may know it
        self.said = 0
        self.sent_bytes = 0
        self.sent: Sent | None = None
        self.commit = False
        self.abort: AbortUpdate | None = None
        #: the final answer, unless the journal says that it is committed
        self.refused: ErrorReply | None = None
        #: when the lease is renewed, or the question is asked again
        self.renew_at = inf
        self.heard_at = -inf

    @property
    def may_be_committed(self) -> bool:
        """Whether a coordinator that heard everything could have committed it."""
        return self.commit and (self.sent is not None or self.publish.transfer in _UNSENT)

    @property
    def name(self) -> str:
        return f"version {self.publish.version}"


class Updates:
    """All updates of one client without a final answer: usually one."""

    def __init__(self, settings: SessionSettings, client: bytes) -> None:
        self.settings = settings
        self._client = client
        self.by_id: dict[int, PublishedUpdate] = {}
        #: when `tick` has something to do
        self.wake_at = inf
        self._open = False

    # --- the caller's side ---------------------------------------------------------------------------------------------

    def open(self, event: UpdateBegin, now: float, out: list[SessionEffect]) -> None:
        update = self.by_id[event.publish.id] = PublishedUpdate(event)
        if self._open:
            self._say_all(update, now, out)
        self._time()

    def progress(self, id_: int, sent_bytes: int) -> None:
        update = self.by_id.get(id_)
        if update is not None:
            update.sent_bytes = max(update.sent_bytes, sent_bytes)

    def all_sent(self, id_: int, digest: str, sent_bytes: int, regions: list[MemoryRegion], out: list[SessionEffect]) -> None:
        update = self.by_id.get(id_)
        if update is not None and update.sent is None:
            update.sent_bytes = sent_bytes
            update.sent = Sent(id_, digest, sent_bytes, regions)
            self._say(update, update.sent, out)
            if not update.commit and update.abort is None:
                # It may wait for its caller's `commit` now, which brings a deadline of its own.
                update.deadline = inf
                self._time()

    def allow(self, id_: int, deadline: float | None, out: list[SessionEffect]) -> None:
        update = self.by_id.get(id_)
        if update is not None:
            update.deadline = inf if deadline is None else deadline
            if not update.commit:
                update.commit = True
                self._say(update, Commit(id_), out)
            self._time()

    def abort(self, event: UpdateAbort, now: float, out: list[SessionEffect]) -> None:
        update, reason = self.by_id.get(event.id), event.reason
        if update is None or update.abort is not None:
            return
        update.abort = AbortUpdate(event.id, reason, event.broken)
        if not update.said:
            self._fail(update, _aborted(update, f"given up before it began{_because(reason)}"), out)
            return
        self._say(update, update.abort, out)
        update.deadline = min(update.deadline, now + self.settings.abort_wait_s)
        self._time()

    # --- the coordinator's side ----------------------------------------------------------------------------------------

    def welcome(self, new_epoch: bool, now: float, out: list[SessionEffect]) -> None:
        """The link stands. A coordinator of a new epoch knows no transaction of the old one."""
        self._open = True
        for update in list(self.by_id.values()):
            if new_epoch and update.said:
                if not update.may_be_committed:
                    self._fail(update, _aborted(update, "the coordinator ended before it was sent and committed"), out)
                    continue
                update.place = "asking"
            self._say_all(update, now, out)
        self._time()

    def shelve(self) -> None:
        """The link is lost."""
        self._open = False
        self._time()

    def heard(self, message: Join | Phase, now: float, out: list[SessionEffect]) -> None:
        update = self.by_id.get(message.id)
        if update is not None and update.place == "open":
            update.heard_at = now
            out.append(UpdateStep(message))

    def published(self, message: Published, out: list[SessionEffect]) -> bool:
        """It is committed; False: there is no such update."""
        known = self.by_id.pop(message.id, None) is not None
        if known:
            out.append(Answer(message))
            self._time()
        return known

    def refused(self, id_: int, failure: ErrorReply, now: float, out: list[SessionEffect]) -> bool:
        """It ended with an error; False: there is no such update."""
        update = self.by_id.get(id_)
        if update is None:
            return False
        if update.place == "asking" and failure.code == "update_aborted":
            # That is no answer to a question, but to `sent` and `commit`, which were said again together with what was refused.
            return True
        if failure.code in ("version_backwards", "publishing") and update.said > 1 and update.may_be_committed:
            # Said again to a coordinator that has committed it and forgotten whose it was; another one may be open by now.
            update.place = "asking"
            update.refused = failure
            self._say_all(update, now, out)
            self._time()
        else:
            self._fail(update, failure, out)
        return True

    def reported(self, report: WeightsReport, out: list[SessionEffect]) -> bool:
        """The answer to a question of `welcome`; False: it answers another one."""
        update = self.by_id.get(report.id)
        if update is None or update.place != "asking":
            return False
        record = _committed_in(report, update, publisher_of(self._client, update.id))
        if record is None:
            text = f"the coordinator was restarted, and its journal holds version {report.version}"
            self._fail(update, update.refused or _aborted(update, text), out)
        else:
            del self.by_id[update.id]
            out.append(Answer(Published(update.id, record.version, record)))
            self._time()
        return True

    # --- time ----------------------------------------------------------------------------------------------------------

    def tick(self, now: float, out: list[SessionEffect]) -> None:
        if now < self.wake_at:
            return
        for update in list(self.by_id.values()):
            if now >= update.deadline:
                self._too_late(update, out)
            elif self._open and now >= update.renew_at:
                quiet = now - update.heard_at >= self.settings.resend_s
                if update.place == "asking" or quiet:
                    # A message may be lost on its own, although the link seems well.
                    self._say_all(update, now, out)
                else:
                    update.renew_at = now + _renew_s(update)
                    out.append(SendMessage(Renew(update.id, update.sent_bytes)))
        self._time()

    def end(self, failure: ErrorReply, out: list[SessionEffect]) -> None:
        """`failure` is the final answer of everything. What is open is given up, if the link still stands."""
        for update in list(self.by_id.values()):
            if self._open and update.place == "open" and not update.may_be_committed:
                out.append(SendMessage(AbortUpdate(update.id, "the publisher closed")))
            self._fail(update, failure, out)
        self._open = False

    # --- the parts -----------------------------------------------------------------------------------------------------

    def _say_all(self, update: PublishedUpdate, now: float, out: list[SessionEffect]) -> None:
        """Everything that this coordinator has to know; it attaches what it knows already."""
        update.heard_at = now
        if update.place == "asking":
            update.renew_at = now + self.settings.status_s
            if self._open:
                out.append(SendMessage(InspectWeights(update.id, group=update.publish.group)))
            return
        update.said += 1
        update.renew_at = now + _renew_s(update)
        out.append(SendMessage(update.publish, update.frames))
        if update.sent is not None:
            out.append(SendMessage(update.sent))
        if update.commit:
            out.append(SendMessage(Commit(update.id)))
        if update.abort is not None:
            out.append(SendMessage(update.abort))

    def _say(self, update: PublishedUpdate, message: Sent | Commit | AbortUpdate, out: list[SessionEffect]) -> None:
        if self._open and update.place == "open":
            out.append(SendMessage(message))

    def _too_late(self, update: PublishedUpdate, out: list[SessionEffect]) -> None:
        if update.abort is not None and not update.may_be_committed:
            self._fail(update, _aborted(update, f"given up{_because(update.abort.reason)}"), out)
            return
        known = "whether it was committed is unknown" if update.may_be_committed else "it was given up"
        if update.abort is None:
            self._say(update, AbortUpdate(update.id, "the publisher's time ran out"), out)
        text = f"the update to {update.name} did not end in time; {known}"
        self._fail(update, ErrorReply("deadline_exceeded", text, id=update.id), out)

    def _fail(self, update: PublishedUpdate, failure: ErrorReply, out: list[SessionEffect]) -> None:
        del self.by_id[update.id]
        out.append(Fail(update.id, failure))
        self._time()

    def _time(self) -> None:
        self.wake_at = min(
            (min(update.deadline, update.renew_at if self._open else inf) for update in self.by_id.values()), default=inf
        )


def _renew_s(update: PublishedUpdate) -> float:
    return max(update.publish.lease_ms, 3) / 3000


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""


def _aborted(update: PublishedUpdate, why: str) -> ErrorReply:
    return ErrorReply("update_aborted", f"the update to {update.name} was aborted: {why}", id=update.id)


def _committed_in(report: WeightsReport, update: PublishedUpdate, publisher: str) -> UpdateRecord | None:
    """The record of this update, if the coordinator committed it before it ended."""
    for record in report.history:
        if record.publisher == publisher and record.outcome == "committed":
            return record
    if report.publisher != publisher:
        return None
    return UpdateRecord(
        version=report.version,
        outcome="committed",
        transfer=update.publish.transfer,
        message="committed before the coordinator was restarted",
        sent_bytes=update.sent_bytes,
        digest=report.digest,
        publisher=publisher,
    )
