"""What runs between two batches of an engine: later work waits until it is done, and earlier work is finished before."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class BetweenBatches:
    """Batches and generations enter with `batch`, and something that must find the engine empty with `alone`."""

    def __init__(self) -> None:
        #: batches and generations inside
        self._inside = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._open = asyncio.Event()
        self._open.set()
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def batch(self) -> AsyncGenerator[None]:
        """Meanwhile nothing is alone."""
        while not self._open.is_set():
            await self._open.wait()
        self._inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._empty.set()

    @asynccontextmanager
    async def alone(self) -> AsyncGenerator[None]:
        """Meanwhile no batch is inside."""
        async with self._turn:
            self._open.clear()
            try:
                await self._empty.wait()
                yield
            finally:
                self._open.set()
