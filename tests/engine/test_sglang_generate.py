"""Generation on the real engine: its tokens and log-probabilities are those of a direct computation."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from enginepool.protocol.messages import Sampling
from enginepool.workers.engine import EngineError, GenerationTask, NewTokens
from tests.engine.hosted import HostedEngine
from tests.engine.reference import Models, Reference
from tests.engine.test_sglang_scores import declared

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
VOCAB = 512
PROMPTS = ([5, 17, 300], [8], [*range(40, 90)], [11, 12, 13, 14, 15, 16, 17])


@pytest.fixture(scope="module")
def generating(models: Models) -> Iterator[HostedEngine]:
    """One engine for all tests. A random model would fill JSON with spaces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        engine = HostedEngine(
            str(models.causal), operations=("generate",), options={"constrained_json_disable_any_whitespace": True}
        )
        yield engine.wait_until_started()
        engine.end()


def task(prompt: Sequence[int] = PROMPTS[0], n: int = 1, logprobs: bool = False, **sampling: Any) -> GenerationTask:
    """A task that is greedy unless it says otherwise."""
    wanted: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 12} | sampling
    return GenerationTask(np.array(prompt, np.int32), Sampling(**wanted), n, logprobs)


class Continued:
    """All that was emitted of one sequence."""

    def __init__(self, emitted: list[NewTokens]) -> None:
        self.tokens = [token for new in emitted for token in new.tokens]
        self.logprobs = [logprob for new in emitted for logprob in new.logprobs]
        self.chunks = [len(new.tokens) for new in emitted]
        assert [new.reason for new in emitted[:-1]] == [""] * (len(emitted) - 1)
        self.reason, self.matched = emitted[-1].reason, emitted[-1].matched


def run(engine: HostedEngine, *tasks: GenerationTask) -> list[list[Continued]]:
    """The sequences of each task, all of them at once."""
    found: list[list[Continued]] = []
    for asked, emitted in zip(tasks, engine.call("generate", tasks), strict=True):
        assert not isinstance(emitted, Exception), emitted
        found.append([Continued([new for new in emitted if new.sequence == i]) for i in range(asked.n)])
    return found


def one(engine: HostedEngine, asked: GenerationTask) -> Continued:
    [[sequence]] = run(engine, asked)
    return sequence


def refusal(engine: HostedEngine, asked: GenerationTask) -> str:
    [error] = engine.call("generate", (asked,))
    assert isinstance(error, EngineError), error
    assert "\n" not in str(error)
    return str(error)


def assert_greedy(reference: Reference, prompt: Sequence[int], found: Continued) -> None:
    """These are the tokens of the largest logits, one after the other, with their log-probabilities."""
    tokens, logprobs = reference.greedy(list(prompt), len(found.tokens))
    assert found.tokens == tokens
    if found.logprobs:
        np.testing.assert_allclose(found.logprobs, logprobs, rtol=1e-4, atol=1e-5)


@pytest.mark.every_version
def test_an_engine_that_generates_says_what_it_runs_at_once(generating: HostedEngine) -> None:
    can = declared(generating)
    assert (can.kind, can.operations, can.pace) == ("causal", ("generate",), 0)
    assert set(can.features) == {"grammar", "stop_text"}
    assert (can.inflight_rows, can.inflight_tokens) == (64, 8192)
    assert can.context + can.reserved == 4096
    # Neither less than asked for, nor refused.
    longest = one(generating, task([7] * (can.context - 1), max_new_tokens=1))
    assert (len(longest.tokens), longest.reason) == (1, "length")
    short = one(generating, task([7], max_new_tokens=can.context - 1, ignore_eos=True))
    assert (len(short.tokens), short.reason) == (can.context - 1, "length")
    assert re.search(f"{can.context} together", refusal(generating, task([7] * can.context, max_new_tokens=1)))


@pytest.mark.every_version
@pytest.mark.parametrize("n", [1, 2])
def test_greedy_tokens_and_logprobs_equal_a_direct_computation(generating: HostedEngine, reference: Reference, n: int) -> None:
    tasks = [task(prompt, n, logprobs=True, ignore_eos=True, max_new_tokens=24) for prompt in PROMPTS]
    for prompt, sequences in zip(PROMPTS, run(generating, *tasks), strict=True):
        for sequence in sequences:
            assert sequence.reason == "length"
            assert sequence.chunks == [1] * 24  # as they come, one for each step
            assert_greedy(reference, prompt, sequence)
