"""What the requests to a group may ask for, as its status report says."""

from typing import Any

from enginepool.coordinator.operations.base import longest_row
from enginepool.protocol.messages import Capabilities, GroupLimits


def limits_of(can: Capabilities | None, items: int) -> GroupLimits | None:
    """What any request to a group of workers of these capabilities may ask for, and at most so many `items`. None before a
    worker was ready."""
    if can is None:
        return None
    own: dict[str, Any] = {"context": longest_row(can), "items": items}
    return GroupLimits(**{name: getattr(can, name) for name in GroupLimits.__struct_fields__ if name not in own}, **own)
