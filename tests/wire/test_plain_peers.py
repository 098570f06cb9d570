"""The client and the worker that were written from the specification alone send what the codec takes and do what it promises.

The other side is played by the test, with the golden messages; one thread, every step is awaited.
"""

import math
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq

from enginepool.coordinator.core.events import Submit
from enginepool.coordinator.shell.decode import client_event
from enginepool.protocol import messages as m
from enginepool.protocol.frames import decode_header, encode_header
from tests.wire.plain_client import PlainClient
from tests.wire.plain_worker import CAPABILITIES, PlainWorker, toy_score, toy_tokens
from tests.wire.test_vectors import DECODERS, VALID, frames_of, specs_of

GOLDEN = {vector["name"]: frames_of(vector) for vector in VALID}
EPOCH = 1_700_000_000_000_000
Context = zmq.Context[zmq.Socket[bytes]]


class Script:
    """The coordinator's end of one endpoint, played by a test."""

    def __init__(self, context: Context, decoder: str) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.address = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.decoder = DECODERS[decoder]
        self.link = b""

    def hear(self, kind: type[Any], step: Callable[[], object]) -> tuple[Any, list[bytes]]:
        """The peer's next message, which is of this type; pings on the way are skipped."""
        until = time.monotonic() + 30
        while time.monotonic() < until:
            step()
            if not self.socket.poll(20):
                continue
            self.link, *frames = self.socket.recv_multipart()
            message = decode_header(self.decoder, frames[0])
            if isinstance(message, kind):
                return message, frames
            assert isinstance(message, m.Ping), f"{message} where {kind} was expected"
        raise AssertionError(f"no {kind} came")

    def say(self, *frames: bytes) -> None:
        self.socket.send_multipart([self.link, *frames])

    def tell(self, message: m.Message) -> None:
        self.say(encode_header(message))


@contextmanager
def played(decoder: str) -> Generator[tuple[Context, Script]]:
    context = Context()
    script = Script(context, decoder)
    try:
        yield context, script
    finally:
        context.destroy(linger=0)


@pytest.fixture
def client() -> Iterator[tuple[PlainClient, Script, Callable[[], object]]]:
    with played("client-coordinator") as (context, script):
        plain = PlainClient(context, script.address)
        yield plain, script, lambda: plain.step(time.monotonic() + 30)


@pytest.fixture
def worker() -> Iterator[tuple[PlainWorker, Script, Callable[[], object]]]:
    with played("worker-coordinator") as (context, script):
        plain = PlainWorker(context, script.address, "policy")
        yield plain, script, lambda: plain.ended or plain.step(20)


Played = tuple[PlainClient, Script, Callable[[], object]]
PlayedWorker = tuple[PlainWorker, Script, Callable[[], object]]


def welcome(plain: PlainClient, script: Script, step: Callable[[], object]) -> m.Hello:
    plain.greet()
    hello, _ = script.hear(m.Hello, step)
    script.say(*GOLDEN["welcome"])
    while not plain.welcome:
        step()
    return hello


def test_a_plain_client_asks_in_the_golden_bytes_and_reads_the_golden_answer(client: Played) -> None:
    plain, script, step = client
    hello = welcome(*client)
    assert (len(hello.client), len(hello.token), hello.protocol) == (16, 16, 1)

    id_ = plain.submit([11, 12, 13], [[21, 22], [23]], labels=[5, 6], softmax=True, timeout_s=1000)
    score, frames = script.hear(m.Score, step)
    assert frames[1:] == GOLDEN["score"][1:]
    assert isinstance(client_event(0.0, b"", frames, 1 << 20), Submit)
    assert (score.id, score.labels, score.softmax) == (1, [5, 6], True)
    assert 900_000 < score.timeout_ms <= 1_000_000

    script.say(*GOLDEN["result"])
    answer = plain.wait(id_)
    assert answer.rows() == [[0.75, 0.25], [0.5, 0.5]]
    assert answer.header["version"] == 3
    ack, _ = script.hear(m.Ack, step)
    assert ack.ids == [1]


def test_a_plain_client_sends_nothing_again_before_the_welcome_of_its_newest_hello(client: Played) -> None:
    plain, script, step = client
    welcome(*client)
    plain.submit([11], [[21]], labels=[5])
    _, first = script.hear(m.Score, step)
    plain.greet()
    script.hear(m.Hello, step)
    plain.greet()
    hello, _ = script.hear(m.Hello, step)
    script.tell(m.Welcome(EPOCH, incarnation=hello.incarnation - 1))
    script.tell(m.ErrorReply("superseded", "too late", incarnation=hello.incarnation - 1))
    script.tell(m.Ping(7))
    script.hear(m.Pong, step)
    assert not plain.welcome and not plain.complaints
    plain.submit([12], [[22]], labels=[5])
    script.tell(m.Welcome(EPOCH, incarnation=hello.incarnation))
    _, again = script.hear(m.Score, step)
    assert again == first
    later, _ = script.hear(m.Score, step)
    assert later.id == 2


def test_a_client_takes_what_is_sent_to_it_although_it_is_busy(client: Played) -> None:
    plain, script, _ = client
    welcome(*client)
    # What waits at this end is bounded, so that the other end has to take it.
    script.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    left, until = 20_000, time.monotonic() + 30
    while left:
        assert time.monotonic() < until, f"{left} messages were not taken"
        try:
            script.socket.send_multipart([script.link, b"x" * 2000], zmq.NOBLOCK)
            left -= 1
        except zmq.Again:
            script.socket.poll(5)
    plain.socket.close(0)


def test_a_plain_client_sends_text_and_pairs_that_the_door_takes(client: Played) -> None:
    plain, script, step = client
    welcome(*client)
    cases: dict[str, Any] = {
        "score-text": ("Is it good? ", ["Ja", "Grüße", "👍"]),
        "score-text-pairs": (["a", "b"], ["c", "de"]),
        "score-pairs": ([[11], [12, 13]], [[21, 22], [23]]),
        "score-empty-query": ([], [[21, 22], [23]]),
        "score-empty-items-frame": ([11, 12, 13], [[]]),
    }
    for golden, arguments in cases.items():
        plain.submit(*arguments, labels=[5])
        message, frames = script.hear(m.Score, step)
        assert frames[1:] == GOLDEN[golden][1:]
        assert specs_of(message) == specs_of(decode_header(script.decoder, GOLDEN[golden][0]))
        assert isinstance(client_event(0.0, b"", frames, 1 << 20), Submit)


@pytest.mark.parametrize(
    "news",
    [m.ErrorReply("hello_required", "say hello"), m.Pong(epoch=EPOCH + 1)],
    ids=["hello_required", "higher epoch"],
)
def test_a_plain_client_greets_again_and_sends_again_what_is_unanswered(client: Played, news: m.Message) -> None:
    plain, script, step = client
    first = welcome(*client)
    plain.submit([11, 12, 13], [[21, 22], [23]], labels=[5, 6])
    _, sent = script.hear(m.Score, step)
    script.tell(news)
    again, _ = script.hear(m.Hello, step)
    assert (again.client, again.token) == (first.client, first.token)
    assert again.incarnation > first.incarnation
    script.tell(m.Welcome(EPOCH + 1, incarnation=again.incarnation))
    _, resent = script.hear(m.Score, step)
    assert resent == sent


def test_a_plain_client_that_hears_nothing_opens_a_new_link(client: Played) -> None:
    plain, script, step = client
    first = welcome(*client)
    link = script.link
    plain.silence_s = 0.0
    again, _ = script.hear(m.Hello, step)
    plain.silence_s = 30.0
    assert script.link != link
    assert again.incarnation > first.incarnation


def test_a_plain_client_that_is_never_welcomed_opens_a_new_link(client: Played) -> None:
    """Although it says hello again, more often than it looks for silence."""
    plain, script, step = client
    plain.silence_s = 1.5
    plain.greet()
    script.hear(m.Hello, step)
    link, hellos = script.link, 1
    while script.link == link and hellos < 5:
        script.hear(m.Hello, step)
        hellos += 1
    assert script.link != link


def test_a_plain_client_tries_again_after_busy_and_drops_a_second_answer(client: Played) -> None:
    plain, script, step = client
    welcome(*client)
    id_ = plain.submit([11, 12, 13], [[21, 22], [23]], labels=[5, 6])
    script.hear(m.Score, step)
    script.tell(m.ErrorReply("busy", "full", id=id_, retry_after_ms=1))
    again, _ = script.hear(m.Score, step)
    assert again.id == id_
    script.say(*GOLDEN["result"])
    script.say(*GOLDEN["result"])
    assert plain.wait(id_).header["id"] == id_
    for _ in range(2):
        script.hear(m.Ack, step)
    assert plain.answers == {}


def test_a_plain_worker_registers_says_idle_and_ready_and_answers_pings(worker: PlayedWorker) -> None:
    _, script, step = worker
    register, _ = script.hear(m.Register, step)
    assert (register.group, register.protocol, register.epoch) == ("policy", 1, 0)
    script.say(*GOLDEN["accept"])
    idle, _ = script.hear(m.Idle, step)
    ready, _ = script.hear(m.Ready, step)
    assert idle.epoch == EPOCH
    assert (ready.capabilities.kind, ready.capabilities.vocab) == ("causal", CAPABILITIES["vocab"])
    script.say(*GOLDEN["ping-to-worker"])
    pong, _ = script.hear(m.Pong, step)
    assert (pong.at, pong.stage) == (77, "ready")


def past_idle(script: Script, step: Callable[[], object]) -> None:
    """Register, accept, idle, ready."""
    script.hear(m.Register, step)
    script.say(*GOLDEN["accept"])
    script.hear(m.Idle, step)
    script.hear(m.Ready, step)


def test_a_plain_worker_scores_golden_batches_part_by_part_and_a_copy_gets_the_same_answer(worker: PlayedWorker) -> None:
    _, script, step = worker
    past_idle(script, step)
    script.say(*GOLDEN["batch-three-parts"])
    done, frames = script.hear(m.Done, step)
    assert done.batch == (EPOCH, 2)
    assert [part.frames[0].shape for part in done.parts] == [(2, 2), (1, 1), (2, 1)]
    first = memoryview(frames[1]).cast("f").tolist()
    total = toy_score([11, 12, 13, 23], 5) + toy_score([11, 12, 13, 23], 6)
    assert first[2] == pytest.approx(toy_score([11, 12, 13, 23], 5) / total)
    assert memoryview(frames[2]).cast("f").tolist() == [toy_score([2, 73, 115], 7)]
    scores = (toy_score([3, 1], 8), toy_score([4, 2], 8))
    logarithms = [math.log(score) if score else -math.inf for score in scores]
    assert memoryview(frames[3]).cast("f").tolist() == pytest.approx(logarithms)
    script.say(*GOLDEN["batch-three-parts"])
    assert script.hear(m.Done, step)[1] == frames


def test_a_plain_worker_tokenizes_each_row_as_one_text(worker: PlayedWorker) -> None:
    _, script, step = worker
    past_idle(script, step)
    script.say(*GOLDEN["tokenize-item-first"])
    tokenized, frames = script.hear(m.Tokenized, step)
    rows = [toy_tokens(item + "Is it good? ") for item in ("Ja", "Grüße", "👍")]
    assert tokenized.task == (EPOCH, 5)
    assert memoryview(frames[1]).cast("i").tolist() == [token for row in rows for token in row]
    assert memoryview(frames[2]).cast("I").tolist() == [len(row) for row in rows]


def test_a_plain_worker_serves_the_highest_epoch_that_it_heard(worker: PlayedWorker) -> None:
    _, script, step = worker
    past_idle(script, step)
    script.tell(m.Accept(EPOCH + 1))
    assert script.hear(m.Idle, step)[0].epoch == EPOCH + 1
    script.hear(m.Ready, step)
    script.say(*GOLDEN["accept"])
    script.say(*GOLDEN["batch"])
    refused, _ = script.hear(m.ErrorReply, step)
    assert (refused.code, refused.id) == ("hello_required", 1)
    script.tell(m.ErrorReply("hello_required", "who are you?"))
    assert script.hear(m.Register, step)[0].epoch == EPOCH + 1


def test_a_plain_worker_drains_and_ends(worker: PlayedWorker) -> None:
    plain, script, step = worker
    past_idle(script, step)
    script.say(*GOLDEN["drain"])
    assert script.hear(m.Stage, step)[0].stage == "draining"
    assert not script.hear(m.Exiting, step)[0].failed
    assert plain.ended == "drained"


def test_a_plain_worker_that_is_refused_ends(worker: PlayedWorker) -> None:
    plain, script, step = worker
    script.hear(m.Register, step)
    script.say(*GOLDEN["error-to-worker"])
    until = time.monotonic() + 30
    while not plain.ended and time.monotonic() < until:
        step()
    assert plain.ended == "superseded"
