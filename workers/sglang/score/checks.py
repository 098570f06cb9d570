"""What the engine would refuse, cut, or worse, take: refused before it gets there, each part by itself. Pure."""

from collections.abc import Sequence

from enginepool.protocol.messages import Capabilities
from enginepool.workers.engine import EngineError, RowPart
from enginepool.workers.packed import packed_cost, refuse_unpackable


def check_rows(part: RowPart, capabilities: Capabilities, *, packed: bool = False) -> None:
    """Raise EngineError for rows that the engine would refuse, or worse, take, in any operation."""
    if packed:
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


def refuse_oversize(parts: Sequence[RowPart], capabilities: Capabilities, *, packed: bool = False) -> None:
    """A batch that does not fit would be cut: it is refused instead."""
    if packed:
        tokens = packed_cost(parts, capabilities)
    else:
        page = capabilities.page
        tokens = sum(-(-length // page) * page for part in parts for length in part.lengths)
    count = sum(part.item_lengths.size for part in parts)
    most_tokens, most_rows = capabilities.inflight_tokens, capabilities.inflight_rows
    if capabilities.mixed:
        # Each batch is put into its forward alone, and no batch is larger than a chunk of a prompt.
        most_tokens, most_rows = max(capabilities.batch_tokens, capabilities.context), capabilities.batch_rows
    if tokens > most_tokens or count > most_rows:
        raise EngineError(
            f"a batch of {count} rows and {tokens} tokens would be cut: this engine takes"
            f" {most_rows} rows and {most_tokens} tokens at once"
        )
