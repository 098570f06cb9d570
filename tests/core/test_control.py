"""`control`: a command reaches every ready worker of a group once, and its one answer has an outcome of each worker."""

import asyncio

import pytest

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.fleet.fan_out import OPEN, OPEN_EACH
from enginepool.protocol.messages import Exiting, TaskId
from enginepool.protocol.messages.control import Command, Commanded, Control, ControlReport, WorkerOutcome
from enginepool.protocol.messages.weight_reports import Inspect, Inspected, InspectWeights, WeightsReport
from enginepool.protocol.roles import FROM_CLIENT
from enginepool.workers.between_batches import BetweenBatches
from tests.core.machines import Pool, Sent, codes, config, failures


def flush(pool: Pool, id: int = 1, group: str = "", link: bytes = b"c") -> list[Sent]:
    return pool.do(ev.ControlAsked(0, link, Control(id, "flush", group)))


def commands(sent: list[Sent]) -> dict[bytes, Command]:
    return {one.link: one.message for one in sent if isinstance(one.message, Command)}


def reports(sent: list[Sent]) -> list[ControlReport]:
    return [one.message for one in sent if isinstance(one.message, ControlReport)]


def answer(pool: Pool, link: bytes, command: Command, code: str = "", message: str = "") -> list[Sent]:
    return pool.do(ev.WorkerSaid(0, link, Commanded(command.task, code, message)))


def test_every_ready_worker_is_commanded_and_the_answer_has_a_row_for_each() -> None:
    pool = Pool()
    first, second = pool.worker("w1"), pool.worker("w2")
    pool.worker("w3", ready=False)
    asked = commands(flush(pool))
    assert asked.keys() == {first, second}
    assert not reports(answer(pool, first, asked[first]))
    assert not reports(answer(pool, first, asked[first])), "a second answer of one worker counts once"
    [report] = reports(answer(pool, second, asked[second], "engine_error", "it refused"))
    assert (report.id, report.group, report.command) == (1, "g", "flush")
    assert [(row.code, row.message) for row in report.workers] == [
        ("", ""), ("engine_error", "it refused"), ("pool_down", "not ready: starting"),
    ]  # fmt: skip
    assert all(isinstance(row, WorkerOutcome) and row.name for row in report.workers)


def test_an_unknown_code_of_a_worker_is_told_as_engine_error() -> None:
    pool = Pool()
    worker = pool.worker()
    [command] = commands(flush(pool)).values()
    [report] = reports(answer(pool, worker, command, "x" * 600_000, "it refused"))
    assert [(row.code, row.message) for row in report.workers] == [("engine_error", "it refused")]


def test_a_worker_that_is_lost_or_silent_has_an_outcome_too() -> None:
    pool = Pool()
    first, second = pool.worker("w1"), pool.worker("w2")
    assert commands(flush(pool)).keys() == {first, second}
    pool.do(ev.WorkerSaid(0, first, Exiting("it crashed", True)))
    seconds = pool.machine.core.config.timing.update_inspect_s
    pool.do(ev.WorkerHeard(0, second))
    [report] = [report for _ in range(int(seconds) + 2) for report in reports(beat(pool, second))]
    assert {row.code for row in report.workers} == {"engine_error", "deadline_exceeded"}


def test_a_command_has_all_of_its_time_when_the_coordinator_stood_still() -> None:
    pool = Pool()
    worker = pool.worker()
    [command] = commands(flush(pool)).values()
    pool.now += 2 * pool.machine.core.config.timing.update_inspect_s
    assert not reports(pool.do(ev.Tick(pool.now)))
    [report] = reports(answer(pool, worker, command))
    assert [row.code for row in report.workers] == [""]


def beat(pool: Pool, link: bytes) -> list[Sent]:
    sent = pool.wait(1.0)
    return sent + pool.do(ev.WorkerHeard(0, link))


def test_a_worker_on_a_new_link_is_commanded_again() -> None:
    pool = Pool()
    pool.worker("w")
    [command] = commands(flush(pool)).values()
    again = commands(pool.do(ev.WorkerRegistered(0, b"new", "g", "w", 1, "host")))
    assert again == {b"new": command}
    assert reports(answer(pool, b"new", command))


def test_a_worker_that_answers_a_question_of_another_kind_has_not_answered() -> None:
    pool = Pool()
    worker = pool.worker()
    asked = pool.do(ev.WeightsAsked(0, b"c", InspectWeights(2, what="digest")))
    [inspect] = [one.message for one in asked if isinstance(one.message, Inspect)]
    assert not pool.do(ev.WorkerSaid(0, worker, Commanded(inspect.task)))
    assert [type(one.message) for one in pool.do(inspected(worker, inspect.task))] == [WeightsReport]
    [command] = commands(flush(pool)).values()
    assert not pool.do(inspected(worker, command.task))
    assert reports(answer(pool, worker, command))


def inspected(link: bytes, task: TaskId) -> ev.WorkerInspected:
    return ev.WorkerInspected(0, link, Inspected(task, "abc"), ())


def test_without_a_worker_the_answer_comes_at_once_and_an_unknown_group_is_named() -> None:
    pool = Pool(config(groups=("a", "b")))
    [report] = reports(flush(pool, group="a"))
    assert report.workers == []
    assert codes(flush(pool, group="c")) == ["unknown_group"]


def test_one_link_has_few_commands_open_at_a_time() -> None:
    pool = Pool()
    pool.worker()
    for id_ in range(OPEN_EACH):
        assert not failures(flush(pool, id_ + 1))
    assert failures(flush(pool, 9))[9].code == "busy"
    assert commands(flush(pool, 1, link=b"other")), "another link has room"


def test_a_command_that_is_asked_again_while_it_is_open_is_the_same_command() -> None:
    pool = Pool()
    worker = pool.worker()
    [command] = commands(flush(pool)).values()
    for _ in range(OPEN_EACH):
        assert not flush(pool), "it is not run again, and takes no place"
    assert len(reports(answer(pool, worker, command))) == 1
    assert commands(flush(pool)), "the answer may be lost with its link: asked once more, it runs once more"


def test_the_commands_of_a_caller_that_is_gone_end_and_leave_their_places() -> None:
    pool = Pool()
    worker = pool.worker()
    for id_ in range(OPEN_EACH):
        [command] = commands(flush(pool, id_ + 1)).values()
        pool.do(ev.LinkCut(0, b"c"))
        answer(pool, worker, command)
        assert not pool.machine.questions.open
    assert commands(flush(pool, 9, link=b"next"))
    pool.do(ev.LinkCut(0, b"next"))
    for _ in range(int(pool.machine.core.config.timing.update_inspect_s) + 2):
        beat(pool, worker)
    assert not pool.machine.questions.open, "a worker that does not answer keeps no place either"


def test_a_pause_that_may_be_undone_keeps_its_place_while_others_ask() -> None:
    """A caller that heard `busy` would leave a group paused whose engine was not."""
    pool = Pool(config(groups=("a", "b", "c")))
    for group in "abc":
        pool.worker(group, group=group)
    for number in range(OPEN - 3):
        pool.do(ev.ControlAsked(0, b"greedy%d" % number, Control(1, "flush", "a")))
    told: list[Sent] = []
    for number, group in enumerate("abc"):
        told += pool.do(ev.ControlAsked(0, b"t", Control(number, "pause", group, mode="in_place")))
    assert failures(pool.do(ev.ControlAsked(0, b"new", Control(9, "flush", "a")))).keys() == {9}
    for sent in told:
        if isinstance(sent.message, Command) and sent.message.command == "pause":
            pool.do(ev.WorkerSaid(0, sent.link, Commanded(sent.message.task, "engine_error", "it cannot pause so")))
    for hold in pool.holds:
        pool.do(ev.HoldsKept(0, hold.number))
    assert {one.message.id for one in pool.sent if one.link == b"t" and isinstance(one.message, ControlReport)} == {0, 1, 2}
    assert not any(group.holds.paused for group in pool.machine.core.groups.values())


def test_a_client_that_only_scores_may_not_flush() -> None:
    assert FROM_CLIENT["control"] == "publisher"


# --- in the worker ------------------------------------------------------------------------------------------------------


def test_a_command_finds_the_engine_empty_and_batches_are_not_starved_by_commands() -> None:
    seen: list[str] = []

    async def main() -> None:
        between, end = BetweenBatches(), asyncio.Event()

        async def batch(name: str, until: asyncio.Event | None = None) -> None:
            async with between.batch():
                seen.append(name)
                if until is not None:
                    await until.wait()
                seen.append(f"{name} ends")

        async def alone(name: str) -> None:
            async with between.alone():
                seen.append(name)
                await asyncio.sleep(0)

        tasks = [asyncio.ensure_future(one) for one in (batch("a", end), alone("flush 1"), alone("flush 2"), batch("b"))]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert seen == ["a"]
        end.set()
        await asyncio.gather(*tasks)

    asyncio.run(asyncio.wait_for(main(), 20))
    assert seen == ["a", "a ends", "flush 1", "b", "b ends", "flush 2"]


def test_a_command_that_is_given_up_lets_batches_in_again() -> None:
    async def main() -> None:
        between = BetweenBatches()
        async with between.batch():
            waiting = asyncio.ensure_future(asyncio.wait_for(between.alone().__aenter__(), 0.01))
            with pytest.raises(TimeoutError):
                await waiting
        async with between.batch():
            pass

    asyncio.run(asyncio.wait_for(main(), 20))
