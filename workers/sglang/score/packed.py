"""Packed batches in SGLang's own request types, and its answers to them, as in its own multi-item scoring. No SGLang here.

One request object is one message to the scheduler; each sequence is one request in it. SGLang answers at every delimiter of a
sequence: log-probabilities for a causal model, the head's outputs and pooled hidden states for the others.
"""

import uuid
from typing import Any

from enginepool.workers.engine import EngineError, PartScores, ScorePart
from enginepool.workers.packed import Sequence, take_apart
from enginepool.workers.sglang.score.outputs import head_scores, hidden_rows, label_shares

#: Token id that SGLang itself puts between items. Positions are sent with the ids, and no item attends to a delimiter.
DELIMITER = 9999


def packed_labels(types: Any, joined: list[Sequence], priority: int) -> Any:
    """Ask for the log-probabilities of each sequence's labels before each of its delimiters."""
    return types.GenerateReqInput(
        **_common(joined, priority),
        token_ids_logprob=[sequence.labels for sequence in joined],
        return_logprob=True,
        logprob_start_len=0,
        stream=False,
        sampling_params={"max_new_tokens": 0},
    )


def packed_heads(types: Any, joined: list[Sequence], priority: int, hidden: bool) -> Any:
    """Ask for the head's outputs before each delimiter, and with `hidden` for what the head saw."""
    request = types.EmbeddingReqInput(**_common(joined, priority), return_pooled_hidden_states=hidden)
    request.normalize_batch_and_arguments()
    for i in range(len(request.input_ids)):
        request[i].priority = priority  # SGLang 0.5.17 does not hand it on
    return request


def _common(joined: list[Sequence], priority: int) -> dict[str, Any]:
    return {
        "input_ids": [sequence.ids for sequence in joined],
        "multi_item_delimiter_indices": [sequence.delimiters for sequence in joined],
        "rid": [uuid.uuid4().hex for _ in joined],
        "priority": priority,
    }


def packed_label_scores(joined: list[Sequence], answers: list[dict[str, Any]], parts: list[ScorePart]) -> list[PartScores]:
    """Scores of each part from a causal model's answers."""
    rows = take_apart(joined, [answer["meta_info"]["input_token_ids_logprobs"] for answer in answers], len(parts))
    return [PartScores(label_shares(mine, part)) for part, mine in zip(parts, rows, strict=True)]


def packed_head_scores(
    joined: list[Sequence], answers: list[dict[str, Any]], parts: list[ScorePart], hidden: bool
) -> list[PartScores]:
    """Scores, and hidden states, of each part from the answers of a model with a head."""
    rows = take_apart(joined, [answer["embedding"] for answer in answers], len(parts))
    scores = [head_scores(mine, part) for part, mine in zip(parts, rows, strict=True)]
    if not hidden:
        return [PartScores(mine) for mine in scores]
    if any(answer.get("pooled_hidden_state") is None for answer in answers):
        raise EngineError("the engine returned no pooled hidden states")
    states = take_apart(joined, [list(answer["pooled_hidden_state"]) for answer in answers], len(parts))
    return [PartScores(mine, hidden_rows(pooled)) for mine, pooled in zip(scores, states, strict=True)]
