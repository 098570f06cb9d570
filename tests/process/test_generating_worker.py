"""A real worker process that generates, against a bare ROUTER that speaks for the coordinator."""

from typing import Any

import msgspec
import numpy as np

from enginepool.protocol.messages import (
    Drain,
    Exiting,
    FrameSpec,
    GenerationProgress,
    Sampling,
    Stage,
    StartGeneration,
    Step,
    StopGeneration,
)
from enginepool.workers.events import Exit
from enginepool.workers.sim.tokens import expected_output
from tests.process import test_worker_process as bare
from tests.process.test_worker_process import Coordinator, Start

coordinator, start = bare.coordinator, bare.start
EPOCH = 5
#: a step of 20 ms
GENERATES: dict[str, Any] = {"operations": ["generate"], "options": {"forward_s": 0.02, "end_every": 0}}
PROMPT = [1, 2, 3]


def begin(coordinator: Coordinator, counter: int, tokens: int) -> None:
    header = StartGeneration((EPOCH, counter), [FrameSpec("prompt", "int32", (len(PROMPT),))], Sampling(max_new_tokens=tokens))
    coordinator.send(header, np.array(PROMPT, np.int32).tobytes())


class Taken:
    """What the worker generated, by the counters of its tasks."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, Step] = {}

    def next(self) -> GenerationProgress:
        message, frames = self.coordinator.receive()
        while isinstance(message, Stage):
            message, frames = self.coordinator.receive()
        assert isinstance(message, GenerationProgress), message
        flat, first = np.frombuffer(frames[0], np.int32).tolist(), 0
        for step in message.steps:
            mine = self.tokens.setdefault(step.task, [])
            assert step.at == len(mine) and step.task not in self.ends
            mine += flat[first : first + step.count]
            first += step.count
            if step.reason:
                self.ends[step.task] = step
        return message

    def until_ended(self, *counters: int) -> None:
        while not self.ends.keys() >= {*counters}:
            self.next()


def test_all_streams_of_a_step_are_in_one_message(coordinator: Coordinator, start: Start) -> None:
    start(**GENERATES)
    coordinator.accept_until_ready(EPOCH)
    for counter in (1, 2, 3):
        begin(coordinator, counter, 10)
    taken = Taken(coordinator)
    while len(taken.tokens) < 3:
        taken.next()
    message = taken.next()
    assert (message.epoch, message.version, [step.task for step in message.steps]) == (EPOCH, 0, [1, 2, 3])
    taken.until_ended(1, 2, 3)
    expected, _, _ = expected_output(PROMPT, Sampling(max_new_tokens=10), end_every=0)
    assert taken.tokens == {1: expected, 2: expected, 3: expected}
    assert {step.reason for step in taken.ends.values()} == {"length"}


def test_a_stopped_stream_ends_without_an_answer_and_the_others_go_on(coordinator: Coordinator, start: Start) -> None:
    start(**GENERATES)
    coordinator.accept_until_ready(EPOCH)
    begin(coordinator, 1, 1000)
    begin(coordinator, 2, 50)
    taken = Taken(coordinator)
    while len(taken.tokens) < 2:
        taken.next()
    coordinator.send(StopGeneration(EPOCH, [1]))
    begin(coordinator, 3, 10)
    taken.until_ended(2, 3)
    assert 1 not in taken.ends and len(taken.tokens[1]) < len(taken.tokens[2])


def test_a_task_that_cannot_be_read_fails_alone(coordinator: Coordinator, start: Start) -> None:
    start(**GENERATES)
    coordinator.accept_until_ready(EPOCH)
    begin(coordinator, 1, 10)
    unknown = {"type": "start", "task": [EPOCH, 2], "frames": [], "sampling": {"heat": 1}}
    coordinator.send_raw(msgspec.msgpack.encode(unknown))
    coordinator.send(StartGeneration((EPOCH, 3), [FrameSpec("prompt", "int32", (9,))], Sampling()), b"1234")
    taken = Taken(coordinator)
    taken.until_ended(1, 2, 3)
    assert [taken.ends[counter].reason for counter in (1, 2, 3)] == ["length", "error", "error"]
    assert "heat" in str(taken.ends[2].matched)


def test_a_drain_lets_streams_finish(coordinator: Coordinator, start: Start) -> None:
    worker = start(**GENERATES)
    coordinator.accept_until_ready(EPOCH)
    begin(coordinator, 1, 20)
    taken = Taken(coordinator)
    taken.next()
    coordinator.send(Drain())
    taken.until_ended(1)
    assert coordinator.until(Exiting).reason == "drained: the coordinator asked for it"
    assert len(taken.tokens[1]) == 20 and worker.ends() == Exit.DRAINED
