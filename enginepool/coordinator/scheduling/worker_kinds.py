"""The classes of workers: which workers of a group can serve a request, and why none can.

A plain worker runs every row as a prompt of its own. A packed worker joins rows of one query into a sequence, and its engine
dies if a batch holds any other request. Each class is a bit, and a request carries the bits of the classes that can serve it.
Until the first plain worker is ready, the coordinator assumes that plain workers can serve every request. It assumes nothing of
packed workers before the first of them is ready.
"""

from enginepool.coordinator.operations.base import Work
from enginepool.protocol.errors import WireError
from enginepool.protocol.messages import Capabilities

PLAIN = 1
PACKED = 2


def classes_of(work: Work, plain: Capabilities | None, packed: Capabilities | None, expected: int) -> int | WireError:
    """The classes that can serve `work`, at least one; or the error that says why no class can.

    Args:
        plain, packed: capabilities of the first worker of the class that was ready; None before that.
        expected: the classes that have workers, or may get some.
    """
    operation = work.operation
    if packed is None:
        if plain is None:
            return expected
        if not _serves(plain, work):
            return _unserved(work, plain)
        return operation.refuse(work, plain) or PLAIN
    if not _serves(packed, work):
        return classes_of(work, plain, None, PLAIN) if expected & PLAIN else _unserved(work, packed)
    if wrong := operation.refuse(work, packed, alone=False):
        return wrong
    if not expected & PLAIN and work.text and operation.knows_outputs(work, packed):
        return PACKED  # Its ids may be packed.
    if not expected & PLAIN:
        return PACKED if operation.packs(work, packed) else operation.why_not_packed(work, packed)
    wrong = None
    if plain is not None:
        wrong = operation.refuse(work, plain) if _serves(plain, work) else _unserved(work, plain)
    if work.text:
        # Its ids may be packed, but for an answer of which packed workers do not say how large it is.
        return wrong or (expected if operation.knows_outputs(work, packed) else PLAIN)
    found = PACKED if operation.packs(work, packed) else 0
    if wrong is None:
        return found | PLAIN
    return found or wrong


def _serves(can: Capabilities, work: Work) -> bool:
    return work.operation.name in can.operations or work.operation.of_tokenizer


def _unserved(work: Work, can: Capabilities) -> WireError:
    """The refusal of an operation that workers with these capabilities do not support."""
    names = ", ".join(can.operations)
    text = f"type: {work.operation.name} is not an operation of this group; its workers have: {names}"
    return WireError("bad_request", text, field="type", limit=names)
