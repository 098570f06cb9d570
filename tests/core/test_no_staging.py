"""Staging memory by need: workers that start after a staged update reserve it. An update goes on without workers that have
none, where a snapshot can bring them the weights: they serve on, and the commit restores them."""

from typing import Any

import msgspec
import pytest

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.states import WorkerState
from enginepool.protocol.messages import Accept, Capabilities, Ready
from enginepool.protocol.messages.weights import (
    Committed,
    Join,
    LoadWeights,
    Prepared,
    Published,
    ReleaseWeights,
    Restore,
    Restored,
)
from tests.core.machines import CAN, EPOCH, failures, results, work
from tests.core.publishers import DIGEST, Trainer, UpdatePool, of_type

WHY = "no staged transfer: this worker has no stager"


def opened(cans: tuple[Capabilities, ...] = (CAN, CAN, CAN), **changes: Any) -> tuple[UpdatePool, Trainer, list[bytes]]:
    """A pool of three workers in which an update has begun."""
    pool = UpdatePool()
    pool.machine.ending.snapshots = {"memory": "/dev/shm/pool", "disk": "/var/lib/pool"}
    trainer = Trainer(pool)
    links = [pool.worker(f"w{i}", can=can) for i, can in enumerate(cans)]
    trainer.publish(1, **changes)
    return pool, trainer, links


def unable(pool: UpdatePool, link: bytes) -> list[Any]:
    """This worker has no staging memory."""
    return pool.tell(link, Prepared(pool.update.id, code="unsupported", message=WHY, no_staging=True))


def able(pool: UpdatePool, links: list[bytes]) -> list[Any]:
    return [s for link in links for s in pool.tell(link, Prepared(pool.update.id, peer="peer", staging="host"))]


def test_an_update_goes_on_without_a_worker_that_has_no_staging_memory() -> None:
    pool, trainer, links = opened()
    sent = unable(pool, links[1])
    assert [s.link for s in sent if isinstance(s.message, ReleaseWeights)] == [links[1]]
    unable(pool, links[1])  # said again on a new link
    joins = able(pool, [links[0], links[2]])
    assert [s.link for s in joins if isinstance(s.message, Join)] == [trainer.link, links[0], links[2]]
    assert {join.world for join in of_type(joins, Join)} == {3}
    pool.answer(joins)
    trainer.sent()
    pool.stage([links[0], links[2]])
    handed = trainer.commit()
    assert [s.link for s in handed if isinstance(s.message, LoadWeights)] == [links[0], links[2]]
    pool.answer(handed)
    end = pool.written()
    assert [s.link for s in end if isinstance(s.message, Committed)] == [links[0], links[2]]
    assert [s.link for s in end if isinstance(s.message, Restore)] == [links[1]]
    (published,) = of_type(end, Published)
    assert (published.record.members, published.record.committed) == (2, 2)
    assert published.record.message == f"restored after it: w1: {WHY}"


def test_it_serves_the_old_version_until_the_commit_and_nothing_after_until_it_is_restored() -> None:
    pool, trainer, links = opened()
    unable(pool, links[1])
    pool.answer(able(pool, [links[0], links[2]]))
    trainer.sent()
    pool.stage([links[0], links[2]])
    for number in (50, 51, 52):
        pool.submit(trainer.link, number, work())
    (mine,) = [batch for batch in pool.batches if batch.link == links[1]]
    answered = results(pool.finish(mine))
    assert [result.version for result in answered.values()] == [0]
    pool.submit(trainer.link, 53, work())
    (late,) = [batch for batch in pool.batches if batch.link == links[1]]
    for batch in [batch for batch in pool.batches if batch.link != links[1]]:
        pool.finish(batch)
    pool.answer(trainer.commit())
    pool.written()
    assert not results(pool.finish(late)), "it was taken back: the answer is of the old version"
    worker = pool.machine.core.worker_links[links[1]]
    assert not worker.open and worker.state is WorkerState.RESTORING
    for batch in list(pool.batches):
        assert batch.link != links[1]
        pool.finish(batch, version=1)
    pool.do(ev.WorkerSaid(0, links[1], Ready(CAN, 1, DIGEST)))
    assert worker.open


def test_without_any_staging_memory_the_publisher_hears_why() -> None:
    pool, _, links = opened()
    sent = [s for link in links for s in unable(pool, link)]
    failure = failures(sent)[1]
    assert (failure.code, WHY in failure.message) == ("unsupported", True)


def test_a_worker_that_could_not_be_restored_aborts() -> None:
    """No snapshot has a part of the weights alone."""
    pool, _, links = opened(partial=True)
    assert failures(unable(pool, links[1]))[1].code == "unsupported"


@pytest.mark.parametrize(
    ("snapshot", "hosts", "leaves"),
    [
        ("none", "aaa", False),
        ("memory", "aab", True),
        ("memory", "aba", False),
        ("disk", "aba", True),
    ],
)
def test_a_worker_that_serves_leaves_only_where_a_snapshot_can_bring_it_the_weights(
    snapshot: Any, hosts: str, *, leaves: bool
) -> None:
    """It would never get work again."""
    pool, trainer, links = opened()
    group = pool.machine.core.groups["g"]
    group.config = msgspec.structs.replace(group.config, snapshot=snapshot)
    for worker, host in zip(group.workers.values(), hosts, strict=True):
        worker.host = host
    sent = unable(pool, links[1])
    assert [failure.code for failure in failures(sent).values()] == ([] if leaves else ["unsupported"])
    if not leaves:
        return
    pool.answer(able(pool, [links[0], links[2]]))
    trainer.sent()
    pool.stage([links[0], links[2]])
    pool.answer(trainer.commit())
    (restore,) = of_type(pool.written(), Restore)
    assert restore.snapshot


def test_an_update_goes_on_without_a_worker_that_has_no_weights_to_lose() -> None:
    """It gets no work before, and none after; the others need not wait for it."""
    pool = UpdatePool()
    trainer, links = Trainer(pool), [pool.worker(f"w{i}") for i in range(2)]
    pool.publish(trainer, 3, links)
    pool.written()
    late = pool.worker("late")  # on the checkpoint, and nothing brings it version 3
    pool.tell(late, Restored(3, "needs_weights", "nowhere"))
    trainer.publish(4)
    assert not failures(unable(pool, late))
    pool.answer(able(pool, links))
    trainer.sent()
    pool.stage(links)
    pool.answer(trainer.commit())
    (published,) = of_type(pool.written(), Published)
    assert published.record.message == f"left out: late: {WHY}"


def test_who_has_said_yes_cannot_leave() -> None:
    pool, _, links = opened()
    able(pool, links[:2])
    assert failures(unable(pool, links[1]))[1].code == "unsupported"


def staged_before(pool: UpdatePool, name: str) -> bool:
    """What a worker that starts now hears of staged updates."""
    (accept,) = of_type(pool.do(ev.WorkerRegistered(0, name.encode(), "g", name, 1, "h")), Accept)
    return accept.staged


def test_workers_that_start_after_the_first_staged_update_reserve_memory_for_the_next() -> None:
    pool = UpdatePool()
    trainer, links = Trainer(pool), [pool.worker("w")]
    pool.answer(trainer.publish(1, transfer="set_version"))
    pool.answer(trainer.commit(), digest="")
    pool.written()
    assert not staged_before(pool, "a"), "no bytes were staged"
    pool.publish(trainer, 2, links)
    assert not staged_before(pool, "b"), "it is not committed"
    pool.written()
    assert staged_before(pool, "c")
    later = UpdatePool()
    later.machine = later.machine.__class__(later.machine.core.config)
    later.do(ev.Started(0, EPOCH, {"g": pool.journal[-1].weights}))
    assert staged_before(later, "d"), "a later coordinator knows it"


@pytest.mark.parametrize("by_need", [True, False])
def test_the_record_names_engines_on_gpus_whose_bytes_lay_on_the_host(by_need: bool) -> None:
    pool, trainer, links = opened()
    core = pool.machine.core
    if not by_need:
        core.groups["g"].config = msgspec.structs.replace(core.groups["g"].config, reserve_staging=True)
    why = "GPU 0 has 3000 MiB left for 16000 MiB of weights"
    joins = [
        s
        for link in links
        for s in pool.tell(link, Prepared(pool.update.id, peer="peer", staging="host", message=why if link == links[1] else ""))
    ]
    pool.answer(joins)
    trainer.sent()
    pool.stage(links)
    pool.answer(trainer.commit())
    (published,) = of_type(pool.written(), Published)
    then = ", which workers that are restarted from now on reserve" if by_need else ""
    assert published.record.message == f"w1 staged it in memory of the host: {why}{then}"
