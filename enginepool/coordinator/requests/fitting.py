"""Requests as their group can run them: with the tokens of their labels, and rows that are not too long. Pure."""

from enginepool.coordinator.core.group import Group
from enginepool.coordinator.core.request import Request
from enginepool.coordinator.operations.base import Work
from enginepool.coordinator.operations.labels import with_known_labels
from enginepool.coordinator.operations.truncation import fitted
from enginepool.protocol.errors import WireError
from enginepool.protocol.messages import Capabilities


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
    return fitted(work, group.capabilities)


def refusal(work: Work, can: Capabilities | None) -> WireError | None:
    """Why workers of these capabilities cannot serve `work`, or None. Before one was ready they are assumed to."""
    if can is None:
        return None
    operation = work.operation
    if operation.name in can.operations or operation.of_tokenizer:
        return operation.refuse(work, can)
    names = ", ".join(can.operations)
    text = f"type: {operation.name} is not an operation of this group; its workers have: {names}"
    return WireError("bad_request", text, field="type", limit=names)


def can_be_packed(work: Work, can: Capabilities | None) -> bool:
    """Whether the rows of `work` may be packed, as far as is known. Text is not known."""
    return can is not None and not work.text and work.operation.packs(work, can)
