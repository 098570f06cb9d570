"""One real engine that generates and runs rows: all of it equals a direct computation, and each batch is one forward."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from enginepool.workers.engine import BatchOutcome, EngineError, GenerationTask, NewTokens, RowBatch
from tests.engine.hosted import HostedEngine
from tests.engine.language_models import LanguageModel
from tests.engine.reference import Models, Reference
from tests.engine.test_sglang_generate import Continued, assert_greedy, task
from tests.engine.test_sglang_response_logprobs import RESPONSES, check, part
from tests.engine.test_sglang_scores import VOCAB, assert_close, declared, full_batch, part_of, random_part, whole

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

#: prompts that are prefilled in pieces, and sequences that need more room than there is
CHUNK, POOL, CONTEXT = 128, 1536, 512
LONG = [[(7 * i + k) % VOCAB for i in range(300)] for k in range(3)]


@pytest.fixture(scope="module")
def mixed(models: Models) -> Iterator[HostedEngine]:
    """One engine for all tests, with little room."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        engine = HostedEngine(
            str(models.causal),
            operations=("score", "logprobs", "generate"),
            max_batch_tokens=96,
            max_batch_rows=12,
            options={
                "context_length": CONTEXT,
                "chunked_prefill_size": CHUNK,
                "max_total_tokens": POOL,
                "disable_overlap_schedule": False,
            },
        )
        yield engine.wait_until_started()
        engine.end()


def sequences(emitted: list[NewTokens], n: int) -> list[Continued]:
    assert not isinstance(emitted, Exception), emitted
    return [Continued([new for new in emitted if new.sequence == i]) for i in range(n)]


def rows_of(engine: HostedEngine, count: int, seed: int) -> list[RowBatch]:
    """Batches of scores, each full of tokens or of any form, and of log-probabilities."""
    chance, can = random.Random(seed), declared(engine)
    found: list[RowBatch] = []
    for number in range(count):
        if number % 3 == 0:
            found.append(full_batch(can, 1 + number % can.batch_rows, seed + number))
        elif number % 3 == 1:
            found.append(RowBatch((random_part(chance, can.batch_tokens, can.batch_rows, True),), priority=number))
        else:
            prompts = [[chance.randrange(300) for _ in range(1 + i)] for i in range(4)]
            found.append(RowBatch((part(prompts, RESPONSES), part([3, 4, 5], RESPONSES[:2])), operation="logprobs"))
    return found


def assert_right(batches: list[RowBatch], outcomes: list[Any], reference: Reference, model: LanguageModel) -> None:
    for batch, outcome in zip(batches, whole(outcomes), strict=True):
        assert outcome.cached == 0, "a row found what a sequence left"
        for asked, found in zip(batch.parts, outcome.parts, strict=True):
            if batch.operation == "logprobs":
                check(model, asked, found)
                continue
            assert isinstance(found, dict), found
            expected = [reference.label_scores(row, asked.asked.labels, asked.asked.softmax) for row in asked.prompts()]
            assert_close(found["scores"], expected)


@pytest.fixture(scope="module")
def model(models: Models) -> LanguageModel:
    return LanguageModel(models.causal)


@pytest.mark.every_version
def test_it_has_room_for_rows_and_room_for_sequences(mixed: HostedEngine) -> None:
    can = declared(mixed)
    assert can.operations == ("score", "logprobs", "generate") and can.mixed
    assert (can.batch_tokens, can.batch_rows, can.inflight_tokens, can.inflight_rows) == (96, 12, 192, 24)
    assert can.context == 96 and CONTEXT - 8 <= can.sequence_context < CONTEXT
    assert can.sequence_tokens + can.inflight_tokens < POOL and can.sequences >= 32


@pytest.mark.every_version
def test_scores_logprobs_and_generations_at_once_equal_a_direct_computation(
    mixed: HostedEngine, reference: Reference, model: LanguageModel
) -> None:
    """Also prompts in pieces, samples, and rows whose prompt a sequence has in the cache."""
    tasks = [
        task([5, 17, 300], logprobs=True, max_new_tokens=100, ignore_eos=True),
        task([8, 9], n=3, max_new_tokens=60, ignore_eos=True),
    ]
    tasks += [task(prompt, max_new_tokens=30, ignore_eos=True) for prompt in LONG]
    batches = rows_of(mixed, 24, seed=1)
    batches.append(RowBatch((part_of([([], LONG[0][:90])], shared=True, labels=(7, 8)),)))
    emitted, outcomes, counts = mixed.call("mixed", tuple(tasks), tuple(batches), 2)
    assert_right(batches, outcomes, reference, model)
    for asked, found in zip(tasks, emitted, strict=True):
        for sequence in sequences(found, asked.n):
            assert len(sequence.tokens) == asked.sampling.max_new_tokens
            assert_greedy(reference, asked.prompt.tolist(), sequence)
    while_running = [count for count in counts if count < sum(one.n * one.sampling.max_new_tokens for one in tasks)]
    assert len(set(while_running)) > len(while_running) // 2, "sequences had a step between two batches"


@pytest.mark.every_version
def test_rows_have_their_room_when_sequences_need_more_than_there_is(
    mixed: HostedEngine, reference: Reference, model: LanguageModel
) -> None:
    """The coordinator would not give a worker so many: SGLang takes sequences back, and computes them again."""
    tasks = [task([20 + k, *LONG[0][:100]], max_new_tokens=150, min_new_tokens=150) for k in range(10)]
    allowed = [token for token in range(VOCAB) if token != reference.tokenizer.eos_token_id]
    batches = rows_of(mixed, 40, seed=2)
    emitted, outcomes, _ = mixed.call("mixed", tuple(tasks), tuple(batches), 2)
    assert_right(batches, outcomes, reference, model)
    for asked, found in zip(tasks, emitted, strict=True):
        [sequence] = sequences(found, 1)
        assert len(sequence.tokens) == 150
        below, _ = reference.following(asked.prompt.tolist(), sequence.tokens, allowed)
        assert below.max() < 1e-4


@pytest.mark.every_version
def test_a_batch_that_would_be_cut_is_refused(mixed: HostedEngine) -> None:
    can = declared(mixed)
    [outcome] = mixed.score(RowBatch(full_batch(can, 4, 3).parts + full_batch(can, 4, 4).parts))
    assert isinstance(outcome, EngineError) and "would be cut" in str(outcome)
    [outcome] = mixed.score(full_batch(can, 4, 3))
    assert isinstance(outcome, BatchOutcome) and outcome.forwards == 1


def test_what_was_generated_is_scored_as_it_was_generated(mixed: HostedEngine) -> None:
    """Log-probabilities of an answer, asked of the same engine, are those that came with its tokens."""
    asked: GenerationTask = task([11, 12, 13], logprobs=True, max_new_tokens=40)
    [[sequence]] = [sequences(found, 1) for found in mixed.call("generate", (asked,))]
    [outcome] = mixed.score(RowBatch((part([11, 12, 13], [sequence.tokens]),), operation="logprobs"))
    assert isinstance(outcome, BatchOutcome) and isinstance(outcome.parts[0], dict)
    np.testing.assert_allclose(outcome.parts[0]["logprobs"][0], sequence.logprobs, rtol=1e-4, atol=1e-4)
