"""What engines had of prompts in their prefix caches is counted, in answers and in the status."""

from collections.abc import Sequence

import numpy as np
import pytest

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.shell.decode import worker_event
from enginepool.protocol.frames import encode_header
from enginepool.protocol.messages import FrameSpec, GenerationProgress, StartGeneration, StatusReport, Step
from enginepool.workers.sim.operation import Weights
from enginepool.workers.sim.prefix_cache import BLOCK, SimPrefixCache
from tests.core.generations import CAN, GeneratingPool, generate, outputs
from tests.core.machines import EPOCH


def status(pool: GeneratingPool) -> StatusReport:
    [report] = [one.message for one in pool.do(ev.StatusAsked(0, b"asks", 1)) if isinstance(one.message, StatusReport)]
    return report


def test_the_usage_counts_each_prompt_once_as_it_was_when_its_first_task_began() -> None:
    pool = GeneratingPool()
    client = pool.client()
    link = pool.worker("a", can=CAN)
    pool.submit(client, 1, generate(5, 7, n=2))
    one, two = pool.tasks()
    pool.step(link, (one, 0, 0, [1, 2], ""), (two, 0, 0, [3], "stop"), (two, 1, 0, [3], "stop"), cached=[(0, 4), (1, 6)])
    other = pool.worker("b", can=CAN)
    pool.do(ev.WorkerBroken(0, link, "it broke"))
    first, second = pool.tasks()[2:]
    resumed = [(first, 0, 2, [4], "stop"), (second, 0, 0, [5], "stop")]
    sent = pool.step(other, *resumed, cached=[(0, 7), (1, 0)])
    usage = outputs(sent)[1][0].usage
    assert (usage.prompt_tokens, usage.cached_tokens) == (12, 10)


def test_the_status_counts_every_prompt_that_a_worker_began_with_and_what_of_it_was_cached() -> None:
    pool = GeneratingPool()
    client = pool.client()
    link = pool.worker("a", can=CAN)
    pool.submit(client, 1, generate(5, output=[[1, 2]]))
    pool.step(link, (pool.tasks()[0], 0, 2, [1], "stop"), cached=[(0, 6)])
    [group] = status(pool).groups
    [worker] = group.workers
    assert (worker.prompt_tokens, worker.cached_tokens) == (group.prompt_tokens, group.cached_tokens) == (7, 6)
    assert outputs(pool.sent)[1][0].usage.cached_tokens == 5, "what the request brought along is no prompt"


@pytest.mark.parametrize("cached", [-1, 4, 1 << 62])
def test_a_worker_that_had_what_no_cache_can_have_is_lost(cached: int) -> None:
    pool = GeneratingPool()
    client = pool.client()
    link = pool.worker(can=CAN)
    pool.submit(client, 1, generate(3))
    [task] = pool.tasks()
    assert isinstance(task.message, StartGeneration)
    counter = task.message.task[1]
    progress = GenerationProgress(EPOCH, 0, [Step(counter, 0, 0, 1)], [FrameSpec("tokens", "int32", (1,))], [(counter, cached)])
    pool.do(worker_event(0.0, link, [encode_header(progress), np.array([1], np.int32).tobytes()]))
    assert not pool.machine.core.worker_links
    assert any(f"it reported {cached} cached tokens of a prompt of 3" in line for line in pool.logged)


@pytest.mark.parametrize("together", [True, False])
def test_a_worker_that_says_twice_what_it_had_of_a_prompt_is_lost(together: bool) -> None:
    pool = GeneratingPool()
    link = pool.worker(can=CAN)
    [task] = pool.tasks(pool.submit(pool.client(), 1, generate(3)))
    pool.step(link, (task, 0, 0, [1], ""), cached=[(0, 1)] * (1 + together))
    if not together:
        assert pool.machine.core.worker_links
        pool.step(link, (task, 0, 1, [1], ""), cached=[(0, 1)])
    assert not pool.machine.core.worker_links
    assert any("it reported the cached tokens of task 1 twice" in line for line in pool.logged), pool.logged


def test_a_number_for_a_task_that_was_taken_back_is_ignored() -> None:
    pool = GeneratingPool()
    client = pool.client()
    link = pool.worker(can=CAN)
    pool.submit(client, 1, generate(3))
    [task] = pool.tasks()
    pool.do(ev.CancelAsked(0, client, 1))
    pool.step(link, (task, 0, 0, [1], ""), cached=[(0, 99)])
    assert pool.machine.core.worker_links and status(pool).groups[0].prompt_tokens == 0


# --- the sim engine's own ------------------------------------------------------------------------------------------------


def tokens(ids: Sequence[int]) -> bytes:
    return np.array(ids, np.int32).tobytes()


def test_the_cache_of_a_sim_engine_has_the_longest_beginning_but_the_last_token_and_is_bounded() -> None:
    weights, cache = Weights(), SimPrefixCache(4 * BLOCK)
    ids = list(range(3 * BLOCK))
    assert cache.found(tokens(ids), weights) == 0
    cache.add(tokens(ids), weights)
    assert cache.found(tokens(ids), weights) == 3 * BLOCK - 1
    assert cache.found(tokens([*ids, 7]), weights) == 3 * BLOCK
    assert cache.found(tokens([*ids[: BLOCK + 3], 999, *ids]), weights) == BLOCK
    assert cache.found(tokens([]), weights) == 0
    cache.add(tokens([-id_ for id_ in ids]), weights)
    assert cache.found(tokens(ids), weights) == BLOCK, "it holds four blocks, and drops the last ones of a sequence first"


def test_new_weights_and_a_flush_empty_the_cache_of_a_sim_engine() -> None:
    old, new, cache = Weights(), Weights(version=1), SimPrefixCache(1 << 10)
    ids = tokens(range(BLOCK + 1))
    cache.add(ids, old)
    assert cache.found(ids, old) == 0, "weights that it has not run with"
    cache.add(ids, old)
    assert cache.found(ids, old) == BLOCK
    assert cache.found(ids, new) == 0
    cache.add(ids, old)
    assert cache.found(ids, new) == 0
    cache.add(ids, new)
    cache.clear()
    assert cache.found(ids, new) == 0
