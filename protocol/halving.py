"""Halving: what is left of a worker's budgets each time an engine of its group ran out of memory. One rule for both sides."""

import msgspec

from enginepool.protocol.messages import Capabilities

#: Of 512 rows and 32,768 tokens in flight, 8 and 512 are left. A forward that is too large even then is not too large.
MOST_HALVINGS = 6


def halved(can: Capabilities, times: int) -> Capabilities:
    """`can` with every budget halved so many times; none is less than one row, or one page.

    The longest row that is accepted is never longer than all tokens in flight, and shrinks with them.
    """
    for _ in range(times):
        page = can.page
        batch, inflight, cached = (
            max(page, tokens // 2 // page * page) for tokens in (can.batch_tokens, can.inflight_tokens, can.cached_tokens)
        )
        context = min(can.context, inflight)
        can = msgspec.structs.replace(
            can,
            context=context,
            reserved=can.reserved if context == can.context else 0,
            batch_tokens=batch,
            batch_rows=max(1, can.batch_rows // 2),
            inflight_tokens=inflight,
            inflight_rows=max(1, can.inflight_rows // 2),
            max_item=min(can.max_item, context),
            cached_tokens=max(batch, cached) if can.cached_query else 0,
            halvings=can.halvings + 1,
        )
    return can
