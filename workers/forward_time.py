"""How long the forwards of an engine are meant to take, from what a small one takes. Pure.

A forward has a fixed cost. Where that is an eighth of it, short forwards cost an eighth of the throughput, and a
request of high priority waits for no more than it must.
"""

from enginepool.protocol.capabilities import FORWARD_S

#: A forward is meant to take so many times what a small one takes.
SMALL_FORWARDS = 8
#: The longest: a high priority waits for two forwards, also where a small one takes long.
MOST_FORWARD_S = 1.0


def forward_ms(small_s: float) -> int:
    """Milliseconds that a forward of several requests is meant to take, where a forward of a few tokens takes `small_s`."""
    return round(1000 * min(max(FORWARD_S, SMALL_FORWARDS * small_s), MOST_FORWARD_S))


def pace(tokens: int, seconds: float, wanted_ms: int, batch_tokens: int) -> int:
    """Tokens that are computed in `wanted_ms`, where `tokens` took `seconds`; at least 1, and at most a batch of them."""
    return max(1, min(batch_tokens, int(tokens * wanted_ms / (1000 * seconds))))
