"""Whether an engine is gone, why, and what that means to the calls that wait for it. No SGLang here."""

import asyncio
from collections.abc import Awaitable
from typing import Any

from enginepool.workers.engine import EngineDied, EngineError


class EngineEnd:
    """An engine ends once: it is lost, or it is closed. All methods run on the engine's loop."""

    def __init__(self) -> None:
        #: Its result is the reason why the engine was lost. Made at the first question: futures belong to a running loop.
        self._lost: asyncio.Future[str] | None = None
        #: Why every call fails from now on.
        self._over: asyncio.Future[str] | None = None

    def _futures(self) -> tuple[asyncio.Future[str], asyncio.Future[str]]:
        if self._lost is None or self._over is None:
            loop = asyncio.get_running_loop()
            self._lost, self._over = loop.create_future(), loop.create_future()
        return self._lost, self._over

    def lose(self, reason: str) -> None:
        """The engine is gone by itself. The first reason counts, and none after `close`."""
        lost, over = self._futures()
        if not over.done():
            lost.set_result(reason)
            over.set_result(reason)

    def close(self) -> None:
        """The engine is being stopped: calls end, but it was not lost."""
        _, over = self._futures()
        if not over.done():
            over.set_result("the engine was closed")

    async def lost(self) -> str:
        """Wait until the engine is lost; the reason."""
        lost, _ = self._futures()
        return await asyncio.shield(lost)

    def check(self) -> None:
        """Raises EngineDied when the engine has ended."""
        _, over = self._futures()
        if over.done():
            raise EngineDied(over.result())

    async def unless_over(self, work: Awaitable[Any]) -> Any:
        """The result of `work`, or EngineDied as soon as the engine is gone: the engine itself would wait without a limit."""
        _, over = self._futures()
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, over}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            task.cancel()  # nothing where it is done
        if over.done() and task.done() and not task.cancelled():
            task.exception()  # looked at: the end of the engine is the reason that counts
        self.check()
        return task.result()


def one_line(error: BaseException) -> str:
    """What went wrong, for the operator: the last line of the message says it in tracebacks, the first one elsewhere."""
    text = str(getattr(error, "detail", None) or error).strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    line = lines[-1] if lines[0].startswith("Traceback") else lines[0]
    return line if isinstance(error, ValueError | EngineError) else f"{type(error).__name__}: {line}"
