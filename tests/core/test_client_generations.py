"""What a client's session promises of requests to generate: no token is lost or seen twice, and the reader sets the pace."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from enginepool.client.session.events import (
    AbandonRequest,
    Answer,
    Fail,
    MessageReceived,
    SendMessage,
    SessionEffect,
    StreamPart,
    SubmitRequest,
    TokensTaken,
)
from enginepool.coordinator.operations.generate import GENERATE
from enginepool.protocol.generated import read_prompt_columns
from enginepool.protocol.messages import (
    Ack,
    Cancel,
    Credit,
    Ended,
    FrameSpec,
    Generate,
    Generated,
    GenerationUsage,
    Message,
    Run,
    Sampling,
    SequenceEnd,
    StreamEnd,
    Timings,
    Tokens,
)
from tests.core.test_client_session import Driver

End = tuple[int, Ended, int | str | None]


def ints(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


def floats(*values: float) -> bytes:
    return np.array(values, np.float32).tobytes()


def request(
    *, n: int = 1, output: Sequence[Sequence[int]] = (), text: bool = False, **fields: Any
) -> tuple[Generate, list[bytes]]:
    """One prompt with its frames; `fields` of `Generate`, with `sampling` of 8 tokens."""
    prompt = b"abcd" if text else ints(5)
    specs = [FrameSpec("items", "utf8" if text else "int32", (4 if text else 1,)), FrameSpec("item_lengths", "uint32", (1,))]
    frames = [prompt, np.array([4 if text else 1], np.uint32).tobytes()]
    if output:
        flat = [token for row in output for token in row]
        specs += [FrameSpec("output", "int32", (len(flat),)), FrameSpec("output_lengths", "uint32", (len(output),))]
        frames += [ints(*flat), np.array([len(row) for row in output], np.uint32).tobytes()]
    fields = {"stream": True, "credit": 4, "sampling": Sampling(max_new_tokens=8), **fields}
    return Generate(1, specs, n=n, **fields), frames


def answer(
    *rows: Sequence[int], ends: Sequence[End] = (), starts: Sequence[int] = (), logprobs: bool = False, version: int = 1
) -> tuple[Generated, list[bytes]]:
    flat = [token for row in rows for token in row]
    specs = [FrameSpec("output", "int32", (len(flat),)), FrameSpec("output_lengths", "uint32", (len(rows),))]
    frames = [ints(*flat), np.array([len(row) for row in rows], np.uint32).tobytes()]
    if logprobs:
        specs.append(FrameSpec("logprobs", "float32", (len(flat),)))
        frames.append(floats(*(-token for token in flat)))
    ended = [SequenceEnd(*end) for end in ends or [(s, "length", None) for s in range(len(rows))]]
    spans = [[(version, len(row))] if row else [] for row in rows]
    usage = GenerationUsage(len(rows), 1, len(flat))
    return Generated(1, version, usage, Timings(1, 2), ended, spans, specs, list(starts)), frames


class Streaming(Driver):
    """A connected session with one stream, id 1."""

    def __init__(self, asked: tuple[Generate, list[bytes]] | None = None, **fields: Any) -> None:
        super().__init__()
        self.connect()
        message, frames = asked or request(**fields)
        self.logprobs = message.logprobs
        self(SubmitRequest(self.now, message, frames))

    def tokens(self, *runs: tuple[int, int, Sequence[int]], ended: Sequence[End] = (), version: int = 1) -> list[SessionEffect]:
        """Tokens arrive: runs of (sequence, position, tokens)."""
        flat = [token for _, _, tokens in runs for token in tokens]
        specs, frames = [FrameSpec("tokens", "int32", (len(flat),))], [ints(*flat)]
        if self.logprobs:
            specs.append(FrameSpec("logprobs", "float32", (len(flat),)))
            frames.append(floats(*(-token for token in flat)))
        made = [Run(1, sequence, at, len(tokens), version) for sequence, at, tokens in runs]
        return self(MessageReceived(self.now, Tokens(made, specs, [StreamEnd(1, *end) for end in ended]), frames))

    def of_prompt(self, logprob: float) -> None:
        """The log-probability of the prompt, which has one token, arrives."""
        specs = [FrameSpec("tokens", "int32", (0,)), FrameSpec("prompt_logprobs", "float32", (1,))]
        self(MessageReceived(self.now, Tokens([], specs, prompts=[(1, 0, 1)]), [b"", floats(logprob)]))

    def finish(self, made: tuple[Generated, list[bytes]]) -> list[SessionEffect]:
        return self(MessageReceived(self.now, *made))

    def take(self, tokens: int) -> list[Message]:
        self(TokensTaken(self.now, 1, tokens))
        return self.sent()

    def relink(self, epoch: int = 7) -> None:
        """The link is lost, and a coordinator of this epoch welcomes again."""
        self.now += 1.0
        self.refuse("hello_required")
        self.welcome(epoch=epoch)

    def again(self) -> tuple[Generate, list[list[int]]]:
        """The request as it was sent last: with the tokens that it brings along, by sequence."""
        message, frames = [(e.message, e.frames) for e in self.effects if isinstance(e, SendMessage)][-1]
        assert isinstance(message, Generate)
        if len(frames) == 2:
            return message, []
        flat, lengths = np.frombuffer(frames[2], np.int32), np.frombuffer(frames[3], np.uint32)
        return message, [row.tolist() for row in np.split(flat, np.cumsum(lengths)[:-1])]

    def parts(self) -> list[tuple[int, list[int], Ended | None]]:
        return [
            (part.sequence, np.frombuffer(part.tokens, np.int32).tolist(), part.end and part.end.reason)
            for part in self.effects
            if isinstance(part, StreamPart)
        ]

    def whole(self) -> tuple[Generated, list[list[int]]]:
        [end] = [effect for effect in self.effects if isinstance(effect, Answer)]
        assert isinstance(end.message, Generated)
        flat, lengths = np.frombuffer(end.frames[0], np.int32), np.frombuffer(end.frames[1], np.uint32)
        return end.message, [row.tolist() for row in np.split(flat, np.cumsum(lengths)[:-1])]

    def of_prompts(self) -> bytes:
        """The log-probabilities of prompts in the final answer."""
        [end] = [effect for effect in self.effects if isinstance(effect, Answer)]
        assert isinstance(end.message, Generated) and end.message.prompts
        return bytes(read_prompt_columns(end.message.frames, end.frames))


# --- tokens --------------------------------------------------------------------------------------------------------------


def test_tokens_and_ends_are_passed_on_as_they_arrive_together_where_they_come_together() -> None:
    driver = Streaming(n=2)
    driver.tokens((0, 0, [1, 2]), (1, 0, [5]))
    assert driver.parts() == [(0, [1, 2], None), (1, [5], None)]
    driver.tokens((0, 2, [3]), ended=[(0, "stop", 3), (1, "length", None)])
    assert driver.parts() == [(0, [3], "stop"), (1, [], "length")]


def test_two_runs_of_a_sequence_in_one_message_stay_in_order() -> None:
    driver = Streaming()
    driver(
        MessageReceived(
            driver.now,
            Tokens([Run(1, 0, 0, 2, 1), Run(1, 0, 2, 1, 2)], [FrameSpec("tokens", "int32", (3,))], [StreamEnd(1, 0, "stop")]),
            [ints(1, 2, 3)],
        )
    )
    assert driver.parts() == [(0, [1, 2], None), (0, [3], "stop")]
    assert [part.version for part in driver.effects if isinstance(part, StreamPart)] == [1, 2]


def test_tokens_that_are_already_there_are_dropped() -> None:
    driver = Streaming()
    driver.tokens((0, 0, [1, 2]))
    assert driver.tokens((0, 0, [1, 2])) == []
    driver.tokens((0, 1, [2, 3, 4]), ended=[(0, "stop", 4)])
    assert driver.parts() == [(0, [3, 4], "stop")]
    assert driver.tokens((0, 2, [3, 4]), ended=[(0, "stop", 4)]) == []


@pytest.mark.parametrize(
    ("runs", "ended", "said"),
    [
        ([(0, 3, [4])], [], "tokens from position 3 on, after 2"),
        ([(0, 2, [1] * 7)], [], "9 tokens, of max_new_tokens = 8"),
        ([(1, 2, [1])], [], "tokens after its end"),
        ([(2, 0, [1])], [], "sequence 2 of 2"),
        ([(-1, 0, [1])], [], "sequence -1 of 2"),
        ([], [(2, "stop", None)], "sequence 2 of 2"),
    ],
)
def test_tokens_that_no_coordinator_could_send_end_the_request_here_and_there(
    runs: list[tuple[int, int, list[int]]], ended: list[End], said: str
) -> None:
    driver = Streaming(n=2)
    driver.tokens((0, 0, [1, 2]), (1, 0, [5, 6]), ended=[(1, "stop", 6)])
    driver.tokens(*runs, ended=ended)
    assert driver.sent() == [Cancel(1)]
    [failed] = [effect for effect in driver.effects if isinstance(effect, Fail)]
    assert failed.failure.code == "malformed" and said in failed.failure.message
    assert driver.tokens((0, 2, [3])) == [], "it is over"


def test_tokens_without_the_logprobs_that_were_asked_for_end_the_request() -> None:
    driver = Streaming(logprobs=True)
    driver.logprobs = False
    driver.tokens((0, 0, [1]))
    assert driver.failed() == [(1, "malformed")]


def test_tokens_of_a_stream_that_was_taken_back_are_dropped() -> None:
    driver = Streaming()
    driver(AbandonRequest(driver.now, 1))
    assert driver.sent() == [Cancel(1)]
    assert driver.tokens((0, 0, [1]), ended=[(0, "stop", 1)]) == []
    assert driver.take(1) == []
    driver.finish(answer([1]))
    assert driver.parts() == []


# --- credit --------------------------------------------------------------------------------------------------------------


def test_a_reader_that_keeps_up_gives_credit_before_the_window_is_used_up() -> None:
    driver = Streaming(sampling=Sampling(max_new_tokens=100), credit=4)
    driver.tokens((0, 0, [1, 2, 3, 4]))
    assert driver.take(1) == []
    assert driver.take(2) == [Credit(1, 2)]
    assert driver.take(3) == []
    assert driver.take(4) == [Credit(1, 4)]


def test_a_reader_that_does_not_read_gives_none_and_no_more_than_arrived() -> None:
    driver = Streaming(credit=2)
    assert driver.take(5) == []
    driver.tokens((0, 0, [1, 2]))
    assert driver.sent() == []
    assert driver.take(9) == [Credit(1, 2)]


def test_a_credit_of_one_is_given_back_for_each_token() -> None:
    driver = Streaming(credit=1)
    driver.tokens((0, 0, [1]))
    assert driver.take(1) == [Credit(1, 1)]


def test_credit_counts_from_the_request_that_was_sent_last() -> None:
    driver = Streaming(credit=4)
    driver.tokens((0, 0, [1, 2, 3]))
    driver.take(1)
    driver.relink()
    assert driver.again()[1] == [[1, 2, 3]]
    assert driver.take(3) == [], "these three the coordinator counts as taken"
    driver.tokens((0, 3, [4, 5]))
    assert driver.take(5) == [Credit(1, 2)]


def test_no_credit_is_given_while_the_link_is_lost() -> None:
    driver = Streaming(credit=2)
    driver.tokens((0, 0, [1, 2]))
    driver.now += 1.0
    driver.refuse("hello_required")
    assert driver.take(2) == []
    driver.welcome()
    assert driver.again()[1] == [[1, 2]]


# --- sending again -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epoch", [7, 8], ids=["new link", "new coordinator"])
def test_a_stream_is_sent_again_with_the_tokens_and_the_ends_that_it_has(epoch: int) -> None:
    driver = Streaming(n=3)
    driver.tokens((0, 0, [1, 2]), (1, 0, [5]), ended=[(1, "stop", "x")])
    driver.relink(epoch)
    message, brought = driver.again()
    assert brought == [[1, 2], [5], []]
    assert (message.id, message.ended) == (1, [SequenceEnd(1, "stop", "x")])
    assert [spec.name for spec in message.frames] == ["items", "item_lengths", "output", "output_lengths"]
    driver.tokens((0, 2, [3]), (2, 0, [9]))
    driver.relink(epoch + 1)
    assert driver.again()[1] == [[1, 2, 3], [5], [9]]


def test_a_stream_without_tokens_and_a_request_without_stream_are_sent_again_as_they_were() -> None:
    for asked in (request(), request(stream=False), request(stream=False, output=[[3]])):
        driver = Streaming(asked)
        driver.relink(8)
        assert driver.sent() == [asked[0]]


def test_tokens_that_the_caller_brought_along_come_first() -> None:
    driver = Streaming(n=2, output=[[7, 8], []], ended=[])
    driver.tokens((0, 2, [9]), (1, 0, [4]))
    driver.relink()
    assert driver.again()[1] == [[7, 8, 9], [4]]


def test_a_sequence_with_all_its_tokens_has_ended_though_its_end_was_lost() -> None:
    driver = Streaming(sampling=Sampling(max_new_tokens=2))
    driver.tokens((0, 0, [1, 2]))
    driver.relink()
    assert driver.again()[0].ended == [SequenceEnd(0, "length")]


@pytest.mark.parametrize("fields", [{"partial": True}, {"sampling": Sampling(max_new_tokens=8, stop=["a"])}])
def test_a_sequence_that_no_other_coordinator_can_continue_exactly_is_interrupted_there(fields: dict[str, Any]) -> None:
    driver = Streaming(n=3, **fields)
    driver.tokens((0, 0, [1, 2]), (2, 0, [5]), ended=[(2, "stop", 5)])
    driver.relink()
    assert driver.again()[0].ended == [SequenceEnd(0, "interrupted"), SequenceEnd(2, "stop", 5)]
    driver.tokens((0, 2, [3]))
    assert driver.parts() == [(0, [3], None)], "this coordinator goes on"
    driver.relink(8)
    ends: list[End] = [(0, "interrupted", None), (1, "length", None), (2, "stop", 5)]
    driver.finish(answer([], [9], [], starts=[3, 0, 1], ends=ends))
    assert driver.parts() == [(0, [], "interrupted"), (1, [9], "length")]
    assert driver.whole()[1] == [[1, 2, 3], [9], [5]]


def test_a_stream_that_is_sent_again_counts_its_tokens_in_the_window() -> None:
    driver = Streaming()
    before = driver.session.calls.used_bytes
    driver.tokens((0, 0, [1, 2]))
    driver.relink()
    assert driver.session.calls.used_bytes == before + 4 * 2 + 4


def test_a_stream_that_says_nothing_for_long_is_sent_again_but_not_for_a_reader_that_is_slow() -> None:
    driver = Streaming()
    driver.tokens((0, 0, [1, 2]))
    resend_s = driver.session.settings.resend_s
    driver.pass_time(3 * resend_s)
    assert not [m for m in driver.sent() if isinstance(m, Generate)]
    driver.take(2)
    driver.pass_time(3 * resend_s)
    assert driver.again()[1] == [[1, 2]]


@pytest.mark.parametrize("output", [(), [[3, 4], [5]]])
@pytest.mark.parametrize("text", [True, False])
@pytest.mark.parametrize("logprobs", [True, False])
def test_a_request_counts_as_much_in_the_window_as_the_coordinator_counts(
    output: list[list[int]], text: bool, logprobs: bool
) -> None:
    sampling = Sampling(max_new_tokens=50, stop_token_ids=[1, 2, 3], stop=["a"])
    asked = request(n=2, output=output, text=text, logprobs=logprobs, sampling=sampling)
    work = GENERATE.open(*asked)
    assert work.charge is not None
    assert Streaming(asked).session.calls.used_bytes == work.charge[1]


# --- the final answer ----------------------------------------------------------------------------------------------------


def test_what_only_the_final_answer_has_is_passed_on_before_the_whole() -> None:
    driver = Streaming(n=2, logprobs=True)
    driver.tokens((0, 0, [1, 2]), (1, 0, [5]), ended=[(1, "stop", 5)])
    driver.finish(answer([1, 2, 3], [5], ends=[(0, "length", None), (1, "stop", 5)], logprobs=True))
    assert driver.parts() == [(0, [3], "length")]
    assert isinstance(driver.effects[-1], Answer)
    message, rows = driver.whole()
    assert rows == [[1, 2, 3], [5]] and message.spans == [[(1, 3)], [(1, 1)]]


def test_the_answer_of_another_coordinator_is_joined_with_the_tokens_that_it_continued() -> None:
    driver = Streaming(n=2, logprobs=True)
    driver.tokens((0, 0, [1, 2]), version=1)
    driver.relink(8)
    driver.tokens((0, 2, [3]), version=2)
    driver.finish(answer([3, 4], [5], starts=[2, 0], logprobs=True, version=2))
    assert driver.parts() == [(0, [4], "length"), (1, [5], "length")]
    message, rows = driver.whole()
    assert rows == [[1, 2, 3, 4], [5]] and message.starts == []
    assert message.spans == [[(1, 2), (2, 2)], [(2, 1)]] and message.version == 2
    [end] = [effect for effect in driver.effects if isinstance(effect, Answer)]
    assert np.frombuffer(end.frames[2], np.float32).tolist() == [-1, -2, -3, -4, -5]


def test_the_workers_of_another_coordinator_are_not_named_for_tokens_that_came_before_it() -> None:
    driver = Streaming(n=3)
    driver.tokens((0, 0, [1, 2]), ended=[(0, "stop", 2)])
    driver.relink(8)
    ends: list[End] = [(0, "stop", 2), (1, "length", None), (2, "length", None)]
    message, frames = answer([], [5, 6], [7], starts=[2, 0, 0], ends=ends)
    driver.finish((msgspec.structs.replace(message, workers=["b"]), frames))
    message, _ = driver.whole()
    assert (message.workers, message.places) == (["b"], [[], [(0, 0)], [(0, 0)]])


def test_the_log_probabilities_of_a_prompt_stay_those_of_the_weights_that_computed_its_first_token() -> None:
    """Another coordinator, which continues the stream, computes them again, perhaps by later weights."""
    driver = Streaming(n=2, prompt_logprobs=True)
    driver.of_prompt(-1.0)
    driver.relink(8)
    driver.of_prompt(-2.0)  # no token had arrived: the coordinator before may have begun on other weights
    driver.tokens((1, 0, [1]), version=2)
    driver.relink(9)
    driver.of_prompt(-3.0)
    message, frames = answer([5, 6], [2], starts=[0, 1], version=3)
    message.frames += [FrameSpec("prompt_logprobs", "float32", (1,))]
    message.prompts = [(0, 1)]
    driver.finish((message, [*frames, floats(-3.0)]))
    assert driver.of_prompts() == floats(-2.0)


def test_without_a_token_the_final_answer_says_the_log_probabilities_of_the_prompt() -> None:
    driver = Streaming(prompt_logprobs=True)
    driver.of_prompt(-1.0)
    driver.relink(8)
    message, frames = answer([5], version=2)
    message.frames += [FrameSpec("prompt_logprobs", "float32", (1,))]
    message.prompts = [(0, 1)]
    driver.finish((message, [*frames, floats(-2.0)]))
    assert driver.of_prompts() == floats(-2.0)


def test_the_whole_begins_where_the_callers_request_ended() -> None:
    driver = Streaming(n=2, output=[[7, 8], [6]], ended=[SequenceEnd(1, "stop", 6)])
    driver.tokens((0, 2, [9]))
    driver.relink(8)
    driver.finish(answer([10], [], starts=[3, 1], ends=[(0, "stop", 10), (1, "stop", 6)]))
    message, rows = driver.whole()
    assert (rows, message.starts) == ([[9, 10], []], [2, 1])


@pytest.mark.parametrize(
    "made",
    [
        answer([1]),
        answer([3, 4], starts=[3]),
        answer([1, 2, 3], [4]),
        answer([1, 2, 3], ends=[(1, "stop", None)]),
        answer([1, 2, 3], starts=[0, 0]),
        answer([1, 2, 3], starts=[-1]),
        answer([1, 2, 3], logprobs=True),
        answer([1] * 9),
    ],
    ids=["fewer", "gap", "rows", "ends", "starts", "negative", "frames", "more"],
)
def test_an_answer_that_does_not_continue_what_arrived_is_a_failure(made: tuple[Generated, list[bytes]]) -> None:
    driver = Streaming()
    driver.tokens((0, 0, [1, 2]))
    driver.finish(made)
    assert driver.failed() == [(1, "malformed")]


def test_a_second_answer_is_dropped() -> None:
    driver = Streaming()
    driver.finish(answer([1]))
    assert driver.answered() == [1]
    driver.finish(answer([1]))
    assert driver.answered() == [] and driver.parts() == []


# --- as other requests ---------------------------------------------------------------------------------------------------


def test_an_answer_is_acknowledged_and_a_busy_coordinator_is_asked_again() -> None:
    driver = Streaming()
    driver.refuse("busy", 1, retry_after_ms=10)
    driver.pass_time(0.5)
    assert [type(m) for m in driver.sent()] == [Generate]
    driver.finish(answer([1]))
    driver.pass_time(driver.session.settings.ack_delay_s)
    assert Ack([1]) in driver.sent()


def test_a_stream_ends_at_its_deadline_without_a_coordinator() -> None:
    driver = Driver()
    driver.connect()
    driver(SubmitRequest(driver.now, *request(), driver.now + 5.0))
    [message] = driver.sent()
    assert isinstance(message, Generate) and message.timeout_ms == 5000
    driver.pass_time(5.0 + driver.session.settings.grace_s)
    assert driver.failed() == [(1, "deadline_exceeded")]
