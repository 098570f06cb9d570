"""Classes: which workers of a group can serve a request, and why none can.

A plain worker runs every row as a prompt of its own; a packed one joins rows of one query into a sequence, and its engine dies
when anything else is among them. So each is a class, a bit, and a request carries the bits of those that can serve it. Before
a plain worker was ready, plain ones are believed to serve everything; packed ones are believed once one is ready.
"""

from enginepool.coordinator.operations.base import Work, longest_row
from enginepool.protocol.errors import WireError
from enginepool.protocol.messages import Capabilities, GroupLimits

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
        return operation.refuse(work, plain) or PLAIN
    if wrong := operation.refuse(work, packed, alone=False):
        return wrong
    if not expected & PLAIN:
        return PACKED if operation.packs(work, packed) else operation.why_not_packed(work, packed)
    wrong = None if plain is None else operation.refuse(work, plain)
    if work.text:
        return wrong or expected
    found = PACKED if operation.packs(work, packed) else 0
    if wrong is None:
        return found | PLAIN
    return found or wrong


def limits_of(plain: Capabilities | None, packed: Capabilities | None, expected: int, items: int) -> GroupLimits | None:
    """What any request to a group may ask for, and at most so many `items`: what its plain workers serve, where it has them.
    None while that is not known: before a worker was ready, or a plain one where there will be plain ones."""
    if plain is not None:
        return GroupLimits(plain.kind, plain.vocab, longest_row(plain), items, plain.labels, plain.hidden, plain.text)
    if packed is None or expected & PLAIN:
        return None
    longest = longest_row(packed) - 2
    max_item = min(packed.max_item, longest - 1)
    return GroupLimits(packed.kind, packed.vocab, longest, items, packed.labels, packed.hidden, False, max_item)
