"""Requests that are truncated: once it is known what the workers of their group take, and before any of them runs. Pure."""

from enginepool.coordinator.core.request import Request
from enginepool.coordinator.operations.truncation import fitted
from enginepool.coordinator.scheduling.worker_kinds import PLAIN
from enginepool.protocol.errors import WireError


def truncate_waiting(request: Request) -> WireError | None:
    """Cut the rows of a request of which none was ever given to a worker. Returns why they cannot be cut, or None."""
    group, before = request.group, request.work.tokens
    try:
        request.work = fitted(request.work, group.plain, group.packed, plain_expected=group.expected & PLAIN > 0)
    except WireError as error:
        return error
    group.tokens += request.work.tokens - before
    return None
