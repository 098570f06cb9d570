"""Calls of a `Pool` that ask twice, on a real socket: both questions are within the one timeout of the call."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from enginepool import Pool, errors
from enginepool.client.connection import Connection
from enginepool.protocol.messages.status import GroupLimits, GroupStatus
from tests.wire.fake_coordinator import FakeCoordinator

#: seconds more to each answer
LATE_S = 0.2


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[FakeCoordinator]:
    with FakeCoordinator(f"ipc://{tmp_path}/c.sock") as fake:
        fake.groups = [GroupStatus("g", limits=GroupLimits("classifier", 1000, 100, 8, labels=1))]
        yield fake


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """The seconds that each question had."""
    found: list[float | None] = []
    ask = Connection.ask

    async def late(self: Connection, question: Any, answer: Any, within: float | None = None, frames: Any = ()) -> Any:
        found.append(within)
        said = await ask(self, question, answer, within, frames)
        await asyncio.sleep(LATE_S)
        return said

    monkeypatch.setattr(Connection, "ask", late)
    return found


def scene(coordinator: FakeCoordinator, call: Callable[[Pool], Awaitable[object]]) -> None:
    async def main() -> None:
        async with Pool.connect(coordinator.address) as pool:
            await call(pool)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_rerank_asks_what_the_model_is_within_its_timeout(coordinator: FakeCoordinator) -> None:
    async def main(pool: Pool) -> None:
        coordinator.silent = True
        async with asyncio.timeout(5):
            with pytest.raises(errors.DeadlineExceeded):
                await pool.rerank("q", ["a"], timeout=0.1)

    scene(coordinator, main)


def test_the_scores_of_rerank_have_what_is_left_of_its_timeout(coordinator: FakeCoordinator, given: list[float | None]) -> None:
    async def main(pool: Pool) -> None:
        await pool.rerank("q", ["a"], timeout=5)
        await pool.rerank("q", ["a"])

    scene(coordinator, main)
    assert given == [pytest.approx(5, abs=1), None]
    timed, endless = coordinator.scores
    assert timed.timeout_ms is not None and timed.timeout_ms <= (5 - LATE_S) * 1000
    assert endless.timeout_ms is None


def test_load_adapter_without_a_version_has_one_timeout(coordinator: FakeCoordinator, given: list[float | None]) -> None:
    async def main(pool: Pool) -> None:
        with pytest.raises(errors.DeadlineExceeded):
            await pool.load_adapter("french", "/adapters/french", timeout=1)

    scene(coordinator, main)
    first, second = given
    assert first is not None and second is not None and second <= first - LATE_S
