"""`Pool.logprobs` on a real socket: what travels, what comes back, and which arguments are refused by name."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginepool import BlockingPool, LogprobsResult, Pool, errors
from enginepool.protocol.messages import MAX_PLACE_LABELS, FrameSpec
from tests.wire.fake_coordinator import FakeCoordinator


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[FakeCoordinator]:
    with FakeCoordinator(f"ipc://{tmp_path}/c.sock") as fake:
        yield fake


def ask(coordinator: FakeCoordinator, prompts: Any, responses: Any, **options: Any) -> LogprobsResult:
    async def main() -> LogprobsResult:
        async with Pool.connect(coordinator.address) as pool:
            return await pool.logprobs(prompts, responses, **options)

    return asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("prompt", [[1, 2], np.array([1, 2]), range(1, 3), (np.int64(1), np.int64(2))])
def test_one_prompt_for_all_responses_travels_once_and_rows_come_back_cut(coordinator: FakeCoordinator, prompt: Any) -> None:
    result = ask(coordinator, prompt, [[3], [4, 5, 6]])
    assert [row.tolist() for row in result.logprobs] == [[0.0], [-3.0, -4.0, -5.0]] and result.labels is None
    assert all(row.dtype == np.float32 and row.flags.writeable for row in result.logprobs)
    assert (result.version, result.forwards, result.usage, result.timings) == (2, (1,), (2, 8), (0.0015, 2.0))
    [sent] = coordinator.logprobs
    assert [spec.name for spec in sent.frames] == ["query", "items", "item_lengths"]
    assert sent.frames[0] == FrameSpec("query", "int32", (2,)) and coordinator.payloads[0][0] == b"\1\0\0\0\2\0\0\0"
    assert (sent.group, sent.labels, sent.priority, sent.timeout_ms, sent.min_version) == ("", [], 0, None, 0)


@pytest.mark.parametrize("prompts", [[[1], [2, 7]], (np.array([1]), np.array([2, 7], np.uint8))])
def test_prompts_of_their_own_and_every_option_travel(coordinator: FakeCoordinator, prompts: Any) -> None:
    options = {
        "group": "g",
        "label_token_ids": [8, 9],
        "top_logprobs": 3,
        "priority": -3,
        "timeout": 30,
        "min_version": 4,
        "version": 5,
    }
    result = ask(coordinator, prompts, [[3], [4, 5]], **options)
    assert result.labels is not None and result.top_ids is not None and result.top_logprobs is not None
    assert [row.tolist() for row in result.top_ids] == [[[0, -1, -2]], [[-6, -7, -8], [-9, -10, -11]]]
    assert all(row.dtype == np.int32 and row.flags.writeable for row in result.top_ids)
    assert [row.shape for row in result.top_logprobs] == [(1, 3), (2, 3)]
    assert [row.tolist() for row in result.labels] == [[[0.0, -1.0]], [[-4.0, -5.0], [-6.0, -7.0]]]
    [sent] = coordinator.logprobs
    assert [spec.name for spec in sent.frames] == ["query", "query_lengths", "items", "item_lengths"]
    assert (sent.group, sent.labels, sent.priority, sent.min_version, sent.version) == ("g", [8, 9], -3, 4, 5)
    assert sent.top_logprobs == 3
    assert sent.timeout_ms is not None and 0 < sent.timeout_ms <= 30_000


WRONG: list[tuple[Any, Any, dict[str, Any], str, str]] = [
    ("text", ["text"], {}, "prompts", ""),
    (["a"], ["b"], {}, "prompts", ""),
    ([1], ["b"], {}, "responses[0]", ""),
    ([[1]], ["b"], {}, "responses[0]", ""),
    ([], [[1]], {}, "prompts", "1"),
    (np.empty(0, np.int32), [[1]], {}, "prompts", "1"),
    ([1], [], {}, "responses", "1"),
    ([1], [[2], []], {}, "responses[1]", "1"),
    ([[1], []], [[2], [3]], {}, "prompts[1]", "1"),
    ([[1], [2]], [[2], []], {}, "responses[1]", "1"),
    ([[1]], [[2], [3]], {}, "responses", "1"),
    ([1, -1], [[2]], {}, "prompts[1]", "0"),
    ([1], [[2, -2]], {}, "responses[0][1]", "0"),
    (None, [[2]], {}, "prompts", ""),
    ([1], [[2]], {"label_token_ids": [-1]}, "label_token_ids[0]", "0"),
    ([1], [[2]], {"label_token_ids": [0] * (MAX_PLACE_LABELS + 1)}, "label_token_ids", str(MAX_PLACE_LABELS)),
    ([1], [[2]], {"top_logprobs": 21}, "top_logprobs", "20"),
    ([1], [[2]], {"top_logprobs": -1}, "top_logprobs", "0"),
    ([1], [[2]], {"priority": 1001}, "priority", "1000"),
]


@pytest.mark.parametrize(("prompts", "responses", "options", "field", "limit"), WRONG)
def test_an_argument_that_cannot_be_served_is_named(
    coordinator: FakeCoordinator, prompts: Any, responses: Any, options: dict[str, Any], field: str, limit: str
) -> None:
    with pytest.raises(errors.BadRequest) as refused:
        ask(coordinator, prompts, responses, **options)
    assert (refused.value.field, refused.value.limit) == (field, limit)
    assert str(refused.value).startswith(f"{field}: ")
    assert not coordinator.logprobs


def test_text_is_refused_with_what_to_do(coordinator: FakeCoordinator) -> None:
    with pytest.raises(errors.BadRequest, match="prompts: text; tokenize prompts and responses each for itself"):
        ask(coordinator, ["a", "b"], ["c", "d"])


def test_an_answer_of_another_shape_is_malformed(coordinator: FakeCoordinator) -> None:
    coordinator.short_rows = True
    with pytest.raises(errors.Malformed, match=r"no logprobs float32 \[1, 2\]"):
        ask(coordinator, [1], [[2, 3]])


def test_a_blocking_pool_gives_logprobs_as_well(coordinator: FakeCoordinator) -> None:
    with BlockingPool.connect(coordinator.address) as pool:
        assert [len(row) for row in pool.logprobs([[1], [2]], [[3], [4, 5]]).logprobs] == [1, 2]


def test_a_refusal_of_the_coordinator_names_the_argument(coordinator: FakeCoordinator) -> None:
    coordinator.vocab = 5
    with pytest.raises(errors.BadRequest, match=r"^responses\[0\]\[1\]: token id 9"):
        ask(coordinator, [1], [[1, 9]])
