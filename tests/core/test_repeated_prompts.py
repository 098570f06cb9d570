"""The requests of a trainer's prompts: their answers come in order, and an error of one ends the others."""

import asyncio
from typing import Any

import pytest

from enginepool import errors
from enginepool.integrations.repeated_prompts import generate_runs


class StandIn:
    """A pool that refuses the prompt [9], and answers others when `may_answer` is set."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.begun: list[list[int]] = []
        self.cancelled: list[list[int]] = []

    async def generate(self, prompt: list[int], *, n: int, temperature: float) -> tuple[list[int], int, float]:
        self.begun.append(prompt)
        if prompt == [9]:
            raise errors.BadRequest("prompts[0]: refused") from KeyError("the cause")
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.cancelled.append(prompt)
            raise
        return prompt, n, temperature


def run(pool: Any, *runs: tuple[list[int], int]) -> Any:
    return generate_runs(pool, runs, {"temperature": 0.5})


def test_all_are_asked_at_once_and_answers_are_in_the_order_of_the_prompts() -> None:
    async def scene() -> None:
        pool = StandIn()
        pool.may_answer.set()
        assert await run(pool, ([1], 2), ([2], 1)) == [([1], 2, 0.5), ([2], 1, 0.5)]

    asyncio.run(scene())


def test_an_error_of_one_request_ends_the_others_and_is_raised_as_it_is() -> None:
    async def scene() -> None:
        pool = StandIn()
        with pytest.raises(errors.BadRequest, match="refused") as refused:
            await run(pool, ([1], 1), ([2], 1), ([9], 1), ([3], 1))
        assert isinstance(refused.value.__cause__, KeyError)
        assert pool.begun == [[1], [2], [9], [3]] and sorted(pool.cancelled) == [[1], [2], [3]]

    asyncio.run(scene())


def test_cancelling_the_call_ends_its_requests() -> None:
    async def scene() -> None:
        pool = StandIn()
        asked = asyncio.ensure_future(run(pool, ([1], 1), ([2], 1)))
        while len(pool.begun) < 2:
            await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert sorted(pool.cancelled) == [[1], [2]]

    asyncio.run(scene())
