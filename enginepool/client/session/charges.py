"""What a request and its answer count in bytes: against the window, and as a message. PROTOCOL.md has the formula."""

from collections.abc import Sequence

import msgspec

from enginepool.protocol.basis import ELEMENT_BYTES, LABEL_BYTES, REQUEST_BYTES, RESULT_BYTES, ROW_BYTES, SEQUENCE_BYTES
from enginepool.protocol.chat import MAX_TEMPLATE_TOKENS
from enginepool.protocol.frames import Buffer
from enginepool.protocol.messages import Generate, RowRequest, Score
from enginepool.protocol.row_labels import has_row_labels

#: Frame 0 of a request has at most this many bytes, plus 5 for each label and 4 for each character of the group.
_HEADER_BYTES = 512


def message_bytes(request: RowRequest | Generate, frames: Sequence[Buffer]) -> int:
    """At least the bytes of the request as a message."""
    if isinstance(request, Generate) or (isinstance(request, Score) and (request.label_texts or request.chat)):
        header = len(msgspec.msgpack.encode(request))
    else:
        header = 5 * request.values + 4 * len(request.group)
    return _HEADER_BYTES + header + sum(map(len, frames))


def charge_of(request: RowRequest | Generate, frames: Sequence[Buffer]) -> int:
    """Bytes that the coordinator counts for a request and its answer, as far as the request alone tells: hidden states and the
    labels of a classifier are what only a model knows."""
    payload = REQUEST_BYTES + LABEL_BYTES * request.values + sum(map(len, frames))
    if isinstance(request, Generate):
        sequences = request.frames[1].shape[0] * request.n
        # Its tokens are kept twice for a moment: as they came, and in the answer.
        answer = RESULT_BYTES + sequences * (SEQUENCE_BYTES + ELEMENT_BYTES * request.columns)
        text = ELEMENT_BYTES * sum(spec.shape[0] for spec in request.frames[:2]) if request.frames[0].dtype == "utf8" else 0
        return payload + text + 2 * (answer + ELEMENT_BYTES * request.prompt_columns)
    rows = request.frames[-1].shape[0]
    if has_row_labels(request.frames):
        frames = frames[:-1]
    text = 0
    if request.frames[0].dtype == "utf8":
        query = 0 if len(frames) == 2 else len(frames[0]) * (rows if len(frames) == 3 else 1)
        template = MAX_TEMPLATE_TOKENS * rows if isinstance(request, Score) and request.chat is not None else 0
        text = ELEMENT_BYTES * (query + len(frames[-2]) + rows + template)
    return payload + text + RESULT_BYTES + rows * (ROW_BYTES + ELEMENT_BYTES * request.columns(frames))
