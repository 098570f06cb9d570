"""What can be packed, and what it weighs. Pure; the rule is the protocol's."""

from collections.abc import Iterable

from enginepool.protocol.messages import Capabilities
from enginepool.protocol.packing import WHOLE_QUERY, Packable, Packing, cheap_to_repeat
from enginepool.workers.engine import EngineError, RowPart

#: the longest item whose positions fit the attention kernel's uint16
MAX_ITEM = 65_535


def refuse_unpackable(part: RowPart, can: Capabilities) -> None:
    """Raise EngineError when the rows of `part` cannot be packed: the engine would die of them, or be wrong."""
    if not can.packs:
        raise EngineError("this engine does not pack")
    if part.labels is not None:
        raise EngineError("packed rows have no labels of their own")
    _, query, lengths, _ = packable(part)
    if not lengths or not min(lengths):
        raise EngineError("an item behind a query that packed rows share is empty" if query else "a packed row has no tokens")
    longest = max(lengths)
    item = longest + query if cheap_to_repeat(query, 1) else longest
    if item > can.max_item or query + longest + 2 > can.context:
        raise EngineError(
            f"an item has {longest} tokens after a query of {query}; packed, this engine takes items, and whole rows with a"
            f" query of at most {WHOLE_QUERY}, of {can.max_item} and {can.context} tokens for both and two delimiters"
        )


def packed_cost(parts: Iterable[RowPart], can: Capabilities) -> int:
    """What the sequences of these parts weigh."""
    packing = Packing(can.context, can.page)
    for rows in map(packable, parts):
        packing.place(rows, packing.weigh(rows, 1 << 62))
    return packing.cost


def packable(part: RowPart) -> Packable:
    """The rows of `part` as the rule of packing takes them."""
    labels = tuple(part.asked.labels)
    if part.query.size and part.query_lengths is None and not part.asked.item_first:
        return Packable(part.query.tobytes(), part.query.size, part.item_lengths.tolist(), labels)
    return Packable(b"", 0, part.lengths, labels)
