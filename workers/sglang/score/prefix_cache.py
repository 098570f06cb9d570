"""Long queries that the engine computes once: which of them it has, and which batch waits for another one. No SGLang here.

A query is sent alone, ahead of its rows, and stays in SGLang's radix cache; the rows that follow compute their items alone.
SGLang looks for what it has when it puts a row into a forward, so the query must be answered before the rows are sent: in
the same forward they would find nothing. SGLang may drop what it has whenever it needs the memory. A row whose query is
gone computes it again: as right as before, and counted in full by every budget. The worker reads off each answer how much was
found, and believes no longer in a query that was not.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

from enginepool.workers.engine import RowPart

#: Computes these queries, one row each.
Compute = Callable[[list[list[int]]], Awaitable[object]]


class CachedQueries:
    """The queries that one engine has, as far as its worker knows.

    Args:
        shortest: a query of fewer tokens is not worth a forward of its own; 0: none is.
        capacity: tokens of queries to believe in; what was used longest ago is forgotten first, as in the engine.
        page: the engine keeps whole pages of a query.
    """

    def __init__(self, shortest: int, capacity: int, page: int) -> None:
        self._shortest = shortest
        self._capacity = capacity
        self._page = page
        #: query -> its tokens; the most recently used one is the last
        self._known: dict[bytes, int] = {}
        self._tokens = 0
        #: query -> the batch that computes it: its priority, and an event for its end
        self._pending: dict[bytes, tuple[int, asyncio.Event]] = {}
        #: queries that were sent ahead, and parts whose rows did not find their query
        self.computed = 0
        self.missed = 0

    def shared(self, part: RowPart) -> bool:
        """Whether the rows of `part` share a query that is worth it."""
        return 0 < self._shortest <= part.shared <= self._capacity

    async def ensure(self, parts: Iterable[RowPart], priority: int, compute: Compute) -> None:
        """Return when the engine has the query of every part that shares one. A query that another batch computes is
        not computed again, unless that batch has a lower priority and could wait without a limit."""
        left = {part.query.tobytes(): part.query for part in parts if self.shared(part)}
        while left := {key: query for key, query in left.items() if not self._has(key)}:
            mine = [key for key in left if key not in self._pending or self._pending[key][0] < priority]
            if not mine:
                await self._pending[next(iter(left))][1].wait()
                continue
            known, sign = self._known, (priority, asyncio.Event())
            self._pending.update(dict.fromkeys(mine, sign))
            try:
                await compute([left[key].tolist() for key in mine])
                self.computed += len(mine)
                if known is self._known:  # else the engine has dropped everything in the meantime
                    self._remember({key: left[key].size for key in mine})
            finally:
                for key in mine:
                    if self._pending.get(key) is sign:
                        del self._pending[key]
                sign[1].set()
            left = {key: query for key, query in left.items() if key not in mine}

    def look(self, parts: Iterable[RowPart], found: Sequence[int]) -> None:
        """Forget queries that rows did not find; `found` are the tokens that each row of the batch did not have to compute."""
        row = 0
        for part in parts:
            end = row + part.item_lengths.size
            # Of a query that is followed by a response, SGLang computes the last token again.
            if self.shared(part) and min(found[row:end]) < (part.query.size - 1) // self._page * self._page:
                self.missed += 1
                self._tokens -= self._known.pop(part.query.tobytes(), 0)
            row = end

    def clear(self) -> None:
        """The engine has dropped everything: its weights are others, or its caches were flushed."""
        self._known, self._tokens = {}, 0

    def _has(self, key: bytes) -> bool:
        size = self._known.pop(key, 0)
        if size:
            self._known[key] = size
        return size > 0

    def _remember(self, sizes: dict[bytes, int]) -> None:
        for key, size in sizes.items():
            self._tokens += size - self._known.pop(key, 0)
            self._known[key] = size
        while self._tokens > self._capacity:
            self._tokens -= self._known.pop(next(iter(self._known)))
