"""Routed experts of sequences: what is refused and charged, and where they go."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from enginepool.client.generate import GenerateCalls
from enginepool.client.generations import Continued, Generation, read_generations
from enginepool.coordinator.core import events as ev
from enginepool.coordinator.fleet.checks import impossible
from enginepool.coordinator.operations.generate import GENERATE
from enginepool.coordinator.requests.fitting import refusal as refusal_of
from enginepool.coordinator.requests.memory import UNKNOWN_EXPERTS, charge
from enginepool.coordinator.shell.decode import worker_event
from enginepool.errors import BadRequest
from enginepool.protocol.errors import WireError
from enginepool.protocol.frames import encode_header
from enginepool.protocol.generated import read_generated
from enginepool.protocol.messages import (
    FrameSpec,
    Generate,
    Generated,
    GenerationProgress,
    Medium,
    Sampling,
    SequenceEnd,
    StartGeneration,
    Step,
)
from enginepool.workers.engine import Emit, GenerationTask, NewTokens
from tests.core.generations import CAN, GeneratingPool, generate, routes
from tests.core.machines import EPOCH, Sent, failures
from tests.core.test_generation_runner import Worker

SHAPE = (2, 3)
EXPERTS = msgspec.structs.replace(CAN, experts=SHAPE)


def asked(n: int = 1) -> Generate:
    specs = [FrameSpec("items", "int32", (3,)), FrameSpec("item_lengths", "uint32", (1,))]
    return Generate(1, specs, n=n, sampling=Sampling(max_new_tokens=8), routed_experts=True)


class ExpertPool(GeneratingPool):
    """A pool with one request for routed experts, of a prompt of 3 tokens."""

    def __init__(self, **fields: Any) -> None:
        super().__init__()
        self.caller = self.client()
        self.link = self.worker(can=EXPERTS)
        self.submit(self.caller, 1, generate(3, routed_experts=True, **fields))
        self.task = self.tasks()[0]

    def ended(self, *rows: int, shape: tuple[int, int] = SHAPE, reason: str = "stop") -> list[Sent]:
        """Each of its sequences ends with two tokens, with the experts of so many of all tokens."""
        steps = [(self.task, i, 0, [i, i], reason) for i in range(len(rows))]
        return self.step(self.link, *steps, experts=[(self.task, i, n) for i, n in enumerate(rows) if n], expert_shape=shape)


def answered(sent: list[Sent]) -> Sent:
    [one] = [one for one in sent if isinstance(one.message, Generated)]
    return one


def experts_of(sent: list[Sent], n: int = 1, before: Sequence[Generation] = ()) -> list[Any]:
    one = answered(sent)
    assert isinstance(one.message, Generated)
    return [sample.routed_experts for sample in read_generations(asked(n), Continued(before), one.message, one.frames)[0]]


# --- what is refused, and what it costs ---------------------------------------------------------------------------------


def test_they_are_refused_where_the_workers_have_none_with_the_option_that_is_missing() -> None:
    wrong = refusal_of(generate(routed_experts=True), CAN)
    assert isinstance(wrong, WireError) and (wrong.code, wrong.field) == ("bad_request", "routed_experts")
    assert "enable_return_routed_experts" in wrong.message and wrong.limit == ""
    assert refusal_of(generate(routed_experts=True), EXPERTS) is None


def test_a_stream_has_none() -> None:
    with pytest.raises(WireError, match="routed_experts: given with stream"):
        generate(routed_experts=True, stream=True)
    with pytest.raises(BadRequest, match="not for a stream"):
        GenerateCalls.stream(object(), [1], routed_experts=True)  # pyright: ignore[reportArgumentType]


def test_prompts_with_media_have_none() -> None:
    message = Generate(1, asked().frames, media=[Medium(0, "image")], routed_experts=True)
    specs, frames = [FrameSpec("media", "uint8", (1,)), FrameSpec("media_lengths", "uint32", (1,))], [b"x", b"\1\0\0\0"]
    message.frames = [*message.frames, *specs]
    with pytest.raises(WireError, match="routed_experts: given with media"):
        GENERATE.open(message, [np.arange(3, dtype=np.int32).tobytes(), b"\3\0\0\0", *frames])


def test_their_bytes_are_charged_before_the_request_is_taken() -> None:
    plain, with_them = generate(3, 4, n=2), generate(3, 4, n=2, routed_experts=True)
    for can, size in ((EXPERTS, 6), (None, UNKNOWN_EXPERTS)):
        (answer, held), (larger, both) = charge(plain, can), charge(with_them, can)
        more = 2 * size * (2 * 7 + 4 * 8)
        assert (larger - answer, both - held) == (more, 2 * more)
    assert with_them.operation.knows_outputs(with_them, EXPERTS) and not with_them.operation.knows_outputs(with_them, None)
    assert with_them.digest != plain.digest


@pytest.mark.parametrize("shape", [(0, 2), (2, 0), (-1, -1), (1 << 17, 1)])
def test_a_worker_with_an_impossible_shape_is_refused(shape: tuple[int, int]) -> None:
    assert "impossible" in impossible(msgspec.structs.replace(CAN, experts=shape))


# --- where they go ------------------------------------------------------------------------------------------------------


def test_the_answer_has_those_of_each_sequence() -> None:
    pool = ExpertPool(n=2)
    assert isinstance(pool.task.message, StartGeneration) and pool.task.message.routed_experts
    for found in experts_of(pool.ended(4, 4), n=2):
        assert found.dtype == np.int16 and found.shape == (4, *SHAPE) and found.tobytes() == routes(4, SHAPE)


def test_an_interrupted_sequence_has_none() -> None:
    pool = ExpertPool(n=2, partial=True)
    pool.step(pool.link, (pool.task, 0, 0, [1, 2], "stop"), experts=[(pool.task, 0, 4)], expert_shape=SHAPE)
    pool.step(pool.link, (pool.task, 1, 0, [1], ""))
    one = answered(pool.do(ev.WorkerBroken(0, pool.link, "it is gone")))
    assert isinstance(one.message, Generated) and one.message.experts == [4, 0]
    message = msgspec.structs.replace(asked(2), partial=True)
    first, second = read_generations(message, Continued(), one.message, one.frames)[0]
    assert first.routed_experts is not None and first.routed_experts.shape == (4, *SHAPE) and second.routed_experts is None


def test_those_of_a_message_that_is_refused_are_dropped() -> None:
    pool = ExpertPool(partial=True)
    pool.step(pool.link, (pool.task, 0, 0, [1], ""))
    wrong = (pool.task, 0, 2, [2], "stop")  # at position 2, and it has one token
    one = answered(pool.step(pool.link, wrong, experts=[(pool.task, 0, 4)], expert_shape=SHAPE))
    assert isinstance(one.message, Generated) and one.message.experts == [0]


def test_a_sequence_that_goes_on_elsewhere_has_those_of_its_last_engine() -> None:
    pool = ExpertPool()
    pool.step(pool.link, (pool.task, 0, 0, [1, 2], ""))
    second = pool.worker("w2", can=EXPERTS)
    pool.do(ev.WorkerBroken(0, pool.link, "it is gone"))
    task = pool.tasks()[-1]
    assert task.link == second
    [found] = experts_of(pool.step(second, (task, 0, 2, [3], "stop"), experts=[(task, 0, 5)], expert_shape=SHAPE))
    assert found.tobytes() == routes(5, SHAPE)


def test_those_of_a_call_that_is_continued_are_of_the_whole_sequence_or_stay() -> None:
    known = np.zeros((4, *SHAPE), np.int16)
    before = Generation(np.array([1, 2], np.int32), None, "length", None, ((0, 2),), routed_experts=known)
    pool = ExpertPool(output=[[1, 2]])
    sent = pool.step(pool.link, (pool.task, 0, 2, [3], "stop"), experts=[(pool.task, 0, 5)], expert_shape=SHAPE)
    assert experts_of(sent, before=[before])[0].tobytes() == routes(5, SHAPE)
    pool = GeneratingPool()
    client = pool.client()
    pool.worker(can=EXPERTS)
    from_call = generate(3, routed_experts=True, output=[[1, 2]], ended=[SequenceEnd(0, "length")])
    assert experts_of(pool.submit(client, 1, from_call), before=[before]) == [known]


# --- wrong ones ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "shape"), [(0, SHAPE), (3, SHAPE), (5, SHAPE), (4, (2, 2)), (4, (1, 3))], ids=str)
def test_a_worker_that_sends_others_than_asked_for_is_lost(rows: int, shape: tuple[int, int]) -> None:
    pool = ExpertPool()
    pool.ended(rows, shape=shape)
    assert not pool.machine.core.worker_links


def test_a_worker_that_sends_some_that_were_not_asked_for_is_lost() -> None:
    pool = GeneratingPool()
    client = pool.client()
    link = pool.worker(can=EXPERTS)
    pool.submit(client, 1, generate(3))
    [task] = pool.tasks()
    pool.step(link, (task, 0, 0, [1], "stop"), experts=[(task, 0, 3)], expert_shape=SHAPE)
    assert not pool.machine.core.worker_links


def test_a_failed_task_needs_none() -> None:
    pool = ExpertPool()
    assert failures(pool.step(pool.link, (pool.task, 0, 0, [], "error")))[1].code == "engine_error"


@pytest.mark.parametrize(
    ("experts", "spec"),
    [
        ([(1, 0, 2)], None),
        ([], FrameSpec("routed_experts", "int16", (4, 3))),
        ([(1, 0, 2)], FrameSpec("routed_experts", "int16", (5, 3))),
        ([(1, 0, 2)], FrameSpec("routed_experts", "int16", (0, 3))),
        ([(1, 0, 2)], FrameSpec("routed_experts", "int16", (4, 0))),
        ([(1, 0, 2)], FrameSpec("routed_experts", "int32", (4, 3))),
        ([(1, 0, 2)], FrameSpec("routed_experts", "int16", (4,))),
        ([(1, 0, 0)], FrameSpec("routed_experts", "int16", (0, 3))),
        ([(1, 0, 3), (1, 1, -1)], FrameSpec("routed_experts", "int16", (4, 3))),
    ],
)
def test_frames_that_do_not_fit_are_malformed(experts: list[tuple[int, int, int]], spec: FrameSpec | None) -> None:
    specs = [FrameSpec("tokens", "int32", (1,)), *([] if spec is None else [spec])]
    frames = [bytes((2 if one.dtype == "int16" else 4) * int(np.prod(one.shape))) for one in specs]
    message = GenerationProgress(EPOCH, 0, [Step(1, 0, 0, 1, "stop")], specs, experts=experts)
    assert isinstance(worker_event(0.0, b"w", [encode_header(message), *frames]), ev.WorkerBroken)


@pytest.mark.parametrize(
    ("experts", "shape"), [([4], (8, 3)), ([4, 4], (15, 3)), ([-1, 5], (8, 3)), ([4, 4], (16, 0)), ([], (16, 3))]
)
def test_an_answer_that_does_not_fit_is_malformed(experts: list[int], shape: tuple[int, int]) -> None:
    one = answered(ExpertPool(n=2).ended(4, 4))
    assert isinstance(one.message, Generated)
    specs = [*one.message.frames[:-1], FrameSpec("routed_experts", "int16", shape)]
    frames = [*one.frames[:-1], bytes(2 * shape[0] * shape[1])]
    with pytest.raises(WireError):
        read_generated(msgspec.structs.replace(one.message, frames=specs, experts=experts), frames, 2, asked(2))


# --- workers ------------------------------------------------------------------------------------------------------------


def test_a_worker_sends_them_with_the_end_of_their_sequence() -> None:
    values = np.arange(4 * 6, dtype=np.int16).reshape(4, *SHAPE)

    async def plan(task: GenerationTask, emit: Emit) -> None:
        assert task.routed_experts
        emit(NewTokens(0, [1], cached=0, prompt_logprobs=[0.5]))
        emit(NewTokens(0, [2], reason="stop", routed_experts=values))

    async def main() -> Worker:
        worker = Worker(plan)
        worker.start(4, routed_experts=True, prompt_logprobs=1)
        await worker.until_left()
        return worker

    [event] = asyncio.run(main()).steps
    message = GenerationProgress(EPOCH, 4, event.steps, event.specs, event.cached, event.prompts, event.lengths, event.experts)
    read = worker_event(0.0, b"w", [encode_header(message), *event.frames])
    assert isinstance(read, ev.TokensGenerated)
    assert (read.experts, read.expert_shape, bytes(read.routed_experts)) == ([(4, 0, 4)], SHAPE, values.tobytes())
    assert np.frombuffer(read.prompt_columns, np.float32).tolist() == [0.5]


def test_many_sequences_that_end_together_are_no_long_stop() -> None:
    """What is looked at of a message grows with its sequences, not with their square."""
    looked = 0

    class Steps(list[Step]):
        def __iter__(self) -> Iterator[Step]:
            nonlocal looked
            for step in super().__iter__():
                looked += 1
                yield step

    pool, n = GeneratingPool(), 64
    link = pool.worker(can=msgspec.structs.replace(EXPERTS, inflight_rows=n, inflight_tokens=4096))
    pool.submit(pool.client(), 1, generate(3, n=n, routed_experts=True))
    [task] = pool.tasks()
    rows = [(task, i, 3) for i in range(n)]
    event = pool.progress(link, *((task, i, 0, [i], "stop") for i in range(n)), experts=rows, expert_shape=SHAPE)
    event.steps = Steps(event.steps)
    assert len(experts_of(pool.do(event), n)) == n
    assert looked <= 4 * n
