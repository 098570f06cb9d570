"""Room for what is held at once, such as bytes. Who finds none waits, those before it first."""

import asyncio


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
        self._turn = asyncio.Lock()
        self._more = asyncio.Event()

    async def take(self, amount: int) -> Held:
        """Wait for so much of it; for all of it, where that is less."""
        amount = min(amount, self._most)
        async with self._turn:
            while self.free < amount:
                self._more.clear()
                await self._more.wait()
            self.free -= amount
        return Held(self, amount)

    def add(self, amount: int) -> None:
        """For `Held`: there is so much more."""
        self.free += amount
        self._more.set()
