"""Waiting in a test for what has no event. A task that ends meanwhile ends the wait, as nothing may come any more."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from tests.process.daemons import PATIENCE_S


async def wait_until(
    there: Callable[[], Coroutine[Any, Any, bool]], *needed: "asyncio.Future[Any]", limit_s: float = PATIENCE_S
) -> None:
    """Look until it is there, while all tasks that are `needed` for it run.

    Raises:
        TimeoutError: it did not come.
        AssertionError: a task has ended, and it is not there; what a task has raised is raised instead.
    """
    async with asyncio.timeout(limit_s):
        while not await there():
            check_running(needed)
            await asyncio.sleep(0.01)


def check_running(tasks: "Iterable[asyncio.Future[Any]]") -> None:
    """None of them has ended; raises what one has raised."""
    for task in tasks:
        if task.done():
            raise AssertionError(f"it has ended before: {task.result()}")
