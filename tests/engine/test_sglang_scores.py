"""What the real engine answers: every number equals a direct computation, and every batch is one forward."""

import dataclasses
import json
import random
import re
from itertools import chain
from typing import Any

import numpy as np
import pytest

from enginepool.protocol.messages import Capabilities, ChatTemplate, Part, Tokenize
from enginepool.workers.engine import BatchOutcome, EngineError, RowBatch, RowPart
from enginepool.workers.texts import TextIds, TextTask
from tests.engine.hosted import HostedEngine
from tests.engine.reference import Reference

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
VOCAB = 512


def assert_close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def part_of(rows: list[tuple[list[int], list[int]]], shared: bool, **settings: object) -> RowPart:
    """A part from (query, item) pairs; `shared`: one query for all."""
    queries = [query for query, _ in rows]
    return RowPart(
        query=np.array(queries[0] if shared else [*chain.from_iterable(queries)], np.int32),
        items=np.array([*chain.from_iterable(item for _, item in rows)], np.int32),
        item_lengths=np.array([len(item) for _, item in rows], np.uint32),
        query_lengths=None if shared else np.array([len(query) for query in queries], np.uint32),
        asked=Part([], **settings),  # pyright: ignore[reportArgumentType]
    )


def random_part(chance: random.Random, tokens: int, rows: int, causal: bool) -> RowPart:
    """A part within these bounds, of any form that there is."""
    shared = chance.random() < 0.5
    count = chance.randint(1, rows)
    length = max(2, tokens // count)
    query = [chance.randrange(VOCAB) for _ in range(chance.randint(0, length - 1))]
    pairs: list[tuple[list[int], list[int]]] = []
    for _ in range(count):
        head = query if shared else query[: chance.randint(0, len(query))]
        tail = [chance.randrange(VOCAB) for _ in range(chance.randint(1, length - len(head)))]
        pairs.append((head, tail))
    labels = tuple(chance.randrange(VOCAB) for _ in range(chance.randint(1, 5))) if causal else ()
    return part_of(pairs, shared, labels=labels, softmax=chance.random() < 0.5, item_first=chance.random() < 0.5)


def random_batch(chance: random.Random, capabilities: Capabilities) -> RowBatch:
    """A batch of up to four parts within the declared budget, from nearly empty to full."""
    causal = capabilities.kind == "causal"
    count = chance.randint(1, 4)
    parts = tuple(
        random_part(chance, capabilities.batch_tokens // count, capabilities.batch_rows // count, causal) for _ in range(count)
    )
    return RowBatch(parts, priority=chance.randint(-1000, 1000), hidden=not causal and chance.random() < 0.5)


def full_batch(capabilities: Capabilities, rows: int, seed: int) -> RowBatch:
    """A batch that takes the whole declared budget of tokens in `rows` rows of random ids."""
    chance = random.Random(seed)
    length = capabilities.batch_tokens // rows
    pairs: list[tuple[list[int], list[int]]] = [([], [chance.randrange(VOCAB) for _ in range(length)]) for _ in range(rows)]
    return RowBatch((part_of(pairs, shared=True, labels=(7,) if capabilities.kind == "causal" else ()),))


def declared(engine: HostedEngine) -> Capabilities:
    assert engine.capabilities is not None
    return engine.capabilities


def whole(outcomes: list[BatchOutcome | Exception]) -> list[BatchOutcome]:
    """The outcomes, all of them answers that took one forward."""
    for outcome in outcomes:
        assert isinstance(outcome, BatchOutcome), outcome
        assert outcome.forwards == 1
    return [outcome for outcome in outcomes if isinstance(outcome, BatchOutcome)]


@pytest.mark.every_version
def test_causal_scores_equal_a_direct_computation(causal: HostedEngine, reference: Reference) -> None:
    chance = random.Random(11)
    batches = [random_batch(chance, declared(causal)) for _ in range(60)]
    rows = 0
    for batch, outcome in zip(batches, whole(causal.score(*batches, at_once=2)), strict=True):
        for part, scored in zip(batch.parts, outcome.parts, strict=True):
            assert isinstance(scored, dict)
            expected = [reference.label_scores(row, part.asked.labels, part.asked.softmax) for row in part.prompts()]
            assert_close(scored["scores"], expected)
            assert scored["scores"].dtype == np.float32
            assert "hidden" not in scored
            rows += len(expected)
    assert rows > 400


@pytest.mark.every_version
def test_rewards_and_hidden_states_equal_a_direct_computation(reward: HostedEngine, reference: Reference) -> None:
    chance = random.Random(12)
    batches = [random_batch(chance, declared(reward)) for _ in range(60)]
    rows = hidden_rows = 0
    for batch, outcome in zip(batches, whole(reward.score(*batches, at_once=2)), strict=True):
        for part, scored in zip(batch.parts, outcome.parts, strict=True):
            assert isinstance(scored, dict)
            prompts = part.prompts()
            assert_close(scored["scores"], [reference.rewards(row, part.asked.softmax) for row in prompts])
            rows += len(prompts)
            assert ("hidden" in scored) == batch.hidden
            if batch.hidden:
                assert_close(scored["hidden"], [reference.hidden(row) for row in prompts])
                hidden_rows += len(prompts)
    assert rows > 400
    assert hidden_rows > 100


@pytest.mark.every_version
def test_rows_with_labels_of_their_own_share_a_forward_with_others(causal: HostedEngine, reference: Reference) -> None:
    pairs = [([5, 6], [7]), ([5, 6], [8, 9]), ([5, 6], [10])]
    own = np.array([[1, 2, 3], [400, 2, 400], [9, 8, 7]], np.int32)
    for softmax in (False, True):
        part = dataclasses.replace(part_of(pairs, shared=True, softmax=softmax), labels=own)
        [outcome] = whole(causal.score(RowBatch((part_of(pairs, shared=True, labels=(3, 4)), part))))
        answer = outcome.parts[1]
        assert isinstance(answer, dict)
        rows = zip(part.prompts(), own.tolist(), strict=True)
        assert_close(answer["scores"], [reference.label_scores(row, labels, softmax) for row, labels in rows])
    [outcome] = causal.score(RowBatch((dataclasses.replace(part_of(pairs, shared=True), labels=own + 500),)))
    assert isinstance(outcome, BatchOutcome) and "a label is outside 0..511" in str(outcome.parts[0])


def test_softmax_divides_logits_by_the_temperature(causal: HostedEngine, reward: HostedEngine, reference: Reference) -> None:
    pairs = [([5, 6], [7]), ([5, 6], [8, 9])]
    for engine, labels in ((causal, (3, 9, 200)), (reward, ())):
        asked = {"labels": labels, "softmax": True, "temperature": 0.05}
        part, logarithms = part_of(pairs, True, **asked), part_of(pairs, True, **asked, logprobs=True)
        [outcome] = whole(engine.score(RowBatch((part, logarithms))))
        logits = [reference.logits(row, labels) for row in part.prompts()]
        expected = np.exp(np.array(logits) / 0.05)
        expected /= expected.sum(axis=1, keepdims=True)
        for answer, values in zip(outcome.parts, (expected, np.log(expected)), strict=True):
            assert isinstance(answer, dict)
            assert_close(answer["scores"], values)


def test_scores_of_different_rows_differ(causal: HostedEngine, reward: HostedEngine) -> None:
    for engine in (causal, reward):
        [outcome] = whole(engine.score(full_batch(declared(engine), rows=16, seed=1)))
        assert isinstance(outcome.parts[0], dict)
        assert len(np.unique(outcome.parts[0]["scores"][:, 0])) == 16


@pytest.mark.parametrize("rows", [1, 2, 24])
def test_full_batches_that_wait_together_take_one_forward_each(causal: HostedEngine, reward: HostedEngine, rows: int) -> None:
    for engine in (causal, reward):
        capabilities = declared(engine)
        whole(engine.score(*(full_batch(capabilities, rows, seed) for seed in range(20)), at_once=2))


def test_the_longest_row_that_is_declared_is_taken_whole(causal: HostedEngine, reference: Reference) -> None:
    chance = random.Random(3)
    row = [chance.randrange(VOCAB) for _ in range(declared(causal).context)]
    [outcome] = whole(causal.score(RowBatch((part_of([([], row)], shared=True, labels=(1, 2)),))))
    assert isinstance(outcome.parts[0], dict)
    assert_close(outcome.parts[0]["scores"][0], reference.label_scores(row, (1, 2), False))


def test_an_engine_that_must_split_is_caught_by_the_count(causal: HostedEngine, reward: HostedEngine) -> None:
    """The adapter is made to believe in four times the engine's budget: what it then sends cannot be one forward."""
    for engine in (causal, reward):
        capabilities = declared(engine)
        too_much = full_batch(capabilities, rows=16, seed=5)
        batch = RowBatch(too_much.parts * 6)
        engine.call("pretend", 4)
        try:
            [outcome] = engine.score(batch)
        finally:
            engine.call("pretend", 1)
        assert isinstance(outcome, BatchOutcome)
        assert outcome.forwards > 1
        # The same work inside the budget is whole again.
        whole(engine.score(too_much))


def test_a_larger_priority_runs_first_inside_the_engine(causal: HostedEngine, reward: HostedEngine) -> None:
    """With more waiting than one forward takes, a late batch of high priority overtakes."""
    for engine in (causal, reward):
        parts = [full_batch(declared(engine), rows=4, seed=seed).parts for seed in range(12)]
        batches = (*(RowBatch(part, priority=-5) for part in parts), RowBatch(parts[0], priority=5))
        engine.call("pretend", 8)
        try:
            order = engine.call("finish_order", batches)
        finally:
            engine.call("pretend", 1)
        assert order.index(12) < order.index(11)


def test_a_batch_beyond_the_budget_is_refused_not_cut(causal: HostedEngine) -> None:
    part = full_batch(declared(causal), rows=8, seed=1).parts[0]
    [tokens] = causal.score(RowBatch((part, part, part)))
    [rows] = causal.score(RowBatch(tuple(part_of([([1], [2])] * 24, shared=True, labels=(1,)) for _ in range(3))))
    for outcome in (tokens, rows):
        assert isinstance(outcome, EngineError)
        assert "would be cut" in str(outcome)


def test_a_wrong_part_does_not_harm_its_neighbors(causal: HostedEngine) -> None:
    good = part_of([([5], [6, 7]), ([5], [8])], shared=True, labels=(3, 3, 9))
    context = declared(causal).context
    wrong = {
        "outside 0..511": part_of([([], [512])], shared=True, labels=(1,)),
        "labels are empty": part_of([([], [5])], shared=True),
        "a label is outside": part_of([([], [5])], shared=True, labels=(512,)),
        "no tokens": part_of([([], [])], shared=True, labels=(1,)),
        f"this engine takes {context}": part_of([([], [5] * (context + 1))], shared=True, labels=(1,)),
    }
    [alone] = whole(causal.score(RowBatch((good,))))
    [mixed] = whole(causal.score(RowBatch((good, *wrong.values(), good))))
    for reason, part in zip(wrong, mixed.parts[1:-1], strict=True):
        assert isinstance(part, EngineError)
        assert reason in str(part)
    assert isinstance(alone.parts[0], dict)
    for part in (mixed.parts[0], mixed.parts[-1]):
        assert isinstance(part, dict)
        assert_close(part["scores"], alone.parts[0]["scores"])


def test_hidden_states_of_a_causal_model_are_refused(causal: HostedEngine) -> None:
    [outcome] = causal.score(RowBatch((part_of([([], [5])], shared=True, labels=(1,)),), hidden=True))
    assert isinstance(outcome, EngineError)
    assert "no pooled hidden states" in str(outcome)


def test_labels_for_a_classifier_are_refused(reward: HostedEngine) -> None:
    [outcome] = reward.score(RowBatch((part_of([([], [5])], shared=True, labels=(1,)),)))
    assert isinstance(outcome, BatchOutcome)
    assert "labels must be empty" in str(outcome.parts[0])
    assert outcome.forwards == 0


def test_text_becomes_the_ids_of_the_models_own_tokenizer(causal: HostedEngine, reference: Reference) -> None:
    texts = ["What is the capital of France?", "", "Ω≈ç√ 你好\n\t", "<|endoftext|>yes"]
    assert causal.call("tokenize", [(text[:2], text[2:]) for text in texts]) == [
        reference.tokenizer(text)["input_ids"] for text in texts
    ]
    assert causal.call("tokenize", []) == []


@pytest.mark.every_version
@pytest.mark.parametrize("item_first", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_text_that_is_too_long_is_scored_without_tokens_of_its_item(
    causal: HostedEngine, reference: Reference, side: str, item_first: bool
) -> None:
    query, longest = "Which one is better? ", declared(causal).context
    items = [" ".join(f"word{i}" for i in range(longest)), "short"]
    pairs = [(item, query) if item_first else (query, item) for item in items]
    asked = Tokenize((0, 0), [], item_first=item_first, truncation=side, longest=longest)  # pyright: ignore[reportArgumentType]
    found = causal.call("text_ids", TextTask(pairs, asked))
    whole, short = ([*reference.tokenizer(first + second)["input_ids"]] for first, second in pairs)
    kept = len(reference.tokenizer(query)["input_ids"])
    gone = slice(kept, len(whole) - longest + kept) if side == "left" else slice(longest, None)
    if item_first:
        gone = slice(0, len(whole) - longest) if side == "left" else slice(longest - kept, len(whole) - kept)
    del whole[gone]
    assert (found.rows, found.truncated) == ([whole, short], 1)
    assert_close(outcome_of(causal, found.rows[0]), reference.label_scores(whole, (1, 2), False))


@pytest.mark.every_version
def test_a_label_by_its_text_is_one_token_or_refused_with_its_tokens(causal: HostedEngine, reference: Reference) -> None:
    def label_ids(*labels: str) -> list[int]:
        return causal.call("text_ids", TextTask([], Tokenize((0, 0), [], labels=list(labels)))).labels

    single = [text for text in ("yes", "no", " the", "a") if len(reference.tokenizer(text)["input_ids"]) == 1]
    assert len(single) > 1
    assert label_ids(*single) == [reference.tokenizer(text)["input_ids"][0] for text in single]
    several = reference.tokenizer("qzx")["input_ids"]
    shown = re.escape(", ".join(f"{token} {reference.tokenizer.decode([token])!r}" for token in several))
    with pytest.raises(
        EngineError, match=rf"label_texts\[1\]: 'qzx' is {len(several)} tokens of this model \({shown}\); a label is"
    ):
        label_ids("a", "qzx")


@pytest.mark.every_version
def test_chats_become_the_ids_that_transformers_makes_with_the_models_own_template(
    causal: HostedEngine, reference: Reference
) -> None:
    chats = [
        [{"role": "system", "content": "Answer yes or no."}, {"role": "user", "content": "Ist das höflich? 👍"}],
        [{"role": "user", "content": "a b " * declared(causal).context}],
    ]

    def rendered(prompt: bool) -> list[list[int]]:
        return [reference.tokenizer.apply_chat_template(c, add_generation_prompt=prompt, return_dict=False) for c in chats]

    def found(**asked: Any) -> TextIds:
        pairs = [("", json.dumps(chat)) for chat in chats]
        return causal.call("text_ids", TextTask(pairs, Tokenize((0, 0), [], **asked)))

    assert found(chat=ChatTemplate()).rows == rendered(True)
    assert found(chat=ChatTemplate(False)).rows == rendered(False)
    longest = declared(causal).context
    cut = found(chat=ChatTemplate(), truncation="left", longest=longest)
    assert (cut.rows, cut.truncated) == ([row[-longest:] for row in rendered(True)], 1)
    scored = [outcome_of(causal, row) for row in cut.rows]
    assert_close(scored, [reference.label_scores(row, (1, 2), False) for row in cut.rows])
    assert "chat_template" in declared(causal).features
    for name in ("chat_template", "tools", "messages"):
        with pytest.raises(EngineError, match=f"bad_request chat: .*'{name}' in kwargs is no option of a chat template"):
            found(chat=ChatTemplate(kwargs={name: "{{ 1 }}"}))


def outcome_of(engine: HostedEngine, row: list[int]) -> Any:
    [outcome] = whole(engine.score(RowBatch((part_of([([], row)], shared=True, labels=(1, 2)),))))
    assert isinstance(outcome.parts[0], dict)
    return outcome.parts[0]["scores"][0]
