"""From an engine's raw answers to scores, and how many forwards they took. Pure: no SGLang here."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from enginepool.workers.engine import EngineError, Scores


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


def label_scores(answers: Sequence[dict[str, Any]], labels: Sequence[int], softmax: bool) -> Scores:
    """Probability of each label as the next token, [rows, labels]: under all tokens, or with `softmax` under the labels alone.

    A label may appear more than once; under `softmax` each appearance has its own share.
    """
    return label_shares([answer["meta_info"]["output_token_ids_logprobs"][0] for answer in answers], labels, softmax)


def label_shares(rows: Sequence[Sequence[tuple[float, int, Any]]], labels: Sequence[int], softmax: bool) -> Scores:
    """The same from each row's (log-probability, token id, text), in any order and with other labels among them."""
    logprobs = np.empty((len(rows), len(labels)), dtype=np.float64)
    for i, row in enumerate(rows):
        found = {token: logprob for logprob, token, _ in row}
        logprobs[i] = [found[label] for label in labels]
    return _softmax(logprobs) if softmax else np.exp(logprobs).astype(np.float32)


def head_scores(rows: Sequence[Sequence[float]] | Sequence[float], softmax: bool) -> Scores:
    """The classification head's outputs, [rows, labels]; with `softmax` as probabilities.

    Where a cross-encoder has one label, SGLang says a bare number for each row.
    """
    logits = np.asarray(rows, dtype=np.float64).reshape(len(rows), -1)
    return _softmax(logits) if softmax else logits.astype(np.float32)


def hidden_rows(rows: Sequence[Any]) -> Scores:
    """The pooled hidden state of each row, a tensor each, as [rows, hidden size]."""
    return np.stack([row.float().numpy().reshape(-1) for row in rows]).astype(np.float32)


def _softmax(values: np.ndarray[Any, np.dtype[np.float64]]) -> Scores:
    shifted = np.exp(values - values.max(axis=1, keepdims=True))
    return (shifted / shifted.sum(axis=1, keepdims=True)).astype(np.float32)
