"""A pool whose workers generate, driven by hand."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.operations.generate import GENERATE, GenerateWork
from enginepool.protocol.columns import join_columns
from enginepool.protocol.messages import (
    Capabilities,
    FrameSpec,
    Generate,
    Generated,
    Sampling,
    SequenceEnd,
    StartGeneration,
    Step,
    StopGeneration,
    Tokens,
)
from tests.core.machines import EPOCH, Pool, Sent

#: 8 slots, and room for 200 tokens
CAN = Capabilities(
    "causal", 1000, 100, batch_tokens=200, batch_rows=8, inflight_tokens=200, inflight_rows=8, operations=("generate",),
    features=("grammar", "stop_text"),
)  # fmt: skip


def generate(
    *lengths: int,
    n: int = 1,
    output: list[list[int]] | None = None,
    ended: list[SequenceEnd] | None = None,
    stream: bool = False,
    credit: int = 1024,
    logprobs: bool = False,
    top_logprobs: int = 0,
    prompt_logprobs: bool = False,
    partial: bool = False,
    adapter: str = "",
    hidden_states: bool = False,
    routed_experts: bool = False,
    **sampling: Any,
) -> GenerateWork:
    """A request with prompts of these lengths: prompt i has the ids 10 i, 10 i + 1, …"""
    prompts = [np.arange(length, dtype=np.int32) + 10 * i for i, length in enumerate(lengths or (3,))]
    specs = [
        FrameSpec("items", "int32", (sum(map(len, prompts)),)),
        FrameSpec("item_lengths", "uint32", (len(prompts),)),
    ]
    frames = [np.concatenate(prompts).tobytes(), np.array([len(p) for p in prompts], np.uint32).tobytes()]
    if output is not None:
        flat = np.array([token for row in output for token in row], np.int32)
        specs += [FrameSpec("output", "int32", (len(flat),)), FrameSpec("output_lengths", "uint32", (len(output),))]
        frames += [flat.tobytes(), np.array([len(row) for row in output], np.uint32).tobytes()]
    message = Generate(
        1,
        specs,
        n=n,
        sampling=msgspec.convert({"max_new_tokens": 8, **sampling}, Sampling),
        stream=stream,
        credit=credit,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        prompt_logprobs=prompt_logprobs,
        partial=partial,
        ended=ended or [],
        adapter=adapter,
        hidden_states=hidden_states,
        routed_experts=routed_experts,
    )
    return GENERATE.open(message, frames)


class GeneratingPool(Pool):
    """What its workers are asked, and what they answer."""

    def tasks(self, sent: list[Sent] | None = None) -> list[Sent]:
        return [one for one in (self.sent if sent is None else sent) if isinstance(one.message, StartGeneration)]

    def stopped(self) -> list[tuple[bytes, list[int]]]:
        return [(one.link, one.message.tasks) for one in self.sent if isinstance(one.message, StopGeneration)]

    def step(self, link: bytes, *steps: tuple[Sent, int, int, list[int], str], **more: Any) -> list[Sent]:
        """The worker on `link` generated, as in `progress`."""
        return self.do(self.progress(link, *steps, **more))

    def progress(
        self,
        link: bytes,
        *steps: tuple[Sent, int, int, list[int], str],
        version: int = 0,
        logprobs: bool = False,
        cached: Sequence[tuple[int, int]] = (),
        top: int = 0,
        prompts: Sequence[tuple[Sent, Sequence[float]]] = (),
        lengths: Sequence[tuple[int, int]] = (),
        hidden: int = 0,
        experts: Sequence[tuple[Sent, int, int]] = (),
        expert_shape: tuple[int, int] = (0, 0),
    ) -> ev.TokensGenerated:
        """What a worker says that generated: for each of (task, sequence, position, tokens, reason) a step.
        `cached`: (number of a step, tokens): so many of the prompt of its task were in the engine's cache.
        `prompts`: the log-probabilities of prompts of tasks. `lengths`: (number of a step, tokens of its prompt).
        `hidden`: the size of hidden states. `experts`: (task, sequence, tokens) of routed experts, 0, 1, … of each."""
        made: list[Step] = []
        flat: list[int] = []
        for task, sequence, at, tokens, reason in steps:
            assert isinstance(task.message, StartGeneration)
            made.append(Step(task.message.task[1], sequence, at, len(tokens), reason))  # pyright: ignore[reportArgumentType]
            flat += tokens
        tokens_ = memoryview(np.array(flat, np.int32).tobytes())
        chances = memoryview(columns(flat, top) if logprobs else b"")
        had = [(made[place].task, count) for place, count in cached]
        longer = [(made[place].task, count) for place, count in lengths]
        sent: list[tuple[int, int]] = []
        for task, values in prompts:
            assert isinstance(task.message, StartGeneration)
            sent.append((task.message.task[1], len(values)))
        data = b"".join(prompt_columns(values, top) for _, values in prompts)
        event = ev.TokensGenerated(0, link, EPOCH, version, made, tokens_, chances, -1, had, top, sent, data, longer)
        event.hidden_states, event.hidden = memoryview(states(flat, hidden)), hidden
        for task, sequence, rows in experts:
            assert isinstance(task.message, StartGeneration)
            event.experts = [*event.experts, (task.message.task[1], sequence, rows)]
            event.routed_experts = b"".join((event.routed_experts, routes(rows, expert_shape)))
        event.expert_shape = expert_shape
        return event


def columns(tokens: Sequence[int], top: int = 0) -> bytes:
    """What these tokens have besides their ids: a token t has the logprob −t, and the most probable ones in its place are
    t, t + 1, … with the logprobs −t, −t − 1, …"""
    ids = np.array(tokens, np.int32).reshape(-1, 1) + np.arange(top, dtype=np.int32)
    values = (-ids).astype(np.float32)
    return join_columns((-np.array(tokens, np.float32)).tobytes(), ids.tobytes(), values.tobytes(), top)


def states(tokens: Sequence[int], hidden: int) -> bytes:
    """The hidden states from which these tokens are chosen: of a token t they are t, t, …"""
    return np.repeat(np.array(tokens, np.float32), hidden).tobytes()


def routes(rows: int, shape: tuple[int, int]) -> bytes:
    """Routed experts of so many tokens: 0, 1, …"""
    return np.arange(rows * shape[0] * shape[1], dtype=np.int16).tobytes()


def prompt_columns(logprobs: Sequence[float], top: int = 0) -> bytes:
    """What the tokens of a prompt have: these log-probabilities, and the most probable ones in their place are 0, 1, …"""
    ids = np.tile(np.arange(top, dtype=np.int32), (len(logprobs), 1))
    ids[:1] = -1
    values = np.array(logprobs, np.float32)
    return join_columns(values.tobytes(), ids.tobytes(), np.repeat(values, top).tobytes(), top)


def streamed(sent: list[Sent]) -> list[tuple[int, int, int, int, list[int]]]:
    """(request, sequence, position, version, tokens) of the runs that clients were sent."""
    out: list[tuple[int, int, int, int, list[int]]] = []
    for one in sent:
        if isinstance(one.message, Tokens):
            ids, first = np.frombuffer(one.frames[0], np.int32).tolist(), 0
            for run in one.message.runs:
                out.append((run.id, run.sequence, run.at, run.version, ids[first : first + run.count]))
                first += run.count
    return out


def outputs(sent: list[Sent]) -> dict[int, tuple[Generated, list[list[int]]]]:
    """The final answers: by request, the message and the tokens of each sequence."""
    found: dict[int, tuple[Generated, list[list[int]]]] = {}
    for one in sent:
        if isinstance(one.message, Generated):
            ids, first = np.frombuffer(one.frames[0], np.int32).tolist(), 0
            rows: list[list[int]] = []
            for length in np.frombuffer(one.frames[1], np.uint32).tolist():
                rows.append(ids[first : first + length])
                first += length
            found[one.message.id] = one.message, rows
    return found
