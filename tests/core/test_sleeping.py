"""Sleep and wake: which engines are told, what becomes of requests meanwhile, and what a restart of either side finds."""

from typing import Any, ClassVar

import pytest

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.effects import StartWorker
from enginepool.coordinator.core.group_holds import ALL, GroupHolds
from enginepool.coordinator.core.states import WorkerState
from enginepool.protocol.messages import Batch, Idle, Ready
from enginepool.protocol.messages.control import Command, Commanded, CommandName, Control, ControlReport, MemoryTag
from enginepool.protocol.messages.weight_reports import Inspect, InspectWeights
from enginepool.protocol.messages.weights import Prepare, Restore, Restored
from tests.core.generations import CAN as GENERATING
from tests.core.generations import GeneratingPool, generate, outputs
from tests.core.machines import CAN, EPOCH, Pool, Sent, codes, failures, results, work
from tests.core.publishers import DIGEST, Trainer, UpdatePool, of_type

WEIGHTS, KV, GRAPHS = "weights", "kv_cache", "cuda_graph"
EVERY: list[MemoryTag] = [GRAPHS, KV, WEIGHTS]


def say(
    pool: Pool, command: CommandName, *tags: MemoryTag, id: int = 1, worker: str = "", group: str = "", link: bytes = b"c"
) -> list[Sent]:
    return pool.do(ev.ControlAsked(0, link, Control(id, command, group, worker, list(tags))))


def commands(sent: list[Sent]) -> dict[bytes, Command]:
    return {one.link: one.message for one in sent if isinstance(one.message, Command)}


def obey(pool: Pool, sent: list[Sent], version: int = 0, digest: str = "") -> list[Sent]:
    """Every worker does what it is told in `sent`, and the journal is written; what follows."""
    out: list[Sent] = []
    for one in sent:
        if isinstance(one.message, Command):
            worker = pool.machine.core.worker_links[one.link]
            if one.message.command in ("pause", "resume"):
                out += pool.do(ev.WorkerSaid(0, one.link, Commanded(one.message.task)))
                continue
            assert worker.capabilities is not None
            asleep, tags = set(worker.asleep), set(one.message.tags or EVERY)
            asleep = asleep | tags if one.message.command == "sleep" else asleep - tags
            ready = Ready(worker.capabilities, version, digest, asleep=sorted(asleep))
            out += pool.do(ev.WorkerSaid(0, one.link, ready))
            out += pool.do(ev.WorkerSaid(0, one.link, Commanded(one.message.task)))
    return out + kept(pool)


def kept(pool: Pool) -> list[Sent]:
    """The journal has what it was given."""
    out: list[Sent] = []
    while pool.holds:
        out += pool.do(ev.HoldsKept(0, pool.holds.pop(0).number))
    return out


def rows(sent: list[Sent]) -> list[tuple[str, str]]:
    [report] = [one.message for one in sent if isinstance(one.message, ControlReport)]
    return [(row.name, row.code) for row in report.workers]


def done(pool: Pool, sent: list[Sent], code: str = "") -> list[Sent]:
    """Every worker says that it did what it was told in `sent`; the journal is not written."""
    return [
        one for link, asked in commands(sent).items() for one in pool.do(ev.WorkerSaid(0, link, Commanded(asked.task, code)))
    ]


def state(pool: Pool, name: str) -> WorkerState:
    return pool.machine.core.worker_links[name.encode()].state


def test_a_group_that_sleeps_holds_its_requests_and_their_deadlines_count() -> None:
    pool = Pool()
    pool.worker("w1")
    pool.worker("w2")
    client = pool.client()
    asked = say(pool, "sleep")
    assert {command.command for command in commands(asked).values()} == {"sleep"} and len(commands(asked)) == 2
    assert not pool.submit(client, 1, work()) and not pool.submit(client, 2, work(), timeout=5.0)
    assert rows(obey(pool, asked)) == [("w1", ""), ("w2", "")]
    assert state(pool, "w1") is WorkerState.ASLEEP
    pool.do(ev.WorkerHeard(0, b"w1"), ev.WorkerHeard(0, b"w2"))
    late = failures(pool.wait(6.0))
    assert late.keys() == {2}
    assert late[2].message.endswith("; group g sleeps (cuda_graph, kv_cache, weights) until it is woken")
    pool.do(ev.Heard(0, client))
    woken = obey(pool, say(pool, "wake", id=2))
    assert [one for one in woken if isinstance(one.message, Batch)]
    assert results(pool.finish_all()).keys() == {1}


@pytest.mark.parametrize("command", ["sleep", "pause"])
def test_what_is_asked_again_is_answered_after_the_journal_has_what_was_asked_first(command: CommandName) -> None:
    pool = Pool()
    pool.worker("w")
    first, second = say(pool, command), say(pool, command, id=2, link=b"new")
    assert len(pool.holds) == 1, "it changes nothing"
    assert not of_type(done(pool, first) + done(pool, second), ControlReport)
    assert {one.link for one in kept(pool) if isinstance(one.message, ControlReport)} == {b"c", b"new"}
    assert of_type(done(pool, say(pool, command, id=3)), ControlReport), "the journal has it"


def test_no_worker_gets_work_before_all_of_its_engine_is_awake() -> None:
    pool = Pool()
    pool.worker("w")
    client = pool.client()
    obey(pool, say(pool, "sleep"))
    pool.submit(client, 1, work())
    for id_, tag in enumerate((WEIGHTS, KV), 2):
        obey(pool, say(pool, "wake", tag, id=id_))
        assert not pool.batches and state(pool, "w") is WorkerState.ASLEEP
    last = say(pool, "wake", GRAPHS, id=4)
    assert not pool.batches, "it says itself when it is awake"
    obey(pool, last)
    assert results(pool.finish_all())


def test_what_runs_when_a_group_is_put_to_sleep_is_taken_back_and_goes_on() -> None:
    pool = GeneratingPool()
    link = pool.worker("w", can=GENERATING)
    client = pool.client()
    pool.submit(client, 1, generate(3))
    [task] = pool.tasks()
    pool.step(link, (task, 0, 0, [7, 8], ""))
    asked = say(pool, "sleep", KV)
    kinds = [type(one.message).__name__ for one in asked if one.link == link]
    assert kinds == ["StopGeneration", "Command"], "the engine is empty before it sleeps"
    obey(pool, asked)
    [again] = pool.tasks(obey(pool, say(pool, "wake", KV, id=2)))
    assert len(again.frames[0]) == 4 * 5, "it goes on after its last token"
    assert outputs(pool.step(link, (again, 0, 2, [9], "stop")))[1][1] == [[7, 8, 9]]


def test_one_worker_sleeps_after_its_batches_and_further_requests_run_on_the_others() -> None:
    pool = Pool()
    pool.worker("w1")
    pool.worker("w2")
    client = pool.client()
    pool.submit(client, 1, work(3))
    [batch] = pool.batches
    other = b"w2" if batch.link == b"w1" else b"w1"
    name = batch.link.decode()
    asked = say(pool, "sleep", worker=name)
    assert commands(asked).keys() == {batch.link}
    for id_ in range(2, 6):
        assert {one.link for one in pool.submit(client, id_, work()) if isinstance(one.message, Batch)} <= {other}
    assert results(pool.finish(batch)).keys() == {1}, "it was there before the command"
    assert rows(obey(pool, asked)) == [(name, "")]
    assert results(pool.finish_all()).keys() == {2, 3, 4, 5}
    obey(pool, say(pool, "wake", worker=name, id=2))
    assert state(pool, name) is WorkerState.READY


def test_a_worker_of_a_sleeping_group_is_not_woken_alone_and_names_are_checked() -> None:
    pool = Pool()
    pool.worker("w")
    obey(pool, say(pool, "sleep"))
    [refused] = failures(say(pool, "wake", worker="w", id=2)).values()
    assert (refused.code, refused.field) == ("bad_request", "worker") and "wake the group" in refused.message
    for command in ("sleep", "wake", "flush"):
        [refused] = failures(say(pool, command, worker="x", id=3)).values()
        assert (refused.code, refused.field) == ("bad_request", "worker") and "which has w" in refused.message


def test_the_answer_waits_for_the_journal_and_a_command_that_changes_nothing_does_not() -> None:
    pool = Pool()
    assert not say(pool, "sleep", KV)
    assert pool.holds[0].holds == GroupHolds({ALL: frozenset({KV})})
    assert rows(kept(pool)) == []
    assert rows(say(pool, "sleep", KV, id=2)) == [] and not pool.holds
    assert not say(pool, "wake", id=3) and pool.holds[0].holds == GroupHolds()
    answer = pool.wait(pool.machine.core.config.timing.update_inspect_s + 1)
    assert rows(answer) == [], "a disk that hangs is waited for as long as a worker"


class Restarted(Pool):
    found: ClassVar[dict[str, Any]] = {"holds": {"g": GroupHolds({ALL: frozenset({WEIGHTS})})}}


def test_a_restarted_coordinator_keeps_the_group_asleep_and_tells_workers_that_are_awake() -> None:
    pool = Restarted()
    client = pool.client()
    pool.submit(client, 1, work())
    pool.do(ev.WorkerRegistered(0, b"w", "g", "w", 1, "host"), ev.WorkerSaid(0, b"w", Idle(EPOCH)))
    told = pool.do(ev.WorkerSaid(0, b"w", Ready(CAN, asleep=[WEIGHTS])))
    assert not commands(told) and not pool.batches
    pool.do(ev.WorkerRegistered(0, b"v", "g", "v", 1, "host"), ev.WorkerSaid(0, b"v", Idle(EPOCH)))
    told = pool.do(ev.WorkerSaid(0, b"v", Ready(CAN)))
    assert [(one.command, one.tags) for one in commands(told).values()] == [("sleep", [WEIGHTS])] and not pool.batches
    obey(pool, told)
    assert not pool.batches
    obey(pool, say(pool, "wake"))
    assert results(pool.finish_all())


def test_the_log_says_what_sleeps_and_what_is_paused() -> None:
    pool = Pool()
    before = len(pool.logged)
    obey(pool, say(pool, "sleep", WEIGHTS, KV, id=6))
    obey(pool, say(pool, "sleep", KV, id=7))
    obey(pool, say(pool, "wake", KV, id=8))
    obey(pool, say(pool, "wake", id=9))
    obey(pool, say(pool, "pause", id=10))
    obey(pool, say(pool, "resume", id=11))
    assert pool.logged[before:] == [
        "group g is to sleep: kv_cache, weights",
        "group g is to sleep: weights",
        "group g is woken",
        "group g is paused: its requests wait until it is resumed",
        "group g is resumed",
    ]
    assert set(pool.kinds[before:]) == {"update"}, "publishers cause them, so their rate is bounded"
    assert Restarted().logged == ["group g is to sleep: weights (from the journal)"]


def test_a_worker_that_missed_a_wake_is_told_again() -> None:
    pool = Pool()
    pool.worker("w")
    obey(pool, say(pool, "sleep"))
    lost = say(pool, "wake", id=2)
    assert commands(lost)
    again = pool.do(ev.WorkerSaid(0, b"w", Ready(CAN, asleep=EVERY)))
    assert [(one.command, one.tags) for one in commands(again).values()] == [("wake", EVERY)]
    obey(pool, again)
    assert state(pool, "w") is WorkerState.READY


def test_a_worker_that_ends_while_it_sleeps_is_started_again_when_it_is_woken() -> None:
    pool = Pool(workers=2)
    for start in pool.started:
        pool.worker(start.incarnation)
    first, started = pool.started[0].incarnation, len(pool.started)
    obey(pool, say(pool, "sleep"))
    pool.do(ev.WorkerExited(0, first, "killed", False))
    report = say(pool, "wake", KV, id=2)
    assert ("g-0", "pool_down") in rows(obey(pool, report)), "it is not forgotten that one is not there"
    for _ in range(20):
        pool.do(*(ev.WorkerHeard(0, link) for link in pool.machine.core.worker_links))
        pool.wait(1.0)
    assert len(pool.started) == started, "its GPU is in use by what put it to sleep"
    [woken] = of_type(obey(pool, say(pool, "wake", id=3)), ControlReport)
    messages = {row.name: row.message for row in woken.workers}
    assert messages["g-0"] == "not ready: backoff; it takes its memory back once it is", "nothing else has to be done"
    pool.wait(1.0)
    assert [start.index for start in pool.started[started:]] == [0]


def test_a_worker_that_was_starting_is_put_to_sleep_when_it_is_ready() -> None:
    pool = Pool(workers=1)
    [start] = pool.started
    assert isinstance(start, StartWorker)
    assert rows(say(pool, "sleep") + kept(pool)) == [("g-0", "pool_down")]
    link = start.incarnation.encode()
    pool.do(ev.WorkerRegistered(0, link, "g", start.incarnation, 1, "host"), ev.WorkerSaid(0, link, Idle(EPOCH)))
    told = pool.do(ev.WorkerSaid(0, link, Ready(CAN)))
    assert commands(told)[link].command == "sleep"
    obey(pool, told)
    assert state(pool, start.incarnation) is WorkerState.ASLEEP


def test_an_external_worker_that_is_lost_leaves_nothing_behind() -> None:
    pool = Pool()
    pool.worker("w")
    obey(pool, say(pool, "sleep", worker="w"))
    pool.do(ev.WorkerBroken(0, b"w", "its link is gone"))
    assert pool.machine.core.groups["g"].holds == GroupHolds() and pool.holds


# --- pause --------------------------------------------------------------------------------------------------------------


def test_a_paused_group_starts_nothing_and_goes_on_where_it_stopped() -> None:
    pool = GeneratingPool()
    link = pool.worker("w", can=GENERATING)
    pool.do(ev.WorkerSaid(0, pool.worker("late", can=GENERATING, ready=False), Idle(EPOCH)))
    client = pool.client()
    pool.submit(client, 1, generate(3))
    pool.submit(client, 2, generate(4, partial=True))
    first, second = pool.tasks()
    pool.step(link, (first, 0, 0, [7], ""), (second, 0, 0, [8], ""))
    asked = say(pool, "pause")
    assert [type(one.message).__name__ for one in asked if one.link == link] == ["StopGeneration", "Command"]
    message, tokens = outputs(asked)[2]
    assert (message.ended[0].reason, tokens) == ("interrupted", [[8]]), "a caller of parts has its part at once"
    assert commands(asked)[link].command == "pause"
    assert rows(obey(pool, asked)) == [("late", ""), ("w", "")]
    assert not pool.submit(client, 3, generate(3))
    assert pool.machine.core.groups["g"].holds.waits_for == "is paused until it is resumed"
    [again, new] = pool.tasks(resumed := say(pool, "resume", id=2))
    assert rows(obey(pool, resumed)) == [("late", ""), ("w", "")]
    assert (len(again.frames[0]), len(new.frames[0])) == (4 * 4, 4 * 3)
    assert outputs(pool.step(link, (again, 0, 1, [9], "stop")))[1][1] == [[7, 9]]


class FoundPool(Pool):
    found: ClassVar[dict[str, Any]] = {"found": [ev.EarlierWorker("g", 0, "old-0")]}


def test_a_process_of_an_earlier_coordinator_may_work_until_it_has_dropped_that_work() -> None:
    pool = FoundPool(workers=2)
    assert rows(say(pool, "resume")) == [("g-0", ""), ("g-1", "")]
    assert rows(obey(pool, say(pool, "pause"))) == [("g-0", "pool_down"), ("g-1", "")]
    pool.do(ev.WorkerRegistered(0, b"o", "g", "old-0", 1, "here"))
    assert rows(say(pool, "pause", id=2)) == [("g-0", "pool_down"), ("g-1", "")]
    pool.do(ev.WorkerSaid(0, b"o", Idle(EPOCH)))
    assert rows(say(pool, "pause", id=3)) == [("g-0", ""), ("g-1", "")]


def test_a_paused_group_takes_new_weights_and_stays_paused() -> None:
    pool = UpdatePool()
    link = pool.worker("w")
    trainer = Trainer(pool)
    obey(pool, say(pool, "pause"))
    pool.submit(trainer.link, 9, work())
    pool.publish(trainer, 1, [link])
    pool.written()
    assert pool.machine.core.groups["g"].version == 1 and not pool.batches
    obey(pool, say(pool, "resume", id=2), version=1, digest=DIGEST)
    assert results(pool.finish(pool.batches[0], version=1))[9].version == 1


def test_a_group_is_resumed_and_still_sleeps_and_the_other_way_round() -> None:
    pool = Pool()
    pool.worker("w")
    client = pool.client()
    obey(pool, say(pool, "pause"))
    obey(pool, say(pool, "sleep", id=2))
    pool.submit(client, 1, work())
    obey(pool, say(pool, "resume", id=3))
    assert not pool.batches
    obey(pool, say(pool, "pause", id=4))
    obey(pool, say(pool, "wake", id=5))
    assert not pool.batches and state(pool, "w") is WorkerState.READY
    obey(pool, say(pool, "resume", id=6))
    assert results(pool.finish_all())
    [refused] = failures(say(pool, "pause", worker="w", id=7)).values()
    assert (refused.code, refused.field) == ("bad_request", "worker")


def test_all_requests_of_a_group_end_with_what_they_have() -> None:
    pool = GeneratingPool()
    link = pool.worker("w", can=GENERATING)
    client = pool.client()
    pool.submit(client, 1, generate(3))
    [task] = pool.tasks()
    pool.step(link, (task, 0, 0, [7, 8], ""))
    say(pool, "pause")
    pool.submit(client, 2, generate(4))
    ended = say(pool, "abort", id=2)
    message, tokens = outputs(ended)[1]
    assert (message.ended[0].reason, tokens) == ("interrupted", [[7, 8]])
    assert failures(ended)[2].code == "cancelled"
    [report] = [one.message for one in ended if isinstance(one.message, ControlReport)]
    assert (report.command, report.aborted, report.workers) == ("abort", 2, [])
    say(pool, "resume", id=3)
    assert pool.tasks(pool.submit(client, 3, generate(3))), "what comes later is served"


# --- weights ------------------------------------------------------------------------------------------------------------


def test_a_worker_whose_weights_sleep_after_a_restore_is_not_restored_before_it_is_woken() -> None:
    pool = UpdatePool()
    pool.publish(Trainer(pool), 1, [pool.worker("w")])
    pool.written()
    late = pool.worker("late")
    assert state(pool, "late") is WorkerState.RESTORING
    say(pool, "sleep")
    ready = [Ready(CAN, 1, DIGEST), Ready(CAN, 0, "lost", asleep=EVERY)]
    sent = pool.do(*(ev.WorkerSaid(0, late, one) for one in ready))  # the coordinator stood still: it hears both at once
    assert not of_type(sent, Restore) and state(pool, "late") is WorkerState.ASLEEP
    woken = obey(pool, say(pool, "wake", id=2), digest="lost")
    assert len(of_type(woken, Restore)) == 2 and state(pool, "late") is WorkerState.RESTORING


@pytest.mark.parametrize("restored", [True, False])
def test_a_worker_that_refused_to_sleep_while_it_took_weights_is_told_again_until_it_sleeps(restored: bool) -> None:
    pool = UpdatePool()
    pool.publish(Trainer(pool), 1, [pool.worker("w")])
    pool.written()
    late = pool.worker("late")
    asked = commands(say(pool, "sleep", KV))[late]
    for _ in range(2):
        pool.do(ev.WorkerSaid(0, late, Commanded(asked.task, "pool_down", "not ready: it takes weights")))
        if not restored:
            pool.do(ev.WorkerSaid(0, late, Restored(1, "needs_weights", "no stager")))
        told = commands(pool.wait(0.5))
        assert [(link, one.command, one.tags) for link, one in told.items()] == [(late, "sleep", [KV])]
        asked = told[late]
    pool.do(ev.WorkerSaid(0, late, Commanded(asked.task)))
    assert not commands(pool.wait(0.5))


def test_the_colocated_cycle_updates_while_only_the_weights_are_awake() -> None:
    pool = UpdatePool()
    link = pool.worker("w")
    trainer = Trainer(pool)
    obey(pool, say(pool, "sleep"), digest="lost")
    pool.submit(trainer.link, 99, work())
    assert codes(trainer.publish(1, id=50)) == ["update_aborted"], "there is no memory for them"
    woken = obey(pool, say(pool, "wake", WEIGHTS, id=2), digest="lost")
    assert not of_type(woken, Restore), "an update is expected, and the memory that a restore takes may be the trainer's"
    trainer.ids = 60
    pool.publish(trainer, 1, [link])
    pool.written()
    assert pool.machine.core.groups["g"].version == 1 and not pool.batches
    obey(pool, say(pool, "wake", id=3), version=1, digest=DIGEST)
    assert results(pool.finish(pool.batches[0], version=1))[99].version == 1


def test_an_engine_whose_weights_are_lost_is_restored_before_it_serves() -> None:
    pool = UpdatePool()
    link = pool.worker("w")
    trainer = Trainer(pool)
    pool.publish(trainer, 1, [link])
    pool.written()
    obey(pool, say(pool, "sleep"), version=1, digest=DIGEST)
    woken = obey(pool, say(pool, "wake", id=2), digest="lost")
    [restore] = of_type(woken, Restore)
    assert (restore.version, restore.digest) == (1, DIGEST)
    pool.submit(trainer.link, 9, work())
    assert not pool.batches
    pool.tell(link, Ready(CAN, 1, DIGEST))
    assert pool.batches


def test_engines_do_not_sleep_in_the_middle_of_an_update() -> None:
    pool = UpdatePool()
    pool.worker("w")
    trainer = Trainer(pool)
    trainer.publish(1)
    [refused] = failures(say(pool, "sleep")).values()
    assert refused.code == "publishing" and "version 1" in refused.message
    assert not pool.machine.core.groups["g"].holds.asleep


@pytest.mark.parametrize("tags", [[WEIGHTS], []])
def test_a_worker_without_weights_takes_no_part_in_an_update_and_is_restored_when_it_wakes(tags: list[MemoryTag]) -> None:
    pool = UpdatePool()
    pool.worker("w1")
    other = pool.worker("w2")
    trainer = Trainer(pool)
    obey(pool, say(pool, "sleep", *tags, worker="w1"))
    asked = [one.link for one in trainer.publish(1) if isinstance(one.message, Prepare)]
    assert asked == [other]
    looked = pool.do(ev.WeightsAsked(0, b"c", InspectWeights(2, what="digest")))
    assert {one.link for one in looked if isinstance(one.message, Inspect)} == {other}
