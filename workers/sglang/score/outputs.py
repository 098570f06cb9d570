"""What an engine's raw answers say of every operation: forwards, aborted rows, hidden states, and what is no number. Pure."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from enginepool.workers.engine import EngineError, Floats, Outputs, RowPart


def forward_count(entered: Sequence[float]) -> int:
    """In how many forward passes these rows entered the model: SGLang takes one timestamp for all rows of a forward."""
    if min(entered) <= 0.0:
        raise EngineError("the engine does not say in which forward a row ran")
    return len(set(entered))


def refuse_aborted(answers: Sequence[dict[str, Any]]) -> None:
    """Raise EngineError when the engine gave up a row instead of computing it."""
    for answer in answers:
        reason = answer["meta_info"].get("finish_reason")
        if isinstance(reason, dict) and reason.get("type") == "abort":  # pyright: ignore[reportUnknownMemberType]
            raise EngineError(f"the engine aborted a row: {reason.get('message')}")  # pyright: ignore[reportUnknownMemberType]


def pooled_entries(answer: dict[str, Any], packed: bool) -> Sequence[Any]:
    """The pooled hidden states in SGLang's answer to a prompt: one for its row; packed, one for each delimiter."""
    pooled = answer.get("pooled_hidden_state")
    if pooled is None:
        raise EngineError("the engine returned no pooled hidden states")
    return list(pooled) if packed else [pooled]


def hidden_rows(rows: Sequence[Any]) -> Floats:
    """The pooled hidden state of each row, a tensor each, as [rows, hidden size]."""
    return np.stack([row.float().numpy().reshape(-1) for row in rows]).astype(np.float32)


def unless_not_finite(part: RowPart, outputs: Outputs) -> Outputs | EngineError:
    """`outputs`, or the error that they are: NaN or infinity is no answer. The logarithm of 0 is −infinity."""
    for name, values in outputs.items():
        logarithms = part.asked.logprobs or part.asked.operation == "logprobs"
        wrong = ~(values < np.inf) if logarithms else ~np.isfinite(values)
        rows = wrong.any(axis=1)
        if rows.any():
            return EngineError(
                f"{name}[{int(rows.argmax())}]: NaN or infinite ({int(rows.sum())} of {rows.size} rows);"
                " `enginepool weights validate` looks for NaN and infinity in the weights"
            )
    return outputs
