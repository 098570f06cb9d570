"""Logarithms of label probabilities from the real engine, for a model so sure that most probabilities are 0 in float32."""

import dataclasses
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginepool.cli.tiny_model_files import make_tiny_model
from enginepool.workers.engine import RowBatch
from tests.engine.conftest import BUDGETS
from tests.engine.hosted import HostedEngine
from tests.engine.reference import Models, Reference
from tests.engine.test_sglang_scores import VOCAB, part_of, whole

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
LABELS = tuple(range(VOCAB))
ROWS = [([5, 6, 7], [20 + i, 30, 40]) for i in range(4)]


@pytest.fixture(scope="module")
def peaked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose logits are 40 times as large as those of others."""
    folder = make_tiny_model(tmp_path_factory.mktemp("peaked"), seed=1)
    path = folder / "model.safetensors"
    safetensors: Any = importlib.import_module("safetensors.numpy")
    weights = safetensors.load_file(path)
    weights["lm_head.weight"] *= np.float32(40)
    safetensors.save_file(weights, path, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module", params=[{}, {"cached_query_tokens": 3}], ids=["plain", "cached"])
def engine(request: pytest.FixtureRequest, peaked: Path) -> Iterator[HostedEngine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        hosted = HostedEngine(str(peaked), **request.param, **BUDGETS)
        yield hosted.wait_until_started()
    hosted.end()


@pytest.mark.parametrize("softmax", [False, True])
def test_logprobs_of_a_peaked_policy_are_finite_and_equal_a_direct_computation(
    engine: HostedEngine, peaked: Path, models: Models, softmax: bool
) -> None:
    reference = Reference(dataclasses.replace(models, causal=peaked))
    part = part_of(ROWS, shared=True, labels=LABELS, softmax=softmax, logprobs=True)
    [outcome] = whole(engine.score(RowBatch((part, part_of(ROWS, shared=True, labels=LABELS, softmax=softmax)))))
    logarithms, probabilities = outcome.parts
    assert isinstance(logarithms, dict) and isinstance(probabilities, dict)
    assert (probabilities["scores"] == 0).sum(axis=1).min() > VOCAB // 4, "probabilities say nothing of these labels"
    assert np.isfinite(logarithms["scores"]).all()
    with np.errstate(divide="ignore"):
        expected = np.stack([np.log(reference.label_scores(row, LABELS, softmax)) for row in part.prompts()])
    np.testing.assert_allclose(logarithms["scores"], expected, rtol=1e-4, atol=1e-3)
