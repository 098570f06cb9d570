"""What the engine would refuse, cut, or worse, take: refused before it gets there, each part by itself. Pure."""

from enginepool.protocol.messages import Capabilities
from enginepool.workers.engine import EngineError, ScorePart
from enginepool.workers.packed import packed_cost, refuse_unpackable


def checked_rows(part: ScorePart, capabilities: Capabilities) -> list[list[int]]:
    """The part's rows; of a packed worker none, since it builds sequences. Raises EngineError for what the engine would refuse,
    or worse, take."""
    if capabilities.packed:
        refuse_unpackable(part, capabilities)
        _check_content(part, capabilities)
        return []
    rows = part.prompts()
    if not rows:
        raise EngineError("items are empty")
    lengths = [len(row) for row in rows]
    if min(lengths) < 1:
        raise EngineError("a row has no tokens")
    if max(lengths) > capabilities.context:
        raise EngineError(f"a row has {max(lengths)} tokens; this engine takes {capabilities.context}")
    _check_content(part, capabilities)
    return rows


def _check_content(part: ScorePart, capabilities: Capabilities) -> None:
    for ids in (part.query, part.items):
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < capabilities.vocab:
            raise EngineError(f"a token id is outside 0..{capabilities.vocab - 1}")
    if part.dimensions > capabilities.embedding:
        raise EngineError(f"dimensions: {part.dimensions}; an embedding of this model has {capabilities.embedding}")
    if capabilities.kind == "causal":
        if not part.labels:
            raise EngineError("labels are empty: this model scores label tokens")
        if not 0 <= min(part.labels) <= max(part.labels) < capabilities.vocab:
            raise EngineError(f"a label is outside 0..{capabilities.vocab - 1}")
    elif part.labels:
        raise EngineError("this model has no next token: labels must be empty")


def refuse_oversize(parts: list[tuple[ScorePart, list[list[int]]]], capabilities: Capabilities) -> None:
    """A batch that does not fit would be cut: it is refused instead."""
    if capabilities.packed:
        tokens = packed_cost([part for part, _ in parts], capabilities)
    else:
        page = capabilities.page
        tokens = sum(-(-len(row) // page) * page for _, rows in parts for row in rows)
    count = sum(part.item_lengths.size for part, _ in parts)
    if tokens > capabilities.inflight_tokens or count > capabilities.inflight_rows:
        raise EngineError(
            f"a batch of {count} rows and {tokens} tokens would be cut: this engine takes"
            f" {capabilities.inflight_rows} rows and {capabilities.inflight_tokens} tokens at once"
        )
