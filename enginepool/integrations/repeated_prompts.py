"""Prompts of a trainer, which repeats each one for each of its samples: equal prompts in a row are one request."""

import asyncio
from collections.abc import Sequence
from typing import Any

from enginepool.client.generations import Generations
from enginepool.client.pool import Pool


async def generate_runs(pool: Pool, runs: Sequence[tuple[Any, int]], options: Any) -> list[Generations]:
    """Generate for each (prompt, samples), all at the same time. The first error ends the other requests, and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(pool.generate(prompt, n=n, **options)) for prompt, n in runs]
    except ExceptionGroup as failed:
        error = failed.exceptions[0]
        raise error from error.__cause__
    return [task.result() for task in tasks]
