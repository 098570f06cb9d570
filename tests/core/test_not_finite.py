"""NaN or infinity is an error of its request, and never an answer; the other requests of its batch are answered."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from enginepool.protocol.messages import Capabilities, Part
from enginepool.workers.engine import EngineError, Outputs, RowBatch, RowPart
from enginepool.workers.sglang.score.scoring import EngineScoring

NAN, INF = float("nan"), float("inf")


class Tensor:
    """A pooled hidden state."""

    def __init__(self, values: list[float]) -> None:
        self.values = values

    def float(self) -> "Tensor":
        return self

    def numpy(self) -> Any:
        return np.array(self.values, np.float32)


Wanted = dict[str, Any]


def scored(
    kind: Any, rows: list[Any], hidden: list[list[float]] | None = None, wanted: Wanted | None = None
) -> list[Outputs | EngineError]:
    """A batch of parts with one row each, for which the engine says `rows`."""

    async def generate(request: Any, _: None) -> AsyncIterator[list[dict[str, Any]]]:
        answers: list[dict[str, Any]] = []
        for i, row in enumerate(rows):
            logprobs = [[(value, token, None) for token, value in enumerate(row)]]
            answers.append({"meta_info": {"output_token_ids_logprobs": logprobs}, "embedding": row})
            if hidden is not None:
                answers[i]["pooled_hidden_state"] = Tensor(hidden[i])
        yield answers

    causal = kind == "causal"
    embeds = kind == "embedding"
    tm = SimpleNamespace(is_generation=causal, generate_request=generate)
    asked = SimpleNamespace(rid=["r"], normalize_batch_and_arguments=lambda: None)

    class Request(SimpleNamespace):
        def __init__(self, **fields: Any) -> None:
            super().__init__(**(fields | vars(asked)))

        def __getitem__(self, place: int) -> Any:
            return SimpleNamespace()

    types = SimpleNamespace(GenerateReqInput=Request, EmbeddingReqInput=Request)

    def took(rows: list[str]) -> list[Any]:
        return [SimpleNamespace(time=1.0, cached=0) for _ in rows]

    entries: Any = SimpleNamespace(expect=len, pop=took)
    capabilities = Capabilities(
        kind=kind, vocab=64, context=32, batch_tokens=256, batch_rows=8, inflight_tokens=256, inflight_rows=8, hidden=4,
        operations=("embed",) if embeds else ("score",), embedding=2,
    )  # fmt: skip
    scoring = EngineScoring(tm, types, entries, capabilities, SimpleNamespace(settings={}, kv_tokens=0))  # type: ignore[arg-type]
    labels = list(range(len(rows[0]))) if causal else []
    asked_of_each = Part([], labels, **(wanted or {}))
    ids, length = np.array([1, 2], np.int32), np.array([2], np.uint32)
    parts = tuple(RowPart(np.empty(0, np.int32), ids, length, asked=asked_of_each) for _ in rows)
    outcomes, _, _ = asyncio.run(scoring.score(RowBatch(parts, 0, hidden is not None, "embed" if embeds else "score")))
    return list(outcomes)


def refused(outcome: Outputs | EngineError, what: str) -> bool:
    return isinstance(outcome, EngineError) and str(outcome).startswith(f"{what}[0]: NaN or infinite (1 of 1 rows)")


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("wrong", [NAN, INF, -INF])
def test_a_reward_that_is_not_finite_is_an_error_of_its_request_alone(wrong: float, softmax: bool) -> None:
    first, second, third = scored("classifier", [[1.0, 2.0], [wrong, wrong], [3.0, 4.0]], wanted={"softmax": softmax})
    assert isinstance(first, dict) and isinstance(third, dict)
    assert refused(second, "scores"), second


@pytest.mark.parametrize("wanted", [{}, {"softmax": True}, {"logprobs": True}, {"softmax": True, "logprobs": True}])
def test_a_logprob_of_nan_is_an_error_of_its_request_alone(wanted: Wanted) -> None:
    first, second = scored("causal", [[-1.0, -2.0], [NAN, -2.0]], wanted=wanted)
    assert isinstance(first, dict), first
    assert refused(second, "scores"), second


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("wrong", [NAN, INF])
def test_an_embedding_that_is_not_finite_is_an_error_of_its_request_alone(wrong: float, normalize: bool) -> None:
    first, second, third = scored("embedding", [[3.0, 4.0], [wrong, 2.0], [0.0, 0.0]], wanted={"normalize": normalize})
    assert isinstance(first, dict) and first["embeddings"].tolist() == [
        [3.0, 4.0] if not normalize else pytest.approx([0.6, 0.8])
    ]
    assert refused(second, "embeddings"), second
    assert isinstance(third, dict) and third["embeddings"].tolist() == [[0.0, 0.0]], "a vector of zeros stays one"


def test_a_dimension_that_is_cut_off_does_not_matter() -> None:
    [outcome] = scored("embedding", [[2.0, NAN]], wanted={"dimensions": 1})
    assert isinstance(outcome, dict) and outcome["embeddings"].tolist() == [[1.0]]


def test_a_hidden_state_of_nan_is_an_error_of_its_request_alone() -> None:
    first, second = scored("classifier", [[1.0], [1.0]], [[1.0, 2.0], [NAN, 2.0]])
    assert isinstance(first, dict) and "hidden" in first
    assert refused(second, "hidden"), second


def test_a_probability_of_zero_is_an_answer_and_so_is_its_logarithm() -> None:
    for wanted in ({"logprobs": False}, {"logprobs": True}):
        [outcome] = scored("causal", [[-INF, -1.0]], wanted=wanted)
        assert isinstance(outcome, dict), outcome
        assert outcome["scores"][0, 0] == (-INF if wanted["logprobs"] else 0.0)
