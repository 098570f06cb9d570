"""`Pool.rollout` through a real coordinator, with sim workers that generate and others that reward: a process that is lost, or
new weights, in the middle change no sample and no reward."""

import asyncio
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from enginepool import Generation, Pool, RolloutGroup, WeightPublisher, errors
from enginepool.client.media import media_of
from enginepool.client.rewards import prompt_of
from enginepool.config import GroupConfig
from enginepool.protocol.messages import Sampling
from enginepool.workers.sim.scores import expected_scores
from enginepool.workers.sim.tokens import expected_output
from tests.process.daemons import PATIENCE_S, Daemon, sim_pool
from tests.process.forking import ForkedDaemon, ForkedProcess
from tests.process.processes import Processes
from tests.process.scenes import OPTIONS
from tests.process.test_generate import GENERATES, VOCAB, prompt, run
from tests.process.test_media import with_media
from tests.process.weights import some_weights

SAMPLING: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 100}
#: one in so many tokens ends a sample
END_EVERY = 60
PROMPTS, N = 24, 3
#: of a publisher that tries again
PATIENT: dict[str, Any] = {**OPTIONS, "retry_timeout": PATIENCE_S}
#: the reward group's engine refuses what has this token, which no sample has
REFUSED = VOCAB


def rewarding(processes: Processes, directory: Path, **more: Any) -> Daemon:
    """Two workers that generate, and one that scores."""
    engine = {**GENERATES, "forward_s": 0.005, "end_every": END_EVERY, **more}
    config = sim_pool(directory, options=engine, generates=True, silence_s=2.0, client_silence_s=3.0)
    refuses = {"faults": [{"kind": "error", "on_token": REFUSED}]}
    judge = GroupConfig(model="sim", engine="sim", options={"kind": "classifier", "vocab": VOCAB + 1, **refuses})
    return ForkedDaemon(processes, msgspec.structs.replace(config, groups={**config.groups, "judge": judge})).listening()


def check(group: RolloutGroup, digests: dict[int, str] | None = None) -> None:
    """Its samples are those of an undisturbed run, and so are their rewards. Samples that begin again may change places."""
    assert not group.errors, group.errors
    check_samples(group, digests)
    ids: Any = prompt_of(group.prompt)
    for one, reward in zip(group.samples, group.rewards, strict=True):
        assert reward == np.float32(expected_scores(ids, [one.token_ids.tolist()], classes=1)["scores"][0, 0])


def check_samples(group: RolloutGroup, digests: dict[int, str] | None = None) -> None:
    assert len(group.samples) == N
    ids: Any = prompt_of(group.prompt)
    images: Any = media_of(group.prompt).get("images", ())
    for one in group.samples:
        named: Any = {"spans": one.spans, "digests": digests, "vocab": VOCAB, "end_every": END_EVERY}
        runs = [expected_output(with_media(ids, *images), Sampling(**SAMPLING), sample=k, **named) for k in range(N)]
        assert one.logprobs is not None
        tokens, given = one.token_ids.tolist(), one.logprobs
        # Two samples that begin with the same token by chance differ in its logprob alone.
        assert any(run[0] == tokens and np.allclose(given, run[1], rtol=1e-5, atol=0) for run in runs)
        assert one.workers and sum(count for _, count in one.spans) == len(tokens)


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


# --- one pool for all that may go wrong ----------------------------------------------------------------------------------

#: of every second prompt, an image or two
ROWS: list[Any] = [
    {"prompt": prompt(i), "images": [bytes([i]) * 5000] * (1 + i % 4 // 2)} if i % 2 else prompt(i) for i in range(PROMPTS)
]
CALLER = """
import asyncio, sys
from enginepool import Pool

async def main():
    async with Pool.connect(sys.argv[1]) as pool:
        async for _ in pool.rollout([[i, 2] for i in range(500)], 4, reward="judge", group="g", max_new_tokens=100):
            print("there", flush=True)

asyncio.run(main())
"""


class Shared:
    def __init__(self, processes: Processes, directory: Path) -> None:
        self.processes = processes
        self.daemon = rewarding(processes, directory, take_s=0.2)

    async def strike(self, pool: Pool, who: str, sign: signal.Signals) -> None:
        if who == "coordinator":
            await asyncio.to_thread(self.daemon.kill)
            self.daemon = await asyncio.to_thread(self.daemon.successor)
        else:
            os.kill(next(group.workers[0].pid for group in (await pool.status()).groups if group.name == who), sign)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    with Processes() as processes:
        yield Shared(processes, tmp_path_factory.mktemp("pool"))


@pytest.mark.parametrize(
    ("mode", "who", "sign"),
    [
        ("", "g", signal.SIGSTOP),
        ("", "judge", signal.SIGKILL),
        ("", "judge", signal.SIGSTOP),
        ("", "coordinator", signal.SIGKILL),
        ("in_place", "", None),
        ("retract", "", None),
        ("drain", "", None),
        ("in_place", "g", signal.SIGKILL),
        ("abort", "g", signal.SIGKILL),
        ("retract", "judge", signal.SIGKILL),
        ("abort", "judge", signal.SIGKILL),
        ("in_place", "judge", signal.SIGSTOP),
    ],
)
def test_a_process_that_is_lost_and_new_weights_change_no_sample_and_no_reward(
    shared: Shared, mode: Any, who: str, sign: Any
) -> None:
    groups = list[RolloutGroup]()

    async def disturb(pool: Pool) -> None:
        """While weights arrive, where there are some. More come until they have met samples; with `drain` they meet none."""
        if not mode:
            await shared.strike(pool, who, sign)
            return
        new = (await pool.weights("g")).version + 1
        async with WeightPublisher(pool, group="g", **PATIENT) as publisher:
            handle = await publisher.start(some_weights(new), new, in_flight=mode)
            finish = asyncio.create_task(handle.finish())
            while who and handle.phase != "load" and not finish.done():
                await asyncio.sleep(0.002)
            if who:
                await shared.strike(pool, who, sign)
            await finish
            while mode != "drain" and not any(map(mixed, groups)):
                taken, new = len(groups), new + 1
                await publisher.publish(some_weights(new), new, in_flight=mode)
                while len(groups) == taken:
                    await asyncio.sleep(0.01)

    async def scene() -> None:
        async with Pool.connect(shared.daemon.address) as pool:
            await ready(pool)
            over = asyncio.Event()
            rows = itertools.takewhile(lambda _: not over.is_set(), itertools.cycle(ROWS))
            rollout = pool.rollout(rows, N, reward="judge", group="g", max_in_flight=PROMPTS, **SAMPLING)
            groups.extend(await rollout.take(1))
            async with asyncio.TaskGroup() as tasks:
                disturbing = tasks.create_task(disturb(pool))
                disturbing.add_done_callback(lambda _: over.set())
                async for group in rollout:
                    groups.append(group)
            digests = await committed_in(pool)
            for group in groups:
                check(group, digests)
            assert sorted(group.index for group in groups) == [*range(len(groups))]
            assert any(map(mixed, groups)) == (mode not in ("", "drain")), "weights arrived while samples were generated"
            await ready(pool)

    run(scene)


def without_reward(sample: Generation) -> bool:
    return int(sample.token_ids.sum()) % 5 == 0


async def reward_function(_: Any, sample: Generation) -> float:
    await asyncio.sleep(0.01)
    if without_reward(sample):
        raise ValueError("no reward")
    return 1.0


def rewarded_row(row: Any, sample: Generation) -> tuple[Any, Any]:
    return prompt_of(row), [REFUSED] if without_reward(sample) else sample.token_ids


@pytest.mark.parametrize("reward", ["function", "group"])
def test_rewards_that_fail_while_weights_change_are_errors_of_their_groups_and_no_sample_is_too_old(
    shared: Shared, reward: str
) -> None:
    options: dict[str, Any] = (
        {"reward": reward_function} if reward == "function" else {"reward": "judge", "to_row": rewarded_row}
    )
    failure = ValueError if reward == "function" else errors.EngineFailed
    groups, over = list[RolloutGroup](), asyncio.Event()

    async def publish(pool: Pool) -> None:
        modes: Any = itertools.cycle(("in_place", "abort", "retract"))
        async with WeightPublisher(pool, group="g", **OPTIONS) as publisher:
            new = (await pool.weights("g")).version
            while not over.is_set():
                new += 1
                await publisher.publish(some_weights(new), new, in_flight=next(modes))
                taken = len(groups)
                while len(groups) < taken + 4:  # samples of each version are seen
                    await asyncio.sleep(0.01)

    async def scene() -> None:
        async with Pool.connect(shared.daemon.address) as pool:
            await ready(pool)
            rollout = pool.rollout(itertools.cycle(ROWS), N, group="g", max_staleness=2, max_in_flight=8, **options, **SAMPLING)
            async with rollout, asyncio.TaskGroup() as tasks:
                publishing = tasks.create_task(publish(pool))
                while not publishing.done():
                    committed = (await pool.weights("g")).version
                    [group] = await rollout.take(1)
                    assert all(one.spans[0][0] >= committed - 2 for one in group.samples)
                    groups.append(group)
                    if sum(map(mixed, groups)) > 3 and any(one.errors for one in groups):
                        over.set()
            digests = await committed_in(pool)
            for group in groups:
                check_samples(group, digests)
                failed = [without_reward(one) for one in group.samples]
                assert np.isnan(group.rewards).tolist() == failed
                assert len(group.errors) == sum(failed) and all(isinstance(error, failure) for error in group.errors)
            await ready(pool)

    run(scene)


async def committed_in(pool: Pool) -> dict[int, str]:
    """The digests of the versions."""
    return {0: "", **{one.version: one.digest for one in (await pool.weights("g")).history if one.outcome == "committed"}}


def mixed(group: RolloutGroup) -> bool:
    """Weights arrived while its samples were generated."""
    return any(len(sample.spans) > 1 for sample in group.samples)


def test_a_rollout_whose_program_is_killed_is_taken_back_and_the_next_one_is_served(shared: Shared) -> None:
    program = shared.processes.keep(
        ForkedProcess([sys.executable, "-c", CALLER, shared.daemon.address], stdout=subprocess.PIPE, text=True)
    )
    assert program.stdout.readline() == "there\n"
    program.kill()

    async def scene() -> None:
        async with Pool.connect(shared.daemon.address) as pool:
            while any(group.queued or group.running for group in (await pool.status()).groups):
                await asyncio.sleep(0.02)
            for group in await pool.rollout(ROWS[:4], N, reward="judge", group="g", **SAMPLING).result():
                assert len(group.samples) == N and not group.errors

    run(scene)
