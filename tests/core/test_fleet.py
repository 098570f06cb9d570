"""Promises about workers: loss is noticed, nothing is lost with them, poison is found, restarts are bounded."""

from typing import Any, Literal

import msgspec
import pytest

from enginepool.config import GroupConfig, RestartConfig
from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.machine import WATCH_S
from enginepool.coordinator.core.status import report
from enginepool.coordinator.fleet.slots import STEADY_S
from enginepool.coordinator.fleet.workers import GOODBYE_S
from enginepool.coordinator.shell.decode import worker_event
from enginepool.protocol.capabilities import MAX_BUDGET, MOST_FORWARD_MS
from enginepool.protocol.frames import encode_header
from enginepool.protocol.messages import (
    Accept,
    Batch,
    Drain,
    ErrorReply,
    Exiting,
    Expired,
    FrameSpec,
    Idle,
    Ping,
    Prepared,
    Ready,
    Register,
    Stage,
    StatusReport,
    WorkerSettings,
)
from tests.core.machines import CAN, EPOCH, Pool, accepts, codes, config, failures, results, work


def test_a_worker_gets_work_only_when_ready_and_idle_in_this_epoch() -> None:
    pool = Pool()
    client = pool.client()
    pool.submit(client, 1, work())
    link = pool.worker(ready=False)
    pool.do(ev.WorkerSaid(0, link, Ready(CAN, 0)))
    assert not pool.batches
    pool.do(ev.WorkerSaid(0, link, Idle(EPOCH - 1)))
    assert not pool.batches
    pool.do(ev.WorkerSaid(0, link, Idle(EPOCH)))
    assert len(pool.batches) == 1


def test_a_worker_on_another_weight_version_gets_no_work() -> None:
    pool = Pool()
    client = pool.client()
    pool.worker("old", version=3)
    pool.submit(client, 1, work())
    assert not pool.batches
    pool.worker("current")
    assert [s.link for s in pool.batches] == [b"current"]


def test_work_of_a_worker_that_turns_out_to_hold_other_weights_runs_elsewhere() -> None:
    """It was taking weights for a coordinator that is gone, and will drop what it has when it restores."""
    pool = Pool()
    client = pool.client()
    pool.worker("a")
    pool.submit(client, 1, work())
    pool.worker("b")
    pool.do(ev.WorkerSaid(0, b"a", Ready(CAN, 5)))
    assert [s.link for s in pool.batches] == [b"a", b"b"]
    assert list(results(pool.finish(pool.batches[1]))) == [1]


def test_an_unknown_link_is_asked_to_register() -> None:
    pool = Pool()
    assert codes(pool.do(ev.WorkerHeard(0, b"who"))) == ["hello_required"]


def test_silence_loses_a_worker_and_its_requests_run_elsewhere() -> None:
    pool = Pool()
    client = pool.client()
    pool.worker("a")
    pool.submit(client, 1, work())
    pool.worker("b")
    for _ in range(5):
        pool.wait(2.5)
        pool.do(ev.WorkerHeard(0, b"b"))
    assert "a" not in pool.machine.core.groups["g"].workers
    assert list(results(pool.finish(pool.batches[-1]))) == [1]
    told = pool.do(ev.WorkerRegistered(0, b"a2", "g", "a", 1, "h"))
    assert [type(s.message) for s in told] == [Expired], "the incarnation is refused from then on"


def test_a_forward_that_takes_too_long_loses_a_worker_that_still_answers_pings() -> None:
    pool = Pool()
    client = pool.client()
    pool.worker("a")
    pool.submit(client, 1, work())
    for _ in range(31):
        pool.wait(1)
        pool.do(ev.WorkerHeard(0, b"a"))
        pool.do(ev.Heard(0, client, 0))
    assert "superseded" in codes(pool.sent)
    assert not pool.machine.core.groups["g"].workers


@pytest.mark.parametrize(("stage", "allowed"), [("loading", 1800), ("compiling", 900), ("draining", 40)])
def test_each_stage_has_its_own_deadline(stage: Literal["loading", "compiling", "draining"], allowed: int) -> None:
    pool = Pool()
    link = pool.worker(ready=False)
    pool.do(ev.WorkerSaid(0, link, Stage(stage, "")))
    for _ in range(allowed // 5 - 1):
        pool.wait(5)
        pool.do(ev.WorkerHeard(0, link))
    assert pool.machine.core.groups["g"].workers
    pool.wait(6)
    assert not pool.machine.core.groups["g"].workers


def test_a_stall_of_the_coordinator_is_not_blamed_on_its_peers() -> None:
    pool = Pool()
    client = pool.client()
    pool.worker("a")
    pool.submit(client, 1, work())
    pool.wait(1)
    pool.now += 60
    pool.do(ev.Tick(0))
    assert "a" in pool.machine.core.groups["g"].workers
    assert client in pool.machine.core.links
    pool.wait(8)
    assert "a" in pool.machine.core.groups["g"].workers
    pool.wait(3)
    assert "a" not in pool.machine.core.groups["g"].workers, "after the stall the clock runs again"


def test_what_follows_a_stall_of_the_coordinator_has_deadlines_of_its_own() -> None:
    pool = Pool()
    client = pool.client()
    link = pool.worker("a")
    pool.wait(1)
    pool.now += 60
    # Messages that arrived meanwhile are read before any timer is looked at.
    pool.do(ev.WorkerHeard(0, link))
    pool.submit(client, 1, work())
    (batch,) = pool.machine.core.worker_links[link].batches.values()
    promised = batch.deadline
    pool.do(ev.Tick(0))
    assert batch.deadline == promised
    (sent,) = pool.do(ev.StatusAsked(0, client, 2))
    assert isinstance(sent.message, StatusReport)
    assert sent.message.groups[0].workers[0].silent_s == 0.0
    pool.wait(9)
    assert "a" in pool.machine.core.groups["g"].workers
    pool.wait(2)
    assert "a" not in pool.machine.core.groups["g"].workers, "10 s of silence, in any state"


def test_a_worker_that_reconnects_gets_its_batches_again_under_the_same_ids() -> None:
    pool = Pool()
    client = pool.client()
    pool.worker("a")
    pool.submit(client, 1, work())
    (first,) = pool.batches
    accept, batch = pool.do(ev.WorkerRegistered(0, b"a-again", "g", "a", 1, "h"))
    assert isinstance(accept.message, Accept) and accepts([accept])
    assert batch.message == first.message and batch.link == b"a-again"
    pool.finish(batch)
    assert list(results(pool.sent)) == [1]


def test_an_answer_with_an_unknown_batch_id_is_dropped() -> None:
    pool = Pool()
    client = pool.client()
    pool.worker("a")
    pool.worker("b")
    pool.submit(client, 1, work())
    (batch,) = pool.batches
    assert isinstance(batch.message, Batch)
    assert pool.do(ev.BatchDone(0, b"b", batch.message.batch, [], 0, 1, 1)) == []
    pool.finish(batch)
    assert pool.finish(batch) == []
    assert list(results(pool.sent)) == [1]


@pytest.mark.parametrize(
    "outcomes",
    [
        [],
        [ev.Outcome([FrameSpec("scores", "float32", (2, 2))], [bytes(16)])],
        [ev.Outcome([FrameSpec("scores", "int32", (3, 2))], [bytes(24)])],
        [ev.Outcome([FrameSpec("numbers", "float32", (3, 2))], [bytes(24)])],
        [ev.Outcome([], [])],
    ],
    ids=["no parts", "a row short", "ints", "another name", "no frames"],
)
def test_a_worker_that_answers_something_else_is_lost_and_its_work_is_done_by_another(outcomes: list[ev.Outcome]) -> None:
    pool = Pool()
    client = pool.client()
    pool.worker("a")
    pool.submit(client, 1, work(3))
    (batch,) = pool.batches
    pool.worker("b")
    assert isinstance(batch.message, Batch)
    pool.batches.clear()
    pool.do(ev.BatchDone(0, b"a", batch.message.batch, outcomes, 0, 1, 1))
    assert "a" not in pool.machine.core.groups["g"].workers
    assert list(results(pool.finish_all())) == [1]


def test_a_poisonous_request_is_found_and_its_neighbors_are_answered() -> None:
    """Each worker that gets request 3 dies. It runs alone after the first death, and three deaths alone make it poisoned."""
    pool = Pool(config(restart=RestartConfig(max_attempts=3)))
    client = pool.client()
    for i in range(1, 6):
        pool.submit(client, i, work(1, first=20 * i))
    n = 0
    pool.worker("w0")
    deaths = 0
    while pool.batches:
        batch = pool.batches.pop(0)
        assert isinstance(batch.message, Batch)
        if any(frame[:4] == (60).to_bytes(4, "little") for frame in batch.frames):
            deaths += 1
            pool.do(ev.WorkerBroken(0, batch.link, f"died of {deaths}"))
            n += 1
            pool.worker(f"w{n}")
        else:
            pool.finish(batch)
    assert sorted(results(pool.sent)) == [1, 2, 4, 5]
    failure = failures([s for s in pool.sent if s.link == client])[3]
    assert failure.code == "poisoned"
    assert failure.evidence == ["died of 2", "died of 3", "died of 4"]
    assert deaths == 4, "one in company, three alone"


def test_suspects_run_alone_one_at_a_time_while_others_are_served() -> None:
    pool = Pool()
    client = pool.client()
    pool.worker("a")
    pool.submit(client, 1, work(2))
    pool.submit(client, 2, work(2))
    pool.batches.clear()
    pool.worker("b")
    pool.worker("c")
    pool.do(ev.WorkerBroken(0, b"a", "gone"))
    (trial,) = pool.batches
    pool.submit(client, 3, work(2))
    pool.submit(client, 4, work(2))
    links = [s.link for s in pool.batches]
    assert links.count(trial.link) == 1, "nothing joins a trial"
    pool.finish(trial)
    assert [results([s]) for s in pool.sent if 1 in results([s])]
    pool.finish_all()
    assert sorted(results(pool.sent)) == [1, 2, 3, 4]


def test_a_trial_waits_for_a_worker_to_fall_idle_and_does_not_wait_without_end() -> None:
    pool = Pool()
    client = pool.client()
    pool.worker("a")
    pool.submit(client, 1, work(8))
    pool.batches.clear()
    pool.worker("b")
    for i in range(2, 6):
        pool.submit(client, i, work(8))
    pool.do(ev.WorkerBroken(0, b"a", "gone"))
    for i in range(6, 30):
        pool.submit(client, i, work(8))
        pool.finish(pool.batches[0])
        if 1 in results(pool.sent):
            break
    assert 1 in results(pool.sent)
    pool.finish_all()


def test_parts_of_one_answer_come_from_one_weight_version() -> None:
    pool = Pool()
    client = pool.client()
    pool.worker("a")
    pool.submit(client, 1, work(20))
    first, second = pool.batches[:2]
    pool.finish(first, version=0)
    pool.finish(second, version=1)
    while pool.batches:
        pool.finish(pool.batches[0], version=1)
    (result,) = results(pool.sent).values()
    assert result.version == 1
    assert len(result.forwards) >= 3


# --- slots ------------------------------------------------------------------------------------------------------------


def start(pool: Pool) -> str:
    """The worker that was started last dials in and is ready."""
    incarnation = pool.started[-1].incarnation
    pool.worker(incarnation)
    return incarnation


def test_places_start_at_once_and_restart_with_growing_backoff() -> None:
    pool = Pool(workers=1)
    gaps: list[float] = []
    for _ in range(8):
        incarnation = start(pool)
        count, at = len(pool.started), pool.now
        pool.do(ev.WorkerExited(0, incarnation, "exit code 1"))
        while len(pool.started) == count:
            pool.wait(0.25)
        # Slots are looked at every WATCH_S, so a start is late by up to that.
        gaps.append((pool.now - at) // (2 * WATCH_S) * 2 * WATCH_S)
    assert gaps == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert not pool.killed, "each had ended"


def test_a_fault_of_the_host_retires_no_slot_and_is_tried_again_after_the_longest_backoff() -> None:
    """One that repeats more often than a worker may fail."""
    pool = Pool(workers=1)
    (slot,) = pool.machine.core.groups["g"].slots
    restart = RestartConfig()
    for count in range(1, restart.max_restarts + 5):
        at, reason = pool.now, "the worker process could not be started: /s/logs/g-0.log: No space left on device"
        pool.do(ev.WorkerExited(0, pool.started[-1].incarnation, reason, unstarted=True))
        assert (slot.state, slot.end_reason, slot.loss_times, slot.same_failures) == ("backoff", reason, [], 0)
        while len(pool.started) == count:
            pool.wait(0.25)
        assert 0 <= pool.now - at - restart.backoff_max_s < 2 * WATCH_S
    start(pool)
    pool.do(ev.WorkerExited(0, slot.incarnation, "exit code 1"))
    assert slot.due - pool.now == restart.backoff_s


def backoff(pool: Pool, up_s: float, *, blameless: bool = False) -> float:
    """The process is up for so long and ends; how long its successor is waited for."""
    (slot,) = pool.machine.core.groups["g"].slots
    while slot.state != "up":
        pool.wait(0.25)
    pool.now = slot.started_at
    pool.wait(up_s)
    if blameless:
        slot.loss_excused = True
    pool.do(ev.WorkerExited(0, slot.incarnation, "exit code 1"))
    assert slot.state == "backoff"
    return slot.due - pool.now


def test_a_backoff_is_forgotten_after_a_worker_that_was_up_for_long() -> None:
    pool = Pool(workers=1)
    assert [backoff(pool, up_s) for up_s in (1.0, STEADY_S - 1.0, STEADY_S + 1.0, 1.0)] == [0.5, 1.0, 0.5, 1.0]


def test_an_end_for_no_fault_of_its_own_makes_no_backoff_longer() -> None:
    pool = Pool(workers=1)
    assert backoff(pool, 1.0, blameless=True) == 0.5
    assert [backoff(pool, up_s) for up_s in (1.0, STEADY_S + 1.0)] == [0.5, 0.5]
    assert backoff(pool, 1.0, blameless=True) == 0.5
    assert backoff(pool, 1.0) == 1.0, "the next one counts again"


@pytest.mark.parametrize(("up_s", "retired"), [(58.0, False), (40.0, True)])
def test_losses_are_counted_and_waited_for_within_a_window(up_s: float, retired: bool) -> None:
    pool = Pool(config(workers=1, restart=RestartConfig(max_restarts=2, window_s=100.0)))
    assert backoff(pool, up_s) == 0.5
    assert backoff(pool, up_s) == 1.0
    (slot,) = pool.machine.core.groups["g"].slots
    if retired:
        pool.wait(1.5)
        pool.wait(up_s)
        pool.do(ev.WorkerExited(0, slot.incarnation, "exit code 1"))
        assert slot.state == "retired"
    else:
        assert [backoff(pool, up_s) for _ in range(5)] == [1.0] * 5


def test_one_worker_that_cannot_come_back_is_no_end_of_the_pool_while_another_may() -> None:
    pool = Pool(workers=2)
    client = pool.client()
    pool.submit(client, 1, work())
    for number, started in enumerate(list(pool.started)):
        pool.do(ev.WorkerExited(0, started.incarnation, "no such model", number == 0))
    assert not codes(pool.sent)
    pool.do(ev.Heard(0, client, None))
    pool.wait(1.0)
    pool.worker(pool.started[-1].incarnation)
    assert 1 in results(pool.finish_all())


def test_no_two_coordinators_name_a_worker_alike() -> None:
    names: set[str] = set()
    for epoch in (7, 8):
        pool = Pool(workers=0)
        pool.machine = type(pool.machine)(config(workers=2))
        pool.do(ev.Started(0, epoch, {}))
        names |= {started.incarnation for started in pool.started}
    assert len(names) == 4


def test_losses_are_counted_also_of_workers_that_take_long_to_fail() -> None:
    """A large model may load for longer than makes a worker steady, and fail then, each time."""
    pool = Pool(config(workers=1, restart=RestartConfig(max_restarts=3, window_s=3600.0)))
    gaps: list[float] = []
    for count in range(1, 5):
        pool.wait(90.0)
        at = pool.now
        pool.do(ev.WorkerExited(0, pool.started[-1].incarnation, "exit code 1"))
        while len(pool.started) == count and not pool.machine.core.groups["g"].down:
            pool.wait(0.25)
        gaps.append(pool.now - at)
    assert max(gaps) < 1.0, "each was up for long: the next one need not wait"
    assert pool.machine.core.groups["g"].down


def test_a_worker_may_be_restarted_without_end() -> None:
    pool = Pool(config(workers=1, restart=RestartConfig(max_restarts=10**9, window_s=1e9, backoff_max_s=0.1)))
    for count in range(1, 1100):
        pool.do(ev.WorkerExited(0, pool.started[-1].incarnation, "exit code 1"))
        pool.wait(0.6)
        assert len(pool.started) == count + 1


def test_no_successor_starts_before_the_end_of_the_process_group_is_seen() -> None:
    pool = Pool(workers=1)
    incarnation = start(pool)
    pool.do(ev.WorkerBroken(0, incarnation.encode(), "nonsense"))
    assert pool.killed == [incarnation]
    pool.wait(60)
    assert len(pool.started) == 1
    pool.do(ev.WorkerExited(0, incarnation, "ended by SIGKILL"))
    pool.wait(1)
    assert len(pool.started) == 2


def test_a_worker_that_falls_silent_is_killed_before_a_successor_starts() -> None:
    pool = Pool(workers=1)
    silent = start(pool)
    pool.wait(12)
    assert pool.killed == [silent]
    assert len(pool.started) == 1


def test_a_process_that_never_registers_is_killed() -> None:
    pool = Pool(workers=1)
    pool.wait(119)
    assert not pool.killed
    pool.wait(2)
    assert pool.killed == [pool.started[0].incarnation]


def test_a_worker_that_said_goodbye_has_a_moment_to_end_by_itself_and_is_killed_after() -> None:
    pool = Pool(workers=1)
    incarnation = start(pool)
    for _ in range(100):
        pool.wait(2)
        pool.do(ev.WorkerHeard(0, incarnation.encode()))
    pool.do(ev.WorkerSaid(0, incarnation.encode(), Exiting("drained", False)))
    pool.wait(GOODBYE_S - WATCH_S)
    assert not pool.killed
    pool.wait(2 * WATCH_S)
    assert (pool.killed, pool.reasons) == ([incarnation], ["drained"])


def test_what_a_worker_said_at_its_goodbye_is_said_of_its_end() -> None:
    pool = Pool(workers=1)
    incarnation = start(pool)
    pool.do(ev.WorkerSaid(0, incarnation.encode(), Exiting("its machine goes down", False)))
    pool.do(ev.WorkerExited(0, incarnation, "exit code 0"))
    assert pool.machine.core.groups["g"].slots[0].end_reason == "its machine goes down"


def test_a_stall_of_the_coordinator_takes_no_time_from_a_process_that_is_starting() -> None:
    pool = Pool(workers=1)
    pool.now += 125.0
    pool.do(ev.Tick(0))
    pool.wait(1.0)
    assert not pool.killed
    pool.wait(121.0)
    assert len(pool.killed) == 1


def test_a_worker_that_says_that_a_restart_cannot_help_is_not_restarted() -> None:
    pool = Pool(workers=1)
    client = pool.client()
    pool.submit(client, 1, work())
    incarnation = pool.started[-1].incarnation
    pool.worker(incarnation, ready=False)
    pool.do(ev.WorkerSaid(0, incarnation.encode(), Exiting("no such model", failed=True, permanent=True)))
    pool.do(ev.WorkerExited(0, incarnation, "ended by SIGKILL"))
    assert failures(pool.sent)[1].code == "pool_down"
    assert "no such model" in failures(pool.sent)[1].message


def test_what_a_worker_said_of_its_end_is_said_of_its_kill_and_shown_until_its_successor_is_ready() -> None:
    pool = Pool(workers=1)
    client = pool.client()

    def shown() -> tuple[str, str]:
        (sent,) = pool.do(ev.StatusAsked(0, client, 1))
        assert isinstance(sent.message, StatusReport)
        (worker,) = sent.message.groups[0].workers
        return worker.stage, worker.detail

    first = pool.started[-1].incarnation
    pool.worker(first, ready=False)
    pool.do(ev.WorkerSaid(0, first.encode(), Exiting("nowhere: no such model", failed=True)))
    assert (pool.killed, pool.reasons) == ([first], ["nowhere: no such model"])
    assert shown() == ("ending", "nowhere: no such model")
    pool.do(ev.WorkerExited(0, first, "ended by SIGKILL"))
    assert shown() == ("backoff", "nowhere: no such model")
    assert pool.machine.core.groups["g"].slots[0].restarts == 1
    pool.wait(1)
    second = pool.started[-1].incarnation
    assert second != first
    assert shown() == ("starting", "the last one ended: nowhere: no such model")
    pool.worker(second, ready=False)
    pool.do(ev.WorkerSaid(0, second.encode(), Stage("loading", "nowhere")))
    assert shown() == ("loading", "nowhere; the last one ended: nowhere: no such model")
    pool.worker(second)
    assert shown() == ("ready", "")
    pool.do(ev.WorkerSaid(0, second.encode(), Stage("loading", "takes weights")))
    assert shown() == ("loading", "takes weights")


@pytest.mark.parametrize("permanent", [True, False])
def test_when_no_worker_can_come_back_the_pool_says_so(permanent: bool) -> None:
    pool = Pool(config(workers=1, restart=RestartConfig(max_restarts=2)))
    client = pool.client()
    pool.submit(client, 1, work())
    losses = 0
    while not failures(pool.sent):
        pool.wait(3)
        pool.do(ev.Heard(0, client, 0))
        if len(pool.started) > losses:
            losses += 1
            pool.do(ev.WorkerExited(0, pool.started[-1].incarnation, "exit code 78: no such model", permanent))
    assert losses == (1 if permanent else 3)
    failure = failures(pool.sent)[1]
    assert failure.code == "pool_down" and "no such model" in failure.message
    assert codes(pool.submit(client, 2, work())) == ["pool_down"]
    pool.worker("dialled-in")
    assert codes(pool.submit(client, 3, work())) == [], "a worker that dials in revives the group"


def test_survivors_of_an_earlier_coordinator_are_adopted_or_ended() -> None:
    pool = Pool(workers=0)
    pool.machine = type(pool.machine)(config(workers=2))
    found = [ev.EarlierWorker("g", 0, "old-0"), ev.EarlierWorker("g", 1, "old-1")]
    pool.do(ev.Started(0, EPOCH, {}, found))
    assert not pool.started
    pool.worker("old-0")
    for _ in range(6):
        assert not pool.killed
        pool.wait(2)
        pool.do(ev.WorkerHeard(0, b"old-0"))
    assert pool.killed == ["old-1"]
    assert pool.reasons == ["stopped by the pool, because its process did not register within 10 s"]
    assert "old-0" in pool.machine.core.groups["g"].workers


def test_a_worker_that_ended_before_its_coordinator_began_is_no_external_one() -> None:
    """It had registered with the successor, which has no slot for it and killed it."""
    pool = Pool(workers=0)
    pool.machine = type(pool.machine)(config(workers=1))
    found = [ev.EarlierWorker("g", 0, "old-0"), ev.EarlierWorker("g", 1, "old-1", lives=False)]
    pool.do(ev.Started(0, EPOCH, {}, found))
    for name in ("old-0", "old-1"):
        pool.worker(name, ready=False)
    status = report(pool.machine.core, ev.StatusAsked(pool.now, b"", 1))
    assert [worker.incarnation for worker in status.groups[0].workers] == ["old-0"]


def test_a_worker_with_impossible_or_other_capabilities_is_refused() -> None:
    pool = Pool()
    pool.worker(
        "a", can=CAN.__class__("causal", 1000, 100, batch_tokens=300, batch_rows=8, inflight_tokens=200, inflight_rows=16)
    )
    wrongs: list[dict[str, Any]] = [
        {"page": 0}, {"page": 2**64 - 1}, {"labels": -1}, {"hidden": -1}, {"operations": ("score", "x" * 2000)},
        {"packed_pace": 2**62}, {"fixed_ms": -1}, {"packed_fixed_ms": 2**40},
    ]  # fmt: skip
    for number, wrong in enumerate(wrongs):
        pool.worker(f"p{number}", can=msgspec.structs.replace(CAN, **wrong))
        assert not pool.machine.core.groups["g"].workers
    pool.worker("b")
    pool.worker("c", can=CAN.__class__("causal", 999, 100, 100, 8, 200, 16))
    assert list(pool.machine.core.groups["g"].workers) == ["b"]


@pytest.mark.parametrize("large", [MAX_BUDGET, MAX_BUDGET + 1, 2**63])
def test_the_status_has_room_for_what_is_learned_of_the_fastest_worker_that_is_taken(large: int) -> None:
    pool = Pool()
    sizes = {"page": large // 2, "batch_tokens": large // 2, "inflight_tokens": large, "pace": large}
    pool.worker(can=msgspec.structs.replace(CAN, **sizes, forward_ms=1, fixed_ms=MOST_FORWARD_MS))
    client = pool.client()
    for number in range(100):
        pool.submit(client, number, work())
        pool.now += 0.002
        for batch in list(pool.batches):
            pool.finish(batch, run_s=0.01)
    status = report(pool.machine.core, ev.StatusAsked(pool.now, b"", 1))
    assert encode_header(status) and all(worker.pace < 2**63 for worker in status.groups[0].workers)
    assert [worker.pace > 2 * large for worker in status.groups[0].workers if worker.stage != "lost"] == [True] * (
        large == MAX_BUDGET
    )


@pytest.mark.parametrize("field", ["group", "incarnation", "host"])
def test_a_worker_with_a_very_long_name_is_not_registered(field: str) -> None:
    """The status report, which has the names of all workers, would be longer than clients read."""
    pool = Pool()
    register = msgspec.structs.replace(Register("g", "w", host="h"), **{field: "x" * 5000})
    event = worker_event(0, b"w", [encode_header(register)])
    assert isinstance(event, ev.WorkerBroken) and f"{field}: expected at most 4096 bytes" in event.reason
    assert codes(pool.do(event)) == ["hello_required"]


@pytest.mark.parametrize("ranks", [-1, 2**64 - 1])
def test_an_impossible_number_of_ranks_is_an_invalid_message(ranks: int) -> None:
    """The size of the process group, which has the ranks of all members, could not be sent."""
    event = worker_event(0, b"w", [encode_header(Prepared((1, 1), "peer", ranks))])
    assert isinstance(event, ev.WorkerBroken) and f"ranks: {ranks} is outside 0..65536" in event.reason


@pytest.mark.parametrize("forwards", [-1, 2**64 - 1])
def test_a_worker_that_answers_with_an_impossible_number_of_forwards_is_lost(forwards: int) -> None:
    """The status report, which has the sum of all, could not be sent."""
    pool = Pool()
    pool.worker()
    pool.submit(pool.client(), 1, work())
    pool.finish(pool.batches[0], forwards=forwards)
    assert not pool.machine.core.groups["g"].workers
    assert pool.machine.core.groups["g"].counts.forwards == 0


def test_workers_are_pinged_every_second() -> None:
    pool = Pool()
    pool.worker("a")
    pings = [s for s in pool.wait(5) if isinstance(s.message, Ping)]
    assert len(pings) in (5, 6)


# --- the end -----------------------------------------------------------------------------------------------------------


def test_a_drain_finishes_begun_work_refuses_new_and_ends_the_workers() -> None:
    pool = Pool(workers=1)
    incarnation = start(pool)
    client = pool.client()
    pool.submit(client, 1, work())
    pool.do(ev.DrainAsked(0, 10))
    assert codes(pool.submit(client, 2, work())) == ["shutting_down"]
    assert not pool.drained
    sent = pool.finish_all()
    assert list(results(sent)) == [1]
    assert [s.link for s in sent if isinstance(s.message, Drain)] == [incarnation.encode()]
    pool.do(ev.WorkerSaid(0, incarnation.encode(), Exiting("drained", False)))
    assert not pool.drained and not pool.killed
    pool.do(ev.WorkerExited(0, incarnation, "exit code 0"))
    assert pool.drained


def test_a_drain_has_a_limit() -> None:
    pool = Pool(workers=1)
    incarnation = start(pool)
    client = pool.client()
    pool.submit(client, 1, work())
    pool.do(ev.DrainAsked(0, 5))
    pool.wait(5.5)
    assert failures(pool.sent)[1].code == "shutting_down"
    for _ in range(2):
        assert not pool.killed
        pool.do(ev.WorkerHeard(0, incarnation.encode()))
        pool.wait(5.25)
    assert (pool.killed, pool.reasons) == ([incarnation], ["stopped by the pool, because the pool ends"])
    pool.do(ev.WorkerExited(0, incarnation, "ended by SIGKILL"))
    assert pool.drained


def test_work_of_the_last_worker_waits_for_the_end_of_a_drain_and_no_worker_starts_for_it() -> None:
    pool = Pool(workers=1)
    incarnation = start(pool)
    pool.submit(pool.client(), 1, work())
    pool.do(ev.DrainAsked(0, 5))
    pool.do(ev.WorkerExited(0, incarnation, "exit code 1"))
    assert pool.machine.core.groups["g"].slots[0].state == "retired"
    pool.wait(5.5)
    assert failures(pool.sent)[1].code == "shutting_down"
    assert pool.drained and len(pool.started) == 1


def test_a_drain_starts_no_worker_that_waited_for_its_turn() -> None:
    pool = Pool(workers=1)
    pool.submit(pool.client(), 1, work())
    pool.do(ev.WorkerExited(0, pool.started[0].incarnation, "exit code 1"))
    pool.do(ev.DrainAsked(0, 5))
    pool.wait(6.0)
    assert pool.drained and len(pool.started) == 1
    assert pool.machine.core.groups["g"].slots[0].state == "retired"


def test_a_drain_of_a_pool_that_is_still_starting_ends_it() -> None:
    pool = Pool(workers=2)
    pool.do(ev.DrainAsked(0, 5))
    assert sorted(pool.killed) == sorted(s.incarnation for s in pool.started)
    for s in pool.started:
        pool.do(ev.WorkerExited(0, s.incarnation, "ended by SIGKILL"))
    assert pool.drained
    pool.wait(WATCH_S * 2)


def test_work_that_a_worker_refuses_goes_elsewhere_and_no_request_is_suspected() -> None:
    pool = Pool()
    client = pool.client()
    link = pool.worker("a")
    pool.submit(client, 1, work())
    (batch,) = pool.batches
    assert isinstance(batch.message, Batch)
    sent = pool.do(ev.WorkerSaid(0, link, ErrorReply("hello_required", "", batch.message.batch[1])))
    assert codes(sent) == ["hello_required"]
    pool.batches.clear()
    pool.worker("b")
    assert [s.link for s in pool.batches] == [b"b"]
    pool.submit(client, 2, work())
    assert [s.link for s in pool.batches] == [b"b", b"b"], "the first worker gets nothing before it is ready again"
    pool.do(ev.WorkerRegistered(0, link, "g", "a", 1, "h"))
    pool.do(ev.WorkerSaid(0, link, Ready(CAN, 0)))
    pool.submit(client, 3, work())
    assert pool.batches[-1].link == b"a"
    assert sorted(results(pool.finish_all())) == [1, 2, 3]


def test_a_link_belongs_to_the_last_worker_that_registered_on_it() -> None:
    pool = Pool()
    client = pool.client()
    pool.worker("a")
    pool.submit(client, 1, work())
    pool.batches.clear()
    pool.do(ev.WorkerRegistered(0, b"a", "g", "another", 1, "h"))
    assert list(pool.machine.core.groups["g"].workers) == ["another"]
    pool.do(ev.WorkerSaid(0, b"a", Idle(EPOCH)))
    pool.do(ev.WorkerSaid(0, b"a", Ready(CAN, 0)))
    assert list(results(pool.finish_all())) == [1]


# --- external workers --------------------------------------------------------------------------------------------------


def test_an_external_worker_whose_link_was_silent_registers_again_under_a_new_incarnation() -> None:
    pool = Pool(workers=0)
    pool.worker("outside")
    client = pool.client()
    pool.submit(client, 1, work())
    told = [s.message for s in pool.wait(12) if isinstance(s.message, Expired | ErrorReply)]
    assert [type(message) for message in told] == [Expired]
    again = pool.do(ev.WorkerRegistered(0, b"outside", "g", "outside", 1, "host", EPOCH))
    assert [s.message.incarnation for s in again if isinstance(s.message, Expired)] == ["outside"]
    pool.do(ev.Heard(0, client, None))
    pool.worker("outside+2")
    assert 1 in results(pool.finish_all())


def test_an_external_worker_at_fault_is_told_to_end_and_not_to_come_back() -> None:
    pool = Pool(workers=0)
    pool.worker("outside")
    told = [s.message for s in pool.do(ev.WorkerBroken(0, b"outside", "nonsense"))]
    assert [message.code for message in told if isinstance(message, ErrorReply)] == ["superseded"]
    again = pool.do(ev.WorkerRegistered(0, b"outside", "g", "outside", 1, "host"))
    assert codes(again) == ["superseded"]


def test_a_new_incarnation_on_the_link_of_the_old_one_is_not_told_to_end() -> None:
    pool = Pool(workers=0)
    pool.worker("outside")
    told = pool.do(ev.WorkerRegistered(0, b"outside", "g", "outside+2", 1, "host", EPOCH))
    assert [type(s.message) for s in told] == [Accept]
    assert list(pool.machine.core.groups["g"].workers) == ["outside+2"]


def test_a_program_that_starts_workers_hears_the_settings_of_their_group() -> None:
    pool = Pool(groups=("a", "b"))
    [sent] = pool.do(ev.SettingsAsked(0, b"unit", "b"))
    assert isinstance(sent.message, WorkerSettings) and sent.message.group == "b"
    group = msgspec.json.decode(sent.message.settings, type=GroupConfig)
    assert group == pool.machine.core.config.groups["b"]
    assert codes(pool.do(ev.SettingsAsked(0, b"unit", "c"))) == ["unknown_group"]
    assert codes(pool.do(ev.SettingsAsked(0, b"unit", ""))) == ["unknown_group"], "two groups: it has to say which"
    assert not pool.machine.core.worker_links
