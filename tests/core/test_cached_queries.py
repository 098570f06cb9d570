"""Promises about queries that an engine computes once: none is computed twice, and an evicted one is not relied on."""

import asyncio
from collections.abc import Awaitable

import numpy as np
import pytest

from enginepool.protocol.messages import Part
from enginepool.workers.engine import RowPart
from enginepool.workers.sglang.score.prefix_cache import CachedQueries


def part_of(query: list[int], rows: int = 2, *, item_first: bool = False, own: bool = False) -> RowPart:
    """`rows` rows of one token after `query`; with `own`, each has a query of its own."""
    return RowPart(
        np.array(query * (rows if own else 1), np.int32),
        np.zeros(rows, np.int32),
        np.ones(rows, np.uint32),
        np.full(rows, len(query), np.uint32) if own else None,
        Part([], item_first=item_first),
    )


class Computing:
    """Keeps what was to be computed; nothing is done before `finish`."""

    def __init__(self) -> None:
        self.asked: list[list[list[int]]] = []
        self._done: list[asyncio.Future[None]] = []

    def __call__(self, queries: list[list[int]]) -> Awaitable[None]:
        self.asked.append(queries)
        self._done.append(asyncio.get_running_loop().create_future())
        return self._done[-1]

    def finish(self, at: int = 0, error: Exception | None = None) -> None:
        done = self._done.pop(at)
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)


async def begun(cached: CachedQueries, computing: Computing, *parts: RowPart, priority: int = 0) -> "asyncio.Task[None]":
    """A batch that asks for its queries, as far as it comes by itself."""
    task = asyncio.create_task(cached.ensure(parts, priority, computing))
    for _ in range(3):
        await asyncio.sleep(0)
    return task


def test_only_long_queries_that_rows_share_are_computed_ahead() -> None:
    cached = CachedQueries(shortest=4, capacity=8, page=1)
    assert cached.shared(part_of([1, 2, 3, 4]))
    assert cached.shared(part_of([1] * 8))
    assert not cached.shared(part_of([1, 2, 3])), "too short"
    assert not cached.shared(part_of([1] * 9)), "more than may be believed in"
    assert not cached.shared(part_of([1] * 4, rows=1)), "no other row to share it with"
    assert not cached.shared(part_of([1] * 4, item_first=True))
    assert not cached.shared(part_of([1] * 4, own=True))


def test_pieces_of_one_request_compute_its_query_once() -> None:
    async def run() -> None:
        cached, computing = CachedQueries(2, 100, 1), Computing()
        first, second = [await begun(cached, computing, part_of([1, 2])) for _ in range(2)]
        assert computing.asked == [[[1, 2]]]
        assert not first.done() and not second.done()
        computing.finish()
        await asyncio.gather(first, second)
        await cached.ensure([part_of([1, 2])], 0, computing)
        assert cached.computed == len(computing.asked) == 1

    asyncio.run(run())


def test_the_queries_of_a_batch_are_computed_together_and_those_of_others_awaited() -> None:
    async def run() -> None:
        cached, computing = CachedQueries(2, 100, 1), Computing()
        first = await begun(cached, computing, part_of([1, 2]))
        second = await begun(cached, computing, part_of([1, 2]), part_of([3, 4]), part_of([5, 6]), part_of([3, 4]))
        assert computing.asked == [[[1, 2]], [[3, 4], [5, 6]]]
        computing.finish(at=1)
        await asyncio.sleep(0)
        assert not second.done()
        computing.finish()
        await asyncio.gather(first, second)

    asyncio.run(run())


def test_a_higher_priority_does_not_wait_for_a_lower_one() -> None:
    async def run() -> None:
        cached, computing = CachedQueries(2, 100, 1), Computing()
        low = await begun(cached, computing, part_of([1, 2]), priority=-5)
        high = await begun(cached, computing, part_of([1, 2]), priority=5)
        assert len(computing.asked) == 2
        computing.finish(at=1)
        await high
        assert not low.done()
        computing.finish()
        await low

    asyncio.run(run())


def test_who_waited_for_one_that_failed_computes_it() -> None:
    async def run() -> None:
        cached, computing = CachedQueries(2, 100, 1), Computing()
        first, second = [await begun(cached, computing, part_of([1, 2])) for _ in range(2)]
        computing.finish(error=RuntimeError("no"))
        with pytest.raises(RuntimeError, match="no"):
            await first
        await asyncio.sleep(0)
        assert len(computing.asked) == 2
        computing.finish()
        await second

    asyncio.run(run())


@pytest.mark.parametrize("how", ["a row did not find it", "a flush", "a flush meanwhile", "others"])
def test_a_query_that_is_gone_is_computed_again(how: str) -> None:
    async def run() -> None:
        cached, computing = CachedQueries(2, 6, 2), Computing()
        part = part_of([1, 2, 3])
        task = await begun(cached, computing, part)
        if how == "a flush meanwhile":
            cached.clear()
        computing.finish()
        await task
        cached.look([part], [2, 3])
        assert cached.missed == 0, "whole pages are kept: 2 of 3 tokens"
        if how == "a row did not find it":
            cached.look([part_of([9]), part], [0, 0, 2, 1])
            assert cached.missed == 1
        elif how == "a flush":
            cached.clear()
        elif how == "others":
            task = await begun(cached, computing, part_of([4] * 4))
            computing.finish()
            await task
        again = await begun(cached, computing, part)
        assert computing.asked[-1] == [[1, 2, 3]] and len(computing.asked) == 2 + (how == "others")
        computing.finish()
        await again

    asyncio.run(run())


def test_what_was_used_last_is_forgotten_last() -> None:
    async def run() -> None:
        cached, computing = CachedQueries(2, 6, 1), Computing()
        for ids in ([1, 1], [2, 2], [3, 3], [1, 1], [4, 4]):
            task = await begun(cached, computing, part_of(ids))
            if not task.done():
                computing.finish()
            await task
        await cached.ensure([part_of([3, 3]), part_of([1, 1])], 0, computing)
        assert len(computing.asked) == 4
        task = await begun(cached, computing, part_of([2, 2]))
        assert computing.asked[-1] == [[2, 2]]
        computing.finish()
        await task

    asyncio.run(run())
