"""`Pool.rollout` through a real coordinator, with sim workers that generate and others that reward: a worker that is killed, or
new weights, in the middle change no sample and no reward."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from enginepool import Generation, Pool, RolloutGroup, WeightPublisher
from enginepool.config import GroupConfig
from enginepool.protocol.messages import Sampling
from enginepool.workers.sim.scores import expected_scores
from enginepool.workers.sim.tokens import expected_output
from tests.process.daemons import PATIENCE_S, Daemon, sim_pool
from tests.process.forking import ForkedDaemon
from tests.process.processes import Processes
from tests.process.scenes import OPTIONS
from tests.process.test_generate import GENERATES, VOCAB, prompt, run
from tests.process.weights import some_weights

SAMPLING: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 100}
#: one in so many tokens ends a sample
END_EVERY = 60
PROMPTS, N = 24, 3


def rewarding(processes: Processes, directory: Path, **more: Any) -> Daemon:
    """Two workers that generate, and one that scores."""
    config = sim_pool(directory, options={**GENERATES, "forward_s": 0.005, "end_every": END_EVERY, **more}, generates=True)
    judge = GroupConfig(model="sim", engine="sim", options={"kind": "classifier", "vocab": VOCAB})
    return ForkedDaemon(processes, msgspec.structs.replace(config, groups={**config.groups, "judge": judge})).listening()


def check(group: RolloutGroup, digests: dict[int, str] | None = None) -> None:
    """Its samples are those of an undisturbed run, and so are their rewards. Samples that begin again may change places."""
    assert len(group.samples) == N and not group.errors
    for one, reward in zip(group.samples, group.rewards, strict=True):
        named: Any = {"spans": one.spans, "digests": digests, "vocab": VOCAB, "end_every": END_EVERY}
        runs = [expected_output(group.prompt, Sampling(**SAMPLING), sample=k, **named) for k in range(N)]
        tokens, logprobs, _ = next(run for run in runs if run[0] == one.token_ids.tolist())
        assert one.logprobs is not None
        np.testing.assert_allclose(one.logprobs, logprobs, rtol=1e-5)
        assert one.workers and sum(count for _, count in one.spans) == len(tokens)
        assert reward == np.float32(expected_scores(group.prompt, [tokens], classes=1)["scores"][0, 0])


async def ready(pool: Pool) -> list[int]:
    """All workers are. Returns the processes of those that generate."""
    async with asyncio.timeout(PATIENCE_S):
        while any(worker.stage != "ready" for group in (await pool.status()).groups for worker in group.workers):
            await asyncio.sleep(0.01)
    return [worker.pid for group in (await pool.status()).groups if group.name == "g" for worker in group.workers]


def test_a_worker_that_is_killed_changes_no_sample_and_no_reward(processes: Processes, tmp_path: Path) -> None:
    daemon = rewarding(processes, tmp_path)

    async def scene() -> None:
        async with Pool.connect(daemon.address) as pool:
            workers = await ready(pool)
            rollout = pool.rollout([prompt(i) for i in range(PROMPTS)], N, reward="judge", group="g", **SAMPLING)
            order: list[int] = []
            async for group in rollout:
                if not order:
                    os.kill(workers[0], signal.SIGKILL)
                check(group)
                order.append(group.index)
            assert sorted(order) == [*range(PROMPTS)] and order != [*range(PROMPTS)], "as they were finished"

    run(scene)


def test_a_reward_function_sees_the_sample_that_the_group_has(processes: Processes, tmp_path: Path) -> None:
    daemon = rewarding(processes, tmp_path, hidden=4, experts=[2, 1])
    seen: dict[tuple[int, ...], Generation] = {}

    async def reward(row: Any, sample: Generation) -> float:
        seen[tuple(sample.token_ids)] = sample
        return 1

    async def scene() -> None:
        async with Pool.connect(daemon.address) as pool:
            await ready(pool)
            for more in ({"top_logprobs": 2, "hidden_states": True}, {"logprobs": False, "routed_experts": True}):
                options: Any = {**SAMPLING, **more, "group": "g"}
                for group in await pool.rollout([prompt(1), prompt(2)], N, reward=reward, **options).result():
                    for sample in group.samples:
                        early = seen[tuple(sample.token_ids)]
                        assert (early.finish_reason, early.matched, early.spans) == (
                            sample.finish_reason, sample.matched, sample.spans,
                        )  # fmt: skip
                        for name in ("token_ids", "logprobs", "top_ids", "top_logprobs", "hidden_states", "routed_experts"):
                            np.testing.assert_array_equal(getattr(early, name), getattr(sample, name), name)
                        assert (sample.top_ids is None) == (sample.logprobs is None) == (sample.routed_experts is not None)

    run(scene)


def test_groups_that_come_after_new_weights_are_not_older_than_asked(processes: Processes, tmp_path: Path) -> None:
    daemon = rewarding(processes, tmp_path)

    async def scene() -> None:
        async with Pool.connect(daemon.address) as pool, WeightPublisher(pool, group="g", **OPTIONS) as publisher:
            await ready(pool)
            prompts = [prompt(i) for i in range(PROMPTS)]
            rollout = pool.rollout(prompts, N, reward="judge", group="g", max_staleness=0, **SAMPLING)
            groups, digests = list[RolloutGroup](), dict[int, str]()
            for version in (1, 2):
                groups += await rollout.take(4)
                digests[version] = (await publisher.publish(some_weights(version), version, in_flight="abort")).digest
                for group in groups[-4:]:
                    check(group, digests)
            last = await rollout.result()
            for group in last:
                check(group, digests)
                assert {sample.spans[0][0] for sample in group.samples} == {2}
            assert sorted(group.index for group in [*groups, *last]) == [*range(PROMPTS)]
            assert sum(group.dropped for group in last) > 0

    run(scene)
