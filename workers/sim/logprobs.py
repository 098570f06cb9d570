"""The log-probabilities of the sim engine: those that `score` gives for the same token after the same tokens.

The value of token t of a response is log(u) of `scores`, where p is the prompt and the tokens before t, and c is t; with labels
also where c is each label. The most probable tokens in its place are those of the tokens that the sim engine generates. So a
request of scores with `logprobs` for each prefix has the same answer.
"""

import zlib
from collections.abc import Sequence

import numpy as np

from enginepool.protocol.messages import Part
from enginepool.workers.engine import EngineError, Floats, Ids, Outputs, RowPart
from enginepool.workers.sim.operation import SimOperation, Weights
from enginepool.workers.sim.options import SimOptions
from enginepool.workers.sim.scores import salt_of, uniform


class SimLogprobs(SimOperation):
    """`logprobs`."""

    name = "logprobs"

    def serves(self, options: SimOptions) -> bool:
        return options.kind == "causal"

    def sizes(self, options: SimOptions) -> dict[str, int]:
        return {}

    def outputs(self, part: RowPart, options: SimOptions, weights: Weights, *, hidden: bool) -> Outputs:
        return logprobs_part(part, weights, options.vocab)


def logprobs_part(part: RowPart, weights: Weights, vocab: int) -> Outputs:
    """Log-probabilities of the responses of `part`, in rows of `columns`."""
    columns, labels, salt = part.asked.columns, tuple(part.asked.labels), salt_of(weights)
    rows: list[Floats] = []
    more: list[Floats] = []
    items: list[int] = part.item_lengths.tolist()
    if not items or not 0 < min(items) <= max(items) <= columns:
        raise EngineError(f"a response has {min(items, default=0)} to {max(items, default=0)} tokens; 1 to {columns}")
    for row, size in zip(part.prompts(), items, strict=True):
        response = row[-size:]
        crc = zlib.crc32(np.array(row[:-size], "<i4").tobytes())
        hashes: list[int] = []
        for token in response:
            hashes.append(crc + 1)
            crc = zlib.crc32(np.array([token], "<i4").tobytes(), crc)
        before = np.array(hashes, np.uint64)
        own = [uniform(before[i : i + 1], (token,), salt)[0, 0] for i, token in enumerate(response)]
        rows.append(_padded(np.array(own, np.float32), columns))
        more.append(_padded(uniform(before, labels, salt).reshape(-1), columns * len(labels)))
    outputs: Outputs = {"logprobs": (found := np.stack(rows))}
    if labels:
        outputs["labels"] = np.stack(more)
    return outputs | _most_probable(part, found, vocab) if part.asked.top_logprobs else outputs


def _most_probable(part: RowPart, found: Floats, vocab: int) -> Outputs:
    """The most probable tokens in the place of each token t: t, t + 1, …, each with 1 less than the one before."""
    top, lengths = part.asked.top_logprobs, part.item_lengths.tolist()
    ids: Ids = np.zeros((*found.shape, top), np.int32)
    values: Floats = np.zeros((*found.shape, top), np.float32)
    steps, first = np.arange(top, dtype=np.int32), 0
    for row, length in enumerate(lengths):
        ids[row, :length] = (part.items[first : first + length, None] + steps) % vocab
        values[row, :length] = found[row, :length, None] - steps
        first += length
    return {"top_ids": ids.reshape(len(found), -1), "top_logprobs": values.reshape(len(found), -1)}


def expected_logprobs(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    *,
    labels: Sequence[int] = (),
    top: int = 0,
    seed: int = 0,
    version: int = 0,
    digest: str = "",
) -> Outputs:
    """What a sim engine answers to a request, for callers that hold lists of ids."""
    part = RowPart(
        np.array([token for row in prompts for token in row], np.int32),
        np.array([token for row in responses for token in row], np.int32),
        np.array([len(row) for row in responses], np.uint32),
        np.array([len(row) for row in prompts], np.uint32),
        Part([], labels=list(labels), operation="logprobs", columns=max(map(len, responses)), top_logprobs=top),
    )
    return logprobs_part(part, Weights(seed, version, digest), SimOptions().vocab)


def _padded(values: Floats, columns: int) -> Floats:
    """The logarithms of a row, and 0 after them."""
    found = np.zeros(columns, np.float32)
    found[: values.size] = np.log(values.astype(np.float64))
    return found
