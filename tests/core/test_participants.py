"""Answers name the workers that computed them, and no others."""

import numpy as np
import pytest

from enginepool.client.generations import Continued, Generation, read_generations
from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.participants import with_worker
from enginepool.errors import Malformed
from enginepool.protocol.basis import NAMES_BYTES
from enginepool.protocol.messages import Exiting, FrameSpec, Generate, Generated, GenerationUsage, SequenceEnd, Timings
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
    assert (answer.workers, answer.places) == (["a", "c"], [[(0, 0), (1, 2)]])


def test_samples_that_one_worker_generated_need_no_places_and_those_of_two_have_them() -> None:
    pool = GeneratingPool()
    a = pool.worker("a", can=CAN)
    pool.submit(pool.client(), 1, generate(3, 3, n=2))
    one, two = pool.tasks()
    steps = [(task, i, 0, [501, 502], "stop") for task in (one, two) for i in range(2)]
    answer, _ = outputs(pool.step(a, *steps))[1]
    assert (answer.workers, answer.places) == (["a"], [])
    b = pool.worker("b", can=CAN)
    pool.submit(pool.client(), 1, generate(3, 3, n=2))
    first, second = pool.tasks()[2:]
    assert {first.link, second.link} == {a, b}
    pool.step(second.link, *[(second, i, 0, [501], "stop") for i in range(2)])
    answer, _ = outputs(pool.step(first.link, *[(first, i, 0, [501], "stop") for i in range(2)]))[1]
    assert answer.workers == [second.link.decode(), first.link.decode()]
    assert answer.places == [[(1, 0)], [(1, 0)], [(0, 0)], [(0, 0)]]


def test_tokens_that_a_request_brings_along_have_no_worker() -> None:
    pool = GeneratingPool()
    a = pool.worker("a", can=CAN)
    pool.submit(pool.client(), 1, generate(3, output=[[501, 502]]))
    answer, _ = outputs(pool.step(a, (pool.tasks()[0], 0, 2, [503], "stop")))[1]
    assert (answer.workers, answer.places) == (["a"], [[(0, 2)]])


def read(places: list[list[tuple[int, int]]], *, workers: tuple[str, ...] = ("a", "b"), count: int = 5) -> Generation:
    """The one sequence of an answer that continues two tokens, with so many further ones."""
    asked = Generate(1, [FrameSpec("items", "int32", (1,)), FrameSpec("item_lengths", "uint32", (1,))])
    specs = [FrameSpec("output", "int32", (count,)), FrameSpec("output_lengths", "uint32", (1,))]
    message = Generated(
        1, 0, GenerationUsage(1, 1, 2 + count), Timings(0, 0), [SequenceEnd(0, "length")], [[(0, count)]], specs, [2],
        workers=[*workers], places=places,
    )  # fmt: skip
    frames = [bytes(4 * count), np.array([count], np.uint32).tobytes()]
    earlier = Generation(np.zeros(2, np.int32), None, "length", None, ((0, 2),), workers=(("b", 2),))
    return read_generations(asked, Continued([earlier]), message, frames)[0][0]


def test_a_client_learns_which_tokens_each_worker_generated() -> None:
    assert read([[(0, 2), (1, 4)]]).workers == (("b", 2), ("a", 2), ("b", 3))
    assert read([[(1, 2)]]).workers == (("b", 7),)
    assert read([]).workers == (("b", 2), ("a", 5))
    assert read([[(-1, 2), (0, 6)]]).workers == (("b", 2), ("", 4), ("a", 1)), "of a worker that is not named"
    assert read([[(0, 4)]]).workers == (("b", 2), ("", 2), ("a", 3)), "of another coordinator"
    assert read([], workers=()).workers == (("b", 2), ("", 5))
    with pytest.raises(Malformed, match="places"):
        read([[(0, 2)], []])


def test_names_are_left_out_where_they_have_no_room() -> None:
    names: list[str] = []
    for number in range(1000):
        names = with_worker(names, f"policy-{number}")
    assert names == [f"policy-{number}" for number in range(len(names))]
    assert NAMES_BYTES - 12 < sum(len(name) + 2 for name in names) <= NAMES_BYTES
    assert with_worker([], "x" * NAMES_BYTES) == []
    assert with_worker(names, "b") == [*names, "b"] or sum(len(name) + 2 for name in names) + 3 > NAMES_BYTES
