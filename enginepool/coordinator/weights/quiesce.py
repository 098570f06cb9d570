"""Holding a group: no new work starts while engines are about to take other weights.

Batches that are in flight finish, or are put back. What is left of a request of which some rows were given to workers waits in
the queue like all others: a large request would hold the group for as long as all its rows take. Rows of it that are computed
count if the group stays on their version, as after an abort. If it does not, they run again: all parts of an answer come from
one version.
"""

from collections.abc import Iterable

from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.group import Group
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.scheduling.batches import release_kept


def hold(group: Group) -> None:
    """No new work starts in `group` from here on."""
    group.held = True
    # No trial starts while it is held.
    release_kept(group)
    _tell(group)


def release(core: Context, group: Group) -> None:
    """Work starts again, unless the coordinator is about to end without its workers."""
    group.held = core.keep_workers
    _tell(group)
    core.wake(group)


def _tell(group: Group) -> None:
    for worker in group.workers.values():
        worker.routing.update(worker)


def working(workers: Iterable[Worker]) -> bool:
    """Whether one of them still has something in hand."""
    return any(worker.batches or worker.texts for worker in workers)
