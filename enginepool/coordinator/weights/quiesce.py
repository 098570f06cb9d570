"""Holding a group: no new work starts while engines are about to take other weights.

Batches that are in flight finish, or are put back. What is left of a request of which some rows were given to workers waits in
the queue like all others: a large request would hold the group for as long as all its rows take. Rows of it that are computed
count if the group stays on their version, as after an abort. If it does not, they run again: all parts of an answer come from
one version.
"""

from collections.abc import Iterable

from enginepool.coordinator.core.worker import Worker


def working(workers: Iterable[Worker]) -> bool:
    """Whether one of them still has something in hand."""
    return any(worker.batches or worker.texts for worker in workers)
