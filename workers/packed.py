"""What can be packed, and what it weighs. Pure; the rule is the protocol's."""

from collections.abc import Iterable

from enginepool.protocol.messages import Capabilities
from enginepool.protocol.packing import Packing
from enginepool.workers.engine import EngineError, RowPart

#: the longest item whose positions fit the attention kernel's uint16
MAX_ITEM = 65_535


def refuse_unpackable(part: RowPart, can: Capabilities) -> None:
    """Raise EngineError when the rows of `part` cannot be packed: the engine would die of them, or be wrong."""
    if not can.packs:
        raise EngineError("this engine does not pack")
    if part.asked.item_first or part.query_lengths is not None:
        raise EngineError("packed rows have one query, before the items")
    lengths = part.item_lengths
    if not part.query.size or not lengths.size or not lengths.min():
        raise EngineError("packed rows have neither an empty query nor an empty item")
    longest = int(lengths.max())
    if longest > can.max_item or part.query.size + longest + 2 > can.context:
        raise EngineError(
            f"an item has {longest} tokens after a query of {part.query.size}; packed, this engine takes items of"
            f" {can.max_item} and {can.context} tokens for both and two delimiters"
        )


def packed_cost(parts: Iterable[RowPart], can: Capabilities) -> int:
    """What the sequences of these parts weigh."""
    packing = Packing(can.context, can.page)
    for query, size, lengths in map(described, parts):
        _, cost, length = packing.weigh(query, size, lengths, 1 << 62)
        packing.place(query, cost, length)
    return packing.cost


def described(part: RowPart) -> tuple[bytes, int, list[int]]:
    """(query, its tokens, lengths of the items), as the rule of packing takes them."""
    return part.query.tobytes(), part.query.size, part.item_lengths.tolist()
