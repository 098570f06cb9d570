"""Workers that an operator restarts, and slots that an operator revives."""

import pytest

from enginepool.config import RestartConfig
from enginepool.coordinator.core import events as ev
from enginepool.protocol.messages import Batch, Stage, StatusReport, WorkerStatus
from tests.core.machines import Pool, Sent, codes, failures, results, work


def up(pool: Pool, index: int = -1, *, ready: bool = True) -> bytes:
    """Let the process that was started last register, and be ready."""
    name = pool.started[index].incarnation
    return pool.worker(name, ready=ready)


def restart(pool: Pool, worker: str, incarnation: str, *, group: str = "") -> list[Sent]:
    return pool.do(ev.RestartAsked(0, b"operator", 9, group=group, worker=worker, incarnation=incarnation))


def ended(pool: Pool, incarnation: str, *, permanent: bool = False, failed: bool = False) -> None:
    pool.do(ev.WorkerExited(0, incarnation, "exit code 1: no", permanent, failed))


def status(pool: Pool, name: str) -> WorkerStatus:
    (report,) = pool.do(ev.StatusAsked(0, b"operator", 1))
    assert isinstance(report.message, StatusReport)
    (found,) = [worker for worker in report.message.groups[0].workers if worker.name == name]
    return found


def test_a_worker_is_drained_and_ended_and_the_next_one_starts_at_once() -> None:
    pool = Pool(workers=2)
    first, second = pool.started
    for index in (0, 1):
        up(pool, index)
    client = pool.client()
    for id_ in range(1, 5):
        pool.submit(client, id_, work(rows=8))
    mine = [sent for sent in pool.batches if sent.link == first.incarnation.encode()]
    assert mine
    (report,) = restart(pool, "g-0", first.incarnation)
    assert isinstance(report.message, StatusReport) and report.message.id == 9
    assert status(pool, "g-0").stage == "draining" and "restart" in status(pool, "g-0").detail
    assert pool.killed == []
    pool.submit(client, 9, work())
    for sent in mine:
        pool.finish(sent)
    pool.wait(0.5)
    assert pool.killed == [first.incarnation] and "operator" in pool.reasons[0]
    ended(pool, first.incarnation)
    pool.wait(0.5)
    assert [start.index for start in pool.started] == [0, 1, 0], "no backoff"
    up(pool)
    pool.finish_all()
    assert sorted(results(pool.sent)) == [1, 2, 3, 4, 9] and not failures(pool.sent)
    assert all(sent.link != first.incarnation.encode() for sent in pool.batches)
    assert (status(pool, "g-0").restarts, status(pool, "g-0").stage) == (0, "ready")
    assert second.incarnation in pool.machine.core.groups["g"].workers


def test_what_is_not_finished_in_time_runs_elsewhere_and_nothing_is_suspected() -> None:
    pool = Pool(workers=1)
    up(pool)
    client = pool.client()
    pool.submit(client, 1, work())
    restart(pool, "g-0", pool.started[0].incarnation)
    pool.wait(pool.machine.core.config.timing.drain_s + 1.0)
    assert pool.killed == [pool.started[0].incarnation]
    ended(pool, pool.started[0].incarnation)
    pool.wait(0.5)
    pool.batches.clear()
    up(pool)
    (sent,) = pool.batches
    assert isinstance(sent.message, Batch)
    pool.finish(sent)
    assert list(results(pool.sent)) == [1]


def test_a_worker_whose_process_could_not_be_made_is_restarted_again() -> None:
    pool = Pool(workers=1)
    [first] = pool.started
    restart(pool, "g-0", first.incarnation)
    pool.do(ev.WorkerExited(0, first.incarnation, "no memory for a process", unstarted=True))
    assert (status(pool, "g-0").stage, len(pool.started)) == ("backoff", 1)
    restart(pool, "g-0", "")
    pool.wait(0.5)
    assert len(pool.started) == 2, "it does not wait for the longest backoff"


def test_a_retired_worker_is_revived_and_its_group_takes_requests_again() -> None:
    pool = Pool(workers=1, restart=RestartConfig(max_restarts=1000))
    for _ in range(2):
        ended(pool, pool.started[-1].incarnation, failed=True)
        pool.wait(60.0)
    assert status(pool, "g-0").stage == "retired"
    client = pool.client()
    assert codes(pool.submit(client, 1, work())) == ["pool_down"]
    restart(pool, "g-0", "")
    pool.wait(0.5)
    assert len(pool.started) == 3
    assert codes(pool.submit(client, 2, work())) == []
    up(pool)
    pool.finish_all()
    assert list(results(pool.sent)) == [2]
    assert status(pool, "g-0").stage == "ready"


def test_a_revived_worker_that_fails_again_is_given_up_again() -> None:
    pool = Pool(workers=1)
    ended(pool, pool.started[-1].incarnation, permanent=True, failed=True)
    assert status(pool, "g-0").stage == "retired"
    for count in (2, 3):
        restart(pool, "g-0", "")
        pool.wait(0.5)
        assert len(pool.started) == count
        pool.submit(pool.client(), 1, work())
        before = len(pool.sent)
        ended(pool, pool.started[-1].incarnation, permanent=True, failed=True)
        assert codes(pool.sent[before:]) == ["pool_down"]
        assert status(pool, "g-0").stage == "retired"


def test_a_restart_that_comes_twice_is_done_once() -> None:
    pool = Pool(workers=1)
    up(pool)
    incarnation = pool.started[0].incarnation
    for _ in range(2):
        restart(pool, "g-0", incarnation)
    ended(pool, incarnation)
    pool.wait(0.5)
    up(pool)
    restart(pool, "g-0", incarnation)
    restart(pool, "g-0", "")
    pool.wait(5.0)
    assert pool.killed == [incarnation] and len(pool.started) == 2


@pytest.mark.parametrize("registered", [False, True])
def test_a_worker_that_starts_is_started_again(registered: bool) -> None:
    pool = Pool(workers=1)
    incarnation = pool.started[0].incarnation
    if registered:
        up(pool, ready=False)
        pool.do(ev.WorkerSaid(0, incarnation.encode(), Stage("loading", "")))
    restart(pool, "g-0", incarnation)
    assert pool.killed == [incarnation]
    ended(pool, incarnation)
    pool.wait(0.5)
    assert len(pool.started) == 2


def test_what_cannot_be_restarted_is_refused_by_name() -> None:
    pool = Pool(workers=2)
    pool.worker("outside")
    for worker, code, said in (
        ("outside", "unsupported", "worker: 'outside' was not started by this pool; restart it on its own host"),
        ("g-7", "bad_request", "worker: 'g-7' is not a worker of group 'g', which starts g-0, g-1"),
    ):
        refused = failures(restart(pool, worker, ""))[9]
        assert (refused.code, refused.message, refused.field) == (code, said, "worker")
    assert codes(restart(pool, "g-0", "", group="none")) == ["unknown_group"]
    pool.do(ev.DrainAsked(0, 1.0))
    assert codes(restart(pool, "g-0", pool.started[0].incarnation)) == ["shutting_down"]


def test_a_worker_that_is_to_be_restarted_and_crashes_is_started_at_once() -> None:
    pool = Pool(workers=1, restart=RestartConfig(max_restarts=0))
    up(pool)
    pool.submit(pool.client(), 1, work())
    restart(pool, "g-0", pool.started[0].incarnation)
    ended(pool, pool.started[0].incarnation, failed=True)
    pool.wait(0.5)
    assert len(pool.started) == 2
    up(pool)
    pool.finish(pool.batches[-1])
    assert list(results(pool.sent)) == [1]
