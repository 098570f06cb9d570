"""The same engine on a GPU: the same answers within its arithmetic, whole batches, and nothing left behind."""

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from enginepool.workers.engine import BatchScores, PartScores, ScoreBatch
from tests.engine.hosted import HostedEngine
from tests.engine.reference import Models, Reference
from tests.engine.test_sglang_scores import declared, full_batch, random_batch, whole

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
#: Kernels on a GPU take bfloat16, of 8 bits: logits, whose deviation is 1, are off by some hundredths.
BFLOAT16 = 0.15


@pytest.fixture(scope="module", params=["causal", "reward"])
def engine(request: pytest.FixtureRequest, models: Models) -> Iterator[HostedEngine]:
    model: Path = getattr(models, request.param)
    options = {"attention_backend": "triton", "sampling_backend": "pytorch", "mem_fraction_static": 0.2}
    hosted = HostedEngine(
        str(model), device="auto", dtype="bfloat16", options=options, max_batch_tokens=2048, max_batch_rows=64
    )
    yield hosted.wait_until_started()
    hosted.end()


def test_a_gpu_is_found_and_its_budgets_are_declared(engine: HostedEngine) -> None:
    capabilities = declared(engine)
    assert capabilities.device == "cuda"
    assert (capabilities.batch_tokens, capabilities.batch_rows) == (2048, 64)
    assert (capabilities.inflight_tokens, capabilities.inflight_rows) == (4096, 128)


def test_scores_equal_a_direct_computation(engine: HostedEngine, reference: Reference) -> None:
    chance = random.Random(21)
    causal = declared(engine).kind == "causal"
    batches = [random_batch(chance, declared(engine)) for _ in range(20)]
    for batch, outcome in zip(batches, whole(engine.score(*batches, at_once=2)), strict=True):
        for part, scored in zip(batch.parts, outcome.parts, strict=True):
            assert isinstance(scored, PartScores)
            rows = part.prompts()
            if causal:
                expected = [np.log(reference.label_scores(row, part.labels, part.softmax)) for row in rows]
                np.testing.assert_allclose(np.log(scored.scores), expected, rtol=0, atol=BFLOAT16)
            else:
                expected = [reference.rewards(row, part.softmax) for row in rows]
                np.testing.assert_allclose(scored.scores, expected, rtol=0, atol=BFLOAT16)
            if scored.hidden is not None:
                hidden = [reference.hidden(row) for row in rows]
                np.testing.assert_allclose(scored.hidden, hidden, rtol=0, atol=BFLOAT16)


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_full_batches_that_wait_together_take_one_forward_each(engine: HostedEngine, rows: int) -> None:
    whole(engine.score(*(full_batch(declared(engine), rows, seed) for seed in range(40)), at_once=2))


def test_an_engine_that_must_split_is_caught_by_the_count(engine: HostedEngine) -> None:
    batch = ScoreBatch(full_batch(declared(engine), rows=16, seed=5).parts * 6)
    engine.call("pretend", 4)
    try:
        [outcome] = engine.score(batch)
    finally:
        engine.call("pretend", 1)
    assert isinstance(outcome, BatchScores)
    assert outcome.forwards > 1


def test_a_killed_scheduler_is_told_and_leaves_nothing(engine: HostedEngine) -> None:
    """The last test of an engine."""
    reason, _ = engine.call("kill_scheduler", full_batch(declared(engine), rows=1, seed=1))
    assert "scheduler" in reason
    assert "SIGKILL" in reason
    closed = engine.close()
    assert closed.children == []
    assert closed.seconds < 20
