"""What the engine would refuse, cut, or worse, take: refused before it gets there, each part by itself. Pure."""

from collections.abc import Sequence

from enginepool.protocol.messages import Capabilities
from enginepool.workers.engine import EngineError, RowPart
from enginepool.workers.packed import packed_cost, refuse_unpackable


def check_rows(part: RowPart, capabilities: Capabilities) -> None:
    """Raise EngineError for rows that the engine would refuse, or worse, take, in any operation."""
    if capabilities.packed:
        refuse_unpackable(part, capabilities)
    else:
        lengths = part.lengths
        if not lengths:
            raise EngineError("items are empty")
        if min(lengths) < 1:
            raise EngineError("a row has no tokens")
        if (longest := max(lengths)) > capabilities.context:
            raise EngineError(f"a row has {longest} tokens; this engine takes {capabilities.context}")
    for ids in (part.query, part.items):
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < capabilities.vocab:
            raise EngineError(f"a token id is outside 0..{capabilities.vocab - 1}")


def refuse_oversize(parts: Sequence[RowPart], capabilities: Capabilities) -> None:
    """A batch that does not fit would be cut: it is refused instead."""
    if capabilities.packed:
        tokens = packed_cost(parts, capabilities)
    else:
        page = capabilities.page
        tokens = sum(-(-length // page) * page for part in parts for length in part.lengths)
    count = sum(part.item_lengths.size for part in parts)
    if tokens > capabilities.inflight_tokens or count > capabilities.inflight_rows:
        raise EngineError(
            f"a batch of {count} rows and {tokens} tokens would be cut: this engine takes"
            f" {capabilities.inflight_rows} rows and {capabilities.inflight_tokens} tokens at once"
        )
