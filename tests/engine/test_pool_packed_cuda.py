"""What a score may ask for besides its labels, of a pool that packs: equal to a direct computation."""

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from enginepool import Pool, ScoreResult
from enginepool.protocol.messages import GroupLimits
from tests.engine.reference import Models, Reference

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
START_S = 400.0
VOCAB = 300
#: As in `test_sglang_cuda.py`: how much logits in bfloat16 are off.
BFLOAT16 = 0.15
OPTIONS: dict[str, Any] = {"sampling_backend": "pytorch", "mem_fraction_static": 0.2}
SETTINGS: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "max_batch_tokens": 512, "options": OPTIONS}


def ids(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(VOCAB) for _ in range(count)]


def logarithms(logits: Any, temperature: float) -> Any:
    """Of the softmax over these logits, at a temperature."""
    scaled = logits / temperature
    return scaled - np.logaddexp.reduce(scaled)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_softmax_of_packed_rows_is_at_the_temperature_also_of_labels_that_are_texts(
    packed_pool: "PackedPool", reference: Reference, temperature: float
) -> None:
    chance = random.Random(5)
    texts = [text for text in ("yes", "no", " the", "a", "b") if len(reference.tokenizer(text)["input_ids"]) == 1][:3]
    labels = [reference.tokenizer(text)["input_ids"][0] for text in texts]
    query, items = ids(chance, 40), [ids(chance, chance.randint(1, 20)) for _ in range(60)]
    options: dict[str, Any] = {"apply_softmax": True, "temperature": temperature, "logprobs": True}
    found = packed_pool.score(query, items, labels=texts, **options)
    expected = [logarithms(reference.logits(query + item, labels), temperature) for item in items]
    np.testing.assert_allclose(found.scores, expected, rtol=0, atol=2 * BFLOAT16 / temperature)
    assert set(found.forwards) == {1}
    same = packed_pool.score(query, items, label_token_ids=labels, **options)
    np.testing.assert_allclose(same.scores, found.scores, rtol=0, atol=2 * BFLOAT16 / temperature)


@pytest.mark.parametrize("side", ["left", "right"])
def test_items_that_are_too_long_are_cut_on_the_side_that_was_named(
    packed_pool: "PackedPool", reference: Reference, side: str
) -> None:
    chance, limits = random.Random(6), packed_pool.limits
    query, labels = ids(chance, 40), [5, 9]
    room = limits.context - len(query)
    items = [ids(chance, room + 30), ids(chance, 3), ids(chance, room), ids(chance, 2 * room)]
    found = packed_pool.score(query, items, label_token_ids=labels, truncation=side, logprobs=True)
    cut = [item[-room:] if side == "left" else item[:room] for item in items]
    expected = [np.log(reference.label_scores(query + item, labels, False)) for item in cut]
    np.testing.assert_allclose(found.scores, expected, rtol=0, atol=2 * BFLOAT16)
    assert found.truncated == 2 and set(found.forwards) == {1}


def test_rows_behind_a_query_and_whole_ones_and_some_that_cannot_be_packed_come_from_the_same_worker(
    packed_pool: "PackedPool", reference: Reference
) -> None:
    chance = random.Random(7)
    query, items, labels = ids(chance, 30), [ids(chance, 5) for _ in range(6)], [5, 9]
    packed = packed_pool.score(query, items, label_token_ids=labels, logprobs=True)
    turned = packed_pool.score(query, items, label_token_ids=labels, logprobs=True, item_first=True)
    plain = packed_pool.score(query, items, label_token_ids=[labels] * 6, logprobs=True)
    behind, before = [query + item for item in items], [item + query for item in items]
    for found, rows in ((packed, behind), (turned, before), (plain, behind)):
        expected = [np.log(reference.label_scores(row, labels, False)) for row in rows]
        np.testing.assert_allclose(found.scores, expected, rtol=0, atol=2 * BFLOAT16)
        assert set(found.forwards) == {1}


def test_single_rows_of_many_callers_are_packed_and_each_gets_its_own_score(
    packed_pool: "PackedPool", reference: Reference
) -> None:
    chance, labels = random.Random(8), [5, 9]
    rows = [(ids(chance, chance.randint(1, 20)), ids(chance, chance.randint(1, 10))) for _ in range(150)]
    answers = packed_pool.score_each([([*query], [item]) for query, item in rows], label_token_ids=labels, logprobs=True)
    for (query, item), found in zip(rows, answers, strict=True):
        expected = [np.log(reference.label_scores(query + item, labels, False))]
        np.testing.assert_allclose(found.scores, expected, rtol=0, atol=2 * BFLOAT16)
        assert found.forwards == (1,)


def test_text_is_packed_and_equal_to_its_tokens(packed_pool: "PackedPool", reference: Reference) -> None:
    query, items = "Is it polite? ", ["Good day!", "Go away!", "a b c"]
    rows = [reference.tokenizer(query + item)["input_ids"] for item in items]
    found = packed_pool.score(query, items, label_token_ids=[5, 9], logprobs=True)
    expected = [np.log(reference.label_scores(row, [5, 9], False)) for row in rows]
    np.testing.assert_allclose(found.scores, expected, rtol=0, atol=2 * BFLOAT16)
    assert set(found.forwards) == {1}


class PackedPool:
    """A pool with one worker, which packs, for one call after the other."""

    def __init__(self, model: str, **settings: Any) -> None:
        self._runner = asyncio.Runner()
        self._pool = self._runner.run(self._start(model, settings))
        self.limits = self._runner.run(self._limits())

    async def _start(self, model: str, settings: dict[str, Any]) -> Pool:
        pool = await Pool.start(model, start_timeout=START_S, **settings)
        await pool.ready(timeout=START_S)
        return pool

    async def _limits(self) -> GroupLimits:
        [group] = (await self._pool.status()).groups
        assert group.limits is not None
        return group.limits

    def score(self, query: Any, items: Any, **options: Any) -> ScoreResult:
        return self._runner.run(self._pool.score(query, items, timeout=START_S, **options))

    def score_each(self, asked: list[tuple[Any, Any]], **options: Any) -> list[ScoreResult]:
        """The same of calls that wait together."""

        async def all_of_them() -> list[ScoreResult]:
            return await asyncio.gather(*(self._pool.score(*one, timeout=START_S, **options) for one in asked))

        return self._runner.run(all_of_them())

    def close(self) -> None:
        self._runner.run(self._pool.close())
        self._runner.close()


@pytest.fixture(scope="module")
def packed_pool(models: Models) -> Any:
    pool = PackedPool(str(models.causal), packing="on", **SETTINGS)
    yield pool
    pool.close()
