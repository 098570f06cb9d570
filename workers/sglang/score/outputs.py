"""From an engine's raw answers to scores, and how many forwards they took. Pure: no SGLang here."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from enginepool.workers.engine import EngineError, PartScores, ScorePart, Scores

Doubles = npt.NDArray[np.float64]


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


def label_scores(answers: Sequence[dict[str, Any]], part: ScorePart) -> Scores:
    """Probability of each of the part's labels as the next token, [rows, labels]: under all tokens, or with `softmax` under the
    labels alone; with `logprobs` its logarithm.

    A label may appear more than once; under `softmax` each appearance has its own share.
    """
    return label_shares([answer["meta_info"]["output_token_ids_logprobs"][0] for answer in answers], part)


def label_shares(rows: Sequence[Sequence[tuple[float, int, Any]]], part: ScorePart) -> Scores:
    """The same from each row's (log-probability, token id, text), in any order and with other labels among them."""
    logprobs = np.empty((len(rows), len(part.labels)), dtype=np.float64)
    for i, row in enumerate(rows):
        found = {token: logprob for logprob, token, _ in row}
        logprobs[i] = [found[label] for label in part.labels]
    if part.softmax:
        logprobs = _log_softmax(logprobs)
    # A probability below 1e-45 is 0 in float32: its logarithm must not be taken from there.
    return (logprobs if part.logprobs else np.exp(logprobs)).astype(np.float32)


def head_scores(rows: Sequence[Sequence[float]] | Sequence[float], part: ScorePart, activation: str = "") -> Scores:
    """The classification head's outputs, [rows, labels]; with `softmax` as probabilities, with `logprobs` as their logarithms.

    `activation` is that of `Capabilities`; softmax is over what it gives, as in sentence-transformers. Where a cross-encoder
    has one label, SGLang says a bare number for each row.
    """
    outputs = np.asarray(rows, dtype=np.float64).reshape(len(rows), -1)
    sigmoid = activation == "sigmoid"
    if part.softmax:
        logarithms = _log_softmax(np.exp(_log_sigmoid(outputs)) if sigmoid else outputs)
    elif sigmoid:
        logarithms = _log_sigmoid(outputs)
    else:
        return outputs.astype(np.float32)
    return (logarithms if part.logprobs else np.exp(logarithms)).astype(np.float32)


def hidden_rows(rows: Sequence[Any]) -> Scores:
    """The pooled hidden state of each row, a tensor each, as [rows, hidden size]."""
    return np.stack([row.float().numpy().reshape(-1) for row in rows]).astype(np.float32)


def unless_not_finite(part: ScorePart, scored: PartScores, *, embedding: bool = False) -> PartScores | EngineError:
    """`scored`, or the error that it is: NaN or infinity is no score, embedding or hidden state. The logarithm of 0 is
    −infinity."""
    wrong = ~(scored.scores < np.inf) if part.logprobs else ~np.isfinite(scored.scores)
    rows, what = wrong.any(axis=1), "embedding" if embedding else "score"
    if scored.hidden is not None and not rows.any():
        rows, what = ~np.isfinite(scored.hidden).all(axis=1), "hidden state"
    if not rows.any():
        return scored
    return EngineError(
        f"row {int(rows.argmax())}: its {what} is NaN or infinite ({int(rows.sum())} of {rows.size} rows);"
        " `enginepool weights validate` looks for NaN and infinity in the weights"
    )


def _log_sigmoid(values: Doubles) -> Doubles:
    # An infinite logit is no score, and its sigmoid would not show it.
    finite = np.where(np.isfinite(values), values, np.nan)
    with np.errstate(invalid="ignore"):
        return -np.logaddexp(0.0, -finite)


def _log_softmax(values: Doubles) -> Doubles:
    with np.errstate(invalid="ignore"):  # infinity gives NaN, which is refused
        shifted = values - values.max(axis=1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
