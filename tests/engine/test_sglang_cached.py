"""A long query that rows share is computed once by the real engine: the same numbers, and every batch is still one forward."""

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from enginepool.cli.tiny_model_files import make_tiny_model
from enginepool.protocol.messages import Part
from enginepool.workers.engine import BatchOutcome, EngineDied, RowBatch, RowPart
from enginepool.workers.engine_weights import NewWeights
from tests.engine.conftest import BUDGETS
from tests.engine.hosted import HostedEngine
from tests.engine.reference import Models, Reference
from tests.engine.test_sglang_scores import VOCAB, assert_close, declared, random_part, whole

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
SHORTEST = 32


@pytest.fixture(scope="module")
def started(models: Models) -> Iterator[dict[str, HostedEngine]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        engines = {
            "causal": HostedEngine(str(models.causal), cached_query_tokens=SHORTEST, **BUDGETS),
            # This one prepares a forward while another runs, as on a GPU.
            "reward": HostedEngine(
                str(models.reward), cached_query_tokens=SHORTEST, options={"disable_overlap_schedule": False}, **BUDGETS
            ),
        }
        yield engines
    for engine in engines.values():
        engine.end()


@pytest.fixture(params=["causal", "reward"])
def engine(request: pytest.FixtureRequest, started: dict[str, HostedEngine]) -> HostedEngine:
    return started[request.param].wait_until_started()


def ids(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(VOCAB) for _ in range(count)]


def sharing(
    engine: HostedEngine, query: list[int], items: list[list[int]], softmax: bool = False, item_first: bool = False
) -> RowPart:
    """Rows of one query."""
    return RowPart(
        np.array(query, np.int32),
        np.array([token for item in items for token in item], np.int32),
        np.array([len(item) for item in items], np.uint32),
        asked=Part([], [3, 8] if declared(engine).kind == "causal" else [], softmax, item_first),
    )


def long_request(engine: HostedEngine, seed: int, rows: int = 8, query: int = 100) -> RowPart:
    chance = random.Random(seed)
    return sharing(engine, ids(chance, query), [ids(chance, 5) for _ in range(rows)])


def assert_right(reference: Reference, batch: RowBatch, outcome: BatchOutcome) -> int:
    """Every row equals the direct computation; how many there were."""
    rows = 0
    for part, scored in zip(batch.parts, outcome.parts, strict=True):
        assert isinstance(scored, dict)
        prompts = part.prompts()
        rows += len(prompts)
        labels = part.asked.labels
        if labels:
            assert_close(scored["scores"], [reference.label_scores(row, labels, part.asked.softmax) for row in prompts])
            continue
        assert_close(scored["scores"], [reference.rewards(row, part.asked.softmax) for row in prompts])
        assert ("hidden" in scored) == batch.hidden
        if batch.hidden:
            assert_close(scored["hidden"], [reference.hidden(row) for row in prompts])
    return rows


def test_mixes_of_cached_and_other_requests_equal_a_direct_computation(engine: HostedEngine, reference: Reference) -> None:
    chance = random.Random(31)
    can = declared(engine)
    causal = can.kind == "causal"
    queries = [ids(chance, chance.randint(SHORTEST - 2, 60)) for _ in range(8)]
    batches: list[RowBatch] = []
    for _ in range(50):
        parts: list[RowPart] = []
        for _ in range(chance.randint(1, 2)):
            if chance.random() < 0.3:
                parts.append(random_part(chance, can.batch_tokens // 4, 4, causal))
                continue
            rows = [ids(chance, chance.randint(1, 6)) for _ in range(chance.randint(1, 4))]
            parts.append(sharing(engine, chance.choice(queries), rows, chance.random() < 0.5, chance.random() < 0.1))
        hidden = not causal and chance.random() < 0.5
        batches.append(RowBatch(tuple(parts), priority=chance.randint(-1000, 1000), hidden=hidden))
    before, _ = engine.call("queries")
    outcomes = whole(engine.score(*batches, at_once=3))
    rows = sum(assert_right(reference, *pair) for pair in zip(batches, outcomes, strict=True))
    computed, missed = engine.call("queries")
    assert rows > 150
    assert 4 <= computed - before <= len(queries) + 3, "one that waits for a lower priority computes it too"
    assert missed == 0
    assert sum(outcome.cached for outcome in outcomes) > 2000


def test_the_query_of_a_request_that_was_cut_is_computed_once(engine: HostedEngine, reference: Reference) -> None:
    can = declared(engine)
    request = long_request(engine, seed=32, rows=24)
    assert can.batch_tokens < 24 * 105 // 3 <= can.cached_tokens
    pieces = [
        RowBatch((sharing(engine, request.query.tolist(), request.items[at * 5 : at * 5 + 40].reshape(8, 5).tolist()),))
        for at in (0, 8, 16)
    ]
    before, _ = engine.call("queries")
    outcomes = whole(engine.score(*pieces, at_once=2))
    after, missed = engine.call("queries")
    assert (after - before, missed) == (1, 0)
    assert min(outcome.cached for outcome in outcomes) >= 800
    for piece, outcome in zip(pieces, outcomes, strict=True):
        assert_right(reference, piece, outcome)


def test_rows_whose_query_is_gone_are_right_and_one_forward_and_it_is_computed_again(
    engine: HostedEngine, reference: Reference
) -> None:
    batch = RowBatch((long_request(engine, seed=33),))
    counts: list[tuple[int, int]] = [engine.call("queries")]
    found: list[int] = []
    for flushed in (False, True, False):
        if flushed:
            engine.call("flush")
        [outcome] = whole(engine.score(batch))
        assert_right(reference, batch, outcome)
        found.append(outcome.cached)
        counts.append(engine.call("queries"))
    computed, missed = (np.diff([count[i] for count in counts]).tolist() for i in (0, 1))
    assert found[0] >= 800 and found[1] == 0 and found[2] >= 800
    assert computed == [1, 0, 1]
    assert missed == [0, 1, 0]


def test_the_command_flush_empties_the_engine_s_cache_and_the_adapter_knows(engine: HostedEngine, reference: Reference) -> None:
    batch = RowBatch((long_request(engine, seed=37),))
    found: list[int] = []
    for flushed in (False, True):
        if flushed:
            engine.call("do", "flush")
        computed, missed = engine.call("queries")
        [outcome] = whole(engine.score(batch))
        assert_right(reference, batch, outcome)
        found.append(outcome.cached)
        # It is computed again ahead of its rows, which then find it: nothing was missed.
        assert engine.call("queries") == (computed + 1, missed)
    assert min(found) >= 800


def test_the_count_of_forwards_tells_when_rows_that_cannot_fit_do_not_find_their_query(engine: HostedEngine) -> None:
    """Made to believe in four times its engine's room, the adapter sends what is one forward only while queries are found."""
    parts = tuple(long_request(engine, seed, rows=12, query=120) for seed in (34, 35, 36))
    assert sum(part.item_lengths.size * 125 for part in parts) > 2 * declared(engine).inflight_tokens
    engine.call("pretend", 4)
    try:
        [with_queries] = engine.score(RowBatch(parts))
        engine.call("flush")
        [without] = engine.score(RowBatch(parts))
    finally:
        engine.call("pretend", 1)
    assert isinstance(with_queries, BatchOutcome) and isinstance(without, BatchOutcome)
    assert with_queries.forwards == 1
    assert with_queries.cached >= 36 * 120
    assert without.forwards > 1


def test_queries_of_other_weights_are_forgotten(
    engine: HostedEngine, models: Models, reference: Reference, tmp_path: Path
) -> None:
    causal = declared(engine).kind == "causal"
    head = "causal" if causal else "reward"
    other = make_tiny_model(tmp_path / "other", head=head, labels=3, seed=9)
    batch = RowBatch((long_request(engine, seed=37),))
    [old] = whole(engine.score(batch))
    before = engine.call("queries")
    engine.call("do", "load_weights", NewWeights(checkpoint=str(other)), 5, "")
    try:
        [new] = whole(engine.score(batch))
    finally:
        engine.call("do", "load_weights", NewWeights(checkpoint=str(getattr(models, head))), 0, "")
    [again] = whole(engine.score(batch))
    assert_right(Reference(Models(*((other, models.reward) if causal else (models.causal, other)))), batch, new)
    assert_right(reference, batch, old)
    assert_right(reference, batch, again)
    assert engine.call("queries") == (before[0] + 2, before[1]), "once for each change of weights, and never missed"
    assert new.version == 5
    assert min(new.cached, again.cached) >= 800


def test_an_engine_without_a_radix_cache_is_refused(models: Models) -> None:
    engine = HostedEngine(str(models.causal), cached_query_tokens=SHORTEST, options={"disable_radix_cache": True})
    try:
        with pytest.raises(EngineDied, match="radix cache, which is off"):
            engine.wait_until_started()
    finally:
        engine.end()
