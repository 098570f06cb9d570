"""Requests that name one exact weight version: what answers them, and what ends them."""

from typing import Any

import pytest

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.operations.base import Work, check_request
from enginepool.coordinator.operations.table import OPERATIONS
from enginepool.coordinator.scheduling.version_queue import ExactVersions
from enginepool.protocol.basis import MAX_ID
from enginepool.protocol.errors import WireError
from enginepool.protocol.messages import Embed, ErrorReply, FrameSpec, Generate, Logprobs, Score, SequenceEnd, Step
from tests.core.generations import CAN, GeneratingPool, generate, outputs, streamed
from tests.core.machines import EPOCH, codes, failures, results, text, work
from tests.core.publishers import Trainer, UpdatePool


class Both(UpdatePool, GeneratingPool):
    """A pool that generates and takes weights."""

    def ask(self, link: bytes, id: int, content: Work, version: int, *, deadline: float | None = None) -> list[Any]:
        return self.do(ev.Submit(0, link, id, content, 0, deadline, exact_version=version))


def stage(**can: Any) -> tuple[Both, Trainer, bytes]:
    """A pool with one worker, on version 0."""
    pool = Both()
    return pool, Trainer(pool), pool.worker("w0", **can)


def commit(pool: Both, trainer: Trainer, version: int, link: bytes, **changes: Any) -> list[Any]:
    pool.publish(trainer, version, [link], **changes)
    return pool.written()


def told(error: ErrorReply) -> tuple[str, str, str, str]:
    return error.code, error.message, error.field, error.limit


# --- what is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "least", "field"), [(-1, 0, "version"), (MAX_ID + 1, 0, "version"), (5, 6, "min_version")])
def test_an_exact_version_is_in_range_and_no_older_than_the_oldest_that_may_answer(
    version: int, least: int, field: str
) -> None:
    for message in (Score(1, [], version=version, min_version=least), Generate(1, [], version=version, min_version=least)):
        with pytest.raises(WireError) as refused:
            check_request(message)
        assert (refused.value.code, refused.value.field) == ("bad_request", field)
        assert refused.value.message.startswith(f"{field}: ")


@pytest.mark.parametrize("kind", [Score, Logprobs, Embed, Generate])
def test_the_same_request_for_another_version_is_another_one(kind: Any) -> None:
    ids, one = FrameSpec("items", "int32", (1,)), b"\1\0\0\0"
    specs, frames = [ids, FrameSpec("item_lengths", "uint32", (1,))], (one, one)
    if kind in (Score, Logprobs):
        specs, frames = [FrameSpec("query", "int32", (1,)), *specs], (one, *frames)
    digests = {OPERATIONS[kind].open(kind(1, specs, version=version), frames).digest for version in (None, 4, 5)}
    assert len(digests) == 3


def test_an_older_version_than_the_committed_one_is_refused_at_once() -> None:
    pool, trainer, link = stage()
    commit(pool, trainer, 7, link)
    sent = pool.ask(trainer.link, 50, work(), 5)
    assert told(failures(sent)[50]) == ("version_passed", "version is 5, but the committed weight version is 7", "version", "7")
    assert not pool.batches


# --- waiting ------------------------------------------------------------------------------------------------------------


def test_a_request_waits_for_its_version_and_is_answered_by_it() -> None:
    pool, trainer, link = stage()
    pool.ask(trainer.link, 50, work(), 2)
    assert not pool.batches
    commit(pool, trainer, 1, link)
    assert not pool.batches
    commit(pool, trainer, 2, link)
    assert results(pool.finish(pool.batches[0], version=2))[50].version == 2


def test_a_request_whose_version_is_never_committed_ends_once_a_newer_one_is() -> None:
    pool, trainer, link = stage()
    pool.ask(trainer.link, 50, work(), 2)
    pool.ask(trainer.link, 51, work(), 3)
    assert told(failures(commit(pool, trainer, 3, link))[50])[:2] == (
        "version_passed", "version is 2, but the committed weight version is 3"
    )  # fmt: skip
    assert results(pool.finish(pool.batches[0], version=3))[51].version == 3


def test_a_request_that_an_update_takes_back_ends_with_the_commit_and_runs_on_after_an_abort() -> None:
    pool, trainer, link = stage()
    pool.ask(trainer.link, 50, work(), 0)
    pool.publish(trainer, 1, [link], in_flight="abort")
    assert not failures(pool.written("the disk is full")).get(50)
    pool.batches.clear()
    link = pool.worker("w1")
    assert results(pool.finish(pool.batches[0]))[50].version == 0
    pool.ask(trainer.link, 51, work(), 0)
    assert codes(commit(pool, trainer, 1, link, in_flight="abort")) == ["version_passed"]


def test_what_is_left_of_a_large_request_is_not_run_on_newer_weights() -> None:
    pool, trainer, link = stage()
    pool.ask(trainer.link, 50, work(16, 10), 0)
    pool.finish(pool.batches[0])
    assert codes(commit(pool, trainer, 1, link, in_flight="abort")) == ["version_passed"]


def test_text_that_no_worker_has_tokenized_yet_ends_like_other_requests() -> None:
    pool, trainer, link = stage()
    pool.ask(trainer.link, 50, text("Is it? ", ["yes"]), 0)
    assert codes(commit(pool, trainer, 1, link, in_flight="abort")) == ["version_passed"]


def test_a_request_that_waits_for_its_version_has_its_deadline() -> None:
    pool, trainer, _ = stage()
    pool.ask(trainer.link, 50, work(), 2, deadline=pool.now + 1.0)
    assert failures(pool.wait(2.0))[50].message.endswith("; version is 2, but the committed weight version is 0")


def test_in_a_new_run_a_request_waits_for_its_version_again() -> None:
    pool, trainer, link = stage()
    commit(pool, trainer, 5, link)
    pool.ask(trainer.link, 50, work(), 5)
    commit(pool, trainer, 1, link, in_flight="abort", new_run=True)
    group = pool.machine.core.groups["g"]
    assert [request.id for request in group.version_queue.waiting()] == [50]
    pool.batches.clear()
    commit(pool, trainer, 5, link)
    assert results(pool.finish(pool.batches[0], version=5))[50].version == 5


def test_rows_that_an_engine_computed_with_other_weights_run_again() -> None:
    pool, trainer, _ = stage()
    pool.ask(trainer.link, 50, work(), 0)
    assert not results(pool.finish(pool.batches[0], version=1))
    assert results(pool.finish(pool.batches[0], version=0))[50].version == 0


def test_a_request_that_has_its_answer_is_not_looked_at_by_a_commit() -> None:
    pool, trainer, _ = stage()
    pool.ask(trainer.link, 50, work(), 0)
    pool.do(ev.CancelAsked(0, trainer.link, 50))
    assert not pool.machine.core.groups["g"].exact.before(1)


def test_versions_that_requests_named_are_forgotten_with_them() -> None:
    exact: ExactVersions[int] = ExactVersions()
    for version in range(1000):
        exact.add(version, version)
        if version % 100:
            exact.discard(version, version)
    assert len(exact._versions) < 200  # pyright: ignore[reportPrivateUsage]
    assert exact.before(500) == [0, 100, 200, 300, 400]
    exact.discard(900, 900)
    assert exact.before(1000) == [500, 600, 700, 800]
    assert not exact.before(MAX_ID)


# --- generations --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_generation_that_an_update_interrupts_ends_with_the_commit_as_far_as_it_is(stream: bool) -> None:
    pool, trainer, link = stage(can=CAN)
    pool.ask(trainer.link, 50, generate(3, n=3, stream=stream), 0)
    [task] = pool.tasks()
    pool.step(link, (task, 0, 0, [1, 2], ""), (task, 1, 0, [5], "stop"))
    sent = commit(pool, trainer, 1, link, in_flight="abort")
    message, rows = outputs(sent)[50]
    assert rows == [[1, 2], [5], []]
    assert message.ended == [SequenceEnd(0, "interrupted"), SequenceEnd(1, "stop"), SequenceEnd(2, "interrupted")]
    assert message.spans == [[(0, 2)], [(0, 1)], []]
    assert len(pool.tasks()) == 1, "nothing of it runs on the new weights"


def test_a_generation_goes_on_after_an_update_that_was_given_up() -> None:
    pool, trainer, link = stage(can=CAN)
    pool.ask(trainer.link, 50, generate(3), 0)
    [task] = pool.tasks()
    pool.step(link, (task, 0, 0, [1, 2], ""))
    pool.publish(trainer, 1, [link], in_flight="abort")
    pool.written("the disk is full")
    other = pool.worker("w1", can=CAN)
    again = pool.tasks()[-1]
    assert again.link == other and again.message.at == 2  # type: ignore[union-attr]
    message, rows = outputs(pool.step(other, (again, 0, 2, [3], "stop")))[50]
    assert (rows, message.spans) == ([[1, 2, 3]], [[(0, 3)]])


@pytest.mark.parametrize("in_flight", ["in_place", "abort"])
def test_in_a_new_run_a_generation_that_has_begun_ends_and_another_waits_for_its_version_again(in_flight: str) -> None:
    pool, trainer, link = stage(can=CAN)
    commit(pool, trainer, 3, link)
    pool.ask(trainer.link, 50, generate(3), 3)
    pool.ask(trainer.link, 51, generate(3), 3)
    begun, other = pool.tasks()[-2:]
    pool.step(link, (begun, 0, 0, [1], ""), version=3)
    message, rows = outputs(commit(pool, trainer, 2, link, in_flight=in_flight, new_run=True))[50]
    assert (rows, message.ended, message.spans) == ([[1]], [SequenceEnd(0, "interrupted")], [[(3, 1)]])
    stopped = {number for _, numbers in pool.stopped() for number in numbers}
    assert {task.message.task[1] for task in (begun, other)} <= stopped  # type: ignore[union-attr]
    commit(pool, trainer, 3, link)
    again = pool.tasks()[-1]
    message, rows = outputs(pool.step(link, (again, 0, 0, [2], "stop"), version=3))[51]
    assert (rows, message.spans) == ([[2]], [[(3, 1)]])


def test_a_generation_without_tokens_ends_with_the_error_of_other_requests() -> None:
    pool, trainer, link = stage(can=CAN)
    pool.ask(trainer.link, 50, generate(3, output=[[1, 2]]), 0)
    assert codes(commit(pool, trainer, 1, link, in_flight="abort")) == ["version_passed"]
    assert codes(pool.ask(trainer.link, 51, generate(3, output=[[1, 2]]), 0)) == ["version_passed"]


def test_a_stream_that_ends_early_has_its_tokens_beyond_the_credit_in_the_final_answer() -> None:
    pool, trainer, link = stage(can=CAN)
    pool.ask(trainer.link, 50, generate(3, stream=True, credit=1), 0)
    [task] = pool.tasks()
    sent = pool.step(link, (task, 0, 0, [1], ""), (task, 0, 1, [2, 3], ""))
    assert streamed(sent) == [(50, 0, 0, 0, [1])]
    message, rows = outputs(commit(pool, trainer, 1, link, in_flight="abort"))[50]
    assert (rows, message.ended) == ([[1, 2, 3]], [SequenceEnd(0, "interrupted")])


def test_tokens_of_other_weights_are_not_taken_and_the_sequence_runs_again() -> None:
    pool, trainer, link = stage(can=CAN)
    pool.ask(trainer.link, 50, generate(3), 0)
    pool.submit(trainer.link, 51, generate(3))
    exact, other = pool.tasks()
    pool.step(link, (exact, 0, 0, [1], ""))
    pool.step(link, (exact, 0, 1, [8], ""), (other, 0, 0, [9], "stop"), version=1)
    assert pool.stopped() == [(link, [exact.message.task[1]])]  # type: ignore[union-attr]
    again = pool.tasks()[-1]
    assert again.message.at == 1, "only what was taken counts"  # type: ignore[union-attr]
    message, rows = outputs(pool.step(link, (again, 0, 1, [2], "stop")))[50]
    assert (rows, message.spans) == ([[1, 2]], [[(0, 2)]])


def test_tokens_for_a_batch_of_rows_end_the_worker_also_when_they_are_of_other_weights() -> None:
    pool, trainer, link = stage()
    pool.ask(trainer.link, 50, work(), 0)
    [batch] = pool.batches
    steps = [Step(batch.message.batch[1], 0, 0, 0, "stop")]  # type: ignore[union-attr]
    pool.do(ev.TokensGenerated(0, link, EPOCH, 1, steps, memoryview(b""), memoryview(b"")))
    assert not pool.machine.core.groups["g"].workers
