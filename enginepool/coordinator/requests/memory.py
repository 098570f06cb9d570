"""How many bytes of the coordinator's memory requests and their answers take. Pure.

The coordinator charges a request when it admits it, before any work is done. The charge covers its payload, the objects that
hold it, and its whole answer, whose size is known by then. The window of the client and `buffer_bytes` of the pool bound the
sum. PROTOCOL.md states the same formula, so that clients can count the same charge.
"""

from collections.abc import Sequence
from typing import NamedTuple

from enginepool.config import Limits
from enginepool.coordinator.operations.base import Work
from enginepool.protocol.basis import ELEMENT_BYTES, LABEL_BYTES, REQUEST_BYTES, RESULT_BYTES, ROW_BYTES
from enginepool.protocol.errors import WireError
from enginepool.protocol.messages import Capabilities, ErrorReply

#: assumed columns of a classifier's scores, and of hidden states, until a worker says how many there are
UNKNOWN_LABELS = 1024
UNKNOWN_HIDDEN = 16_384
#: assumed experts of a token, in all layers together
UNKNOWN_EXPERTS = 1024
#: when a request that found no memory is sent again
NO_MEMORY_MS = 1000
#: share of a memory bound above which the configured buffers come close to it
CLOSE = 0.8


class Bound(NamedTuple):
    """A bound of the memory of this process, in bytes."""

    name: str
    most: int
    #: bytes that count against it already
    used: int


def request_bytes(work: Work) -> int:
    """Bytes that `work` takes without its answer. Text becomes ids: at most one id for each byte of a row with its query."""
    text = ELEMENT_BYTES * (work.tokens + work.rows) if work.of_text else 0
    return REQUEST_BYTES + LABEL_BYTES * work.values + work.nbytes + text


def columns_of(work: Work, can: Capabilities | None) -> int:
    """Elements of a row of the answer of a model with these capabilities; None: no worker was ready yet."""
    return sum(columns for _, columns in work.operation.outputs(work, can))


def answer_bytes(work: Work, can: Capabilities | None) -> int:
    """Bytes that the answer to `work` takes: its payload and the upper bound of its header."""
    return RESULT_BYTES + work.rows * (ROW_BYTES + ELEMENT_BYTES * columns_of(work, can))


def charge(work: Work, can: Capabilities | None) -> tuple[int, int]:
    """(`answer_bytes`, `answer_bytes + request_bytes`) of `work`."""
    if found := work.charge or work.operation.charge(work, can):
        return found
    answer = answer_bytes(work, can)
    return answer, request_bytes(work) + answer


def labels_charge(rows: int, labels: int, nbytes: int) -> tuple[int, int]:
    """`charge` of a request of token ids (`nbytes`) whose answer has one column for each label. It does not depend on the
    model."""
    answer = RESULT_BYTES + rows * (ROW_BYTES + ELEMENT_BYTES * labels)
    return answer, REQUEST_BYTES + LABEL_BYTES * labels + nbytes + answer


def unread_bytes(live: int, limits: Limits) -> int:
    """Bytes that all peers together may leave unread, while the charge of all requests is `live` bytes.

    The limit is the rest of the total, plus a twentieth for small answers that no client is charged for. It is at least a tenth
    of the total. Requests may turn out to take more than their first charge, and peers that read must not be disconnected then.
    """
    return max(limits.buffer_bytes * 21 // 20 - live, limits.buffer_bytes // 10)


def misfit(limits: Limits, bounds: Sequence[Bound]) -> tuple[str, bool]:
    """(what is wrong with `limits.buffer_bytes` under the tightest of these bounds or "", whether it cannot fit at all).

    The process needs memory for two more messages: one that it receives, and one that it assembles.
    """
    more = 2 * limits.max_message_bytes
    for bound in sorted(bounds, key=lambda bound: bound.most - bound.used):
        wanted = bound.used + limits.buffer_bytes + more
        if wanted <= CLOSE * bound.most:
            continue
        what = f"limits.buffer_bytes = {limits.buffer_bytes}: with {more} bytes for two messages and {bound.used} in use it "
        if wanted > bound.most:
            most = max(bound.most - bound.used - more, 0)
            return f"{what}does not fit {bound.name}, {bound.most} bytes; at most {most}", True
        return f"{what}is close to {bound.name}, {bound.most} bytes", False
    return "", False


def too_large(work: Work, can: Capabilities | None, message_bytes: int, limits: Limits) -> WireError | None:
    """Why even an idle coordinator could not serve `work` to a client that accepts messages of so many bytes; or None."""
    answer, held = charge(work, can)
    text = ELEMENT_BYTES * (work.tokens + work.rows)
    if work.of_text and text > 2 * limits.max_message_bytes:
        most = 2 * limits.max_message_bytes // ELEMENT_BYTES - work.rows
        what = f"items: {work.tokens} bytes of text, the query counted in each row; at most {most}: send token ids"
        return WireError("too_large", what, field="items", limit=str(most))
    if not work.operation.knows_outputs(work, can):
        return None
    if answer > message_bytes:
        what = f"items: an answer of {answer} bytes, {work.operation.describe(work, can)}"
        return WireError("too_large", f"{what}; at most {message_bytes}", field="items", limit=str(message_bytes))
    if held > limits.window_bytes:
        what = f"items: the request and its answer take {held} bytes; at most {limits.window_bytes}"
        return WireError("too_large", what, field="items", limit=str(limits.window_bytes))
    return None


def out_of_memory(id: int) -> ErrorReply:
    """The answer to a request for which there is no memory now."""
    text = "buffer_bytes: the coordinator has no memory for this request"
    return ErrorReply("busy", text, id, field="buffer_bytes", retry_after_ms=NO_MEMORY_MS)
