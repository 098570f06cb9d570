"""Log-probabilities of responses by the real engine equal the log_softmax of `transformers`, in whole batches."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from enginepool.cli.tiny_model_files import make_tiny_model
from enginepool.protocol.messages import Part
from enginepool.workers.engine import BatchOutcome, EngineError, Outputs, RowBatch, RowPart
from tests.engine.hosted import HostedEngine
from tests.engine.language_models import LanguageModel

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

BUDGETS: dict[str, Any] = {"max_batch_tokens": 256, "max_batch_rows": 24}
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15, 16], [5, 6]]
RESPONSES = [[21], [22, 23, 24, 25, 26, 27, 28], [29, 30], [31, 5, 6, 31]]
LABELS = [40, 7, 299]


def part(
    prompts: list[list[int]] | list[int], responses: list[list[int]], labels: list[int] | None = None, top: int = 0
) -> RowPart:
    """Prompts of their own, or one for all responses."""
    asked = Part([], labels=labels or [], operation="logprobs", columns=max(map(len, responses)), top_logprobs=top)
    items = np.array([token for row in responses for token in row], np.int32)
    rows = [one if isinstance(one, list) else [one] for one in prompts]
    query = np.array([token for row in rows for token in row], np.int32)
    heads = np.array([len(row) for row in rows], np.uint32) if isinstance(prompts[0], list) else None
    return RowPart(query, items, np.array([len(row) for row in responses], np.uint32), heads, asked)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, seed=5)
    return LanguageModel(folder)


@pytest.fixture(scope="module")
def engine(model: LanguageModel) -> Iterator[HostedEngine]:
    engine = HostedEngine(str(model.folder), **BUDGETS).wait_until_started()
    yield engine
    engine.end()


def run(engine: HostedEngine, *parts: RowPart) -> BatchOutcome:
    [outcome] = engine.score(RowBatch(parts, operation="logprobs"))
    assert isinstance(outcome, BatchOutcome), outcome
    return outcome


def check(model: LanguageModel, asked: RowPart, found: Outputs | EngineError) -> None:
    assert isinstance(found, dict), found
    labels = list(asked.asked.labels)
    top = asked.asked.top_logprobs
    assert [*found] == ["logprobs", *(["labels"] if labels else []), *(["top_ids", "top_logprobs"] if top else [])]
    for i, (row, size) in enumerate(zip(asked.prompts(), asked.item_lengths.tolist(), strict=True)):
        want = model.logprobs(row)[-size - 1 : -1]
        np.testing.assert_allclose(found["logprobs"][i, :size], want[range(size), row[-size:]], rtol=1e-4, atol=1e-5)
        assert not found["logprobs"][i, size:].any()
        if labels:
            values = found["labels"][i].reshape(-1, len(labels))
            np.testing.assert_allclose(values[:size], want[:, labels], rtol=1e-4, atol=1e-5)
            assert not values[size:].any()
        if top:
            ids, values = (found[name][i].reshape(-1, top) for name in ("top_ids", "top_logprobs"))
            np.testing.assert_array_equal(ids[:size], np.argsort(-want, kind="stable")[:, :top])
            np.testing.assert_allclose(values[:size], -np.sort(-want)[:, :top], rtol=1e-4, atol=1e-5)
            assert ids.dtype == np.int32 and not ids[size:].any() and not values[size:].any()


def test_a_causal_engine_that_scores_gives_logprobs_too(engine: HostedEngine) -> None:
    assert engine.capabilities is not None and engine.capabilities.operations == ("score", "logprobs")


@pytest.mark.every_version
def test_logprobs_equal_those_of_transformers_in_one_forward(engine: HostedEngine, model: LanguageModel) -> None:
    parts = [part(PROMPTS, RESPONSES), part([3, 4, 5], RESPONSES), part([[7]], [[8]]), part(PROMPTS[2:], RESPONSES[:2])]
    outcome = run(engine, *parts)
    assert outcome.forwards == 1
    for asked, found in zip(parts, outcome.parts, strict=True):
        check(model, asked, found)


@pytest.mark.every_version
def test_labels_are_answered_at_every_token_also_where_others_ask_for_none(engine: HostedEngine, model: LanguageModel) -> None:
    parts = [part(PROMPTS, RESPONSES), part([3, 4, 5], RESPONSES, LABELS), part([[7]], [[8]], [8]), part(PROMPTS, RESPONSES)]
    outcome = run(engine, *parts)
    assert outcome.forwards == 1
    for asked, found in zip(parts, outcome.parts, strict=True):
        check(model, asked, found)


@pytest.mark.every_version
def test_the_most_probable_tokens_are_answered_at_every_token_and_each_part_has_as_many_as_it_asked_for(
    engine: HostedEngine, model: LanguageModel
) -> None:
    parts = [
        part(PROMPTS, RESPONSES, top=20),
        part([3, 4, 5], RESPONSES),
        part([[7]], [[8]], LABELS, top=1),
        part(PROMPTS, RESPONSES, top=3),
    ]
    outcome = run(engine, *parts)
    assert outcome.forwards == 1
    for asked, found in zip(parts, outcome.parts, strict=True):
        check(model, asked, found)


@pytest.mark.every_version
def test_batches_of_logprobs_and_of_scores_that_meet_in_the_engine_are_right(
    engine: HostedEngine, model: LanguageModel
) -> None:
    meet(engine, model)


def meet(engine: HostedEngine, model: LanguageModel) -> None:
    rows = np.arange(60, dtype=np.int32)
    scored = RowPart(rows[:5], rows, np.full(12, 5, np.uint32), asked=Part([], labels=[1, 2], softmax=True))
    parts = [part(PROMPTS, RESPONSES), part(PROMPTS, RESPONSES, LABELS)]
    batches = [RowBatch((scored,)), RowBatch((parts[0],), operation="logprobs"), RowBatch((parts[1],), operation="logprobs")]
    [alone] = engine.score(RowBatch((scored,)))
    assert isinstance(alone, BatchOutcome) and isinstance(alone.parts[0], dict)
    outcomes = engine.score(*(batches * 4), at_once=4)
    for i, outcome in enumerate(outcomes):
        assert isinstance(outcome, BatchOutcome) and outcome.forwards == 1, outcome
        [found] = outcome.parts
        if i % 3:
            check(model, parts[i % 3 - 1], found)
        else:
            assert isinstance(found, dict)
            np.testing.assert_allclose(found["scores"], alone.parts[0]["scores"], rtol=1e-4)


@pytest.mark.every_version
def test_a_forward_whose_vocabulary_is_computed_in_pieces_gives_the_same(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_LOGPROB_CHUNK_SIZE", "5")
    engine = HostedEngine(str(model.folder), **BUDGETS).wait_until_started()
    try:
        parts = [
            part(PROMPTS, RESPONSES),
            part([3, 4, 5], RESPONSES, LABELS, top=2),
            part([[7]], [[8]], [8]),
            part(PROMPTS, RESPONSES, top=5),
        ]
        outcome = run(engine, *parts)
        assert outcome.forwards == 1
        for asked, found in zip(parts, outcome.parts, strict=True):
            check(model, asked, found)
        meet(engine, model)
        assert engine.capabilities is not None
        length = engine.capabilities.context - 5
        assert length > 400, "a row may be as long as two batches"
        response = [int(token) for token in np.random.default_rng(2).integers(0, 300, length)]
        long = part([1, 2, 3, 4, 5], [response], LABELS, top=3)
        outcome = run(engine, long)
        assert outcome.forwards == 1
        check(model, long, outcome.parts[0])
    finally:
        engine.end()


def test_a_part_that_is_wrong_fails_alone(engine: HostedEngine, model: LanguageModel) -> None:
    good = part(PROMPTS, RESPONSES)
    wrong = [
        replace(good, asked=Part([], operation="logprobs", columns=6)),
        replace(part([3], RESPONSES), query=np.empty(0, np.int32)),
        part(PROMPTS, RESPONSES, [512]),
        part(PROMPTS, RESPONSES, top=513),
    ]
    outcome = run(engine, *wrong, good)
    assert [str(one) for one in outcome.parts[:4]] == [
        "a response has 7 tokens; 1 to columns = 6",
        "a row has no prompt before its response",
        "a label is outside 0..511",
        "top_logprobs: 513; 0 to 512",
    ]
    assert all(isinstance(one, EngineError) for one in outcome.parts[:4])
    check(model, good, outcome.parts[4])


@pytest.mark.every_version
def test_a_prompt_that_is_cached_gives_the_same_logprobs(model: LanguageModel) -> None:
    options: dict[str, Any] = {"cached_query_tokens": 16}
    engine = HostedEngine(str(model.folder), **options, **BUDGETS).wait_until_started()
    try:
        prompt = [int(token) for token in np.random.default_rng(1).integers(0, 300, 40)]
        asked = part(prompt, RESPONSES)
        for again in range(3):
            outcome = run(engine, asked)
            check(model, asked, outcome.parts[0])
            assert outcome.forwards == 1
            assert outcome.cached >= 4 * 39, f"time {again}: the prompt is computed once, but for its last token"
    finally:
        engine.end()
