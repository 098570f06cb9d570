"""Hidden states of generated tokens: what is refused and charged, where they go, and what of them is kept."""

from typing import Any

import msgspec
import numpy as np
import pytest

from enginepool.client.generate import GenerateCalls
from enginepool.client.generations import Continued, Generation, read_generations
from enginepool.client.session.received_tokens import ReceivedTokens
from enginepool.config import Limits
from enginepool.coordinator.core import events as ev
from enginepool.coordinator.requests import generations, stream_messages
from enginepool.coordinator.requests.fitting import refusal as refusal_of
from enginepool.coordinator.requests.memory import UNKNOWN_HIDDEN, charge
from enginepool.coordinator.shell.decode import worker_event
from enginepool.errors import BadRequest
from enginepool.protocol.errors import WireError
from enginepool.protocol.frames import encode_header
from enginepool.protocol.generated import check_tokens, read_generated, read_hidden
from enginepool.protocol.messages import (
    FrameSpec,
    Generate,
    Generated,
    GenerationProgress,
    Run,
    Sampling,
    SequenceEnd,
    StartGeneration,
    Step,
    Tokens,
)
from tests.core.generations import CAN, GeneratingPool, generate, states, streamed
from tests.core.machines import EPOCH, Sent, failures

SIZE = 4
HIDDEN = msgspec.structs.replace(CAN, hidden=SIZE)
SPECS = [FrameSpec("items", "int32", (3,)), FrameSpec("item_lengths", "uint32", (1,))]
FRAMES = (np.arange(3, dtype=np.int32).tobytes(), b"\3\0\0\0")
ASKED = Generate(1, SPECS, sampling=Sampling(max_new_tokens=8), hidden_states=True)


class HiddenPool(GeneratingPool):
    """A pool with one request for hidden states, which runs."""

    def __init__(self, **fields: Any) -> None:
        super().__init__()
        self.caller = self.client()
        self.link = self.worker(can=HIDDEN)
        self.submit(self.caller, 1, generate(3, hidden_states=True, **fields))
        [self.task] = self.tasks()

    def generated(self, *tokens: int, at: int, reason: str = "", hidden: int = SIZE) -> list[Sent]:
        return self.step(self.link, (self.task, 0, at, list(tokens), reason), hidden=hidden)


def hidden_of(sent: list[Sent]) -> list[bytes]:
    """The hidden states that a client was sent, message by message."""
    found: list[bytes] = []
    for one in sent:
        if isinstance(one.message, Tokens | Generated):
            found.append(bytes(read_hidden(one.message.frames, one.frames)))
        if isinstance(one.message, Tokens):
            check_tokens(one.message)
    return found


# --- what is refused, and what it costs ---------------------------------------------------------------------------------


def test_they_are_refused_where_the_workers_have_none_with_the_option_that_is_missing() -> None:
    wrong = refusal_of(generate(hidden_states=True), CAN)
    assert isinstance(wrong, WireError) and (wrong.code, wrong.field) == ("bad_request", "hidden_states")
    assert "enable_return_hidden_states" in wrong.message and wrong.limit == ""
    assert refusal_of(generate(hidden_states=True), HIDDEN) is None


def test_they_are_refused_with_stop_strings() -> None:
    with pytest.raises(WireError, match="given with hidden_states") as refused:
        generate(hidden_states=True, stop=["x"])
    assert (refused.value.code, refused.value.field) == ("bad_request", "sampling.stop")


def test_a_call_names_its_argument() -> None:
    with pytest.raises(BadRequest, match="hidden_states"):
        GenerateCalls.stream(object(), [1], hidden_states=2)  # pyright: ignore[reportArgumentType]


def test_their_bytes_are_charged_before_the_request_is_taken() -> None:
    plain, asked = generate(3, n=2), generate(3, n=2, hidden_states=True)
    for can, size in ((HIDDEN, SIZE), (None, UNKNOWN_HIDDEN)):
        (answer, held), (with_states, both) = charge(plain, can), charge(asked, can)
        more = 4 * 2 * 8 * size
        assert (with_states - answer, both - held) == (more, 2 * more)
    assert asked.operation.knows_outputs(asked, HIDDEN) and not asked.operation.knows_outputs(asked, None)
    assert asked.digest != plain.digest


def test_what_was_a_guess_is_charged_exactly_once_a_worker_is_ready() -> None:
    pool = GeneratingPool()
    client = pool.client()
    work = generate(3, hidden_states=True)
    pool.submit(client, 1, work)
    assert pool.machine.core.live_bytes == charge(work, None)[1]
    pool.worker(can=HIDDEN)
    assert pool.machine.core.live_bytes == charge(work, HIDDEN)[1]
    [task] = pool.tasks()
    assert isinstance(task.message, StartGeneration) and task.message.hidden_states


def test_an_answer_that_would_be_too_large_is_refused_once_their_size_is_known() -> None:
    can = msgspec.structs.replace(CAN, hidden=8192, inflight_tokens=1 << 20, batch_tokens=1 << 20, context=1 << 20)
    work = generate(3, hidden_states=True, max_new_tokens=4096)  # 128 MiB
    pool = GeneratingPool(limits=Limits(window_bytes=1 << 40, buffer_bytes=1 << 50))
    client = pool.client()
    assert not failures(pool.submit(client, 1, work)), "it may be a smaller model"
    pool.worker(can=can)
    assert failures(pool.sent)[1].code == "too_large"
    assert failures(pool.submit(client, 2, work))[2].code == "too_large"


# --- where they go ------------------------------------------------------------------------------------------------------


def test_a_stream_gets_them_with_its_tokens_and_the_answer_has_all() -> None:
    pool = HiddenPool(stream=True, credit=2)
    assert hidden_of(pool.generated(1, at=0)) == [states([1], SIZE)]
    assert hidden_of(pool.generated(2, 3, at=1)) == [states([2], SIZE)], "credit for one"
    assert hidden_of(pool.do(ev.CreditGiven(0, pool.caller, 1, 2))) == [states([3], SIZE)]
    [*_, answer] = pool.generated(4, at=3, reason="stop")
    assert isinstance(answer.message, Generated)
    [row] = read_generated(answer.message, answer.frames, 1, ASKED)
    assert bytes(row.hidden_states) == states([1, 2, 3, 4], SIZE)
    found = read_generations(ASKED, Continued(), answer.message, answer.frames)[0][0].hidden_states
    assert found is not None and found.dtype == np.float32 and found[:, 0].tolist() == [1, 2, 3, 4]


def test_requests_without_them_are_in_other_messages_and_get_none() -> None:
    pool = HiddenPool(stream=True)
    pool.submit(pool.caller, 2, generate(3, stream=True))
    plain = pool.tasks()[-1]
    assert hidden_of(pool.step(pool.link, (plain, 0, 0, [7], ""))) == [b""]
    [*_, answer] = pool.step(pool.link, (plain, 0, 1, [8], "stop"))
    assert isinstance(answer.message, Generated)
    assert [spec.name for spec in answer.message.frames] == ["output", "output_lengths"]


def test_a_long_backlog_is_cut_also_inside_of_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (stream_messages, generations):
        monkeypatch.setattr(module, "MOST_STATES", 2 * 4 * SIZE)
    pool = HiddenPool(stream=True, credit=6)
    old = pool.caller
    pool.generated(1, 2, 3, 4, 5, at=0)
    again = pool.client(b"again", client=old.ljust(16, b"."))
    sent = pool.submit(again, 1, generate(3, hidden_states=True, stream=True, credit=6, output=[[1]]))
    assert hidden_of(sent) == [states([2, 3], SIZE), states([4, 5], SIZE)]
    assert [run[2] for run in streamed(sent)] == [1, 3]


# --- losses -------------------------------------------------------------------------------------------------------------


def test_a_sequence_that_goes_on_elsewhere_keeps_those_that_it_has() -> None:
    pool = HiddenPool()
    pool.generated(1, 2, at=0)
    second = pool.worker("w2", can=HIDDEN)
    pool.do(ev.WorkerBroken(0, pool.link, "it is gone"))
    task = pool.tasks()[-1]
    assert task.link == second and isinstance(task.message, StartGeneration) and task.message.hidden_states
    [answer] = pool.step(second, (task, 0, 2, [3], "stop"), hidden=SIZE)
    assert hidden_of([answer]) == [states([1, 2, 3], SIZE)]


def test_nan_among_them_is_an_engine_error() -> None:
    pool = HiddenPool()
    assert isinstance(pool.task.message, StartGeneration)
    step = Step(pool.task.message.task[1], 0, 0, 1)
    token, hidden = memoryview(b"\1\0\0\0"), memoryview(np.array([1, np.nan, 1, 1], np.float32).tobytes())
    event = ev.TokensGenerated(0, pool.link, EPOCH, 0, [step], token, memoryview(b""), hidden_states=hidden, hidden=SIZE)
    sent = pool.do(event)
    failure = failures(sent)[1]
    assert failure.code == "engine_error" and "hidden state" in failure.message


@pytest.mark.parametrize(("asked", "given"), [(True, 0), (False, SIZE), (True, SIZE + 1)])
def test_a_worker_that_sends_others_than_asked_for_is_lost(asked: bool, given: int) -> None:
    pool = GeneratingPool()
    client = pool.client()
    link = pool.worker(can=HIDDEN)
    pool.submit(client, 1, generate(3, hidden_states=asked))
    pool.step(link, (pool.tasks()[0], 0, 0, [1], ""), hidden=given)
    assert not pool.machine.core.worker_links


@pytest.mark.parametrize("shape", [(1, 0), (2, 4), (4,)])
def test_frames_that_do_not_fit_are_malformed(shape: tuple[int, ...]) -> None:
    specs = [FrameSpec("tokens", "int32", (1,)), FrameSpec("hidden_states", "float32", shape)]
    frames = [bytes(4 * int(np.prod(spec.shape))) for spec in specs]
    message = GenerationProgress(EPOCH, 0, [Step(1, 0, 0, 1)], specs)
    assert isinstance(worker_event(0.0, b"w", [encode_header(message), *frames]), ev.WorkerBroken)
    with pytest.raises(WireError):
        check_tokens(Tokens([Run(1, 0, 0, 1, 0)], specs))


# --- clients ------------------------------------------------------------------------------------------------------------


def test_a_stream_that_is_sent_again_keeps_those_that_arrived() -> None:
    received = ReceivedTokens(ASKED, FRAMES)
    part = received.run(Run(1, 0, 0, 2, 0), np.array([1, 2], np.int32).tobytes(), b"", states([1, 2], SIZE))
    assert part is not None and part.hidden_states == states([1, 2], SIZE)
    part = received.run(Run(1, 0, 1, 2, 0), np.array([2, 3], np.int32).tobytes(), b"", states([2, 3], SIZE))
    assert part is not None and part.hidden_states == states([3], SIZE), "the first of them had arrived"
    for wrong in (b"", states([4], SIZE + 1)):
        with pytest.raises(WireError, match="without their hidden states"):
            received.run(Run(1, 0, 3, 1, 0), b"\4\0\0\0", b"", wrong)
    pool = HiddenPool(output=[[1, 2, 3]])
    [answer] = pool.generated(4, at=3, reason="stop")
    assert isinstance(answer.message, Generated)
    _, whole, frames = received.finish(answer.message, answer.frames)
    found = read_generations(ASKED, Continued(), whole, frames)[0][0]
    assert found.token_ids.tolist() == [1, 2, 3, 4]
    assert found.hidden_states is not None and found.hidden_states.tobytes() == states([1, 2, 3, 4], SIZE)


def before(hidden: Any) -> Generation:
    return Generation(np.array([1, 2], np.int32), None, "interrupted", None, ((0, 2),), hidden_states=hidden)


def test_those_of_earlier_parts_are_joined_and_nan_where_there_are_none() -> None:
    asked = msgspec.structs.replace(ASKED, sampling=Sampling(max_new_tokens=8))
    pool = HiddenPool(output=[[1, 2]])
    [answer] = pool.generated(3, at=2, reason="stop")
    assert isinstance(answer.message, Generated)
    known = np.frombuffer(states([1, 2], SIZE), np.float32).reshape(2, SIZE)
    joined = read_generations(asked, Continued([before(known)]), answer.message, answer.frames)[0][0].hidden_states
    assert joined is not None and joined.tobytes() == states([1, 2, 3], SIZE)
    joined = read_generations(asked, Continued([before(None)]), answer.message, answer.frames)[0][0].hidden_states
    assert joined is not None and np.isnan(joined[:2]).all() and joined[2:].tobytes() == states([3], SIZE)


def test_without_new_tokens_those_of_earlier_parts_stay() -> None:
    work = generate(3, output=[[1, 2]], ended=[SequenceEnd(0, "length")], hidden_states=True, max_new_tokens=2)
    pool = GeneratingPool()
    client = pool.client()
    pool.worker(can=HIDDEN)
    [answer] = pool.submit(client, 1, work)
    assert isinstance(answer.message, Generated)
    known = np.frombuffer(states([1, 2], SIZE), np.float32).reshape(2, SIZE)
    found = read_generations(ASKED, Continued([before(known)]), answer.message, answer.frames)[0][0].hidden_states
    assert found is not None and found.tobytes() == states([1, 2], SIZE)
