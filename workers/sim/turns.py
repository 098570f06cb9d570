"""Whose forward is next in the sim engine, which runs one at a time: batches of rows, and steps of the sequences."""

import asyncio
import heapq


class ForwardTurns:
    """Rows run by priority, and the sequences have a step between two batches of rows, as in the real engine."""

    def __init__(self) -> None:
        #: a forward runs, or is given its turn
        self.busy = False
        self._order = 0
        #: (-priority, order, turn) of batches of rows
        self._rows: list[tuple[int, int, asyncio.Future[None]]] = []
        self._step: asyncio.Future[None] | None = None
        self._of_rows = False

    async def take(self, priority: int | None) -> None:
        """Wait for the turn of a batch of rows, or without a priority for that of the next step of the sequences. `pass_on`
        must be called then."""
        if not self.busy:
            self.busy, self._of_rows = True, priority is not None
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if priority is None:
            self._step = turn
        else:
            self._order += 1
            heapq.heappush(self._rows, (-priority, self._order, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.pass_on()
            raise

    def pass_on(self) -> None:
        """A forward is over."""
        if self._of_rows and self._give(self._step):
            self._step, self._of_rows = None, False
            return
        while self._rows:
            if self._give(heapq.heappop(self._rows)[2]):
                self._of_rows = True
                return
        self.busy = self._give(self._step)
        self._step, self._of_rows = None, False

    @staticmethod
    def _give(turn: asyncio.Future[None] | None) -> bool:
        if turn is None or turn.done():
            return False
        turn.set_result(None)
        return True
