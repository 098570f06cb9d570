"""`Pool.decode` and `Pool.tokenize` on a real socket: what travels, what comes back, and which arguments are refused."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginepool import BlockingPool, Pool, errors
from enginepool.protocol.messages import Decode, FrameSpec
from tests.wire.fake_coordinator import FakeCoordinator


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[FakeCoordinator]:
    with FakeCoordinator(f"ipc://{tmp_path}/c.sock") as fake:
        yield fake


def decode(coordinator: FakeCoordinator, rows: Any, **options: Any) -> list[str]:
    async def main() -> list[str]:
        async with Pool.connect(coordinator.address) as pool:
            return await pool.decode(rows, **options)

    return asyncio.run(asyncio.wait_for(main(), 60))


def test_token_ids_travel_and_texts_come_back_in_their_places(coordinator: FakeCoordinator) -> None:
    rows = [[97, 98], [], np.array([228]), range(99, 101)]
    assert decode(coordinator, rows, group="g", skip_special_tokens=False, priority=3, timeout=30) == ["ab", "", "ä", "cd"]
    [sent] = coordinator.decodes
    assert sent.frames == [FrameSpec("items", "int32", (5,)), FrameSpec("item_lengths", "uint32", (3,))]
    assert (sent.group, sent.skip_special_tokens, sent.priority) == ("g", False, 3)
    assert sent.timeout_ms is not None and 0 < sent.timeout_ms <= 30_000
    assert decode(coordinator, np.array([[97, 98], [99, 100]])) == ["ab", "cd"]
    assert coordinator.decodes[1] == Decode(coordinator.decodes[1].id, coordinator.decodes[1].frames)


def test_rows_without_ids_are_empty_texts_and_nothing_is_asked(coordinator: FakeCoordinator) -> None:
    assert decode(coordinator, [[], []]) == ["", ""] and decode(coordinator, []) == []
    assert not coordinator.decodes


@pytest.mark.parametrize(
    ("rows", "options", "field"),
    [
        ("text", {}, "rows"),
        (["text"], {}, "rows[0]"),
        ([1, 2], {}, "rows[0]"),
        (3, {}, "rows"),
        ([[1, -1]], {}, "rows[0][1]"),
        ([[1.5]], {}, "rows[0][0]"),
        ([[1]], {"skip_special_tokens": 1}, "skip_special_tokens"),
        ([[1]], {"priority": 1001}, "priority"),
        ([[1]], {"timeout": 0}, "timeout"),
    ],
)
def test_an_argument_that_cannot_be_served_is_named(
    coordinator: FakeCoordinator, rows: Any, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(errors.BadRequest) as refused:
        decode(coordinator, rows, **options)
    assert refused.value.field == field and str(refused.value).startswith(f"{field}: ")
    assert not coordinator.decodes


def test_a_blocking_pool_decodes_as_well_and_a_refusal_names_the_argument(coordinator: FakeCoordinator) -> None:
    with BlockingPool.connect(coordinator.address) as pool:
        assert pool.decode([[104, 105]]) == ["hi"]
        coordinator.vocab = 5
        with pytest.raises(errors.BadRequest, match=r"^rows\[0\]\[1\]: token id 9"):
            pool.decode([[1, 9]])


def test_texts_travel_and_their_ids_come_back(coordinator: FakeCoordinator) -> None:
    async def main() -> list[Any]:
        async with Pool.connect(coordinator.address) as pool:
            for texts, field in (("text", "texts"), ([], "texts"), (["a", ""], "texts[1]"), ([[1]], "texts[0]"), (3, "texts")):
                with pytest.raises(errors.BadRequest) as refused:
                    await pool.tokenize(texts)  # type: ignore[arg-type]
                assert refused.value.field == field and not coordinator.tokenizes
            return await pool.tokenize(["ab", "ä"], group="g", add_special_tokens=False, priority=2)

    found = asyncio.run(asyncio.wait_for(main(), 60))
    assert [row.tolist() for row in found] == [[97, 98], [195, 164]]
    assert all(row.dtype == np.int32 and row.flags.writeable for row in found)
    [sent] = coordinator.tokenizes
    assert sent.frames == [FrameSpec("items", "utf8", (4,)), FrameSpec("item_lengths", "uint32", (2,))]
    assert (sent.group, sent.add_special_tokens, sent.priority) == ("g", False, 2)
    with BlockingPool.connect(coordinator.address) as pool:
        assert [row.tolist() for row in pool.tokenize(["c"])] == [[99]]
