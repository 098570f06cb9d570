"""What a rollout is told of its rewards, refused before anything is generated."""

import asyncio
from typing import Any

import pytest

from enginepool.client.rewards import rewarder
from enginepool.errors import BadRequest


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("reward_options", "reward_options: an int; a dict of options of score"),
        ("to_row", "to_row: an int; a function of a prompt and a sample"),
        ("tokenizer", "tokenizer: an int; a tokenizer, which has a method decode"),
    ],
)
def test_what_a_reward_group_cannot_use_is_refused_by_name(field: str, said: str) -> None:
    given: dict[str, Any] = {"to_row": None, "tokenizer": None, "reward_options": None, field: 3}
    pool: Any = None
    with pytest.raises(BadRequest, match=f"^{said}$") as refused:
        rewarder(pool, "reward", given["to_row"], given["tokenizer"], given["reward_options"])
    assert refused.value.field == field


@pytest.mark.parametrize(("made", "said"), [(3, "an int"), ((1, 2, 3), "a tuple")])
def test_a_function_that_makes_no_row_is_named(made: Any, said: str) -> None:
    def to_row(row: Any, sample: Any) -> Any:
        return made

    async def reward() -> float:
        pool: Any = None
        sample: Any = None
        return await rewarder(pool, "reward", to_row, None, None)([1], sample)

    with pytest.raises(BadRequest, match=f"^to_row: the function returned {said}; it must return a query and an item$"):
        asyncio.run(reward())
