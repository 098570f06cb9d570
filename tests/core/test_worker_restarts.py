"""What a program that restarts workers is told of one that does not come back."""

import asyncio

import pytest

from enginepool.client.worker_restarts import restart_workers
from enginepool.errors import PoolDown
from enginepool.protocol.messages import StatusReport, WorkerStatus
from enginepool.protocol.messages.status import GroupStatus


def report(epoch: int, *workers: WorkerStatus) -> StatusReport:
    return StatusReport(epoch, groups=[GroupStatus("g", workers=[*workers])])


def test_a_worker_that_another_coordinator_does_not_have_did_not_become_ready_again() -> None:
    """It was started with fewer workers."""
    first, second = (WorkerStatus(name, stage="ready", incarnation=f"i-{name}") for name in ("a", "b"))
    reports = iter([report(1, first, second), report(2, first)])

    async def ask() -> StatusReport:
        return next(reports)

    async def restart(group: str, worker: str, incarnation: str) -> StatusReport:
        return await ask()

    with pytest.raises(PoolDown, match=r"^b did not become ready again: group 'g' has no such worker any more$"):
        asyncio.run(restart_workers(ask, restart, "g", "b", lambda line: None))
