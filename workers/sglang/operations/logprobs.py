"""Log-probabilities of responses: one prefill reads prompt and response, and says of each token of the response how probable
it was after the tokens before it. No SGLang here.

SGLang computes what a position says of the NEXT token. `logprob_start_len` is the first such position: the last token of the
prompt. So the vocabulary is computed at as many positions as the response has tokens, and one more, at its end. SGLang lists
an entry for each token from that position on, and the first one is empty: of the prompt's last token it has computed nothing.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from enginepool.protocol.messages import Capabilities, Kind
from enginepool.workers.engine import EngineError, Floats, Ids, Outputs, RowPart
from enginepool.workers.sglang.operations.base import RowOperation, common_fields
from enginepool.workers.sglang.score.prompts import Prompts


class ResponseLogprobs(RowOperation):
    """`logprobs`, by a causal model."""

    name = "logprobs"
    kind: Kind = "causal"
    packs = False

    def serves(self, generates: bool, architecture: str) -> bool:
        return generates

    def check(self, part: RowPart, can: Capabilities) -> None:
        columns, labels = part.asked.columns, part.asked.labels
        shortest, longest = int(part.item_lengths.min()), int(part.item_lengths.max())
        if not 0 < shortest <= longest <= columns:
            raise EngineError(f"a response has {shortest if shortest < 1 else longest} tokens; 1 to columns = {columns}")
        prompts = part.query.size if part.query_lengths is None else int(part.query_lengths.min())
        if prompts < 1 or part.asked.item_first:
            raise EngineError("a row has no prompt before its response")
        if labels and not 0 <= min(labels) <= max(labels) < can.vocab:
            raise EngineError(f"a label is outside 0..{can.vocab - 1}")
        if not 0 <= (top := part.asked.top_logprobs) <= can.vocab:
            raise EngineError(f"top_logprobs: {top}; 0 to {can.vocab}")

    def request(self, types: Any, prompts: Prompts, priority: int, hidden: bool) -> Any:
        """Ask from the last token of each prompt on; for a query that is computed ahead of its rows, for nothing."""
        # A row of the warm-up has no prompt: its first token stands for one.
        starts = [max(response - 1, 0) for response in prompts.responses] or [len(ids) for ids in prompts.ids]
        return types.GenerateReqInput(
            **common_fields(prompts, priority),
            # SGLang wants a list of ids for each row of a batch, or none at all.
            token_ids_logprob=[labels or [0] for labels in prompts.labels] if any(prompts.labels) else None,
            top_logprobs_num=prompts.tops,
            return_logprob=True,
            logprob_start_len=starts,
            stream=False,
            sampling_params={"max_new_tokens": 0},
        )

    def entries(self, answer: dict[str, Any], packed: bool) -> Sequence[Any]:
        """One entry: what SGLang says of the tokens of the row, of their labels, and of the most probable tokens in their
        places, without the empty first one."""
        said: dict[str, list[Any] | None] = answer["meta_info"]
        names = "input_token_logprobs", "input_token_ids_logprobs", "input_top_logprobs"
        return [tuple((said.get(name) or [])[1:] for name in names)]

    def outputs(self, entries: Sequence[Any], part: RowPart, can: Capabilities) -> Outputs:
        lengths: list[int] = part.item_lengths.tolist()
        labels = part.asked.labels
        columns = part.asked.columns or max(lengths)
        found: Floats = np.zeros((len(entries), columns), np.float32)
        for row, (tokens, _, _), length in zip(found, entries, lengths, strict=True):
            values = [logprob for logprob, _, _ in tokens]
            if part.asked.columns and len(values) != length:
                raise EngineError(f"the engine gave {len(values)} log-probabilities for a response of {length} tokens")
            row[: len(values)] = values
        outputs: Outputs = {"logprobs": found}
        if labels:
            outputs["labels"] = more = np.zeros((len(entries), columns * len(labels)), np.float32)
            for row, (_, places, _) in zip(more, entries, strict=True):
                values = [logprob for place in places for logprob in _in_order(place, labels)]
                row[: len(values)] = values
        if top := part.asked.top_logprobs:
            outputs |= _most_probable([places for _, _, places in entries], lengths, columns, top)
        return outputs


def _most_probable(rows: Sequence[Sequence[Any]], lengths: Sequence[int], columns: int, top: int) -> Outputs:
    """The `top` most probable tokens in the place of each token, from (log-probability, token id, text) in that order."""
    ids: Ids = np.zeros((len(rows), columns * top), np.int32)
    values: Floats = np.zeros((len(rows), columns * top), np.float32)
    for i, (places, length) in enumerate(zip(rows, lengths, strict=True)):
        if [*map(len, places)] != [top] * length:
            raise EngineError(f"the engine gave the most probable tokens at {len(places)} of {length} tokens")
        ids[i, : length * top] = [token for place in places for _, token, _ in place]
        values[i, : length * top] = [logprob for place in places for logprob, _, _ in place]
    return {"top_ids": ids, "top_logprobs": values}


def _in_order(place: Sequence[tuple[float, int, Any]], labels: Sequence[int]) -> list[float]:
    """The log-probability of each label at one token, from (log-probability, token id, text) in any order."""
    found = {token: logprob for logprob, token, _ in place}
    return [found[label] for label in labels]
