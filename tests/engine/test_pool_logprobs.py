"""`pool.logprobs` on the real engine: what `transformers` computes, in whole batches, by priority, next to scores."""

import asyncio
import random
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest

from enginepool import LogprobsResult, Pool, ScoreResult
from enginepool.cli.tiny_model_files import make_tiny_model
from enginepool.config import GroupConfig, PoolConfig, Timing
from enginepool.errors import BadRequest
from tests.engine.forked import ForkedDaemon
from tests.engine.language_models import LanguageModel
from tests.process.daemons import Daemon
from tests.process.processes import Processes

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

VOCAB = 300
BUDGETS: dict[str, Any] = {"max_batch_tokens": 160, "max_batch_rows": 6}
START_S = 300.0
Asked = tuple[list[list[int]] | list[int], list[list[int]], list[int]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, seed=7)
    return LanguageModel(folder)


@pytest.fixture(scope="module")
def daemon(model: LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("pool")
    with Processes() as processes, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        group = GroupConfig(model=str(model.folder), workers=2, device="cpu", dtype="float32", **BUDGETS)
        config = PoolConfig(
            groups={"policy": group},
            listen=f"ipc://{folder}/pool.sock",
            state_dir=str(folder / "state"),
            timing=Timing(silence_s=60.0, forward_s=15.0),
        )
        daemon = ForkedDaemon(processes, config).listening()
        patch.undo()
        yield daemon


def ids(rng: random.Random, most: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(rng.randrange(1, most + 1))]


def draw(rng: random.Random) -> Asked:
    rows = rng.choice([1, 2, 5, 8, 20])
    prompts = ids(rng, 20) if rng.random() < 0.5 else [ids(rng, 20) for _ in range(rows)]
    return prompts, [ids(rng, rng.choice([1, 20])) for _ in range(rows)], ids(rng, 3) if rng.random() < 0.3 else []


def ask(pool: Pool, asked: Asked, priority: int = 0) -> "asyncio.Task[LogprobsResult]":
    prompts, responses, labels = asked
    return asyncio.ensure_future(pool.logprobs(prompts, responses, label_token_ids=labels, priority=priority))


def check(asked: Asked, result: LogprobsResult, model: LanguageModel) -> None:
    prompts, responses, labels = asked
    assert len(result.logprobs) == len(responses) and (result.labels is None) == (not labels)
    tokens, own = 0, [one for one in prompts if isinstance(one, list)]
    for i, response in enumerate(responses):
        prompt = own[i] if own else [one for one in prompts if isinstance(one, int)]
        tokens += len(prompt) + len(response)
        want = model.logprobs(prompt + response)[len(prompt) - 1 : -1]
        np.testing.assert_allclose(result.logprobs[i], want[range(len(response)), response], rtol=1e-4, atol=1e-5)
        if result.labels is not None:
            np.testing.assert_allclose(result.labels[i], want[:, labels], rtol=1e-4, atol=1e-5)
    assert set(result.forwards) == {1}, "a batch was cut"
    assert result.usage == (len(responses), tokens)


def test_logprobs_are_right_and_whole_next_to_scores_also_when_a_worker_dies(daemon: Daemon, model: LanguageModel) -> None:
    rng = random.Random(11)
    cases = [draw(rng) for _ in range(57)]
    # A row may be as long as two batches, which are in flight together.
    cases += [([5, 6], [[rng.randrange(VOCAB) for _ in range(300)]], labels) for labels in ([], [7, 8], [])]
    judged = [([ids(rng, 20)], [ids(rng, 10) for _ in range(4)]) for _ in range(20)]

    async def scenario() -> tuple[list[LogprobsResult], list[ScoreResult]]:
        async with Pool.connect(daemon.address) as pool, asyncio.timeout(2 * START_S):
            await pool.ready(START_S)
            calls = [ask(pool, case, rng.randrange(-1000, 1001)) for case in cases[:30]]
            scores = [
                asyncio.ensure_future(pool.score(query, items, label_token_ids=[1, 2], logprobs=True))
                for [query], items in judged
            ]
            await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            victim = next(w for w in (await pool.status()).groups[0].workers if w.stage == "ready")
            psutil.Process(victim.pid).send_signal(signal.SIGKILL)
            calls += [ask(pool, case) for case in cases[30:]]
            results = await asyncio.gather(*calls), await asyncio.gather(*scores)
            [group] = (await pool.status()).groups
            assert not group.split_batches and group.batches == group.forwards
            return results

    found, scores = asyncio.run(scenario())
    for case, result in zip(cases, found, strict=True):
        check(case, result, model)
    for ([query], items), scored in zip(judged, scores, strict=True):
        want = np.stack([model.logprobs(query + item)[-1, [1, 2]] for item in items])
        np.testing.assert_allclose(scored.scores, want, rtol=1e-4, atol=1e-5)
        assert set(scored.forwards) == {1}


def test_a_row_too_long_and_a_token_outside_the_vocabulary_are_refused_by_name(daemon: Daemon) -> None:
    async def scenario() -> None:
        async with Pool.connect(daemon.address) as pool, asyncio.timeout(START_S):
            await pool.ready(START_S)
            with pytest.raises(BadRequest) as refused:
                await pool.logprobs([[1], [1]], [[2], [3] * 5000])
            assert refused.value.field == "responses[1]"
            with pytest.raises(BadRequest) as refused:
                await pool.logprobs([1], [[2]], label_token_ids=[512])
            assert (refused.value.field, refused.value.limit) == ("label_token_ids", "512")

    asyncio.run(scenario())


def test_a_high_priority_does_not_wait_for_the_queue(daemon: Daemon, model: LanguageModel) -> None:
    full: list[Asked] = [([7, i], [[i, j] * 8 for j in range(6)], []) for i in range(150)]
    urgent: Asked = ([1, 2, 3], [[4], [5, 6]], [])

    async def scenario() -> tuple[LogprobsResult, float]:
        async with Pool.connect(daemon.address) as pool, asyncio.timeout(START_S):
            await pool.ready(START_S)
            low = [ask(pool, one, -5) for one in full]
            await asyncio.wait(low, return_when=asyncio.FIRST_COMPLETED)
            result = await ask(pool, urgent, 5)
            return result, max(one.timings.queued_s for one in await asyncio.gather(*low))

    result, longest = asyncio.run(scenario())
    check(urgent, result, model)
    assert result.timings.queued_s < longest / 2
