"""What a client's session promises, event by event, and against a coordinator that loses, repeats, delays and restarts."""

import random
from collections.abc import Sequence, Sized
from math import inf

import pytest

from enginepool.client.session.events import (
    AbandonRequest,
    Abort,
    Answer,
    Ask,
    Close,
    Complaint,
    Ended,
    Fail,
    MessageReceived,
    OpenLink,
    SendMessage,
    SessionEffect,
    SessionEvent,
    SessionTick,
    Start,
    SubmitRequest,
    Welcomed,
)
from enginepool.client.session.machine import ClientSession
from enginepool.client.session.settings import SessionSettings
from enginepool.protocol.messages import (
    MAX_ACKS,
    Ack,
    Cancel,
    ErrorReply,
    FrameSpec,
    Goodbye,
    Hello,
    Message,
    Ping,
    Pong,
    Result,
    Score,
    Status,
    StatusReport,
    Timings,
    ToClient,
    Usage,
    Welcome,
)
from tests.core.session_invariants import check_session

SPECS = [FrameSpec("query", "int32", (1,)), FrameSpec("items", "int32", (1,)), FrameSpec("item_lengths", "uint32", (1,))]
FRAMES = (b"\1\0\0\0", b"\2\0\0\0", b"\1\0\0\0")


def score(id_: int, *, priority: int = 0) -> Score:
    return Score(id=id_, frames=SPECS, labels=[1], priority=priority)


def result(id_: int, version: int = 1) -> Result:
    return Result(id_, version, [1], Usage(1, 2), Timings(10, 20), [FrameSpec("scores", "float32", (1, 1))])


class Driver:
    """A session under test: the invariants are checked after every event, and effects are sorted by kind."""

    def __init__(self, settings: SessionSettings | None = None, jitter: float = 0.5) -> None:
        self.session = ClientSession(b"c" * 16, b"t" * 16, lambda: jitter, settings or SessionSettings())
        self.now: float = 100.0
        self.effects: list[SessionEffect] = []

    def __call__(self, event: SessionEvent) -> list[SessionEffect]:
        self.effects = self.session.handle(event)
        check_session(self.session)
        return self.effects

    def start(self, connect_by: float | None = None) -> None:
        self(Start(self.now, connect_by))

    def connect(self, *, window: int = 0, window_bytes: int = 0, message_bytes: int = 0, epoch: int = 7) -> None:
        self.start()
        self.welcome(window=window, window_bytes=window_bytes, message_bytes=message_bytes, epoch=epoch)

    def welcome(self, *, window: int = 0, window_bytes: int = 0, message_bytes: int = 0, epoch: int = 7) -> list[SessionEffect]:
        return self.hear(
            Welcome(epoch, window_requests=window, window_bytes=window_bytes, max_message_bytes=message_bytes, groups=["g"])
        )

    def hear(self, message: ToClient) -> list[SessionEffect]:
        if isinstance(message, Welcome) and not message.incarnation:
            message.incarnation = self.session.link.incarnation
        return self(MessageReceived(self.now, message, (b"\0\0\0\0",) if isinstance(message, Result) else ()))

    def refuse(self, code: str, id_: int | None = None, retry_after_ms: int | None = None) -> list[SessionEffect]:
        return self.hear(ErrorReply(code, "no", id=id_, retry_after_ms=retry_after_ms))

    def refuse_hello(self, code: str, incarnation: int | None = None) -> list[SessionEffect]:
        """The answer to the newest Hello, or to that of this incarnation."""
        return self.hear(ErrorReply(code, "no", incarnation=incarnation or self.session.link.incarnation))

    def submit(
        self, id_: int, *, priority: int = 0, timeout: float | None = None, retry_busy: bool = True, size: int = 0
    ) -> list[SessionEffect]:
        deadline = None if timeout is None else self.now + timeout
        frames = (*FRAMES, b"\0" * size) if size else FRAMES
        return self(SubmitRequest(self.now, score(id_, priority=priority), frames, deadline, retry_busy))

    def pass_time(self, seconds: float, *, answer_pings: bool = True) -> list[SessionEffect]:
        """Ticks as they fall due, for so long; a live coordinator answers each ping."""
        end = self.now + seconds
        seen: list[SessionEffect] = []
        while self.session.wake_at <= end:
            self.now = max(self.now, self.session.wake_at)
            seen += self(SessionTick(self.now))
            if answer_pings and any(isinstance(m, Ping) for m in self.sent()):
                seen += self.hear(Pong(epoch=self.session.link.epoch))
        self.now = end
        self.effects = seen
        return seen

    def sent(self) -> list[Message]:
        return [effect.message for effect in self.effects if isinstance(effect, SendMessage)]

    def sent_ids(self) -> list[int]:
        return [message.id for message in self.sent() if isinstance(message, Score)]

    def failed(self) -> list[tuple[int, str]]:
        return [(effect.id, effect.failure.code) for effect in self.effects if isinstance(effect, Fail)]

    def answered(self) -> list[int]:
        return [effect.id for effect in self.effects if isinstance(effect, Answer)]


@pytest.fixture
def driver() -> Driver:
    driver = Driver()
    driver.connect()
    return driver


# --- connecting --------------------------------------------------------------------------------------------------------


def test_the_first_word_is_hello_on_a_new_link_and_requests_wait_for_the_welcome():
    driver = Driver()
    driver.start()
    assert [type(effect) for effect in driver.effects] == [OpenLink, SendMessage]
    (hello,) = driver.sent()
    assert isinstance(hello, Hello)
    assert (hello.client, hello.token, hello.incarnation) == (b"c" * 16, b"t" * 16, 1)
    assert driver.submit(1) == []
    driver.welcome()
    assert driver.effects[0] == Welcomed(7, ("g",))
    assert driver.sent_ids() == [1]


def test_an_unanswered_hello_is_said_again_with_a_higher_incarnation_and_at_last_on_a_new_socket():
    driver = Driver(SessionSettings(silence_s=3.0, hello_s=1.0))
    driver.start()
    driver.pass_time(3.5)
    assert [m.incarnation for m in driver.sent() if isinstance(m, Hello)] == [2, 3, 4]
    assert sum(isinstance(effect, OpenLink) for effect in driver.effects) == 1


def test_connecting_ends_at_its_deadline_with_the_code_connect():
    driver = Driver()
    driver.start(connect_by=driver.now + 2.0)
    driver.submit(1)
    driver.pass_time(1.9)
    assert driver.failed() == []
    driver.pass_time(0.2)
    assert driver.failed() == [(1, "connect")]
    assert isinstance(driver.effects[-1], Ended)


def test_the_connect_deadline_is_over_with_the_first_welcome():
    driver = Driver()
    driver.start(connect_by=driver.now + 2.0)
    driver.welcome()
    driver.pass_time(10.0)
    assert driver.session.link.state == "welcomed"


@pytest.mark.parametrize("code", ["protocol_version", "unauthorized", "bad_request"])
def test_a_refused_hello_ends_the_session_and_says_why(code: str):
    driver = Driver()
    driver.start()
    driver.submit(1)
    driver.refuse_hello(code)
    assert driver.failed() == [(1, code)]
    assert isinstance(driver.effects[-1], Ended)


@pytest.mark.parametrize("code", ["protocol_version", "unauthorized", "bad_request", "superseded"])
def test_what_answers_an_earlier_hello_does_not_count(code: str):
    driver = Driver()
    driver.start()
    driver.submit(1)
    driver.pass_time(driver.session.settings.hello_s + 0.1)
    assert driver.session.link.incarnation == 2
    assert driver.refuse_hello(code, incarnation=1) == []
    assert driver.hear(Welcome(7, incarnation=1)) == []
    assert driver.session.link.state == "greeting"
    driver.welcome()
    assert driver.sent_ids() == [1]
    assert driver.refuse_hello(code, incarnation=1) == []
    assert driver.session.link.state == "welcomed"


def test_a_welcome_in_another_protocol_ends_the_session():
    driver = Driver()
    driver.start()
    driver.hear(Welcome(7, protocol=2))
    assert isinstance(driver.effects[-1], Ended)
    assert driver.effects[-1].failure.code == "protocol_version"


def test_a_refused_message_without_id_on_a_standing_link_is_only_complained_about(driver: Driver):
    driver.refuse("malformed")
    assert [type(effect) for effect in driver.effects] == [Complaint]


# --- answers -----------------------------------------------------------------------------------------------------------


def test_an_answer_is_passed_on_once_and_its_copies_are_dropped(driver: Driver):
    driver.submit(1)
    driver.hear(result(1))
    assert driver.answered() == [1]
    driver.hear(result(1))
    assert driver.effects == []


def test_an_error_of_a_request_is_its_final_answer(driver: Driver):
    driver.submit(1)
    driver.refuse("engine_error", 1)
    assert driver.failed() == [(1, "engine_error")]


def test_an_answer_that_is_not_final_is_not_passed_on(driver: Driver):
    driver.submit(1)
    partial = result(1)
    partial.final = False
    assert driver.hear(partial) == []


def test_answers_are_acknowledged_together_after_a_short_while(driver: Driver):
    for id_ in (1, 2, 3):
        driver.submit(id_)
        driver.hear(result(id_))
        assert driver.sent() == []
    driver.pass_time(0.11)
    assert driver.sent() == [Ack([1, 2, 3])]


def test_a_full_batch_of_acknowledgements_goes_at_once(driver: Driver):
    acks: list[Message] = []
    for id_ in range(1, 66):
        driver.submit(id_)
        driver.hear(result(id_))
        acks += driver.sent()
    assert acks == [Ack(list(range(1, 65)))]


def test_more_acknowledgements_than_one_message_may_have_go_in_several():
    driver = Driver(settings=SessionSettings(ack_batch=2 * MAX_ACKS + 1))
    driver.connect(window=10_000)
    sent: list[Message] = []
    for id_ in range(1, 2 * MAX_ACKS + 2):
        driver.submit(id_)
        driver.hear(result(id_))
        sent += driver.sent()
    acks = [message.ids for message in sent if isinstance(message, Ack)]
    assert [len(ids) for ids in acks] == [MAX_ACKS, MAX_ACKS, 1]
    assert [id_ for ids in acks for id_ in ids] == list(range(1, 2 * MAX_ACKS + 2))


def test_a_copy_of_an_answer_is_acknowledged_again_because_the_first_acknowledgement_may_be_lost(driver: Driver):
    driver.submit(1)
    driver.hear(result(1))
    driver.pass_time(0.2)
    driver.hear(result(1))
    driver.pass_time(0.2)
    assert driver.sent() == [Ack([1])]


# --- window and order --------------------------------------------------------------------------------------------------


def test_requests_beyond_the_window_wait_and_go_by_priority_then_age():
    driver = Driver()
    driver.connect(window=1)
    assert driver.submit(1) != []
    for id_, priority in ((2, 0), (3, 5), (4, 5), (5, -1)):
        assert driver.submit(id_, priority=priority) == []
    order: list[int] = []
    for _ in range(4):
        driver.hear(result(order[-1] if order else 1))
        order += driver.sent_ids()
    assert order == [3, 4, 2, 5]


def test_the_window_counts_bytes_too():
    driver = Driver()
    driver.connect(window_bytes=12_000)
    driver.submit(1, size=5000)
    assert driver.sent_ids() == [1]
    driver.submit(2, size=5000)
    assert driver.sent_ids() == []
    driver.submit(3)
    assert driver.sent_ids() == [], "a small request must not overtake a large one"
    driver.hear(result(1))
    assert driver.sent_ids() == [2, 3]


def test_a_request_that_can_never_be_taken_fails_at_once_with_the_limit():
    driver = Driver()
    driver.connect(message_bytes=1000, window_bytes=5000)
    driver.submit(1, size=1000)
    assert driver.failed() == [(1, "too_large")]
    assert [effect.failure.limit for effect in driver.effects if isinstance(effect, Fail)] == ["1000"]


def test_ids_only_grow(driver: Driver):
    driver.submit(5)
    with pytest.raises(ValueError, match="only grow"):
        driver.submit(5)


# --- deadlines ---------------------------------------------------------------------------------------------------------


def test_the_time_that_is_left_is_computed_at_each_send(driver: Driver):
    driver.submit(1, timeout=2.0)
    assert [m.timeout_ms for m in driver.sent() if isinstance(m, Score)] == [2000]
    driver.now += 0.5
    driver.refuse("hello_required")
    driver.now += 0.25
    driver.welcome()
    assert [m.timeout_ms for m in driver.sent() if isinstance(m, Score)] == [1250]


def test_a_sent_request_without_an_answer_fails_one_second_after_its_deadline(driver: Driver):
    driver.submit(1, timeout=2.0)
    driver.pass_time(2.9)
    assert driver.failed() == []
    driver.pass_time(0.2)
    assert driver.failed() == [(1, "deadline_exceeded")]
    assert driver.hear(result(1)) == []


def test_a_request_that_was_never_sent_fails_at_its_deadline():
    driver = Driver()
    driver.connect(window=1)
    driver.submit(1)
    driver.submit(2, timeout=2.0)
    driver.pass_time(2.05)
    assert driver.failed() == [(2, "deadline_exceeded")]


# --- busy --------------------------------------------------------------------------------------------------------------


def test_busy_is_tried_again_after_the_time_that_it_names_and_a_random_addition(driver: Driver):
    driver.submit(1)
    driver.refuse("busy", 1, retry_after_ms=200)
    assert driver.effects == []
    driver.pass_time(0.29)
    assert driver.sent_ids() == []
    driver.pass_time(0.02)
    assert driver.sent_ids() == [1]
    driver.hear(result(1))
    assert driver.answered() == [1]


def test_busy_is_never_acknowledged(driver: Driver):
    driver.submit(1)
    driver.refuse("busy", 1, retry_after_ms=50)
    driver.pass_time(10.0)
    assert not [m for m in driver.sent() if isinstance(m, Ack)]


def test_busy_is_the_answer_when_the_next_attempt_would_come_too_late(driver: Driver):
    driver.submit(1, timeout=0.2)
    driver.refuse("busy", 1, retry_after_ms=200)
    assert driver.failed() == [(1, "busy")]


def test_busy_is_the_answer_for_a_caller_that_wants_to_know(driver: Driver):
    driver.submit(1, retry_busy=False)
    driver.refuse("busy", 1, retry_after_ms=1)
    assert driver.failed() == [(1, "busy")]


def test_backing_off_doubles_up_to_its_cap():
    driver = Driver(SessionSettings(busy_s=0.1, busy_cap_s=1.0), jitter=0.999)
    driver.connect()
    driver.submit(1)
    waits: list[float] = []
    for _ in range(6):
        refused = driver.now
        driver.refuse("busy", 1)
        while not driver.pass_time(0.01):
            pass
        while 1 not in driver.sent_ids():
            driver.pass_time(0.01)
        waits.append(driver.now - refused)
    assert [round(wait, 1) for wait in waits] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


def test_a_request_that_backs_off_leaves_its_room_in_the_window():
    driver = Driver()
    driver.connect(window=1)
    driver.submit(1)
    driver.submit(2)
    driver.refuse("busy", 1, retry_after_ms=100)
    assert driver.sent_ids() == [2]


# --- cancelling --------------------------------------------------------------------------------------------------------


def test_a_request_that_was_never_sent_is_cancelled_at_once():
    driver = Driver()
    driver.start()
    driver.submit(1)
    driver(AbandonRequest(driver.now, 1))
    assert driver.failed() == [(1, "cancelled")]
    driver.welcome()
    assert driver.sent_ids() == []


def test_cancelling_a_sent_request_tells_the_coordinator_and_takes_whichever_answer_comes(driver: Driver):
    driver.submit(1)
    driver.submit(2)
    driver(AbandonRequest(driver.now, 1))
    assert driver.sent() == [Cancel(1)]
    driver(AbandonRequest(driver.now, 2))
    driver.refuse("cancelled", 1)
    assert driver.failed() == [(1, "cancelled")]
    driver.hear(result(2))
    assert driver.answered() == [2]


def test_a_cancelled_request_without_an_answer_ends_after_a_second(driver: Driver):
    driver.submit(1)
    driver(AbandonRequest(driver.now, 1))
    driver.pass_time(1.1)
    assert driver.failed() == [(1, "cancelled")]


def test_a_cancel_survives_a_lost_link_and_the_request_is_not_sent_again(driver: Driver):
    driver.submit(1)
    driver.now += 0.2
    driver.refuse("hello_required")
    driver(AbandonRequest(driver.now, 1))
    driver.welcome()
    assert driver.sent_ids() == []
    assert Cancel(1) in driver.sent()


def test_what_was_taken_back_without_an_answer_is_cancelled_on_the_next_link(driver: Driver):
    """The coordinator would compute it to its end, and a stream without credit would keep its place."""
    driver.submit(1)
    driver.now += 0.2
    driver(AbandonRequest(driver.now, 1))  # on a link that is lost, as is seen later
    driver.pass_time(1.1)
    assert driver.failed() == [(1, "cancelled")]
    driver.refuse("hello_required")
    driver.sent()
    driver.welcome()
    assert driver.sent() == [Cancel(1)]
    driver.refuse("cancelled", 1)
    driver.refuse("hello_required")
    driver.sent()
    driver.welcome()
    assert driver.sent() == []


def test_a_coordinator_of_a_new_epoch_is_told_nothing_of_what_was_taken_back(driver: Driver):
    driver.submit(1)
    driver.now += 0.2
    driver(AbandonRequest(driver.now, 1))
    driver.pass_time(1.1)
    driver.sent()
    driver.welcome(epoch=8)
    assert driver.sent() == []
    driver.refuse("hello_required")
    driver.sent()
    driver.welcome(epoch=8)
    assert driver.sent() == []


def test_a_coordinator_of_a_new_epoch_holds_nothing_that_could_be_cancelled(driver: Driver):
    driver.submit(1)
    driver.now += 0.2
    driver(AbandonRequest(driver.now, 1))
    driver.welcome(epoch=8)
    assert driver.failed() == [(1, "cancelled")]
    assert driver.sent() == []


# --- links and epochs --------------------------------------------------------------------------------------------------


def test_hello_required_brings_a_new_hello_and_everything_unanswered_again(driver: Driver):
    driver.submit(1)
    driver.submit(2, priority=9)
    driver.submit(3)
    driver.hear(result(3))
    driver.now += 0.5
    driver.refuse("hello_required", 1)
    assert [m.incarnation for m in driver.sent() if isinstance(m, Hello)] == [2]
    assert driver.refuse("hello_required", 2) == [], "one Hello for many refusals"
    driver.welcome()
    assert driver.sent_ids() == [2, 1]
    assert driver.session.calls.resends == 2


@pytest.mark.parametrize("word", [Pong(epoch=8), Welcome(8)])
def test_a_higher_epoch_makes_everything_unanswered_go_again(driver: Driver, word: ToClient):
    driver.submit(1)
    driver.now += 0.5
    seen = driver.hear(word)
    if isinstance(word, Pong):
        seen += driver.welcome(epoch=8)
    driver.effects = seen
    assert driver.sent_ids() == [1]
    assert driver.session.link.epoch == 8


def test_a_lower_epoch_does_not_count_as_a_word_of_the_coordinator(driver: Driver):
    driver.submit(1)
    driver.now += 0.5
    assert driver.welcome(epoch=6) == []
    assert driver.hear(Pong(epoch=6)) == []
    driver.pass_time(0.6, answer_pings=False)
    silent_at = driver.session.wake_at
    driver.hear(Pong(epoch=6))
    assert driver.session.wake_at == silent_at
    assert driver.session.link.epoch == 7


def test_the_same_welcome_twice_sends_nothing_twice(driver: Driver):
    driver.submit(1)
    driver.now += 0.5
    assert driver.welcome() == []


def test_a_standing_link_is_pinged_as_often_as_welcome_asks():
    driver = Driver()
    driver.start()
    driver.hear(Welcome(7, ping_ms=250))
    driver.pass_time(1.1)
    assert sum(isinstance(m, Ping) for m in driver.sent()) == 4


def test_silence_after_a_ping_opens_a_new_link_and_sends_again(driver: Driver):
    driver.submit(1)
    driver.pass_time(5.9, answer_pings=False)
    assert not [effect for effect in driver.effects if isinstance(effect, OpenLink)]
    driver.pass_time(0.2, answer_pings=False)
    assert [effect for effect in driver.effects if isinstance(effect, OpenLink)]
    driver.welcome()
    assert driver.sent_ids() == [1]


def test_a_client_that_was_stopped_does_not_hold_its_own_pause_against_the_coordinator(driver: Driver):
    driver.submit(1)
    driver.pass_time(1.05, answer_pings=False)
    driver.now += 60.0
    driver(SessionTick(driver.now))
    assert not [effect for effect in driver.effects if isinstance(effect, OpenLink)]
    assert driver.session.link.state == "welcomed"
    driver.pass_time(5.1, answer_pings=False)
    assert driver.session.link.state == "greeting"


def test_a_message_that_was_lost_on_a_good_link_is_sent_again_in_the_end(driver: Driver):
    driver.submit(1)
    driver.pass_time(29.0)
    assert driver.sent_ids() == []
    driver.pass_time(32.0)
    assert driver.sent_ids() == [1]
    driver.pass_time(100.0)
    assert driver.sent_ids() == [1]


def test_a_link_that_was_superseded_once_greets_again_but_a_rival_ends_the_session(driver: Driver):
    driver.submit(1)
    for _ in range(5):
        driver.now += 0.5
        driver.refuse_hello("superseded")
        assert any(isinstance(m, Hello) for m in driver.sent())
        driver.welcome()
    driver.now += 0.5
    driver.refuse_hello("superseded")
    assert driver.failed() == [(1, "superseded")]


def test_a_ping_is_answered_at_once(driver: Driver):
    driver.hear(Ping(at=42))
    assert driver.sent() == [Pong(at=42)]


# --- status ------------------------------------------------------------------------------------------------------------


def test_a_status_question_is_asked_until_it_is_answered():
    driver = Driver()
    driver.start()
    driver(Ask(driver.now, Status(1)))
    driver.welcome()
    assert driver.sent() == [Status(1)]
    driver.pass_time(1.05)
    assert Status(1) in driver.sent()
    driver.hear(StatusReport(7, id=1))
    assert driver.effects == [Answer(StatusReport(7, id=1))]
    driver.hear(StatusReport(7, id=1))
    assert driver.effects == []


def test_a_status_question_ends_at_its_deadline(driver: Driver):
    driver(Ask(driver.now, Status(1), driver.now + 2.5))
    driver.pass_time(2.6)
    assert driver.failed() == [(1, "deadline_exceeded")]


# --- the end -----------------------------------------------------------------------------------------------------------


def test_closing_acknowledges_says_goodbye_and_answers_everything(driver: Driver):
    driver.submit(1)
    driver.submit(2)
    driver(Ask(driver.now, Status(3)))
    driver.hear(result(1))
    driver(Close(driver.now))
    assert driver.sent() == [Ack([1]), Goodbye()]
    assert driver.failed() == [(2, "closed"), (3, "closed")]
    assert isinstance(driver.effects[-1], Ended)
    assert driver.session.wake_at == inf
    driver.submit(4)
    assert driver.failed() == [(4, "closed")]
    assert driver.hear(result(2)) == []


def test_aborting_fails_what_waits_and_what_comes_later_with_the_reason(driver: Driver):
    driver.submit(1)
    driver(Abort(driver.now, ErrorReply("pool_down", "exit code 3")))
    assert driver.failed() == [(1, "pool_down")]
    driver.submit(2)
    assert driver.failed() == [(2, "pool_down")]


def test_the_state_reads_in_words():
    driver = Driver()
    words = [driver.session.describe()]
    driver.start()
    words.append(driver.session.describe())
    driver.welcome()
    driver.submit(1)
    words.append(driver.session.describe())
    driver.now += 0.2
    driver.refuse("hello_required")
    words.append(driver.session.describe())
    driver.welcome()
    words.append(driver.session.describe())
    driver(Close(driver.now))
    words.append(driver.session.describe())
    assert words == [
        "new pending=0 sent=0 resends=0",
        "connecting pending=0 sent=0 resends=0",
        "connected epoch=7 pending=1 sent=1 resends=0",
        "reconnecting epoch=7 pending=1 sent=0 resends=0",
        "connected epoch=7 pending=1 sent=1 resends=1",
        "closed epoch=7 pending=0 sent=0 resends=1",
    ]


def test_a_failed_session_names_the_code_in_its_words():
    driver = Driver()
    driver.start()
    driver.refuse_hello("unauthorized")
    assert driver.session.describe() == "failed (unauthorized) pending=0 sent=0 resends=0"


def test_memory_of_timers_and_queues_is_bounded_by_what_is_pending():
    driver = Driver()
    driver.start()
    session = driver.session
    for id_ in range(1, 20_000):
        session.handle(SubmitRequest(driver.now, score(id_), FRAMES, driver.now + 1e6))
        session.handle(AbandonRequest(driver.now, id_))
    driver.welcome()
    for id_ in range(20_000, 40_000):
        session.handle(SubmitRequest(driver.now, score(id_), FRAMES, driver.now + 1e6))
        session.handle(MessageReceived(driver.now, result(id_)))
    sizes = {name: len(value) for name, value in vars(session.calls).items() if isinstance(value, Sized)}
    assert sizes
    assert {name: size for name, size in sizes.items() if size > 1026} == {}
    check_session(session)


# --- a coordinator that does everything wrong that a network can -------------------------------------------------------


class RoughCoordinator:
    """Answers requests late, out of order, twice or not at all, knows only greeted links, and is restarted without state."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.epoch = 1
        self.greeted: set[int] = set()
        self.kept: dict[int, ToClient] = {}
        self.window = rng.choice([0, 1, 3, 100])

    def restart(self) -> None:
        self.epoch += 1
        self.greeted.clear()
        self.kept.clear()

    def hear(self, link: int, message: Message) -> Sequence[ToClient]:
        rng = self.rng
        if isinstance(message, Hello):
            self.greeted.add(link)
            return [Welcome(self.epoch, window_requests=self.window, incarnation=message.incarnation)]
        if link not in self.greeted:
            return [ErrorReply("hello_required", "who are you?", id=getattr(message, "id", None))]
        if isinstance(message, Ping):
            return [Pong(at=message.at, epoch=self.epoch)]
        if isinstance(message, Ack):
            for id_ in message.ids:
                self.kept.pop(id_, None)
        if isinstance(message, Cancel):
            self.kept.setdefault(message.id, ErrorReply("cancelled", "as you wish", id=message.id))
            return [self.kept[message.id]]
        if isinstance(message, Score):
            if message.id not in self.kept and rng.random() < 0.2:
                return [ErrorReply("busy", "full", id=message.id, retry_after_ms=rng.choice([None, 10, 300]))]
            failed = rng.random() < 0.1
            answer = ErrorReply("engine_error", "no", id=message.id) if failed else result(message.id, self.epoch)
            return [self.kept.setdefault(message.id, answer)]
        return []


@pytest.mark.parametrize("seed", range(150))
def test_every_request_gets_exactly_one_final_answer_on_any_network(seed: int):
    rng = random.Random(seed)
    session = ClientSession(b"c" * 16, b"t" * 16, rng.random, SessionSettings(resend_s=4.0))
    coordinator = RoughCoordinator(rng)
    loss = rng.choice([0.0, 0.05, 0.3])
    now, link, next_id = 0.0, 0, 1
    #: (time, number, to the session?, link, message)
    wire: list[tuple[float, int, bool, int, Message]] = []
    number = 0
    outcomes: dict[int, list[str]] = {}
    until = 40.0

    def put(to_session: bool, on: int, message: Message) -> None:
        nonlocal number
        for _ in range(rng.choice([1, 1, 1, 2])):
            if now > until or rng.random() >= loss:
                number += 1
                wire.append((now + rng.random() * rng.choice([0.01, 0.01, 2.0]), number, to_session, on, message))

    def do(event: SessionEvent) -> None:
        nonlocal link
        for effect in session.handle(event):
            if isinstance(effect, OpenLink):
                link += 1
            elif isinstance(effect, SendMessage):
                put(False, link, effect.message)
            elif isinstance(effect, Answer):
                outcomes[effect.id].append("result")
            elif isinstance(effect, Fail):
                outcomes[effect.id].append(effect.failure.code)
        check_session(session)

    do(Start(now))
    while now < 400.0 and (now < until or session.calls.by_id):
        due = min([session.wake_at, now + rng.random() * 0.3, *(entry[0] for entry in wire)])
        now = max(now, due)
        if now < until:
            chance = rng.random()
            if chance < 0.25 and next_id <= 60:
                outcomes[next_id] = []
                timeout = rng.choice([None, None, 0.5, 5.0])
                deadline = None if timeout is None else now + timeout
                do(SubmitRequest(now, score(next_id, priority=rng.randint(-3, 3)), FRAMES, deadline))
                next_id += 1
            elif chance < 0.30 and next_id > 1:
                do(AbandonRequest(now, rng.randrange(1, next_id)))
            elif chance < 0.305:
                coordinator.restart()
            elif chance < 0.31:
                now += rng.random() * 10.0  # the client is stopped, and drains its socket before it looks at its timers
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
    allowed = {"result", "engine_error", "cancelled", "deadline_exceeded", "busy"}
    assert {got[0] for got in outcomes.values()} <= allowed


def test_the_same_seed_gives_the_same_effects():
    def run() -> list[SessionEffect]:
        rng = random.Random(3)
        session = ClientSession(b"c" * 16, b"t" * 16, rng.random)
        seen = [
            *session.handle(Start(0.0)),
            *session.handle(MessageReceived(0.1, Welcome(1, window_requests=2, incarnation=1))),
        ]
        for id_ in range(1, 9):
            seen += session.handle(SubmitRequest(0.2, score(id_, priority=rng.randint(0, 3)), FRAMES, 9.0))
            seen += session.handle(MessageReceived(0.3, ErrorReply("busy", "full", id=id_)))
        while session.wake_at < 8.0:
            seen += session.handle(SessionTick(session.wake_at))
        return seen

    assert run() == run()
