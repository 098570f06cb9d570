"""Answers name the workers that computed them, and no others."""

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.participants import with_worker
from enginepool.protocol.basis import NAMES_BYTES
from enginepool.protocol.messages import Exiting
from tests.core.generations import CAN, GeneratingPool, generate, outputs
from tests.core.machines import Pool, results, work


def test_each_answer_of_a_shared_batch_names_its_worker() -> None:
    pool = Pool()
    client = pool.client()
    for id_ in range(3):
        pool.submit(client, id_, work(2))
    pool.worker("one")
    found = results(pool.finish_all())
    assert [found[id_].workers for id_ in range(3)] == [["one"]] * 3


def test_a_request_that_was_cut_names_all_its_workers_once_in_the_order_of_their_parts() -> None:
    pool = Pool()
    pool.worker("one")
    pool.worker("two")
    pool.submit(pool.client(), 1, work(40))
    first, *rest = pool.batches
    late = next(batch for batch in rest if batch.link != first.link)
    pool.finish(late)
    assert results(pool.finish_all())[1].workers == [late.link.decode(), first.link.decode()]


def test_a_worker_that_was_lost_before_it_answered_is_not_named() -> None:
    pool = Pool()
    lost = pool.worker("lost")
    pool.submit(pool.client(), 1, work(2))
    pool.do(ev.WorkerSaid(0, lost, Exiting("gone")))
    pool.batches.clear()
    pool.worker("other")
    assert results(pool.finish_all())[1].workers == ["other"]


def test_a_worker_whose_rows_ran_again_on_other_weights_is_not_named_for_them() -> None:
    pool = Pool()
    old = pool.worker("old")
    pool.worker("new")
    pool.submit(pool.client(), 1, work(10))
    first = next(batch for batch in pool.batches if batch.link == old)
    second = next(batch for batch in pool.batches if batch.link != old)
    pool.finish(first, version=0)
    pool.do(ev.WorkerSaid(0, old, Exiting("gone")))
    pool.finish(second, version=1)
    (again,) = pool.batches
    (found,) = results(pool.finish(again, version=1)).values()
    assert (found.version, found.workers) == (1, ["new"])


def test_a_generation_that_went_on_elsewhere_names_both_and_not_a_worker_that_had_no_token() -> None:
    pool = GeneratingPool()
    a = pool.worker("a", can=CAN)
    pool.submit(pool.client(), 1, generate(3))
    (task,) = pool.tasks()
    pool.step(a, (task, 0, 0, [501, 502], ""))
    b = pool.worker("b", can=CAN)
    pool.do(ev.WorkerSaid(0, a, Exiting("gone")))
    assert len(pool.tasks()) == 2
    c = pool.worker("c", can=CAN)
    pool.do(ev.WorkerSaid(0, b, Exiting("gone")))
    answer, _ = outputs(pool.step(c, (pool.tasks()[2], 0, 2, [503], "stop")))[1]
    assert answer.workers == ["a", "c"]


def test_names_are_left_out_where_they_have_no_room() -> None:
    names: list[str] = []
    for number in range(1000):
        names = with_worker(names, f"policy-{number}")
    assert names == [f"policy-{number}" for number in range(len(names))]
    assert NAMES_BYTES - 12 < sum(len(name) + 2 for name in names) <= NAMES_BYTES
    assert with_worker([], "x" * NAMES_BYTES) == []
    assert with_worker(names, "b") == [*names, "b"] or sum(len(name) + 2 for name in names) + 3 > NAMES_BYTES
