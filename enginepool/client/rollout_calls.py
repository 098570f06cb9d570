"""`Pool.rollout`: the call, and its arguments."""

from collections.abc import AsyncIterable, Iterable, Mapping
from functools import partial
from typing import Any, Final, Unpack, cast

from enginepool.client.arguments import bad, check_int, check_options, kind
from enginepool.client.generate import GenerateCalls
from enginepool.client.readiness import named_group
from enginepool.client.rewards import RewardFunction, ToRow, rewarder
from enginepool.client.rollout import Prompts, Rollout
from enginepool.client.sampling import SamplingOptions
from enginepool.client.score import ScoreCalls, ScoreOptions
from enginepool.errors import UnknownGroup
from enginepool.protocol.basis import MAX_ID
from enginepool.protocol.messages import MAX_SEQUENCES, Status, StatusReport

_MAX_IN_FLIGHT = 1 << 16
_OWN: Final = {
    "partial": "a rollout returns whole samples",
    "continue_from": "a rollout begins its samples",
    "prompt_logprobs": "Pool.generate has them",
    **dict.fromkeys(("images", "videos", "audio"), "each row of prompts has its own"),
}


class RolloutOptions(SamplingOptions, total=False):
    """The options of `Pool.rollout` that `Pool.generate` has, too."""

    logprobs: bool
    top_logprobs: int
    hidden_states: bool
    routed_experts: bool
    adapter: str | None


class RolloutCalls(GenerateCalls, ScoreCalls):
    """The calls of a pool that generate and score."""

    def rollout(
        self,
        prompts: Prompts,
        n: int,
        *,
        reward: str | RewardFunction,
        to_row: ToRow | None = None,
        tokenizer: Any = None,
        reward_options: ScoreOptions | None = None,
        max_staleness: int | None = None,
        max_in_flight: int = 64,
        **options: Unpack[RolloutOptions],
    ) -> Rollout:
        """Generate `n` samples of each prompt, and reward each: `async for group in pool.rollout(prompts, 8, reward=reward)`.

        A sample is rewarded as soon as it ends, and a group comes as soon as its samples are rewarded: no group waits for
        another one, so groups come in the order in which they are finished.

        Args:
            prompts: texts, token ids, or rows of a data set: mappings that have one of the two under `prompt`, and the media of
                that prompt, as `stream` takes them, under `images`, `videos` and `audio`. Any iterable, or an async one, also
                without an end: a prompt is taken from it when there is room.
            n: samples of each prompt.
            reward: the name of a group of this pool, whose first score is the reward; or a function of (prompt as it was given,
                sample). A coroutine function runs on this loop, another one in a thread. It returns a number. The sample has no
                `workers` and `adapters` yet.
            to_row: (prompt as it was given, sample) → (query, item), two texts or two rows of token ids, which the reward group
                scores. Default: the token ids of both. No media.
            tokenizer: of the policy: the reward group scores the texts of both.
            reward_options: of `Pool.score`, such as {"label_token_ids": [9454]}.
            max_staleness: a sample whose first token was computed by weights more than so many versions older than the
                committed ones, when its group is taken, is dropped and generated again. 0: by the newest weights alone.
                Default: None, samples of any age. Versions of adapters do not count.
            max_in_flight: prompts that were taken from `prompts` and whose groups were not taken, at most.
            options: of `Pool.generate`. `logprobs` is True unless it is given. `timeout` is for all samples of a prompt.

        Returns:
            An iterable of `RolloutGroup`; its `result()` is a list of all.

        Raises:
            BadRequest: an argument is invalid; `field` names it. What concerns one prompt, or one reward, is in `errors` of its
                group: a request that is invalid or too large, ran out of time, or crashed its engines; any exception of a
                reward function. All else is raised by the loop, after the groups that are finished.
        """
        n = check_int("n", n, 1, MAX_SEQUENCES)
        _check(prompts, options)
        if max_staleness is not None:
            max_staleness = check_int("max_staleness", max_staleness, 0, MAX_ID)
        asked: dict[str, Any] = {"logprobs": True, **options}
        trial: Any = {name: value for name, value in asked.items() if name != "routed_experts"}
        self.stream([0], n=n, **trial).cancel()  # which checks all options
        rewards = rewarder(self, reward, to_row, tokenizer, reward_options)
        committed = partial(self._committed, options.get("group", ""))
        in_flight = check_int("max_in_flight", max_in_flight, 1, _MAX_IN_FLIGHT)
        named = partial(self._check_named, options.get("group", ""), options.get("adapter"), reward)
        by_group = isinstance(reward, str)
        return Rollout(self, prompts, n, rewards, by_group, named, committed, max_staleness, in_flight, asked)

    async def _committed(self, group: str) -> int:
        """The committed weight version of a group. Raises UnknownGroup."""
        return named_group(await self._report(), group).version or 0

    async def _check_named(self, group: str, adapter: str | None, reward: object) -> None:
        """Whether the adapter and the reward group exist, as far as the pool knows. Raises BadRequest, UnknownGroup."""
        if not adapter and not isinstance(reward, str):
            return
        report = await self._report()
        groups = {status.name: status for status in report.groups}
        if isinstance(reward, str):
            if reward not in groups:
                has = ", ".join(groups)
                raise UnknownGroup(f"reward: {reward!r} is none of the groups: {has}", field="reward", limit=has)
            limits = groups[reward].limits  # None until a worker is ready: then each request says it
            if limits is not None and "score" not in limits.operations:
                has = ", ".join(limits.operations)
                raise bad("reward", f"reward: group {reward!r} does not score; its operations: {has}", has)
        policy = named_group(report, group)
        if adapter and policy.limits is not None:
            loaded = sorted({*policy.limits.adapters, *(one.name for one in policy.adapters)})
            if adapter not in loaded:
                has = ", ".join(loaded) or "none"
                raise bad("adapter", f"adapter: {adapter!r} is not loaded; there are: {has}", has)

    async def _report(self) -> StatusReport:
        return (await self._connection.ask(Status(), StatusReport))[0]


def _check(prompts: object, options: RolloutOptions) -> None:
    """Refuse options that a rollout does not have, and prompts that are none. Raises BadRequest, TypeError."""
    for name, why in _OWN.items():
        if name in options:
            raise bad(name, f"{name}: not for a rollout: {why}")
    named = ("prompts", "n", "reward", "to_row", "tokenizer", "reward_options", "max_staleness", "max_in_flight")
    check_options("rollout", options, RolloutOptions, *named)
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable | AsyncIterable):
        raise bad(
            "prompts",
            f"prompts: {kind(cast('object', prompts))}; an iterable of prompts, such as a list, or a data set of rows",
        )
