"""What a publisher's transaction promises, event by event, and against a coordinator that loses, repeats and restarts."""

import random
from math import inf

import pytest

from enginepool.client.session.events import (
    AbandonRequest,
    Answer,
    Ask,
    Close,
    CommittedWeightsLost,
    Fail,
    MessageReceived,
    OpenLink,
    SendMessage,
    SessionEffect,
    SessionEvent,
    SessionTick,
    Start,
    UpdateAbort,
    UpdateBegin,
    UpdateCommit,
    UpdateProgress,
    UpdateSent,
    UpdateStep,
)
from enginepool.client.session.machine import ClientSession
from enginepool.client.session.settings import SessionSettings
from enginepool.protocol.messages import Ack, ErrorReply, Goodbye, Hello, Message, Ping, Pong, ToClient, Welcome
from enginepool.protocol.messages import weights as updates
from enginepool.protocol.messages.weight_reports import InspectWeights, UpdateRecord, WeightsReport, publisher_of
from enginepool.protocol.messages.weights import Commit, Join, Phase, Publish, Published, Renew, Sent, Transfer, WeightsNeeded
from tests.core.session_invariants import check_session
from tests.core.test_client_session import Driver

DIGEST = "d" * 32
MANIFEST = (b"[]",)
#: the first update of the client of `Driver`
MINE = publisher_of(b"c" * 16, 1)


def publish(id_: int, version: int = 8, transfer: Transfer = "staged") -> Publish:
    return Publish(id_, version, group="g", transfer=transfer, lease_ms=9000)


def published(id_: int, version: int = 8) -> Published:
    return Published(id_, version, UpdateRecord(version, "committed", digest=DIGEST))


class Publisher(Driver):
    """A session with an update under way."""

    def open(self, id_: int = 1, *, timeout: float | None = None, transfer: Transfer = "staged") -> list[SessionEffect]:
        deadline = None if timeout is None else self.now + timeout
        return self(UpdateBegin(self.now, publish(id_, transfer=transfer), MANIFEST, deadline))

    def send_all(self, id_: int = 1) -> list[SessionEffect]:
        return self(UpdateSent(self.now, id_, DIGEST, 1000))

    def commit(self, id_: int = 1, *, timeout: float | None = None) -> list[SessionEffect]:
        return self(UpdateCommit(self.now, id_, None if timeout is None else self.now + timeout))

    def restart(self) -> list[SessionEffect]:
        """The coordinator is another one; returns what the session does about it."""
        self.now += 1.0
        self.hear(Pong(epoch=self.session.link.epoch + 1))
        return self.welcome(epoch=self.session.link.epoch + 1)

    def ended(self) -> list[str]:
        """How updates ended in the last step."""
        codes: list[str] = []
        for effect in self.effects:
            if isinstance(effect, Fail):
                codes.append(effect.failure.code)
            elif isinstance(effect, Answer) and isinstance(effect.message, Published):
                codes.append(effect.message.record.outcome)
        return codes

    def words(self) -> list[str]:
        """The kinds of messages that the last step sent, pings aside."""
        return [type(message).__name__ for message in self.sent() if not isinstance(message, Ping)]


@pytest.fixture
def publisher() -> Publisher:
    publisher = Publisher()
    publisher.connect()
    return publisher


# --- the straight way --------------------------------------------------------------------------------------------------


def test_an_update_is_opened_joined_sent_committed_and_acknowledged(publisher: Publisher):
    (opened,) = publisher.open()
    assert opened == SendMessage(publish(1), MANIFEST)
    join, phase = Join("group", 3, id=1), Phase(1, "transfer", 2, 2)
    assert publisher.hear(join) == [UpdateStep(join)]
    assert publisher.hear(phase) == [UpdateStep(phase)]
    assert publisher.send_all() == [SendMessage(Sent(1, DIGEST, 1000))]
    assert publisher.commit() == [SendMessage(Commit(1))]
    assert publisher.hear(published(1)) == [Answer(published(1))]
    publisher.pass_time(0.2)
    assert publisher.sent() == [Ack([1])]
    assert publisher.hear(published(1)) == []


def test_an_update_that_is_opened_before_the_welcome_waits_for_it():
    publisher = Publisher()
    publisher.start()
    assert publisher.open() == []
    publisher.welcome()
    assert publisher.words() == ["Publish"]


def test_an_error_is_the_end_and_nothing_more_is_said(publisher: Publisher):
    publisher.open()
    publisher.refuse("publishing", 1)
    assert publisher.ended() == ["publishing"]
    assert publisher.send_all() == publisher.commit() == []
    publisher.pass_time(20)
    assert publisher.words() == ["Ack"]


def test_the_lease_is_renewed_three_times_in_its_length_with_the_bytes_that_are_sent(publisher: Publisher):
    publisher.open()
    publisher(UpdateProgress(publisher.now, 1, 500))
    publisher(UpdateProgress(publisher.now, 1, 400))
    publisher.pass_time(9.5)
    assert [message for message in publisher.sent() if isinstance(message, Renew)] == [Renew(1, 500)] * 3


def test_what_may_have_been_lost_on_a_good_link_is_said_again_in_the_end(publisher: Publisher):
    publisher.open()
    publisher.send_all()
    publisher.pass_time(35)
    assert [word for word in publisher.words() if word != "Renew"] == ["Publish", "Sent"]


# --- a lost link, and another coordinator ------------------------------------------------------------------------------


def test_after_a_lost_link_everything_is_said_again_in_its_order(publisher: Publisher):
    publisher.open()
    publisher.send_all()
    publisher.commit()
    publisher.now += 1.0
    publisher.refuse("hello_required")
    assert publisher.words() == ["Hello"]
    publisher.welcome()
    assert publisher.words() == ["Publish", "Sent", "Commit"]


def test_a_publisher_has_the_name_that_the_specification_says():
    assert publisher_of(bytes(range(16)), 9) == "1adf646e4ebf10c7cc95ef0256448cde"


def test_a_new_coordinator_knows_nothing_of_an_update_that_was_not_committed(publisher: Publisher):
    publisher.open()
    publisher.send_all()
    publisher.restart()
    assert publisher.ended() == ["update_aborted"]
    assert publisher.words() == []


@pytest.mark.parametrize(
    ("report", "outcome"),
    [
        (WeightsReport(1, "g", version=8, digest=DIGEST, publisher=MINE), "committed"),
        (WeightsReport(1, "g", version=9, history=[UpdateRecord(8, "committed", publisher=MINE)]), "committed"),
        (WeightsReport(1, "g", version=9, history=[UpdateRecord(8, "update_aborted", publisher=MINE)]), "update_aborted"),
        # The same version and weights, in an earlier run or of another publisher.
        (WeightsReport(1, "g", version=8, digest=DIGEST), "update_aborted"),
        (WeightsReport(1, "g", version=8, digest=DIGEST, publisher=publisher_of(b"o" * 16, 1)), "update_aborted"),
        (WeightsReport(1, "g", version=9, history=[UpdateRecord(8, "committed", digest=DIGEST)]), "update_aborted"),
    ],
)
def test_the_journal_of_a_new_coordinator_decides(publisher: Publisher, report: WeightsReport, outcome: str):
    publisher.open()
    publisher.send_all()
    publisher.commit()
    publisher.restart()
    assert publisher.sent() == [InspectWeights(1, group="g")]
    publisher.hear(Join("group", 3, id=1))
    assert publisher.effects == []
    publisher.pass_time(1.5)
    assert publisher.words() == ["InspectWeights"]
    publisher.hear(report)
    assert publisher.ended() == [outcome]


@pytest.mark.parametrize("code", ["version_backwards", "publishing"])
def test_a_refusal_of_what_was_said_again_may_mean_that_it_is_committed_so_the_journal_is_asked(
    publisher: Publisher, code: str
):
    publisher.open()
    publisher.send_all()
    publisher.commit()
    publisher.now += 1.0
    publisher.refuse("hello_required")
    publisher.welcome()
    publisher.refuse(code, 1)
    assert publisher.ended() == []
    assert publisher.sent() == [InspectWeights(1, group="g")]
    # So are `sent` and `commit`, which were said again with it: no such transaction is open any more.
    publisher.refuse("update_aborted", 1)
    publisher.refuse("update_aborted", 1)
    assert publisher.ended() == []
    publisher.hear(WeightsReport(1, "g", version=8, digest=DIGEST, publisher=MINE))
    assert publisher.ended() == ["committed"]


def test_a_refusal_of_what_was_said_again_stands_if_the_journal_holds_weights_of_another_publisher(publisher: Publisher):
    publisher.open()
    publisher.send_all()
    publisher.commit()
    publisher.now += 1.0
    publisher.refuse("hello_required")
    publisher.welcome()
    publisher.refuse("version_backwards", 1)
    publisher.hear(WeightsReport(1, "g", version=8, digest=DIGEST, publisher=publisher_of(b"o" * 16, 1)))
    assert publisher.ended() == ["version_backwards"]


@pytest.mark.parametrize("transfer", ["checkpoint", "set_version"])
def test_weights_that_are_not_broadcast_are_known_by_their_publisher(publisher: Publisher, transfer: Transfer):
    publisher.open(transfer=transfer)
    publisher.commit()
    publisher.restart()
    publisher.hear(WeightsReport(1, "g", version=8, digest="of a file", publisher=MINE))
    assert publisher.ended() == ["committed"]


def test_a_message_that_comes_after_the_end_changes_nothing(publisher: Publisher):
    publisher.open()
    publisher.hear(published(1))
    assert publisher.hear(Join("group", 3, id=1)) == []
    assert publisher.hear(Phase(1, "transfer")) == []
    assert publisher.hear(WeightsReport(1, "g")) == []


# --- ends that the publisher makes -------------------------------------------------------------------------------------


def test_giving_up_is_told_and_the_coordinator_has_the_last_word(publisher: Publisher):
    publisher.open()
    assert publisher(UpdateAbort(publisher.now, 1, "a NaN")) == [SendMessage(updates.AbortUpdate(1, "a NaN"))]
    assert publisher(UpdateAbort(publisher.now, 1, "again")) == []
    publisher.hear(published(1))
    assert publisher.ended() == ["committed"]


def test_giving_up_before_any_coordinator_heard_of_it_is_done_at_once():
    publisher = Publisher()
    publisher.start()
    publisher.open()
    publisher(UpdateAbort(publisher.now, 1))
    assert publisher.ended() == ["update_aborted"]


def test_giving_up_without_an_answer_ends_all_the_same(publisher: Publisher):
    publisher.open()
    publisher(UpdateAbort(publisher.now, 1, "enough"))
    publisher.pass_time(9.0)
    assert publisher.ended() == []
    publisher.pass_time(2.0)
    assert publisher.ended() == ["update_aborted"]


def test_an_update_gives_itself_up_at_its_deadline(publisher: Publisher):
    publisher.open(timeout=5.0)
    publisher.pass_time(5.1)
    assert publisher.ended() == ["deadline_exceeded"]
    assert publisher.words()[-1] == "AbortUpdate"


def test_an_update_that_is_sent_waits_for_its_caller_without_a_deadline(publisher: Publisher):
    publisher.open(timeout=5.0)
    publisher.send_all()
    publisher.pass_time(500.0)
    assert publisher.ended() == []


def test_past_the_deadline_of_a_commit_its_outcome_is_unknown_and_the_error_says_so(publisher: Publisher):
    publisher.open(timeout=5.0)
    publisher.send_all()
    publisher.commit(timeout=60.0)
    publisher.pass_time(59.0)
    assert publisher.ended() == []
    publisher.pass_time(2.0)
    (failure,) = [effect.failure for effect in publisher.effects if isinstance(effect, Fail)]
    assert failure.code == "deadline_exceeded"
    assert "unknown" in failure.message


def test_a_deadline_holds_without_any_coordinator(publisher: Publisher):
    publisher.open(timeout=20.0)
    publisher.pass_time(21.0, answer_pings=False)
    assert publisher.ended() == ["deadline_exceeded"]


def test_closing_gives_up_what_is_open(publisher: Publisher):
    publisher.open()
    publisher(Close(publisher.now))
    assert [type(message) for message in publisher.sent()] == [updates.AbortUpdate, Goodbye]
    assert publisher.ended() == ["closed"]
    assert publisher.session.wake_at == inf
    publisher.open(2)
    assert publisher.ended() == ["closed"]


def test_closing_leaves_to_the_coordinator_what_may_be_committed(publisher: Publisher):
    publisher.open()
    publisher.send_all()
    publisher.commit()
    publisher(Close(publisher.now))
    assert [type(message) for message in publisher.sent()] == [Goodbye]


# --- questions ---------------------------------------------------------------------------------------------------------


def test_a_question_about_weights_is_asked_again_after_a_lost_link_and_answered_once(publisher: Publisher):
    question = InspectWeights(1, what="tensor", name="w")
    assert publisher(Ask(publisher.now, question)) == [SendMessage(question)]
    publisher.pass_time(5.0)
    assert publisher.words() == []
    publisher.refuse("hello_required")
    publisher.welcome()
    assert publisher.sent() == [question]
    report = WeightsReport(1, "g", dtype="float32")
    assert publisher.hear(report) == [Answer(report)]
    assert publisher.hear(report) == []


def test_a_refused_question_fails_and_is_not_acknowledged(publisher: Publisher):
    publisher(Ask(publisher.now, InspectWeights(1, group="nope")))
    publisher.refuse("unknown_group", 1)
    assert publisher.failed() == [(1, "unknown_group")]
    publisher.pass_time(0.5)
    assert publisher.words() == []


def test_a_question_ends_at_its_deadline_and_when_it_is_taken_back(publisher: Publisher):
    publisher(Ask(publisher.now, InspectWeights(1), publisher.now + 2.0))
    publisher(Ask(publisher.now, InspectWeights(2)))
    publisher(AbandonRequest(publisher.now, 2))
    publisher.pass_time(100.0)
    assert publisher.failed() == [(1, "deadline_exceeded")]
    assert publisher.words() == []


def test_weights_that_are_wanted_are_asked_of_the_caller(publisher: Publisher):
    assert publisher.hear(WeightsNeeded("g", 7)) == [CommittedWeightsLost("g", 7)]


# --- a coordinator that does everything wrong that a network can -------------------------------------------------------


class RoughCoordinator:
    """One transaction at a time, a journal that outlives it, and a mind of its own."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.epoch = 1
        self.greeted: set[int] = set()
        self.open: Publish | None = None
        self.sent: Sent | None = None
        self.allowed: set[int] = set()
        self.kept: dict[int, ToClient] = {}
        self.journal = [UpdateRecord(0, "committed")]

    def restart(self) -> None:
        self.epoch += 1
        self.greeted.clear()
        self.kept.clear()
        self.allowed.clear()
        self.open = self.sent = None

    def hear(self, link: int, message: Message) -> list[ToClient]:
        if isinstance(message, Hello):
            self.greeted.add(link)
            return [Welcome(self.epoch, incarnation=message.incarnation)]
        if link not in self.greeted:
            return [ErrorReply("hello_required", "who are you?", id=getattr(message, "id", None))]
        if isinstance(message, Ping):
            return [Pong(at=message.at, epoch=self.epoch)]
        if isinstance(message, InspectWeights):
            last = self.journal[-1]
            report = WeightsReport(message.id, "g", last.version, last.digest, publisher=last.publisher)
            # The history is written after the journal, and may lack the last commit.
            report.history = self.journal[-4 : self.rng.choice([None, -1])]
            return [report]
        if isinstance(message, Publish):
            return self._publish(message)
        if isinstance(message, Commit):
            self.allowed.add(message.id)
        if isinstance(message, Sent | Commit | Renew | updates.AbortUpdate) and self.open and message.id == self.open.id:
            if isinstance(message, Sent):
                self.sent = message
            if isinstance(message, updates.AbortUpdate):
                return self._end("given up")
            if self.rng.random() < 0.1:
                return self._end("a worker was lost")
            if self.sent is not None and message.id in self.allowed:
                record = UpdateRecord(
                    self.open.version, "committed", digest=self.sent.digest, publisher=publisher_of(b"c" * 16, message.id)
                )
                self.journal.append(record)
                return self._say(Published(message.id, record.version, record))
        return []

    def _publish(self, message: Publish) -> list[ToClient]:
        if message.id in self.kept:
            return [self.kept[message.id]]
        if message.version <= self.journal[-1].version:
            return [ErrorReply("version_backwards", "no", id=message.id)]
        if self.open is not None and self.open.id != message.id:
            return [ErrorReply("publishing", "no", id=message.id)]
        self.open = message
        return [Join("group", 2, id=message.id), Phase(message.id, "transfer")]

    def _say(self, answer: Published | ErrorReply) -> list[ToClient]:
        assert answer.id is not None
        self.kept[answer.id] = answer
        self.open = self.sent = None
        return [answer]

    def _end(self, why: str) -> list[ToClient]:
        assert self.open is not None
        return self._say(ErrorReply("update_aborted", why, id=self.open.id))


@pytest.mark.parametrize("seed", range(200))
def test_every_update_ends_once_and_as_the_journal_says_on_any_network(seed: int):
    rng = random.Random(seed)
    session = ClientSession(b"c" * 16, b"t" * 16, rng.random, SessionSettings(resend_s=4.0))
    coordinator = RoughCoordinator(rng)
    loss = rng.choice([0.0, 0.05, 0.3])
    now, link, number = 0.0, 0, 0
    wire: list[tuple[float, int, bool, int, Message]] = []
    outcomes: dict[int, list[str]] = {}
    digests: dict[int, str] = {}
    until = 60.0

    def put(to_session: bool, on: int, message: Message) -> None:
        nonlocal number
        for _ in range(rng.choice([1, 1, 1, 2])):
            if now > until or rng.random() >= loss:
                number += 1
                wire.append((now + rng.random() * rng.choice([0.01, 0.01, 2.0]), number, to_session, on, message))

    def do(event: SessionEvent) -> None:
        nonlocal link
        todo: list[SessionEvent] = []
        for effect in session.handle(event):
            if isinstance(effect, OpenLink):
                link += 1
            elif isinstance(effect, SendMessage):
                put(False, link, effect.message)
            elif isinstance(effect, Answer):
                outcomes[effect.id].append("committed")
            elif isinstance(effect, Fail):
                outcomes[effect.id].append(f"{effect.failure.code} {effect.failure.message}")
            elif isinstance(effect, UpdateStep) and isinstance(effect.message, Phase):
                id_ = effect.message.id
                todo.append(UpdateSent(now, id_, digests[id_], 10))
                todo.append(UpdateCommit(now, id_, now + 30.0))
        check_session(session)
        for after in todo:
            if rng.random() < 0.8:
                do(after)

    do(Start(now))
    next_id = 1
    while now < 400.0 and (now < until or session.updates.by_id):
        now = max(now, min([session.wake_at, now + rng.random() * 0.3, *(entry[0] for entry in wire)]))
        if now < until:
            chance = rng.random()
            if chance < 0.1 and not session.updates.by_id:
                outcomes[next_id] = []
                digests[next_id] = f"{next_id:032x}"
                do(UpdateBegin(now, publish(next_id, version=next_id), MANIFEST, now + 20.0))
                next_id += 1
            elif chance < 0.11 and next_id > 1:
                do(UpdateAbort(now, next_id - 1, "enough"))
            elif chance < 0.12:
                coordinator.restart()
            elif chance < 0.125:
                now += rng.random() * 10.0
        for entry in sorted(entry for entry in wire if entry[0] <= now):
            wire.remove(entry)
            _, _, to_session, on, message = entry
            if not to_session:
                for answer in coordinator.hear(on, message):
                    put(True, on, answer)
            elif on == link:
                assert isinstance(message, ToClient)
                do(MessageReceived(now, message))
        if session.wake_at <= now:
            do(SessionTick(now))
    assert session.end is None
    assert outcomes
    assert {id_: got for id_, got in outcomes.items() if len(got) != 1} == {}
    committed = {record.version for record in coordinator.journal}
    for id_, (outcome,) in outcomes.items():
        if outcome == "committed":
            assert id_ in committed
        elif "unknown" not in outcome:
            assert id_ not in committed, outcome
