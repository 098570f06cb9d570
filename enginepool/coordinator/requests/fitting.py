"""Requests as their group can run them: with the tokens of their labels, and rows that are not too long. Pure."""

from enginepool.coordinator.core.group import Group
from enginepool.coordinator.core.request import Request
from enginepool.coordinator.operations.base import Work, longest_row
from enginepool.coordinator.operations.generate import GenerateWork
from enginepool.coordinator.operations.labels import with_known_labels
from enginepool.coordinator.operations.truncation import fitted
from enginepool.protocol.errors import WireError
from enginepool.protocol.messages import Capabilities, ErrorReply

#: when a request is sent again, to be truncated to what workers take now
SHORTER_MS = 100


def fitting(work: Work, group: Group) -> Work:
    """`work` as far as that is known before any worker has seen it.

    Raises:
        WireError: its rows cannot be truncated.
    """
    return _truncated(with_known_labels(work, group.label_ids), group)


def truncate_waiting(request: Request) -> None:
    """Cut the rows of a request that are too long, if all of them wait.

    Raises:
        WireError: they cannot be cut.
    """
    group, before = request.group, request.work
    if not (request.flying or request.pieces):
        request.work = work = _truncated(before, group)
        if work is not before:
            group.tokens += work.tokens - before.tokens
            request.offsets = None


def too_late_to_truncate(request: Request) -> ErrorReply | None:
    """The answer to a request whose rows are to be truncated, and cannot be any more: an engine ran out of memory, and workers
    take shorter rows since some of them were tokenized or begun. Its client sends it again. None: it is no such request."""
    work, can = request.work, request.group.capabilities
    if can is None or not can.halvings or work.text or (work.truncation or work.text_truncation) not in ("left", "right"):
        return None
    if work.longest <= (longest := longest_row(can)):
        return None
    text = f"items: rows of up to {work.longest} tokens; at most {longest} since an engine ran out of memory: send them again"
    return ErrorReply("busy", text, request.id, field="items", limit=str(longest), retry_after_ms=SHORTER_MS)


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


def sizes(request: Request) -> str:
    """What a worker had to hold for a request, and what it is given at once: for an error."""
    work, state, can = request.work, request.generation, request.group.capabilities
    text = f"{work.rows} rows of up to {work.longest} tokens"
    most_rows, most_tokens = (0, 0) if can is None else (can.inflight_rows, can.inflight_tokens)
    if state is not None and isinstance(work, GenerateWork):
        most_rows, most_tokens = (0, 0) if can is None else (can.most_sequences, can.most_sequence_tokens)
        has, most = max(len(sequence.tokens) for sequence in state.sequences), work.sampling.max_new_tokens
        text = f"{work.rows} sequences after prompts of up to {work.longest} tokens, with up to {has} of {most} tokens"
    return text if can is None else f"{text}; a worker is given {most_rows} with {most_tokens} tokens at once"
