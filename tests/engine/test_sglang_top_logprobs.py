"""Top-k log-probabilities and those of prompts on the real engine: they are those of a direct computation."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from enginepool.protocol.messages import Sampling
from enginepool.workers.engine import EngineError, GenerationTask, NewTokens
from tests.engine.hosted import HostedEngine
from tests.engine.language_models import LanguageModel
from tests.engine.reference import Models

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
PROMPTS = ([5, 17, 300], [8], [*range(40, 90)])
TOP = 5


@pytest.fixture(scope="module")
def generating(models: Models) -> Iterator[HostedEngine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        engine = HostedEngine(str(models.causal), operations=("generate",), options={"context_length": 256})
        yield engine.wait_until_started()
        engine.end()


@pytest.fixture(scope="module")
def direct(models: Models) -> LanguageModel:
    return LanguageModel(models.causal)


def task(prompt: Sequence[int], n: int = 1, *, top: int = 0, of_prompt: int = 0, **sampling: Any) -> GenerationTask:
    wanted: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True} | sampling
    return GenerationTask(
        np.array(prompt, np.int32), Sampling(**wanted), n, logprobs=top > 0, top_logprobs=top, prompt_logprobs=of_prompt
    )


def run(engine: HostedEngine, *tasks: GenerationTask) -> list[list[NewTokens]]:
    found: list[list[NewTokens]] = []
    for emitted in engine.call("generate", tasks):
        assert not isinstance(emitted, Exception), emitted
        found.append(emitted)
    return found


def refusal(engine: HostedEngine, asked: GenerationTask) -> str:
    [error] = engine.call("generate", (asked,))
    assert isinstance(error, EngineError), error
    return str(error)


def scaled(row: np.ndarray[Any, Any], temperature: float) -> np.ndarray[Any, Any]:
    """Log-probabilities at this temperature, of those at 1."""
    logits = row / temperature
    return logits - np.logaddexp.reduce(logits)


@pytest.mark.every_version
@pytest.mark.parametrize(
    ("sampling", "temperature"),
    [
        ({}, 1.0),
        ({"temperature": 0.5, "sampling_seed": 7}, 0.5),
        ({"temperature": 2.0, "top_k": 2, "top_p": 0.5}, 2.0),
        ({"logit_bias": {"7": 3.0}}, 1.0),
    ],
)
def test_the_most_probable_tokens_are_those_at_the_temperature_before_others_are_taken_away(
    generating: HostedEngine, direct: LanguageModel, sampling: dict[str, Any], temperature: float
) -> None:
    for prompt, emitted in zip(PROMPTS, run(generating, *(task(p, top=TOP, **sampling) for p in PROMPTS)), strict=True):
        tokens = [token for new in emitted for token in new.tokens]
        ids = np.array([row for new in emitted for row in new.top_ids])
        values = np.array([row for new in emitted for row in new.top_logprobs])
        chosen = [logprob for new in emitted for logprob in new.logprobs]
        assert ids.shape == values.shape == (len(tokens), TOP)
        table = direct.logprobs([*prompt, *tokens])[len(prompt) - 1 : -1]
        for row, token, logprob, top_ids, top in zip(table, tokens, chosen, ids, values, strict=True):
            row[7] += 3.0 * ("logit_bias" in sampling)
            expected = scaled(row, temperature)
            np.testing.assert_allclose(top, np.sort(expected)[::-1][:TOP], rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(top, expected[top_ids], rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(logprob, expected[token], rtol=1e-4, atol=1e-4)
        if not sampling:
            assert ids[:, 0].tolist() == tokens, "greedy takes the most probable one"


@pytest.mark.every_version
@pytest.mark.parametrize(("temperature", "top"), [(0.0, 0), (0.5, 0), (0.5, TOP)])
def test_log_probabilities_of_a_prompt_are_those_at_temperature_1_also_when_it_is_in_the_cache(
    generating: HostedEngine, direct: LanguageModel, temperature: float, top: int
) -> None:
    for _ in range(2):
        tasks = [task(p, n=2, of_prompt=len(p), temperature=temperature, top=top) for p in PROMPTS]
        for prompt, emitted in zip(PROMPTS, run(generating, *tasks), strict=True):
            [found] = [new.prompt_logprobs for new in emitted if new.prompt_logprobs]
            assert len(found) == len(prompt) and math.isnan(found[0])
            table = direct.logprobs(prompt)
            expected = [table[at, token] for at, token in enumerate(prompt[1:])]
            np.testing.assert_allclose(found[1:], expected, rtol=1e-4, atol=1e-4)
            assert top or not any(new.logprobs for new in emitted), "none were asked for"
            [first] = [new for new in emitted if new.prompt_logprobs]
            ids, values = np.array(first.prompt_top_ids), np.array(first.prompt_top_logprobs)
            if top:
                assert ids.shape == values.shape == (len(prompt), TOP) and (ids[0] == -1).all() and np.isnan(values[0]).all()
                np.testing.assert_allclose(values[1:], np.sort(table)[:-1, ::-1][:, :TOP], rtol=1e-4, atol=1e-4)
                np.testing.assert_allclose(values[1:], np.take_along_axis(table[:-1], ids[1:], 1), rtol=1e-4, atol=1e-4)


@pytest.mark.every_version
def test_a_task_that_goes_on_gives_those_of_the_prompt_alone(generating: HostedEngine, direct: LanguageModel) -> None:
    prompt = PROMPTS[0]
    [first] = run(generating, task(prompt, top=1))
    tokens = [token for new in first for token in new.tokens]
    [rest] = run(generating, task([*prompt, *tokens[:3]], top=2, of_prompt=len(prompt), max_new_tokens=3))
    [found] = [new.prompt_logprobs for new in rest if new.prompt_logprobs]
    table = direct.logprobs(prompt)
    np.testing.assert_allclose(found[1:], [table[at, token] for at, token in enumerate(prompt[1:])], rtol=1e-4, atol=1e-4)
    assert [token for new in rest for token in new.tokens] == tokens[3:]


@pytest.mark.every_version
def test_requests_with_and_without_them_run_side_by_side(generating: HostedEngine) -> None:
    tasks = [task(PROMPTS[0], top=top, of_prompt=3 * (top % 2)) for top in (0, 1, 2, 20)]
    found = run(generating, *tasks)
    assert len({tuple(token for new in emitted for token in new.tokens) for emitted in found}) == 1
    for asked, emitted in zip(tasks, found, strict=True):
        assert all(len(row) == asked.top_logprobs for new in emitted for row in new.top_ids)
        assert sum(len(new.top_ids) for new in emitted) == (6 if asked.top_logprobs else 0)
        assert sum(bool(new.prompt_logprobs) for new in emitted) == bool(asked.prompt_logprobs)


@pytest.mark.every_version
def test_what_the_engine_would_die_of_is_refused(generating: HostedEngine) -> None:
    too_many = GenerationTask(np.array([5], np.int32), Sampling(), logprobs=True, top_logprobs=513)
    assert refusal(generating, too_many).startswith("top_logprobs: 513")
    alone = GenerationTask(np.array([5], np.int32), Sampling(), top_logprobs=2)
    assert "only with logprobs" in refusal(generating, alone)
    assert refusal(generating, task([5, 6], of_prompt=3)).startswith("prompt_logprobs: 3")
    assert run(generating, task([5, 6]))
