"""The answers of the sim engine: a pure function of prompt, label, seed and weight version, easy to repeat in any language.

For a prompt (query and item joined) of ids p and a column c, all modulo 2**64:

    mix(z): z = (z ^ (z >> 30)) * M1, z = (z ^ (z >> 27)) * M2, z ^ (z >> 31)       the finaliser of splitmix64
    crc = CRC-32 (zlib) of p as little-endian int32
    w   = the high 64 bits + the low 64 bits of the weights' digest as a number; 0 where it is ""
    k   = mix(A * seed + B * version + D * w + C * (c + 1)) | 1
    u   = ((((crc + 1) * k) >> 41) + 0.5) / 2**23       in (0, 1), exact in float32

c is the label's token id (causal), the column (classifier), or 2**32 + the column (hidden states). A causal score is u, and
softmax divides by the row's sum, as it does over log-probabilities. A classifier's logit is u, and softmax is that of logits.
Softmax divides logits by the temperature.
With logprobs the answer is the natural logarithm, computed in float64.
"""

import sys
import zlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from enginepool.protocol.messages import Part
from enginepool.workers.engine import Floats, Ids, Lengths, Outputs, RowPart
from enginepool.workers.sim.operation import SimOperation, Weights
from enginepool.workers.sim.options import SimOptions

A = 0x9E3779B97F4A7C15
_B = 0xD1B54A32D192ED03
C = 0x8CB92BA72F3D8DD7
_D = 0xA0761D6478BD642F
_M1 = 0xBF58476D1CE4E5B9
_M2 = 0x94D049BB133111EB
_64 = (1 << 64) - 1
_HIDDEN = 1 << 32


class SimScores(SimOperation):
    """`score`."""

    name = "score"

    def serves(self, options: SimOptions) -> bool:
        return options.kind in ("causal", "classifier")

    def sizes(self, options: SimOptions) -> dict[str, int]:
        return {"labels": classes_of(options), "hidden": options.hidden}

    def outputs(self, part: RowPart, options: SimOptions, weights: Weights, *, hidden: bool) -> Outputs:
        return score_part(part, weights, classes=classes_of(options), hidden=options.hidden if hidden else 0)


def classes_of(options: SimOptions) -> int:
    """Columns of a classifier; 0: a causal model."""
    return options.labels if options.kind == "classifier" else 0


def score_part(part: RowPart, weights: Weights, *, classes: int = 0, hidden: int = 0) -> Outputs:
    """Scores of every row of `part`, and hidden states of size `hidden` when that is not 0.

    Args:
        classes: columns of a classifier; 0: a causal model, whose columns are the part's labels.
    """
    asked = part.asked
    crcs, salt = hashes_of(part), salt_of(weights)
    if part.labels is None or classes:
        scores = uniform(crcs, range(classes) if classes else tuple(asked.labels), salt)
    else:
        own: list[list[int]] = part.labels.tolist()
        scores = np.concatenate([uniform(crcs[i : i + 1], tuple(labels), salt) for i, labels in enumerate(own)])
    if asked.softmax or asked.logprobs:
        wide = scores.astype(np.float64)
        if asked.softmax:
            logits = (wide if classes else np.log(wide)) / asked.temperature
            wide = np.exp(logits - logits.max(axis=1, keepdims=True))
            wide /= wide.sum(axis=1, keepdims=True)
        scores = (np.log(wide) if asked.logprobs else wide).astype(np.float32)
    if not hidden:
        return {"scores": scores}
    return {"scores": scores, "hidden": uniform(crcs, range(_HIDDEN, _HIDDEN + hidden), salt)}


def expected_scores(
    query: Sequence[int] | Sequence[Sequence[int]],
    items: Sequence[Sequence[int]],
    *,
    labels: Sequence[int] = (),
    softmax: bool = False,
    item_first: bool = False,
    classes: int = 0,
    hidden: int = 0,
    seed: int = 0,
    version: int = 0,
    digest: str = "",
    logprobs: bool = False,
    temperature: float = 1.0,
    row_labels: Sequence[Sequence[int]] | None = None,
) -> Outputs:
    """What a sim engine answers to a request, for callers that hold lists of ids. `query` is one for all items, or one each."""
    lengths = np.array([len(item) for item in items], np.uint32)
    flat = np.array([token for item in items for token in item], np.int32)
    if len(query) and not isinstance(query[0], int):
        rows = [list(row) for row in query if not isinstance(row, int)]
        head = np.array([token for row in rows for token in row], np.int32)
        paired = np.array([len(row) for row in rows], np.uint32)
    else:
        head, paired = np.array(query, np.int32), None
    asked = Part([], list(labels), softmax, item_first, logprobs, temperature=temperature)
    weights = Weights(seed, version, digest)
    own = None if row_labels is None else np.array(row_labels, np.int32)
    return score_part(RowPart(head, flat, lengths, paired, asked, own), weights, classes=classes, hidden=hidden)


def salt_of(weights: Weights) -> int:
    """What the weights add to each column."""
    return A * weights.seed + _B * weights.version + _D * weight_of(weights.digest)


def hashes_of(part: RowPart) -> npt.NDArray[np.uint64]:
    """crc + 1 of each row's prompt."""
    crcs = np.array(prompt_crcs(part), np.uint64)
    crcs += 1
    return crcs


def weight_of(digest: str) -> int:
    """What a digest adds to the salt of every score."""
    number = int(digest or "0", 16)
    return ((number >> 64) + number) & _64


def prompt_crcs(part: RowPart) -> list[int]:
    """The CRC-32 of each row's prompt."""
    items = _bytes(part.items)
    ends = _byte_ends(part.item_lengths)
    query = _bytes(part.query)
    crcs: list[int] = []
    start = 0
    if part.query_lengths is None:
        if part.asked.item_first:
            for end in ends:
                crcs.append(zlib.crc32(query, zlib.crc32(items[start:end])))
                start = end
        else:
            head = zlib.crc32(query)
            for end in ends:
                crcs.append(zlib.crc32(items[start:end], head))
                start = end
        return crcs
    query_start = 0
    for end, query_end in zip(ends, _byte_ends(part.query_lengths), strict=True):
        first, second = query[query_start:query_end], items[start:end]
        if part.asked.item_first:
            first, second = second, first
        crcs.append(zlib.crc32(second, zlib.crc32(first)))
        start, query_start = end, query_end
    return crcs


def _bytes(ids: Ids) -> memoryview:
    little = ids if sys.byteorder == "little" else ids.astype("<i4")
    return np.ascontiguousarray(little).data.cast("B") if little.size else memoryview(b"")


def _byte_ends(lengths: Lengths) -> list[int]:
    return (np.cumsum(lengths, dtype=np.int64) * 4).tolist()


def uniform(hashes: npt.NDArray[np.uint64], columns: range | tuple[int, ...], salt: int) -> Floats:
    """float32 [rows, columns] in (0, 1)."""
    z = hashes[:, None] * _factors(columns, salt)
    z >>= 41
    u = z.astype(np.float32)
    u += 0.5
    u *= 2.0**-23
    return u


@lru_cache(256)
def _factors(columns: range | tuple[int, ...], salt: int) -> npt.NDArray[np.uint64]:
    return np.array([mix((salt + C * (column + 1)) & _64) | 1 for column in columns], np.uint64)


def mix(z: int) -> int:
    """The finalizer of splitmix64."""
    z = (z ^ (z >> 30)) * _M1 & _64
    z = (z ^ (z >> 27)) * _M2 & _64
    return z ^ (z >> 31)
