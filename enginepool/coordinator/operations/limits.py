"""What the requests to a group may ask for, as its status report says."""

from typing import Any

from enginepool.coordinator.operations.base import longest_row
from enginepool.protocol.messages import Capabilities, GroupLimits


def limits_of(
    plain: Capabilities | None, packed: Capabilities | None, items: int, *, plain_expected: bool
) -> GroupLimits | None:
    """What any request to a group may ask for, and at most so many `items`: what its plain workers serve, where it has them.
    None while that is not known: before a worker was ready, or a plain one where there will be plain ones."""
    if plain is not None:
        return _limits(plain, context=longest_row(plain), items=items)
    if packed is None or plain_expected:
        return None
    longest = longest_row(packed) - 2
    return _limits(packed, context=longest, items=items, max_item=min(packed.max_item, longest - 1))


def _limits(can: Capabilities, **limits: Any) -> GroupLimits:
    """`limits`, and for all others what `can` has under the same name."""
    same = {name: getattr(can, name) for name in GroupLimits.__struct_fields__ if name not in limits}
    return GroupLimits(**same, **limits)
