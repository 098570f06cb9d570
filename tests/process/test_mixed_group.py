"""Scores and streams of one group on the same workers, in real processes: each is right, and neither waits for the other."""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from enginepool import Pool, ScoreResult, WeightPublisher
from enginepool.workers.sim.scores import expected_scores
from tests.process.daemons import Daemon, sim_pool
from tests.process.forking import ForkedDaemon
from tests.process.processes import Processes
from tests.process.scenes import OPTIONS
from tests.process.test_generate import GENERATES, Streams, prompt, run, streaming, workers_of
from tests.process.weights import PAUSE_S, some_weights

#: few slots for sequences, and for batches of rows
MIXED: dict[str, Any] = {
    **GENERATES, "inflight_rows": 8, "batch_rows": 4, "inflight_tokens": 400, "batch_tokens": 200,
    "sequences": 8, "sequence_tokens": 8000,
}  # fmt: skip


def mixed(processes: Processes, directory: Path, workers: int = 2) -> Daemon:
    config = sim_pool(directory, workers=workers, options=MIXED, silence_s=2.0)
    group = msgspec.structs.replace(config.groups["g"], operations=["score", "logprobs", "generate"])
    return ForkedDaemon(processes, msgspec.structs.replace(config, groups={"g": group})).listening()


async def score_until(pool: Pool, end: asyncio.Event) -> list[tuple[int, ScoreResult]]:
    """Ask for scores until told to stop: the first id of each question, and its answer."""
    found: list[tuple[int, ScoreResult]] = []
    while not end.is_set():
        first = len(found)
        found.append((first, await pool.score([1, 2], [[first + i, 7] for i in range(3)], label_token_ids=[3, 4])))
        await asyncio.sleep(PAUSE_S)
    return found


async def both(pool: Pool, streams: Streams, change: Callable[[], Coroutine[Any, Any, dict[int, str]]]) -> int:
    """Scores are asked for while streams run and something changes, which says the digests of weights. Checks all answers;
    returns how many scores there were."""
    end = asyncio.Event()
    clients = [asyncio.create_task(score_until(pool, end)) for _ in range(3)]
    try:
        digests = await change()
        await streams.check(digests)
    finally:
        end.set()
    answers = [answer for answers in await asyncio.gather(*clients) for answer in answers]
    for first, found in answers:
        items, version = [[first + i, 7] for i in range(3)], found.version
        expected = expected_scores([1, 2], items, labels=[3, 4], version=version, digest=digests.get(version, ""))
        np.testing.assert_array_equal(found.scores, expected["scores"])
        assert set(found.forwards) == {1}
    return len(answers)


@pytest.mark.parametrize("what", ["kill", "drain", "abort", "in_place", "retract"])
def test_scores_and_streams_of_one_group_are_right_whatever_happens_to_its_workers(
    processes: Processes, tmp_path: Path, what: Any
) -> None:
    daemon = mixed(processes, tmp_path)

    async def scene() -> None:
        async with streaming(daemon, 24) as (pool, streams):

            async def change() -> dict[int, str]:
                if what == "kill":
                    os.kill(workers_of(daemon)[0], signal.SIGKILL)
                    return {}
                async with WeightPublisher(pool, **OPTIONS) as publisher:
                    return {1: (await publisher.publish(some_weights(1), 1, in_flight=what)).digest}

            scored = await both(pool, streams, change)
            [group] = (await pool.status()).groups
            assert (group.split_batches, group.failed) == (0, 0) and group.batches >= scored // 3

    run(scene)


def test_scores_are_answered_while_sequences_take_all_slots_and_others_wait(processes: Processes, tmp_path: Path) -> None:
    daemon = mixed(processes, tmp_path, workers=1)

    async def scene() -> None:
        async with streaming(daemon, 8, max_new_tokens=200) as (pool, streams):
            waiting = asyncio.create_task(pool.generate(prompt(9), max_new_tokens=5, temperature=0.0))
            for _ in range(5):
                await pool.score([1], [[2]], label_token_ids=[3])
            assert not any(task.done() for task in streams.tasks) and not waiting.done()
            await pool.logprobs([[1, 2]], [[3, 4]])
            [group] = (await pool.status()).groups
            assert group.workers[0].sequences == 8 and group.limits is not None
            assert (group.limits.context, group.limits.sequence_context) == (400, 4000)
            await streams.check()
            await waiting

    run(scene)
