"""What the ranks of an engine answered to a ticket, put together. No torch here."""

from collections.abc import Sequence
from typing import Any

from enginepool.protocol.messages.weight_reports import Finding
from enginepool.workers.engine import EngineError


def raise_first(answers: Sequence[dict[str, Any]]) -> None:
    """Raise the first error among the answers as EngineError."""
    for answer in answers:
        if "error" in answer:
            raise EngineError(answer["error"])


def whole_findings(answers: Sequence[dict[str, Any]]) -> list[Finding]:
    """What is wrong with whole tensors, from what `model_inspection.part_findings` found in each rank.

    A part that several ranks hold counts once. A tensor is zero only where all its parts are, of all ranks.
    """
    counts: dict[tuple[str, str], dict[str, int]] = {}
    for name, kind, part, count in (one for answer in answers for one in answer["wrong"]):
        of_parts = counts.setdefault((name, kind), {})
        of_parts[part] = max(of_parts.get(part, 0), count)
    return [
        Finding(name, kind, sum(of_parts.values()))  # type: ignore[arg-type]
        for (name, kind), of_parts in counts.items()
        if kind != "zero" or all(part in of_parts for answer in answers for part in answer["filled"].get(name, ()))
    ]
