"""Classes: which workers of a group can serve a request, and why none can.

A plain worker runs every row as a prompt of its own; a packed one joins rows of one query into a sequence, and its engine dies
when anything else is among them. So each is a class, a bit, and a request carries the bits of those that can serve it. Before
a plain worker was ready, plain ones are believed to serve everything; packed ones are believed once one is ready.
"""

from enginepool.coordinator.core.events import Work
from enginepool.coordinator.requests.validation import check_limits, longest_row, row_lengths
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
    if packed is None:
        if plain is None:
            return expected
        return check_limits(work, plain) or PLAIN
    if wrong := check_limits(work, packed, alone=False):
        return wrong
    if not expected & PLAIN:
        return PACKED if may_pack(work, packed) else _why_not(work, packed)
    wrong = None if plain is None else check_limits(work, plain)
    if work.text:
        return wrong or expected
    found = PACKED if may_pack(work, packed) else 0
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


def may_pack(work: Work, can: Capabilities) -> bool:
    """Whether a packed worker of `can` takes the rows of `work`. A row has a sequence of its own at worst: two delimiters."""
    return (
        work.shared > 0
        and work.longest - work.shared <= can.max_item
        and work.longest + 2 <= longest_row(can)
        and (can.hidden > 0 or not work.hidden)
    )


def _why_not(work: Work, can: Capabilities) -> WireError:
    """What keeps `work` from being packed, for a group that has no plain workers."""
    only = "this group has packed workers only"
    if work.text:
        return _bad("query", f"query: text is for plain workers, and {only}", "")
    if work.hidden and not can.hidden:
        return _bad("hidden", f"hidden: not from packed workers, and {only}", "0")
    if work.part.item_first:
        return _bad("item_first", f"item_first: packed rows begin with the query, and {only}", "false")
    if len(work.part.frames) != 3:
        return _bad("query_lengths", f"query_lengths: packed rows share one query, and {only}", "")
    query = work.part.frames[0].shape[0]
    if not query:
        return _bad("query", f"query: empty, so that there is nothing to share, and {only}", "1")
    longest = min(can.max_item, longest_row(can) - 2 - query)
    for row, length in enumerate(row_lengths(work)):
        item = length - query
        if not 0 < item <= longest:
            text = f"items[{row}]: {item} tokens after a query of {query}; 1 to {longest}, for {only}"
            return _bad(f"items[{row}]", text, str(longest))
    raise AssertionError("it can be packed")


def _bad(field: str, message: str, limit: str) -> WireError:
    return WireError("bad_request", message, field=field, limit=limit)
