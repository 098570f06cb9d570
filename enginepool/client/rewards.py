"""The reward of one completion: scores of a group of the pool, or a function of the caller."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias, cast

from enginepool.client.arguments import Ids, bad, check_group, check_options, kind
from enginepool.client.generations import Generation
from enginepool.client.score import ScoreCalls, ScoreOptions

#: (prompt as it was given, sample) → its reward, or a coroutine that returns it
RewardFunction: TypeAlias = Callable[[Any, Generation], Any]
#: (prompt as it was given, sample) → the query and the item that are scored: two texts, or two rows of token ids
ToRow: TypeAlias = Callable[[Any, Generation], tuple[str, str] | tuple[Ids, Ids]]
#: a reward of the kind that was asked for
Rewarder: TypeAlias = Callable[[Any, Generation], Awaitable[float]]


def prompt_of(row: Any) -> Any:
    """The prompt in what the caller gave: the row of a data set has it under `prompt`. Raises BadRequest."""
    if not isinstance(row, Mapping):
        return row
    named = cast("Mapping[str, Any]", row)
    if "prompt" not in named:
        raise bad("prompts", f"prompts: a row without `prompt`; it has {', '.join(map(str, named)) or 'nothing'}"[:300])
    return named["prompt"]


def rewarder(
    pool: ScoreCalls, reward: str | RewardFunction, to_row: ToRow | None, tokenizer: Any, options: ScoreOptions | None
) -> Rewarder:
    """What computes the reward of a sample. The arguments are those of `Pool.rollout`. Raises BadRequest."""
    if isinstance(reward, str):
        if options is not None and not isinstance(options, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise bad("reward_options", f"reward_options: {kind(options)}; a dict of options of score")
        if to_row is not None and not callable(to_row):
            raise bad("to_row", f"to_row: {kind(to_row)}; a function of a prompt and a sample")
        if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
            raise bad("tokenizer", f"tokenizer: {kind(tokenizer)}; a tokenizer, which has a method decode")
        check_options("score", options or {}, ScoreOptions)
        own: ScoreOptions = {**(options or {}), "group": check_group(reward)}
        return _scored(pool, own, to_row or _rows(tokenizer))
    if not callable(reward):
        raise bad("reward", f"reward: {kind(reward)}; the name of a group, or a function of a prompt and a sample")
    for name, value in (("to_row", to_row), ("tokenizer", tokenizer), ("reward_options", options)):
        if value is not None:
            raise bad(name, f"{name}: given with a reward function; it is for a reward that is the name of a group")
    return _called(reward)


def _rows(tokenizer: Any) -> ToRow:
    """What a reward group scores by default: token ids; with a tokenizer, texts."""

    def ids(row: Any, sample: Generation) -> tuple[Ids, Ids]:
        prompt = prompt_of(row)
        if isinstance(prompt, str):
            text = "reward: the prompt is a text, and its completion has token ids; give tokenizer or to_row, or prompts as ids"
            raise bad("reward", text)
        return prompt, sample.token_ids

    def texts(row: Any, sample: Generation) -> tuple[str, str]:
        prompt = prompt_of(row)
        query = prompt if isinstance(prompt, str) else tokenizer.decode(prompt, skip_special_tokens=True)
        return query, tokenizer.decode(sample.token_ids, skip_special_tokens=True)

    return ids if tokenizer is None else texts


def _scored(pool: ScoreCalls, options: ScoreOptions, to_row: ToRow) -> Rewarder:
    async def score(row: Any, sample: Generation) -> float:
        pair = to_row(row, sample)
        try:
            query, item = pair
        except (TypeError, ValueError):
            text = f"to_row: the function returned {kind(pair)}; it must return a query and an item"
            raise bad("to_row", text) from None
        answer = await pool.score(query, cast("Any", [item]), **options)
        return float(answer.scores[0, 0])

    return score


def _called(reward: RewardFunction) -> Rewarder:
    """A coroutine function runs on the loop of the pool. Another one may compute for long, so it runs in a thread."""
    call: Any = cast("Any", reward).__call__
    if inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(call):

        async def awaited(row: Any, sample: Generation) -> float:
            return number(await reward(row, sample))

        return awaited

    def called(row: Any, sample: Generation) -> Any:
        try:
            return reward(row, sample)
        except StopIteration as error:  # no future takes it: who awaits the thread would wait without an end
            raise RuntimeError(f"reward: the function raised {error!r}") from error

    async def threaded(row: Any, sample: Generation) -> float:
        value = await asyncio.to_thread(called, row, sample)
        return number(await value if inspect.isawaitable(value) else value)

    return threaded


def number(value: Any) -> float:
    """The reward that a function returned; also one element of numpy or torch. Raises BadRequest."""
    if isinstance(value, int | float):
        return float(value)
    if getattr(value, "size", None) == 1 or getattr(value, "numel", int)() == 1:
        return float(value.item())
    raise bad("reward", f"reward: the function returned {kind(value)}; it must return a number")
