"""Room for what is held at once, such as bytes. Who finds none waits: higher priorities first, then in the order of arrival."""

import asyncio
import heapq
import itertools


class Held:
    """A part of a `SharedRoom`, until it is given back."""

    def __init__(self, room: "SharedRoom", amount: int) -> None:
        self._room, self._amount = room, amount

    def shrink(self, to: int) -> None:
        """Keep no more than this."""
        more = self._amount - min(self._amount, to)
        self._amount -= more
        self._room.add(more)

    def give_back(self) -> None:
        """Keep nothing. Idempotent."""
        self.shrink(0)


class SharedRoom:
    """Room for so much of something."""

    def __init__(self, most: int) -> None:
        self._most = self.free = most
        self._arrived = itertools.count()
        #: (−priority, order of arrival, amount, its turn)
        self._waiting: list[tuple[int, int, int, asyncio.Future[None]]] = []

    async def take(self, amount: int, priority: int = 0) -> Held:
        """Wait for so much of it; for all of it, where that is less."""
        amount = min(amount, self._most)
        turn = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (-priority, next(self._arrived), amount, turn))
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.free += amount
            turn.cancel()
            self._admit()
            raise
        return Held(self, amount)

    def _admit(self) -> None:
        while self._waiting and ((turn := self._waiting[0][3]).done() or self._waiting[0][2] <= self.free):
            if not turn.done():
                self.free -= self._waiting[0][2]
                turn.set_result(None)
            heapq.heappop(self._waiting)

    def add(self, amount: int) -> None:
        """For `Held`: there is so much more."""
        self.free += amount
        self._admit()
