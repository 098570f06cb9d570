"""`Pool.similarity` and `Pool.rerank` on a real socket: which requests they make, and in what order documents come."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from enginepool import Pool, RerankResult, errors
from enginepool.protocol.messages import FrameSpec, Result, Score, Timings, Usage
from enginepool.protocol.messages.status import GroupLimits, GroupStatus
from tests.wire.fake_coordinator import FakeCoordinator, Rule

T = TypeVar("T")
CROSS_ENCODER = GroupLimits("classifier", 1000, 100, 8, labels=1)
CAUSAL = GroupLimits("causal", 1000, 100, 8)
EMBEDDING = GroupLimits("embedding", 1000, 100, 8, operations=("embed",), embedding=4)


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[FakeCoordinator]:
    with FakeCoordinator(f"ipc://{tmp_path}/c.sock") as fake:
        yield fake


def ask(coordinator: FakeCoordinator, limits: GroupLimits | None, call: Callable[[Pool], Awaitable[T]]) -> T:
    coordinator.groups = [GroupStatus("g", limits=limits)]

    async def main() -> T:
        async with Pool.connect(coordinator.address) as pool:
            return await call(pool)

    return asyncio.run(asyncio.wait_for(main(), 60))


def rerank(coordinator: FakeCoordinator, limits: GroupLimits | None, *documents: str, **options: Any) -> RerankResult:
    return ask(coordinator, limits, lambda pool: pool.rerank("q", list(documents), **options))


def scored(*values: float) -> Rule:
    """The coordinator answers with these scores in the first column."""

    def rule(message: Score, payload: Sequence[bytes]) -> tuple[Result, list[bytes]]:
        columns = max(1, len(message.labels))
        scores = np.zeros((len(values), columns), np.float32)
        scores[:, 0] = values
        result = Result(message.id, 3, [1], Usage(1, 1), Timings(0, 0), [FrameSpec("scores", "float32", scores.shape)])
        return result, [scores.tobytes()]

    return rule


def test_a_cross_encoder_scores_the_pairs_and_the_best_come_first(coordinator: FakeCoordinator) -> None:
    coordinator.rule = scored(0.25, 0.75, 0.5, 0.75)
    result = rerank(coordinator, CROSS_ENCODER, "a", "b", "c", "d", top_n=3, priority=5)
    assert result.order.tolist() == [1, 3, 2] and result.scores.tolist() == [0.25, 0.75, 0.5, 0.75]
    assert (result.method, result.version) == ("cross-encoder", 3)
    [sent] = coordinator.scores
    assert (sent.labels, sent.raw, sent.priority, sent.item_first) == ([], False, 5, False)


def test_a_causal_model_is_asked_for_the_first_of_its_labels(coordinator: FakeCoordinator) -> None:
    coordinator.rule = scored(0.25, 0.75)
    result = rerank(coordinator, CAUSAL, "a", "b", label_token_ids=[7, 8])
    assert result.order.tolist() == [1, 0] and result.method == "labels"
    [sent] = coordinator.scores
    assert (sent.labels, sent.softmax) == ([7, 8], True)


def test_an_embedding_model_embeds_query_and_documents_in_one_request(coordinator: FakeCoordinator) -> None:
    result = rerank(coordinator, EMBEDDING, "a", "b")
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)  # as the fake coordinator embeds
    np.testing.assert_allclose(result.scores, rows[0] @ rows[1:].T)
    assert result.order.tolist() == [1, 0] and result.method == "embeddings"
    [sent] = coordinator.embeds
    assert sent.normalize


def test_an_instruction_goes_before_the_query_alone(coordinator: FakeCoordinator) -> None:
    coordinator.rule = scored(0.25)
    rerank(coordinator, CROSS_ENCODER, "a", instruction="I: ")
    assert coordinator.payloads[0][:2] == [b"I: q", b"a"]
    ask(coordinator, EMBEDDING, lambda pool: pool.similarity(["q", "r"], ["a"], instruction="I: "))
    assert coordinator.payloads[1][0] == b"I: qI: ra"
    with pytest.raises(errors.BadRequest) as wrong:
        ask(coordinator, CROSS_ENCODER, lambda pool: pool.rerank([1], [[2]], instruction="I: "))
    assert wrong.value.field == "instruction"


def test_labels_that_are_texts_rank_as_their_tokens_do(coordinator: FakeCoordinator) -> None:
    coordinator.rule = scored(0.25, 0.75)
    assert rerank(coordinator, CAUSAL, "a", "b", labels=["yes", "no"]).method == "labels"
    assert (coordinator.scores[0].label_texts, coordinator.scores[0].softmax) == (["yes", "no"], True)


def test_similarity_is_the_cosine_of_each_pair(coordinator: FakeCoordinator) -> None:
    found = ask(coordinator, EMBEDDING, lambda pool: pool.similarity([[1], [2]], [[3], [4], [5]]))
    rows = np.arange(20, dtype=np.float32).reshape(5, 4)
    np.testing.assert_allclose(found, rows[:2] @ rows[2:].T)
    assert len(coordinator.embeds) == 1


@pytest.mark.parametrize(
    ("queries", "documents", "field", "received"),
    [
        ("a city", ["Paris"], "queries", "a str"),
        (["a city"], "Paris", "documents", "a str"),
        ({"input_ids": [[1]]}, [[1]], "queries", "a dict"),
        ([[1]], np.zeros((0, 3), np.int32), "documents", "empty"),
    ],
)
def test_a_text_or_a_mapping_is_no_list_of_texts(
    coordinator: FakeCoordinator, queries: Any, documents: Any, field: str, received: str
) -> None:
    async def compare(pool: Pool) -> None:
        with pytest.raises(errors.BadRequest, match=f"^{field}: {received}; ") as refused:
            await pool.similarity(queries, documents)
        assert refused.value.field == field
        if field == "documents":
            for limits in (EMBEDDING, CROSS_ENCODER):
                coordinator.groups = [GroupStatus("g", limits=limits)]
                with pytest.raises(errors.BadRequest, match=f"^{field}: {received}; "):
                    await pool.rerank("a city", documents)

    ask(coordinator, EMBEDDING, compare)
    assert not coordinator.embeds and not coordinator.scores


@pytest.mark.parametrize(
    ("limits", "options", "field"),
    [
        (CAUSAL, {}, "label_token_ids"),
        (CAUSAL, {"label_token_ids": [1]}, "label_token_ids"),
        (CROSS_ENCODER, {"label_token_ids": [1, 2]}, "label_token_ids"),
        (GroupLimits("classifier", 1000, 100, 8, labels=3), {}, "group"),
        (CROSS_ENCODER, {"top_n": 0}, "top_n"),
        (CROSS_ENCODER, {"top_n": 2}, "top_n"),
    ],
)
def test_what_the_model_cannot_rank_by_is_refused_by_name(
    coordinator: FakeCoordinator, limits: GroupLimits, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(errors.BadRequest, match=f"{field}: ") as refused:
        rerank(coordinator, limits, "a", **options)
    assert refused.value.field == field
    assert not coordinator.scores and not coordinator.embeds


def test_an_unknown_group_and_one_that_was_never_ready_are_named(coordinator: FakeCoordinator) -> None:
    with pytest.raises(errors.UnknownGroup, match="'x' is none of: g"):
        rerank(coordinator, CAUSAL, "a", group="x")
    with pytest.raises(errors.PoolDown, match="no worker of 'g' was ready yet"):
        rerank(coordinator, None, "a")
    with pytest.raises(TypeError, match="did you mean top_n"):
        rerank(coordinator, CAUSAL, "a", topn=1)
