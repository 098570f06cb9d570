"""The same engine on a GPU: the same answers within its arithmetic, whole batches, and nothing left behind."""

import importlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginepool.workers.engine import BatchOutcome, EngineError, RowBatch, RowPart
from enginepool.workers.packed import packed_cost
from tests.engine.hosted import HostedEngine
from tests.engine.reference import Models, Reference
from tests.engine.test_sglang_generate import CONTEXT, check_profile, check_saved, check_spans
from tests.engine.test_sglang_scores import VOCAB, declared, full_batch, part_of, random_batch, whole

torch: Any = importlib.import_module("torch")

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
            assert isinstance(scored, dict)
            rows = part.prompts()
            if causal:
                expected = [np.log(reference.label_scores(row, part.asked.labels, part.asked.softmax)) for row in rows]
                np.testing.assert_allclose(np.log(scored["scores"]), expected, rtol=0, atol=BFLOAT16)
            else:
                expected = [reference.rewards(row, part.asked.softmax) for row in rows]
                np.testing.assert_allclose(scored["scores"], expected, rtol=0, atol=BFLOAT16)
            if "hidden" in scored:
                hidden = [reference.hidden(row) for row in rows]
                np.testing.assert_allclose(scored["hidden"], hidden, rtol=0, atol=BFLOAT16)


def test_logprobs_equal_a_direct_computation_next_to_scores(engine: HostedEngine, reference: Reference) -> None:
    """The vocabulary of a full batch is computed in several pieces."""
    can = declared(engine)
    if can.kind != "causal":
        assert can.operations == ("score",)
        return
    chance = random.Random(22)
    batches: list[RowBatch] = []
    for i in range(12):
        longest = chance.choice([1, 40, 200])
        rows = [
            ([chance.randrange(VOCAB) for _ in range(chance.randint(1, 50))], [chance.randrange(VOCAB) for _ in range(longest)])
            for _ in range(8)
        ]
        labels = [chance.randrange(VOCAB)] if i % 3 == 0 else []
        part = part_of(
            rows, shared=i % 2 == 0, operation="logprobs", columns=longest, labels=labels, top_logprobs=(0, 5, 20)[i % 3]
        )
        batches += [RowBatch((part,), operation="logprobs"), random_batch(chance, can)]
    for batch, outcome in zip(batches, whole(engine.score(*batches, at_once=2)), strict=True):
        if batch.operation == "score":
            continue
        [part], [found] = batch.parts, outcome.parts
        assert isinstance(found, dict)
        top = part.asked.top_logprobs
        lengths: list[int] = part.item_lengths.tolist()
        for i, (row, length) in enumerate(zip(part.prompts(), lengths, strict=True)):
            for at in {0, length // 2, length - 1}:
                end = len(row) - length + at
                likely: list[int] = found["top_ids"][i, at * top : (at + 1) * top].tolist() if top else []
                expected = np.log(reference.label_scores(row[:end], [row[end], *likely], False))
                assert abs(found["logprobs"][i, at] - expected[0]) < BFLOAT16
                if top:
                    values = found["top_logprobs"][i, at * top : (at + 1) * top]
                    np.testing.assert_allclose(values, expected[1:], rtol=0, atol=BFLOAT16)
                    assert len({*likely}) == top and (np.diff(values) <= 0).all()


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_full_batches_that_wait_together_take_one_forward_each(engine: HostedEngine, rows: int) -> None:
    whole(engine.score(*(full_batch(declared(engine), rows, seed) for seed in range(40)), at_once=2))


def test_an_engine_that_must_split_is_caught_by_the_count(engine: HostedEngine) -> None:
    batch = RowBatch(full_batch(declared(engine), rows=16, seed=5).parts * 6)
    engine.call("pretend", 4)
    try:
        [outcome] = engine.score(batch)
    finally:
        engine.call("pretend", 1)
    assert isinstance(outcome, BatchOutcome)
    assert outcome.forwards > 1


def test_a_killed_scheduler_is_told_and_leaves_nothing(engine: HostedEngine) -> None:
    """The last test of an engine."""
    reason, _ = engine.call("kill_scheduler", full_batch(declared(engine), rows=1, seed=1))
    assert "scheduler" in reason
    assert "SIGKILL" in reason
    closed = engine.close()
    assert closed.children == []
    assert closed.seconds < 20


# --- packed ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["causal", "reward"])
def packed(request: pytest.FixtureRequest, models: Models) -> Iterator[HostedEngine]:
    model: Path = getattr(models, request.param)
    options = {"sampling_backend": "pytorch", "mem_fraction_static": 0.2}
    hosted = HostedEngine(
        str(model), device="cuda", dtype="bfloat16", options=options, max_batch_tokens=2048, max_batch_rows=256, packing="on"
    )
    yield hosted.wait_until_started()
    hosted.end()


def packed_batch(chance: random.Random, engine: HostedEngine) -> RowBatch:
    """Up to six parts that can be packed, within the declared budget: some behind the same query, of some each row whole."""
    can = declared(engine)
    causal = can.kind == "causal"

    def ids(most: int) -> list[int]:
        return [chance.randrange(VOCAB) for _ in range(chance.randint(1, most))]

    queries = [ids(200) for _ in range(2)]
    parts: list[RowPart] = []
    for _ in range(chance.randint(1, 6)):
        query, shared = chance.choice(queries), chance.random() < 0.8
        rows = [(query if shared else ids(60), ids(40)) for _ in range(chance.choice((1, chance.randint(1, 30))))]
        labels = (7, *ids(3)) if chance.random() < 0.5 else (7, 8)
        options = {"softmax": chance.random() < 0.5, "item_first": chance.random() < 0.2}
        parts.append(part_of(rows, shared=shared, labels=labels if causal else (), **options))
        if packed_cost(parts, can) > can.batch_tokens or sum(part.item_lengths.size for part in parts) > can.batch_rows:
            parts.pop()
            break
    if not parts:
        return packed_batch(chance, engine)
    return RowBatch(tuple(parts), hidden=not causal and chance.random() < 0.5, packed=True)


def test_packed_scores_equal_a_direct_computation_of_each_row(packed: HostedEngine, reference: Reference) -> None:
    chance = random.Random(22)
    can = declared(packed)
    assert can.packs and can.packed_pace > 0
    batches = [packed_batch(chance, packed) for _ in range(40)]
    rows = 0
    for batch, outcome in zip(batches, whole(packed.score(*batches, at_once=2)), strict=True):
        for part, scored in zip(batch.parts, outcome.parts, strict=True):
            assert isinstance(scored, dict)
            prompts = part.prompts()
            rows += len(prompts)
            if can.kind == "causal":
                expected = [np.log(reference.label_scores(row, part.asked.labels, part.asked.softmax)) for row in prompts]
                np.testing.assert_allclose(np.log(scored["scores"]), expected, rtol=0, atol=BFLOAT16)
            else:
                expected = [reference.rewards(row, part.asked.softmax) for row in prompts]
                np.testing.assert_allclose(scored["scores"], expected, rtol=0, atol=BFLOAT16)
            assert ("hidden" in scored) == batch.hidden
            if "hidden" in scored:
                np.testing.assert_allclose(scored["hidden"], [reference.hidden(row) for row in prompts], rtol=0, atol=BFLOAT16)
    assert rows > 500


@pytest.mark.parametrize("longest", [1, 20, 150, 400])
@pytest.mark.parametrize("count", [1, 2, 120])
def test_whole_rows_in_one_sequence_equal_a_direct_computation_of_each(
    packed: HostedEngine, reference: Reference, count: int, longest: int
) -> None:
    """Such a sequence has no query: its first delimiter is its first token, and sees nothing. It alone is a forward here, or
    shares one with a sequence that has a query; its rows end anywhere in the blocks of the attention's kernel."""
    chance = random.Random(24)
    can = declared(packed)
    causal = can.kind == "causal"
    labels = (7, 8) if causal else ()
    count = min(count, can.batch_tokens // 2 // (longest + 1) or 1)
    rows = [[chance.randrange(VOCAB) for _ in range(chance.randint(1, longest))] for _ in range(count)]
    whole_rows = tuple(part_of([([], row)], shared=True, labels=labels) for row in rows)
    behind = part_of([([9] * 300, row[:20]) for row in rows[:10]], shared=True, labels=labels)
    batches = [RowBatch(parts, packed=True) for parts in (whole_rows, (*whole_rows, behind), (behind, *whole_rows))]
    batches += [RowBatch(batch.parts) for batch in batches[:1]]
    for batch, outcome in zip(batches, whole(packed.score(*batches, at_once=2)), strict=True):
        for part, scored in zip(batch.parts, outcome.parts, strict=True):
            assert isinstance(scored, dict), scored
            for row, found in zip(part.prompts(), scored["scores"], strict=True):
                if causal:
                    expected = np.log(reference.label_scores(row, labels, False))
                    np.testing.assert_allclose(np.log(found), expected, rtol=0, atol=BFLOAT16)
                else:
                    np.testing.assert_allclose(found, reference.rewards(row, False), rtol=0, atol=BFLOAT16)


def test_full_packed_batches_that_wait_together_take_one_forward_each(packed: HostedEngine) -> None:
    can = declared(packed)
    labels = (7,) if can.kind == "causal" else ()
    batches: list[RowBatch] = []
    for seed in range(40):
        query = [seed + 1] * 100
        rows = [(query, [(seed * 7 + i) % VOCAB] * 14) for i in range(120)]
        part = part_of(rows, shared=True, labels=labels)
        whole_rows = part_of([(query[:i], item) for i, (_, item) in enumerate(rows[:49])], shared=False, labels=labels)
        for one in (part, whole_rows):
            assert can.batch_tokens * 0.9 < packed_cost([one], can) <= can.batch_tokens, packed_cost([one], can)
            batches.append(RowBatch((one,), packed=True))
    whole(packed.score(*batches, at_once=2))


def test_packed_and_plain_batches_at_one_engine_take_one_forward_each_and_give_the_same_scores(
    packed: HostedEngine, reference: Reference
) -> None:
    """They wait together: SGLang ends when a forward has rows of both kinds. Plain forwards of this size are CUDA graphs."""
    chance = random.Random(23)
    causal = declared(packed).kind == "causal"
    labels = (7, 8) if causal else ()
    batches: list[RowBatch] = []
    for _ in range(20):
        query = [chance.randrange(VOCAB) for _ in range(chance.randint(1, 50))]
        rows = [(query, [chance.randrange(VOCAB) for _ in range(chance.randint(1, 20))]) for _ in range(8)]
        part = part_of(rows, shared=True, labels=labels)
        batches += [RowBatch((part,), packed=True), RowBatch((part,)), RowBatch((part,), packed=True)]
    outcomes = whole(packed.score(*batches, at_once=3))
    for batch, outcome in zip(batches, outcomes, strict=True):
        [scored], [part] = outcome.parts, batch.parts
        assert isinstance(scored, dict)
        for row, found in zip(part.prompts(), scored["scores"], strict=True):
            if causal:
                expected = np.log(reference.label_scores(row, part.asked.labels, part.asked.softmax))
                np.testing.assert_allclose(np.log(found), expected, rtol=0, atol=BFLOAT16)
            else:
                np.testing.assert_allclose(found, reference.rewards(row, part.asked.softmax), rtol=0, atol=BFLOAT16)


def test_a_part_that_cannot_be_packed_is_refused_and_its_neighbor_runs(packed: HostedEngine) -> None:
    labels = (7,) if declared(packed).kind == "causal" else ()
    good = part_of([([1, 2], [3])], shared=True, labels=labels)
    [outcome] = whole(packed.score(RowBatch((part_of([([1], [2]), ([1], [])], shared=True, labels=labels), good), packed=True)))
    refused, scored = outcome.parts
    assert isinstance(refused, EngineError)
    assert isinstance(scored, dict)


# --- one that generates ------------------------------------------------------------------------------------------------

GENERATES: dict[str, Any] = {
    "device": "cuda",
    "dtype": "bfloat16",
    "options": {
        "attention_backend": "triton", "sampling_backend": "pytorch", "mem_fraction_static": 0.2, "context_length": CONTEXT,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def generating(models: Models) -> Iterator[HostedEngine]:
    hosted = HostedEngine(str(models.causal), operations=("generate",), **GENERATES)
    yield hosted.wait_until_started()
    hosted.end()


def test_a_profile_has_the_operators_and_the_kernels_that_ran_meanwhile(generating: HostedEngine, tmp_path: Path) -> None:
    check_profile(generating, tmp_path, {"cpu_op", "kernel"})


def test_an_engine_that_starts_on_saved_weights_generates_the_same(
    generating: HostedEngine, models: Models, tmp_path: Path
) -> None:
    """The same kernels compute both: they differ by less than two values of bfloat16 do."""
    check_saved(generating, models.causal, str(tmp_path), BFLOAT16 / 10, **GENERATES)


@pytest.mark.parametrize("lender", ["cuda:0", ""])
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_sequences_go_on_under_new_weights_also_of_a_publisher_that_shares_the_gpu(
    generating: HostedEngine, reference: Reference, models: Models, tmp_path: Path, mode: str, lender: str
) -> None:
    check_spans(generating, reference, models.causal, tmp_path, mode, lender, torch.bfloat16, BFLOAT16)
