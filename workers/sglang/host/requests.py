"""A batch in SGLang's own request types, which the caller hands over: one request object is one message to the scheduler."""

import uuid
from typing import Any

from enginepool.workers.engine import ScorePart

#: Parts with their rows of token ids.
Parts = list[tuple[ScorePart, list[list[int]]]]


def label_request(types: Any, parts: Parts, priority: int) -> Any:
    """Ask for the log-probabilities of each part's labels after each of its rows."""
    return types.GenerateReqInput(
        **_common(parts, priority),
        # Each label once: SGLang 0.5.23 refuses duplicates.
        token_ids_logprob=[list(dict.fromkeys(part.labels)) for part, rows in parts for _ in rows],
        return_logprob=True,
        logprob_start_len=-1,
        stream=False,
        sampling_params={"max_new_tokens": 0},
    )


def head_request(types: Any, parts: Parts, priority: int, hidden: bool) -> Any:
    """Ask for the head's outputs at the last token of each row, and with `hidden` for what the head saw."""
    request = types.EmbeddingReqInput(**_common(parts, priority), return_pooled_hidden_states=hidden)
    request.normalize_batch_and_arguments()
    for i in range(len(request.input_ids)):
        request[i].priority = priority  # SGLang 0.5.17 does not hand it on
    return request


def _common(parts: Parts, priority: int) -> dict[str, Any]:
    rows = [row for _, rows in parts for row in rows]
    # Of one length: SGLang finds a request to abort by the beginning of its id.
    return {"input_ids": rows, "rid": [uuid.uuid4().hex for _ in rows], "priority": priority}
