"""What the requests to a group may ask for, as its status report says."""

from enginepool.coordinator.operations.base import longest_row
from enginepool.protocol.messages import Capabilities, GroupLimits


def limits_of(
    plain: Capabilities | None, packed: Capabilities | None, items: int, *, plain_expected: bool
) -> GroupLimits | None:
    """What any request to a group may ask for, and at most so many `items`: what its plain workers serve, where it has them.
    None while that is not known: before a worker was ready, or a plain one where there will be plain ones."""
    if plain is not None:
        longest, columns = longest_row(plain), (plain.labels, plain.hidden)
        sizes = plain.embedding, plain.dimensions
        return GroupLimits(plain.kind, plain.vocab, longest, items, *columns, plain.text, 0, plain.operations, *sizes)
    if packed is None or plain_expected:
        return None
    longest = longest_row(packed) - 2
    max_item = min(packed.max_item, longest - 1)
    columns = packed.labels, packed.hidden
    return GroupLimits(packed.kind, packed.vocab, longest, items, *columns, False, max_item, packed.operations)
