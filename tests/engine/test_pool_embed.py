"""`pool.embed` on the real engine: what `transformers` computes, in whole batches, by priority, through a worker's death."""

import asyncio
import importlib
import random
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest

from enginepool import EmbedResult, Pool
from enginepool.config import GroupConfig, PoolConfig, Timing
from enginepool.errors import BadRequest
from tests.engine.embedders import Embedder, last_token_model
from tests.engine.forked import ForkedDaemon
from tests.process.daemons import Daemon
from tests.process.processes import Processes

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

SIZE, VOCAB = 64, 300
BUDGETS: dict[str, Any] = {"max_batch_tokens": 160, "max_batch_rows": 6}
START_S = 300.0
Asked = tuple[list[list[int]], int, bool]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Embedder:
    return last_token_model(tmp_path_factory.mktemp("embedder"))


@pytest.fixture(scope="module")
def daemon(embedder: Embedder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("pool")
    with Processes() as processes, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        group = GroupConfig(
            model=str(embedder.folder), workers=2, device="cpu", dtype="float32", options={"is_embedding": True}, **BUDGETS
        )
        config = PoolConfig(
            groups={"documents": group},
            listen=f"ipc://{folder}/pool.sock",
            state_dir=str(folder / "state"),
            timing=Timing(silence_s=60.0, forward_s=15.0),
        )
        daemon = ForkedDaemon(processes, config).listening()
        patch.undo()
        yield daemon


def draw(rng: random.Random) -> Asked:
    rows = [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, 40))] for _ in range(rng.choice([1, 2, 5, 8, 20]))]
    return rows, rng.choice([0, 0, 1, 16, SIZE]), rng.random() < 0.7


def ask(pool: Pool, asked: Asked, priority: int = 0) -> "asyncio.Task[EmbedResult]":
    rows, dimensions, normalize = asked
    return asyncio.ensure_future(pool.embed(rows, dimensions=dimensions or None, normalize=normalize, priority=priority))


def check(asked: Asked, result: EmbedResult, embedder: Embedder) -> None:
    np.testing.assert_allclose(result.embeddings, embedder.pooled(*asked), rtol=1e-4, atol=1e-5)
    assert set(result.forwards) == {1}, "a batch was cut"
    assert result.usage == (len(asked[0]), sum(map(len, asked[0])))


def test_embeddings_are_right_and_whole_also_when_a_worker_dies(daemon: Daemon, embedder: Embedder) -> None:
    rng = random.Random(11)
    cases = [draw(rng) for _ in range(80)]

    async def scenario() -> list[EmbedResult]:
        async with Pool.connect(daemon.address) as pool, asyncio.timeout(2 * START_S):
            await pool.ready(START_S)
            calls = [ask(pool, case, rng.randrange(-1000, 1001)) for case in cases[:40]]
            await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            victim = next(w for w in (await pool.status()).groups[0].workers if w.stage == "ready")
            psutil.Process(victim.pid).send_signal(signal.SIGKILL)
            calls += [ask(pool, case) for case in cases[40:]]
            results = await asyncio.gather(*calls)
            [group] = (await pool.status()).groups
            assert not group.split_batches and group.batches == group.forwards
            return results

    for case, result in zip(cases, asyncio.run(scenario()), strict=True):
        check(case, result, embedder)


def test_text_is_embedded_as_its_tokens_and_a_size_too_large_is_refused(daemon: Daemon, embedder: Embedder) -> None:
    texts = ["What is the capital of France?", "Grüße", "a"]
    tokenizer: Any = importlib.import_module("tokenizers").Tokenizer.from_file(str(embedder.folder / "tokenizer.json"))
    rows = [tokenizer.encode(text).ids for text in texts]

    async def scenario() -> EmbedResult:
        async with Pool.connect(daemon.address) as pool, asyncio.timeout(START_S):
            await pool.ready(START_S)
            with pytest.raises(BadRequest, match="dimensions: 65") as refused:
                await pool.embed([[1]], dimensions=SIZE + 1)
            assert (refused.value.field, refused.value.limit) == ("dimensions", f"1..{SIZE}")
            with pytest.raises(BadRequest, match="score is not an operation of this group"):
                await pool.score([1], [[2]], label_token_ids=[3])
            return await pool.embed(texts)

    check((rows, 0, True), asyncio.run(scenario()), embedder)


def test_a_high_priority_does_not_wait_for_the_queue(daemon: Daemon, embedder: Embedder) -> None:
    full = [[[7, i, j] * 8 for j in range(6)] for i in range(60)]

    async def scenario() -> tuple[EmbedResult, float]:
        async with Pool.connect(daemon.address) as pool, asyncio.timeout(START_S):
            await pool.ready(START_S)
            low = [ask(pool, (rows, 0, True), -5) for rows in full]
            await asyncio.wait(low, return_when=asyncio.FIRST_COMPLETED)
            result = await ask(pool, ([[1, 2, 3]], 0, True), 5)
            return result, max(one.timings.queued_s for one in await asyncio.gather(*low))

    result, longest = asyncio.run(scenario())
    check(([[1, 2, 3]], 0, True), result, embedder)
    assert result.timings.queued_s < longest / 2
