"""`Pool.embed` on a real socket: what travels, what comes back, and which arguments are refused by name."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginepool import BlockingPool, EmbedResult, Pool, errors
from enginepool.protocol.messages import MAX_DIMENSIONS, FrameSpec
from tests.wire.fake_coordinator import FakeCoordinator


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[FakeCoordinator]:
    with FakeCoordinator(f"ipc://{tmp_path}/c.sock") as fake:
        yield fake


def embed(coordinator: FakeCoordinator, inputs: Any, **options: Any) -> EmbedResult:
    async def main() -> EmbedResult:
        async with Pool.connect(coordinator.address) as pool:
            return await pool.embed(inputs, **options)

    return asyncio.run(asyncio.wait_for(main(), 60))


def test_an_instruction_goes_before_each_text(coordinator: FakeCoordinator) -> None:
    embed(coordinator, ["zwölf", "a"], instruction="Q: ")
    assert coordinator.payloads == [["Q: zwölfQ: a".encode(), b"\x09\0\0\0\4\0\0\0"]]
    for inputs, instruction in (([[1]], "Q: "), (["a"], 3), (["a"], "\ud800"), ("a", "Q: ")):
        with pytest.raises(errors.BadRequest) as wrong:
            embed(coordinator, inputs, instruction=instruction)
        assert wrong.value.field == "instruction"


@pytest.mark.parametrize(
    "inputs",
    [[[1, 2], [3]], (np.array([1, 2]), np.array([3], np.uint8)), [range(1, 3), (3,)]],
    ids=["lists", "arrays", "ranges"],
)
def test_token_ids_travel_without_a_query_and_embeddings_come_back(coordinator: FakeCoordinator, inputs: Any) -> None:
    result = embed(coordinator, inputs)
    np.testing.assert_array_equal(result.embeddings, np.arange(8, dtype=np.float32).reshape(2, 4))
    assert result.embeddings.dtype == np.float32 and result.embeddings.flags.writeable
    assert (result.version, result.forwards, result.usage, result.timings) == (2, (1,), (2, 12), (0.0015, 2.0))
    assert coordinator.payloads == [[b"\1\0\0\0\2\0\0\0\3\0\0\0", b"\2\0\0\0\1\0\0\0"]]
    [sent] = coordinator.embeds
    assert sent.frames == [FrameSpec("items", "int32", (3,)), FrameSpec("item_lengths", "uint32", (2,))]
    assert (sent.group, sent.dimensions, sent.normalize, sent.priority, sent.timeout_ms) == ("", 0, True, 0, None)


def test_text_and_every_option_travel(coordinator: FakeCoordinator) -> None:
    options = {"group": "g", "dimensions": 2, "normalize": False, "priority": -3, "timeout": 30, "min_version": 4, "version": 5}
    assert embed(coordinator, ["zwölf", "a"], **options).embeddings.shape == (2, 2)
    assert coordinator.payloads == [["zwölfa".encode(), b"\6\0\0\0\1\0\0\0"]]
    [sent] = coordinator.embeds
    assert (sent.group, sent.dimensions, sent.normalize, sent.priority, sent.min_version, sent.version) == (
        "g",
        2,
        False,
        -3,
        4,
        5,
    )
    assert sent.timeout_ms is not None and 0 < sent.timeout_ms <= 30_000


WRONG: list[tuple[Any, dict[str, Any], str, str]] = [
    ("one text", {}, "inputs", ""),
    ([], {}, "inputs", "1"),
    ([[]], {}, "inputs[0]", "1"),
    (["a", ""], {}, "inputs[1]", "1"),
    (["a", [1]], {}, "inputs[1]", ""),
    ([[1], "a"], {}, "inputs[1]", ""),
    ([[1, -1]], {}, "inputs[0][1]", "0"),
    ([[1]], {"dimensions": 0}, "dimensions", "1"),
    ([[1]], {"dimensions": MAX_DIMENSIONS + 1}, "dimensions", str(MAX_DIMENSIONS)),
    ([[1]], {"dimensions": 1.5}, "dimensions", ""),
    ([[1]], {"dimensions": True}, "dimensions", ""),
    ([[1]], {"normalize": 1}, "normalize", ""),
    ([[1]], {"priority": 1001}, "priority", "1000"),
    ([[1]], {"timeout": 0}, "timeout", "0"),
]


@pytest.mark.parametrize(("inputs", "options", "field", "limit"), WRONG)
def test_an_argument_that_cannot_be_served_is_named(
    coordinator: FakeCoordinator, inputs: Any, options: dict[str, Any], field: str, limit: str
) -> None:
    with pytest.raises(errors.BadRequest) as refused:
        embed(coordinator, inputs, **options)
    assert (refused.value.field, refused.value.limit) == (field, limit)
    assert str(refused.value).startswith(f"{field}: ")
    assert not coordinator.embeds


def test_an_unknown_option_is_refused_with_the_one_that_was_meant(coordinator: FakeCoordinator) -> None:
    with pytest.raises(TypeError, match=r"embed\(\) has no argument 'dimension'; did you mean dimensions\?"):
        embed(coordinator, [[1]], dimension=3)


def test_a_blocking_pool_embeds_as_well(coordinator: FakeCoordinator) -> None:
    with BlockingPool.connect(coordinator.address) as pool:
        assert pool.embed([[1], [2]], dimensions=3).embeddings.shape == (2, 3)


def test_a_refusal_of_the_coordinator_names_the_argument(coordinator: FakeCoordinator) -> None:
    coordinator.vocab = 5
    with pytest.raises(errors.BadRequest, match=r"^inputs\[0\]\[1\]: token id 9") as refused:
        embed(coordinator, [[1, 9]])
    assert (refused.value.field, refused.value.limit) == ("inputs[0][1]", "5")
