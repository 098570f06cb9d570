"""Scores: probabilities of label tokens of a causal model, or the outputs of a model's head. No SGLang here."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from enginepool.protocol.messages import Capabilities, Kind, Part
from enginepool.workers.engine import EngineError, Floats, Ids, Outputs, RowPart
from enginepool.workers.sglang.host.sentence_modules import Pooling
from enginepool.workers.sglang.operations.base import SCORING_HEADS, HeadOperation, RowOperation, common_fields
from enginepool.workers.sglang.score.cross_encoder import answer_logits
from enginepool.workers.sglang.score.prompts import Prompts

Doubles = npt.NDArray[np.float64]


class LabelScores(RowOperation):
    """`score`, by a causal model: how probable each label is as the next token."""

    name = "score"
    kind: Kind = "causal"

    def serves(self, generates: bool, architecture: str) -> bool:
        return generates

    def trial(self) -> Part:
        return Part([], labels=[0], operation=self.name)

    def check(self, part: RowPart, can: Capabilities) -> None:
        labels = part.asked.labels
        if part.labels is not None:
            labels = [int(part.labels.min()), int(part.labels.max())]
        if not labels:
            raise EngineError("labels are empty: this model scores label tokens")
        if not 0 <= min(labels) <= max(labels) < can.vocab:
            raise EngineError(f"a label is outside 0..{can.vocab - 1}")

    def request(self, types: Any, prompts: Prompts, priority: int, hidden: bool) -> Any:
        """Ask for the log-probabilities of each prompt's labels: after its end; packed, before each of its delimiters."""
        return types.GenerateReqInput(
            **common_fields(prompts, priority),
            token_ids_logprob=prompts.labels,
            return_logprob=True,
            logprob_start_len=-1 if prompts.delimiters is None else 0,
            stream=False,
            sampling_params={"max_new_tokens": 0},
        )

    def entries(self, answer: dict[str, Any], packed: bool) -> Sequence[Any]:
        """(log-probability, token id, text) of each label, at one place."""
        said = answer["meta_info"]
        return said["input_token_ids_logprobs"] if packed else said["output_token_ids_logprobs"][:1]

    def outputs(self, entries: Sequence[Any], part: RowPart, can: Capabilities) -> Outputs:
        return {"scores": label_scores(entries, part.asked, part.labels)}


class HeadScores(HeadOperation):
    """`score`, by a model with a head: the head's outputs."""

    name = "score"
    kind: Kind = "classifier"
    has_hidden = True

    def serves(self, generates: bool, architecture: str) -> bool:
        return not generates and any(head in architecture for head in SCORING_HEADS)

    def change_scheduler(self, pooler: Any, pooling: Pooling) -> None:
        answer_logits(pooler)

    def measured(self, can: Capabilities, outputs: Outputs, config: Any) -> Capabilities:
        return replace(can, labels=outputs["scores"].shape[1])

    def outputs(self, entries: Sequence[Any], part: RowPart, can: Capabilities) -> Outputs:
        return {"scores": head_scores(entries, part.asked, can.activation)}


def label_scores(rows: Sequence[Sequence[tuple[float, int, Any]]], asked: Part, own: Ids | None = None) -> Floats:
    """Probability of each label as the next token, [rows, labels]: under all tokens, or with `softmax` under the labels alone;
    with `logprobs` its logarithm. `softmax` divides logits by `temperature`.

    A label may appear more than once; under `softmax` each appearance has its own share. `rows`: (log-probability, token id,
    text), in any order and with other labels among them. `own`: labels of each row, in place of those that are asked for.
    """
    labels: Sequence[Sequence[int]] = [asked.labels] * len(rows) if own is None else own.tolist()
    logprobs = np.empty((len(rows), len(labels[0])), dtype=np.float64)
    for i, (row, mine) in enumerate(zip(rows, labels, strict=True)):
        found = {token: logprob for logprob, token, _ in row}
        logprobs[i] = [found[label] for label in mine]
    if asked.softmax:
        logprobs = _log_softmax(logprobs / asked.temperature)
    # A probability below 1e-45 is 0 in float32: its logarithm must not be taken from there.
    return (logprobs if asked.logprobs else np.exp(logprobs)).astype(np.float32)


def head_scores(rows: Sequence[Sequence[float]] | Sequence[float], asked: Part, activation: str = "") -> Floats:
    """The head's outputs, [rows, labels]; with `softmax` as probabilities, with `logprobs` as their logarithms.

    `activation` is that of `Capabilities`; softmax is over what it gives, as in sentence-transformers.
    """
    outputs = np.asarray(rows, dtype=np.float64).reshape(len(rows), -1)
    sigmoid = activation == "sigmoid"
    if asked.softmax:
        logarithms = _log_softmax((np.exp(_log_sigmoid(outputs)) if sigmoid else outputs) / asked.temperature)
    elif sigmoid:
        logarithms = _log_sigmoid(outputs)
    else:
        return outputs.astype(np.float32)
    return (logarithms if asked.logprobs else np.exp(logarithms)).astype(np.float32)


def _log_sigmoid(values: Doubles) -> Doubles:
    # An infinite logit is no score, and its sigmoid would not show it.
    finite = np.where(np.isfinite(values), values, np.nan)
    with np.errstate(invalid="ignore"):
        return -np.logaddexp(0.0, -finite)


def _log_softmax(values: Doubles) -> Doubles:
    with np.errstate(invalid="ignore"):  # infinity gives NaN, which is refused
        shifted = values - values.max(axis=1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
