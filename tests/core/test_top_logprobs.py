"""Top-k log-probabilities, and those of prompts: what is refused and charged, where they go, how often they are asked for."""

from typing import Any

import msgspec
import numpy as np
import pytest

from enginepool.client.generations import Continued, Generation, read_generations
from enginepool.client.session.charges import charge_of
from enginepool.coordinator.core import events as ev
from enginepool.coordinator.operations.generate import GENERATE
from enginepool.coordinator.requests.fitting import refusal as refusal_of
from enginepool.coordinator.shell.decode import worker_event
from enginepool.protocol.columns import join_columns, split_columns
from enginepool.protocol.errors import WireError
from enginepool.protocol.frames import encode_header
from enginepool.protocol.generated import check_tokens, read_generated, read_prompt_columns, read_prompts
from enginepool.protocol.messages import (
    MAX_TOP_LOGPROBS,
    FrameSpec,
    Generate,
    Generated,
    GenerationProgress,
    GenerationUsage,
    Sampling,
    SequenceEnd,
    StartGeneration,
    Step,
    Timings,
    Tokens,
)
from tests.core.generations import CAN, GeneratingPool, columns, generate, prompt_columns
from tests.core.machines import EPOCH, Sent, failures
from tests.core.publishers import Trainer, UpdatePool

OF_PROMPT = [float("nan"), -1.0, -2.0]
SPECS = [FrameSpec("items", "int32", (3,)), FrameSpec("item_lengths", "uint32", (1,))]
FRAMES = (np.arange(3, dtype=np.int32).tobytes(), b"\3\0\0\0")


def start(task: Sent) -> StartGeneration:
    assert isinstance(task.message, StartGeneration)
    return task.message


def of_prompts(sent: list[Sent]) -> list[tuple[list[tuple[int, int, int]], bytes]]:
    """The log-probabilities of prompts that clients of streams were sent."""
    found: list[tuple[list[tuple[int, int, int]], bytes]] = []
    for one in sent:
        if isinstance(one.message, Tokens):
            check_tokens(one.message)
            if one.message.prompts:
                found.append((one.message.prompts, bytes(read_prompt_columns(one.message.frames, one.frames))))
    return found


def answered(sent: list[Sent]) -> tuple[Generated, list[bytes]]:
    [one] = [one for one in sent if isinstance(one.message, Generated)]
    assert isinstance(one.message, Generated)
    return one.message, [bytes(frame) for frame in one.frames]


# --- what is refused, and what it costs ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("top", "logprobs"), [(-1, True), (MAX_TOP_LOGPROBS + 1, True), (1, False)])
def test_top_logprobs_have_bounds_and_need_logprobs(top: int, logprobs: bool) -> None:
    with pytest.raises(WireError, match="top_logprobs: ") as refused:
        generate(top_logprobs=top, logprobs=logprobs)
    assert (refused.value.code, refused.value.field) == ("bad_request", "top_logprobs")


def test_a_model_with_fewer_tokens_is_named() -> None:
    wrong = refusal_of(generate(top_logprobs=20, logprobs=True), msgspec.structs.replace(CAN, vocab=19))
    assert isinstance(wrong, WireError) and (wrong.field, wrong.limit) == ("top_logprobs", "19")


@pytest.mark.parametrize(
    ("fields", "more"),
    [
        ({"logprobs": True}, 2 * 8 * 4),
        ({"logprobs": True, "top_logprobs": 5}, 2 * 8 * 4 * 11),
        ({"prompt_logprobs": True}, 4 * (3 + 1)),
        ({"logprobs": True, "top_logprobs": 5, "prompt_logprobs": True}, (2 * 8 + 3 + 1) * 4 * 11),
    ],
)
def test_their_bytes_are_charged_before_the_request_is_taken_and_the_client_counts_the_same(
    fields: dict[str, Any], more: int
) -> None:
    plain, asked = (Generate(1, SPECS, n=2, sampling=Sampling(max_new_tokens=8), **given) for given in ({}, fields))
    before, after = (GENERATE.open(message, FRAMES).charge for message in (plain, asked))
    assert before is not None and after is not None
    assert (after[0] - before[0], after[1] - before[1]) == (more, 2 * more)
    assert charge_of(asked, FRAMES) == after[1]


def test_they_are_part_of_what_a_request_asks() -> None:
    given: list[dict[str, Any]] = [{}, {"top_logprobs": 1}, {"top_logprobs": 2}, {"prompt_logprobs": True}]
    assert len({generate(logprobs=True, **fields).digest for fields in given}) == 4


# --- top k --------------------------------------------------------------------------------------------------------------


def test_tokens_reach_a_stream_with_the_most_probable_ones_in_their_place_and_the_answer_has_all() -> None:
    pool = GeneratingPool()
    client = pool.client()
    link = pool.worker(can=CAN)
    pool.submit(client, 1, generate(3, n=2, stream=True, credit=2, logprobs=True, top_logprobs=3))
    [task] = pool.tasks()
    assert (start(task).top_logprobs, start(task).prompt_logprobs) == (3, 0)
    sent = pool.step(link, (task, 0, 0, [1], ""), (task, 1, 0, [7], ""), logprobs=True, top=3)
    [one] = [one for one in sent if isinstance(one.message, Tokens)]
    assert isinstance(one.message, Tokens)
    assert [(spec.name, spec.shape) for spec in one.message.frames][2:] == [("top_ids", (2, 3)), ("top_logprobs", (2, 3))]
    assert np.frombuffer(one.frames[2], np.int32).tolist() == [1, 2, 3, 7, 8, 9]
    assert np.frombuffer(one.frames[3], np.float32).tolist() == [-1, -2, -3, -7, -8, -9]
    sent = pool.step(link, (task, 0, 1, [2, 3], "stop"), (task, 1, 1, [8], "stop"), logprobs=True, top=3)
    message, frames = answered(sent)
    assert np.frombuffer(frames[0], np.int32).tolist() == [1, 2, 3, 7, 8]
    assert join_columns(frames[2], frames[3], frames[4], 3) == columns([1, 2, 3, 7, 8], 3)
    asked = Generate(1, SPECS, n=2, logprobs=True, top_logprobs=3)
    assert [bytes(row.logprobs) for row in read_generated(message, frames, 2, asked)] == [
        columns([1, 2, 3], 3), columns([7, 8], 3)
    ]  # fmt: skip


def test_a_stream_without_credit_gets_them_later() -> None:
    pool = GeneratingPool()
    client = pool.client()
    link = pool.worker(can=CAN)
    pool.submit(client, 1, generate(3, stream=True, credit=1, logprobs=True, top_logprobs=2))
    [task] = pool.tasks()
    pool.step(link, (task, 0, 0, [1], ""), (task, 0, 1, [2, 3], ""), logprobs=True, top=2)
    [one] = pool.do(ev.CreditGiven(0, client, 1, 1))
    assert np.frombuffer(one.frames[2], np.int32).tolist() == [2, 3]


@pytest.mark.parametrize(("asked", "given"), [(2, 0), (0, 2), (2, 3)])
def test_a_worker_that_sends_another_number_of_them_is_lost(asked: int, given: int) -> None:
    pool = GeneratingPool()
    client = pool.client()
    link = pool.worker(can=CAN)
    pool.submit(client, 1, generate(3, logprobs=True, top_logprobs=asked))
    pool.step(link, (pool.tasks()[0], 0, 0, [1], ""), logprobs=True, top=given)
    assert not pool.machine.core.worker_links


TOP = [FrameSpec("top_ids", "int32", (1, 2)), FrameSpec("top_logprobs", "float32", (1, 2))]
PROMPT = [FrameSpec("prompt_logprobs", "float32", (3,)), FrameSpec("prompt_top_ids", "int32", (3, 2))]
PROMPT.append(FrameSpec("prompt_top_logprobs", "float32", (3, 2)))


@pytest.mark.parametrize(
    ("specs", "prompts"),
    [
        (TOP[:1], []),
        ([TOP[0], FrameSpec("top_logprobs", "float32", (1, 3))], []),
        ([FrameSpec("top_ids", "float32", (1, 2)), TOP[1]], []),
        ([FrameSpec("top_ids", "int32", (2, 1)), FrameSpec("top_logprobs", "float32", (2, 1))], []),
        ([*TOP, FrameSpec("prompt_logprobs", "float32", (3,))], []),
        (TOP, [(1, 3)]),
        ([*TOP, FrameSpec("prompt_logprobs", "float32", (0,))], [(1, 0)]),
        ([*TOP, FrameSpec("prompt_logprobs", "float32", (2,))], [(1, 3), (1, -1)]),
        ([*TOP, *PROMPT[:1]], [(1, 3)]),
        ([*TOP, *PROMPT[:2]], [(1, 3)]),
        ([*TOP, *PROMPT], [(1, 2)]),
        (PROMPT, [(1, 3)]),
        ([*TOP, *PROMPT], []),
    ],
)
def test_frames_that_do_not_fit_are_malformed(specs: list[FrameSpec], prompts: list[tuple[int, int]]) -> None:
    all_specs = [FrameSpec("tokens", "int32", (1,)), FrameSpec("logprobs", "float32", (1,)), *specs]
    frames = [bytes(4 * int(np.prod(spec.shape))) for spec in all_specs]
    message = GenerationProgress(EPOCH, 0, [Step(1, 0, 0, 1)], all_specs, prompts=prompts)
    assert isinstance(worker_event(0.0, b"w", [encode_header(message), *frames]), ev.WorkerBroken)
    with pytest.raises(WireError):
        check_tokens(Tokens([], all_specs, prompts=[(1, *prompt) for prompt in prompts]))


def test_an_id_outside_the_vocabulary_among_them_shows_that_the_worker_is_broken() -> None:
    specs = [FrameSpec("tokens", "int32", (1,)), FrameSpec("logprobs", "float32", (1,)), *TOP]
    frames = [b"\1\0\0\0", bytes(4), np.array([5, -1], np.int32).tobytes(), bytes(8)]
    read = worker_event(0.0, b"w", [encode_header(GenerationProgress(EPOCH, 0, [Step(1, 0, 0, 1)], specs)), *frames])
    assert isinstance(read, ev.TokensGenerated) and (read.top, read.largest) == (2, 2**32 - 1)
    assert [bytes(part) for part in split_columns(read.logprobs, 2)] == frames[1:]


# --- prompts ------------------------------------------------------------------------------------------------------------


def test_a_prompt_is_asked_for_once_for_all_its_samples_and_the_answer_has_it_once() -> None:
    pool = GeneratingPool()
    client = pool.client()
    link = pool.worker(can=msgspec.structs.replace(CAN, inflight_rows=2, batch_rows=2))
    pool.submit(client, 1, generate(3, n=3, prompt_logprobs=True))
    first = pool.tasks()[0]
    assert (start(first).n, start(first).prompt_logprobs) == (2, 3)
    pool.step(link, (first, 0, 0, [1], "stop"), (first, 1, 0, [1], "stop"), prompts=[(first, OF_PROMPT)])
    second = pool.tasks()[1]
    assert (start(second).n, start(second).prompt_logprobs) == (1, 0)
    message, frames = answered(pool.step(link, (second, 0, 0, [1], "stop")))
    assert message.prompts == [(0, 3)]
    np.testing.assert_array_equal(np.frombuffer(frames[-1], np.float32), np.array(OF_PROMPT, np.float32))
    found = read_prompts(message, frames, Generate(1, SPECS, n=3, prompt_logprobs=True))
    assert {number: bytes(data) for number, data in found.items()} == {0: frames[-1]}


def test_another_worker_is_asked_only_for_a_prompt_of_which_nothing_is_known() -> None:
    pool = GeneratingPool()
    client = pool.client()
    link = pool.worker("a", can=CAN)
    pool.submit(client, 1, generate(3, 3, prompt_logprobs=True))
    one, _ = pool.tasks()
    pool.step(link, (one, 0, 0, [1], ""), prompts=[(one, OF_PROMPT)])
    pool.do(ev.WorkerBroken(0, link, "it broke"))
    link = pool.worker("b", can=CAN)
    again = pool.tasks()[2:]
    assert [(start(task).at, start(task).prompt_logprobs) for task in again] == [(1, 0), (0, 3)]
    sent = pool.step(link, (again[0], 0, 1, [2], "stop"), (again[1], 0, 0, [5], "stop"), prompts=[(again[1], OF_PROMPT)])
    assert answered(sent)[0].prompts == [(0, 3), (1, 3)]


class UpdatedPool(GeneratingPool, UpdatePool):
    """Its workers generate, and take weights."""


@pytest.mark.parametrize("sampling", [{"regex": "a+"}, {"stop": ["x"]}, {"repetition_penalty": 1.1}])
def test_a_prompt_whose_samples_all_begin_again_is_asked_for_again_because_its_weights_may_be_later_ones(
    sampling: dict[str, Any],
) -> None:
    pool = UpdatedPool()
    client, link, trainer = pool.client(), pool.worker("w", can=CAN), Trainer(pool)
    pool.submit(client, 1, generate(3, n=2, prompt_logprobs=True, **sampling))
    [task] = pool.tasks()
    pool.step(link, (task, 0, 0, [7], ""), (task, 1, 0, [7], ""), prompts=[(task, OF_PROMPT)])
    pool.publish(trainer, 1, [link], in_flight="abort")
    [again] = pool.tasks(pool.written())
    assert (start(again).at, start(again).n, start(again).prompt_logprobs) == (0, 2, 3)
    later = [float("nan"), -3.0, -4.0]
    steps = (again, 0, 0, [8], "stop"), (again, 1, 0, [8], "stop")
    message, frames = answered(pool.step(link, *steps, version=1, prompts=[(again, later)]))
    assert (message.spans, message.prompts) == ([[(1, 1)], [(1, 1)]], [(0, 3)])
    np.testing.assert_array_equal(np.frombuffer(frames[-1], np.float32), np.array(later, np.float32))


def test_a_prompt_of_which_one_sample_has_ended_is_not_asked_for_again() -> None:
    pool = UpdatedPool()
    client, link, trainer = pool.client(), pool.worker("w", can=CAN), Trainer(pool)
    pool.submit(client, 1, generate(3, n=2, prompt_logprobs=True, stop=["x"]))
    [task] = pool.tasks()
    pool.step(link, (task, 0, 0, [7], "stop"), (task, 1, 0, [7], ""), prompts=[(task, OF_PROMPT)])
    pool.publish(trainer, 1, [link], in_flight="abort")
    [again] = pool.tasks(pool.written())
    assert (start(again).at, start(again).prompt_logprobs) == (0, 0)
    assert answered(pool.step(link, (again, 0, 0, [8], "stop"), version=1))[0].prompts == [(0, 3)]


@pytest.mark.parametrize("top", [0, 2])
def test_a_stream_gets_them_with_its_first_tokens_and_again_on_a_new_link(top: int) -> None:
    pool = GeneratingPool()
    client = pool.client(b"link", client=b"c")
    link = pool.worker(can=CAN)
    asked = generate(3, stream=True, logprobs=top > 0, top_logprobs=top, prompt_logprobs=True)
    pool.submit(client, 1, asked)
    [task] = pool.tasks()
    data = prompt_columns(OF_PROMPT, top)
    given: dict[str, Any] = {"logprobs": top > 0, "top": top}
    assert of_prompts(pool.step(link, (task, 0, 0, [1], ""), prompts=[(task, OF_PROMPT)], **given)) == [([(1, 0, 3)], data)]
    assert of_prompts(pool.step(link, (task, 0, 1, [1], ""), **given)) == []
    client = pool.client(b"again", client=b"c", incarnation=1)
    assert of_prompts(pool.submit(client, 1, asked)) == [([(1, 0, 3)], data)]


@pytest.mark.parametrize(
    ("wanted", "given", "asked", "top"), [(True, OF_PROMPT[:2], 2, 2), (False, OF_PROMPT, 2, 2), (True, OF_PROMPT, 0, 2)]
)
def test_a_worker_that_sends_other_ones_than_were_asked_for_is_lost(
    wanted: bool, given: list[float], asked: int, top: int
) -> None:
    pool = GeneratingPool()
    client = pool.client()
    link = pool.worker(can=CAN)
    pool.submit(client, 1, generate(3, logprobs=asked > 0, top_logprobs=asked, prompt_logprobs=wanted))
    [task] = pool.tasks()
    pool.step(link, (task, 0, 0, [1], ""), logprobs=True, top=top, prompts=[(task, given)])
    assert not pool.machine.core.worker_links


def test_an_id_outside_the_vocabulary_in_the_place_of_a_token_of_a_prompt_shows_that_the_worker_is_broken() -> None:
    pool = GeneratingPool()
    client = pool.client()
    link = pool.worker(can=CAN)
    pool.submit(client, 1, generate(3, logprobs=True, top_logprobs=1, prompt_logprobs=True))
    [task] = pool.tasks()
    data = join_columns(bytes(12), np.array([-1, CAN.vocab, 0], np.int32).tobytes(), bytes(12), 1)
    said, none = [(start(task).task[1], 3)], memoryview(b"")
    pool.do(ev.TokensGenerated(0, link, EPOCH, 0, [], none, none, top=1, prompts=said, prompt_columns=data))
    assert not pool.machine.core.worker_links


def test_one_that_is_nan_after_the_first_is_an_error_of_the_engine() -> None:
    pool = GeneratingPool()
    client = pool.client()
    link = pool.worker(can=CAN)
    pool.submit(client, 1, generate(3, prompt_logprobs=True))
    [task] = pool.tasks()
    sent = pool.step(link, (task, 0, 0, [1], "stop"), prompts=[(task, [float("nan"), -1.0, float("nan")])])
    assert failures(sent)[1].code == "engine_error" and pool.machine.core.worker_links


def test_what_was_taken_back_meanwhile_is_ignored() -> None:
    pool = GeneratingPool()
    client = pool.client()
    link = pool.worker(can=CAN)
    pool.submit(client, 1, generate(3, prompt_logprobs=True))
    [task] = pool.tasks()
    pool.do(ev.CancelAsked(0, client, 1))
    pool.step(link, (task, 0, 0, [1], ""), prompts=[(task, OF_PROMPT)])
    assert pool.machine.core.worker_links


@pytest.mark.parametrize(("has", "known", "expected"), [(2, True, -1.0), (2, False, -2.0), (0, True, -2.0)])
def test_a_prompt_of_which_tokens_are_handed_in_keeps_what_is_known_of_it(has: int, known: bool, expected: float) -> None:
    """By the weights of the first token: those that go on may be later ones."""
    asked = Generate(1, SPECS, n=2, prompt_logprobs=True)
    specs = [FrameSpec("output", "int32", (3,)), FrameSpec("output_lengths", "uint32", (2,))]
    specs.append(FrameSpec("prompt_logprobs", "float32", (3,)))
    ends, spans = [SequenceEnd(0, "length"), SequenceEnd(1, "stop")], [[(2, 3)], []]
    message = Generated(
        1, 2, GenerationUsage(2, 3, 3 + has), Timings(0, 0), ends, spans, specs, [0, has], prompts=[(0, 3)],
    )  # fmt: skip
    frames = [bytes(12), np.array([3, 0], np.uint32).tobytes(), np.array([np.nan, -2, -2], np.float32).tobytes()]
    samples = [Generation(np.zeros(count, np.int32), None, "stop", None, ((1, count),) if count else ()) for count in (0, has)]
    before = np.array([np.nan, -1, -1], np.float32) if known else None
    found = read_generations(asked, Continued(samples, [(before, None, None)]), message, frames).prompt_logprobs
    assert found is not None and found[0] is not None and found[0][1:].tolist() == [expected] * 2
