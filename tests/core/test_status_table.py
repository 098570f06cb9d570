"""The table of `enginepool status`: what an operator looks for is readable on a terminal of 80 columns."""

from rich.console import Console

from enginepool.cli.status import tables
from enginepool.coordinator.core.events import StatusAsked
from enginepool.coordinator.core.status import report
from enginepool.protocol.messages import GroupStatus, StatusReport, WorkerStatus
from tests.core.machines import Pool


def test_a_long_name_of_a_worker_leaves_room_for_its_stage_and_its_process() -> None:
    """The names of external workers contain the name of their host."""
    name = "gpu-host-17-of-the-second-row-judge-0.660f1b07bd58b+2"
    worker = WorkerStatus(name=name, incarnation=name, stage="restoring", pid=4123456, version=1234567, restarts=3)
    shown = StatusReport(epoch=1, uptime_s=5.0, groups=[GroupStatus(name="judge", workers=[worker])])
    console = Console(width=80, record=True)
    console.print(tables(shown))
    text = console.export_text()
    for whole in ("stage", "weights", "batches", "silent", "restarts", "restoring", "4123456", "1234567", "0.0 s"):
        assert f" {whole}" in text, text
    assert "\u2026" not in text


def test_workers_of_the_pool_are_in_the_order_of_their_places_and_external_ones_follow() -> None:
    pool = Pool(workers=3)
    pool.worker("outside")
    for started in reversed(pool.started[1:]):
        pool.worker(started.incarnation)
    assert [worker.name for worker in report(pool.machine.core, StatusAsked(pool.now, b"", 0)).groups[0].workers] == [
        "g-0",
        "g-1",
        "g-2",
        "outside",
    ]
