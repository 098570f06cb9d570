"""Workers that other programs start: the status names those that were lost, and says when a group has none."""

import asyncio
import logging
from typing import Any

import pytest

from enginepool.client import notices
from enginepool.client.notices import Notices
from enginepool.client.readiness import wait_until_ready
from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.group import LOST
from enginepool.coordinator.core.status import report
from enginepool.errors import DeadlineExceeded
from enginepool.protocol.messages import Exiting, GroupStatus, StatusReport, WorkerStatus
from tests.core.machines import Pool, work

NONE = (
    "no worker is connected and the pool starts none (workers = 0); `enginepool worker --connect ADDRESS --group g` starts one"
)


def group(pool: Pool) -> GroupStatus:
    return report(pool.machine.core, ev.StatusAsked(pool.now, b"", 0)).groups[0]


def register(pool: Pool, name: str, pid: int) -> None:
    pool.do(ev.WorkerRegistered(0, name.encode(), "g", name, pid, "far"))


def test_a_lost_external_worker_stays_in_the_status_for_five_minutes() -> None:
    pool = Pool()
    register(pool, "outside", 7)
    pool.do(ev.WorkerSaid(0, b"outside", Exiting("it ends", failed=False)))
    pool.wait(299.0)
    (lost,) = group(pool).workers
    assert (lost.name, lost.stage, lost.pid, lost.host, lost.detail) == ("outside", "lost", 7, "far", "it ends")
    assert lost.silent_s == pytest.approx(299.0)
    pool.wait(2.0)
    assert group(pool).workers == []


def test_a_process_that_is_back_with_another_incarnation_is_not_lost() -> None:
    pool = Pool()
    register(pool, "outside", 7)
    register(pool, "another", 8)
    for link in (b"outside", b"another"):
        pool.do(ev.WorkerBroken(0, link, "it was silent", silent=True))
    register(pool, "outside+1", 7)
    assert [(worker.name, worker.stage) for worker in group(pool).workers] == [("outside+1", "starting"), ("another", "lost")]


def test_the_status_remembers_no_more_lost_workers_than_fit() -> None:
    pool = Pool()
    for number in range(LOST + 10):
        register(pool, f"w{number}", number)
        pool.do(ev.WorkerSaid(0, b"w%d" % number, Exiting("it ends", failed=False)))
    assert [worker.pid for worker in group(pool).workers] == list(range(10, LOST + 10))


def test_a_group_without_a_worker_says_so() -> None:
    pool = Pool()
    assert group(pool).no_worker == NONE
    register(pool, "outside", 7)
    assert group(pool).no_worker == ""
    pool.submit(pool.client(), 1, work())
    pool.do(ev.WorkerSaid(0, b"outside", Exiting("it ends", failed=False)))
    assert group(pool).no_worker == NONE
    assert pool.logged[-1] == f"group g: {NONE}; requests that wait: 1"


def test_a_group_whose_workers_the_pool_starts_does_not_say_so() -> None:
    assert group(Pool(workers=1)).no_worker == ""


def test_ready_says_it_at_once_and_in_its_timeout() -> None:
    lost = WorkerStatus("outside", "outside", "lost", detail="it was silent for 20.1 s")
    said: list[str] = []

    async def ask(_: float | None) -> StatusReport:
        return StatusReport(1, groups=[GroupStatus("g", no_worker=NONE, workers=[lost])])

    with pytest.raises(DeadlineExceeded, match=r"workers = 0.*outside lost \(it was silent for 20\.1 s\)"):
        asyncio.run(wait_until_ready(ask, 0.3, "g", said.append))
    assert said == [f"g: {NONE}", "g: outside lost: it was silent for 20.1 s"]


def test_a_group_without_any_worker_says_why_once() -> None:
    async def ask(_: float | None) -> StatusReport:
        return StatusReport(1, groups=[GroupStatus("g", no_worker=NONE)])

    with pytest.raises(DeadlineExceeded) as caught:
        asyncio.run(wait_until_ready(ask, 0.30000001, "g", lambda line: None))
    assert str(caught.value).startswith(f"not ready after 0.3 s: group 'g': {NONE}")


def test_a_group_that_serves_says_nothing_of_workers_that_were_lost_before() -> None:
    said: list[str] = []
    workers = [WorkerStatus("g-0", "g-0.1", "ready"), WorkerStatus("outside", "outside", "lost", detail="drained: SIGTERM")]

    async def ask(_: float | None) -> StatusReport:
        return StatusReport(1, groups=[GroupStatus("g", workers=workers)])

    asyncio.run(wait_until_ready(ask, 0.3, "g", said.append))
    assert said == ["g: g-0 ready"]


@pytest.mark.parametrize(
    ("stopped", "said"),
    [
        ({"no_worker": NONE}, NONE),
        ({"paused": True}, "it is paused until it is resumed"),
        ({"asleep": ["cuda_graph"]}, "it sleeps (cuda_graph) until it is woken"),
    ],
)
def test_a_call_without_a_timeout_is_told_once_why_nothing_of_its_group_runs(
    stopped: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notices, "LOOK_S", 0.001)
    reports = [GroupStatus("g", queued=2, **stopped)] * 3 + [GroupStatus("g", queued=2)]
    reports += [GroupStatus("g", **stopped)] + [GroupStatus("g", queued=1, **stopped)] * 2

    async def play() -> None:
        looked = asyncio.Event()

        async def ask() -> StatusReport:
            status = reports.pop(0)
            if not reports:
                looked.set()
            return StatusReport(1, groups=[status])

        told = Notices("ipc://pool", ask)
        told.begin()
        await looked.wait()
        told.end()
        told.close()

    with caplog.at_level(logging.WARNING, "enginepool"):
        asyncio.run(play())
    assert [record.getMessage() for record in caplog.records] == [
        f"ipc://pool: group 'g': {said}; calls wait for it",
    ] * 2
