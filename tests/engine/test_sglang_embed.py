"""Embeddings of the real engine equal those of `transformers`: pooled by the model's rule, cut, normalized or not."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from enginepool.protocol.messages import Part
from enginepool.workers.engine import BatchOutcome, EngineError, Outputs, RowBatch, RowPart
from tests.engine.embedders import Embedder, encoder, last_token_model
from tests.engine.hosted import HostedEngine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ROWS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15, 16], [5, 6, 7, 8]]
BUDGETS: dict[str, Any] = {"max_batch_tokens": 256, "max_batch_rows": 24}


def part(rows: list[list[int]], dimensions: int = 0, normalize: bool = True) -> RowPart:
    items = np.array([token for row in rows for token in row], np.int32)
    lengths = np.array([len(row) for row in rows], np.uint32)
    asked = Part([], operation="embed", dimensions=dimensions, normalize=normalize)
    return RowPart(np.empty(0, np.int32), items, lengths, asked=asked)


def embed(engine: HostedEngine, *parts: RowPart) -> BatchOutcome:
    [outcome] = engine.score(RowBatch(parts, operation="embed"))
    assert isinstance(outcome, BatchOutcome), outcome
    return outcome


def rows_of(outcome: Outputs | EngineError) -> npt.NDArray[np.float32]:
    assert isinstance(outcome, dict), outcome
    return np.asarray(outcome["embeddings"], np.float32)


@pytest.fixture(scope="module")
def last_token(tmp_path_factory: pytest.TempPathFactory) -> Embedder:
    return last_token_model(tmp_path_factory.mktemp("last"))


@pytest.fixture(scope="module")
def engine(last_token: Embedder) -> Iterator[HostedEngine]:
    engine = HostedEngine(str(last_token.folder), options={"is_embedding": True}, **BUDGETS).wait_until_started()
    yield engine
    engine.end()


def test_an_engine_that_embeds_says_so_and_of_which_size(engine: HostedEngine) -> None:
    can = engine.capabilities
    assert can is not None
    assert (can.kind, can.operations, can.embedding, can.dimensions) == ("embedding", ("embed",), 64, [])


def test_embeddings_equal_those_of_transformers_in_one_forward(engine: HostedEngine, last_token: Embedder) -> None:
    asked = [(ROWS, 0, True), (ROWS[:2], 16, True), (ROWS[1:], 7, False), (ROWS, 0, False)]
    outcome = embed(engine, *(part(*one) for one in asked))
    assert outcome.forwards == 1
    for one, found in zip(asked, outcome.parts, strict=True):
        np.testing.assert_allclose(rows_of(found), last_token.pooled(*one), rtol=1e-4, atol=1e-6)


def test_a_part_that_is_wrong_fails_alone(engine: HostedEngine, last_token: Embedder) -> None:
    outcome = embed(engine, part(ROWS, 65), part(ROWS), replace(part(ROWS), asked=Part([], [1])))
    assert [isinstance(one, EngineError) for one in outcome.parts] == [True, False, True]
    assert str(outcome.parts[0]) == "dimensions: 65; an embedding of this model has 64"
    np.testing.assert_allclose(rows_of(outcome.parts[1]), last_token.pooled(ROWS), rtol=1e-4, atol=1e-6)


def test_an_engine_that_embeds_does_not_score(engine: HostedEngine) -> None:
    [refused] = engine.score(RowBatch((part(ROWS),)))
    assert str(refused) == "score: this engine runs embed"


@pytest.mark.parametrize(("pooling", "from_checkpoint"), [("", False), ("mean_tokens", False), ("mean_tokens", True)])
def test_an_encoder_pools_as_its_folder_says_or_its_first_token(pooling: str, from_checkpoint: bool, tmp_path: Path) -> None:
    direct, settings = encoder(tmp_path / "model", pooling), dict[str, Any](BUDGETS)
    model = str(direct.folder)
    if from_checkpoint:
        model, settings["origin"] = str(encoder(tmp_path / "checkpoint").folder), model
    engine = HostedEngine(model, options={"is_embedding": True}, **settings).wait_until_started()
    try:
        assert engine.capabilities is not None
        assert (engine.capabilities.embedding, engine.capabilities.dimensions) == (32, [32])
        outcome = embed(engine, part(ROWS), part(ROWS, normalize=False))
        assert outcome.forwards == 1
        np.testing.assert_allclose(rows_of(outcome.parts[0]), direct.pooled(ROWS), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(rows_of(outcome.parts[1]), direct.pooled(ROWS, normalize=False), rtol=1e-4, atol=1e-5)
    finally:
        engine.end()
