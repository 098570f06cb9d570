"""Classes: which workers of a group can serve a request, and why none can.

A plain worker runs every row as a prompt of its own; a packed one joins rows of one query into a sequence, and its engine dies
when anything else is among them. So each is a class, a bit, and a request carries the bits of those that can serve it. Before
a plain worker was ready, plain ones are believed to serve everything; packed ones are believed once one is ready.
"""

from enginepool.coordinator.operations.base import Work
from enginepool.protocol.errors import WireError
from enginepool.protocol.messages import Capabilities

PLAIN = 1
PACKED = 2


def classes_of(work: Work, plain: Capabilities | None, packed: Capabilities | None, expected: int) -> int | WireError:
    """The classes that can serve `work`, at least one; or what stands against it.

    Args:
        plain, packed: of the class's first worker that was ready; None before that.
        expected: the classes of which there may ever be a worker.
    """
    operation = work.operation
    if packed is None:
        if plain is None:
            return expected
        if operation.name not in plain.operations:
            return _unserved(work, plain)
        return operation.refuse(work, plain) or PLAIN
    if operation.name not in packed.operations:
        return classes_of(work, plain, None, PLAIN) if expected & PLAIN else _unserved(work, packed)
    if wrong := operation.refuse(work, packed, alone=False):
        return wrong
    if not expected & PLAIN:
        return PACKED if operation.packs(work, packed) else operation.why_not_packed(work, packed)
    wrong = None
    if plain is not None:
        wrong = operation.refuse(work, plain) if operation.name in plain.operations else _unserved(work, plain)
    if work.text:
        return wrong or expected
    found = PACKED if operation.packs(work, packed) else 0
    if wrong is None:
        return found | PLAIN
    return found or wrong


def _unserved(work: Work, can: Capabilities) -> WireError:
    """The refusal of an operation that workers of these capabilities do not have."""
    names = ", ".join(can.operations)
    text = f"type: {work.operation.name} is not an operation of this group; its workers have: {names}"
    return WireError("bad_request", text, field="type", limit=names)
