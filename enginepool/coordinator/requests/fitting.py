"""Requests as their group knows that it can run them: with the tokens of their labels, and rows that are not too long. Pure."""

from enginepool.coordinator.core.group import Group
from enginepool.coordinator.core.request import Request
from enginepool.coordinator.operations.base import Work
from enginepool.coordinator.operations.labels import with_known_labels
from enginepool.coordinator.operations.truncation import fitted
from enginepool.coordinator.scheduling.worker_kinds import PLAIN


def fitting(work: Work, group: Group) -> Work:
    """`work` as far as that is known before any worker has seen it.

    Raises:
        WireError: its rows cannot be truncated.
    """
    return _truncated(with_known_labels(work, group.label_ids), group)


def truncate_waiting(request: Request) -> None:
    """Cut the rows of a request of which none was ever given to a worker.

    Raises:
        WireError: they cannot be cut.
    """
    group, before = request.group, request.work.tokens
    request.work = _truncated(request.work, group)
    group.tokens += request.work.tokens - before


def _truncated(work: Work, group: Group) -> Work:
    return fitted(work, group.plain, group.packed, plain_expected=group.expected & PLAIN > 0)
