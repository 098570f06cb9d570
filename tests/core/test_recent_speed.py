"""What recent batches foretell of the next one: how long a worker may take for it before it is lost."""

import msgspec
import pytest

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.group_counts import RecentSpeed
from tests.core.machines import CAN, Pool, work

LARGE = msgspec.structs.replace(
    CAN, batch_tokens=16_000, inflight_tokens=32_000, context=16_000, batch_rows=64, inflight_rows=128
)


def allowed(stall_s: float) -> float:
    """Seconds that a worker has for a batch of 15,000 tokens, after many of 10 tokens in 20 ms and one that took so long."""
    pool = Pool()
    pool.worker(can=LARGE)
    client = pool.client()
    for number, seconds in enumerate([0.02] * 60 + [stall_s]):
        pool.submit(client, number, work(1, 10))
        pool.now += seconds
        pool.do(ev.WorkerHeard(0, b"w"))
        pool.finish(pool.batches[0], run_s=seconds)
    pool.submit(client, 100, work(60, 250))
    [batch] = pool.machine.core.worker_links[b"w"].batches.values()
    return batch.deadline - pool.now


def test_one_batch_that_took_long_gives_the_next_one_no_hours() -> None:
    assert allowed(25.0) < 1.5 * allowed(0.02)


def test_the_first_batch_counts_no_more_than_what_its_worker_declared() -> None:
    pool = Pool()
    pool.worker(can=msgspec.structs.replace(LARGE, pace=1000, forward_ms=100, fixed_ms=5))
    client = pool.client()
    pool.submit(client, 1, work(1, 10))
    pool.now += 25.0
    pool.do(ev.WorkerHeard(0, b"w"))
    pool.finish(pool.batches[0], run_s=25.0)
    pool.submit(client, 2, work(60, 250))
    assert max(batch.deadline for batch in pool.machine.core.worker_links[b"w"].batches.values()) - pool.now < 600


def test_engines_that_are_slower_are_known_after_a_few_batches() -> None:
    speed = RecentSpeed()
    for seconds in [0.1] * 50 + [1.0] * 20:
        speed.add(seconds, 1000)
    assert speed.token_s > 0.0008


@pytest.mark.parametrize("before", [0, 20])
def test_a_batch_without_a_time_says_nothing(before: int) -> None:
    speed = RecentSpeed()
    for _ in range(before):
        speed.add(0.1, 1000)
    known = speed.token_s
    speed.add(0.0, 1000)
    assert speed.token_s == known
    speed.add(0.1, 1000)
    assert speed.token_s == pytest.approx(0.0001)
