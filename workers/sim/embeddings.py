"""The embeddings of the sim engine: `u - 0.5` of `scores`, cut and normalized in float64 as the real engine's are."""

from collections.abc import Sequence

import numpy as np

from enginepool.workers.engine import PartScores, ScorePart
from enginepool.workers.sim.scores import hashes_of, salt_of, uniform

_FIRST = 1 << 33


def embed_part(part: ScorePart, size: int, *, seed: int = 0, version: int = 0, digest: str = "") -> PartScores:
    """Embeddings of every row of `part`, by an engine whose embeddings have this size."""
    columns = range(_FIRST, _FIRST + (part.dimensions or size))
    vectors = uniform(hashes_of(part), columns, salt_of(seed, version, digest)).astype(np.float64) - 0.5
    if part.normalize:
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return PartScores(vectors.astype(np.float32))


def expected_embeddings(
    items: Sequence[Sequence[int]],
    size: int,
    *,
    dimensions: int = 0,
    normalize: bool = True,
    seed: int = 0,
    version: int = 0,
    digest: str = "",
) -> PartScores:
    """What a sim engine answers to a request, for callers that hold lists of ids."""
    lengths = np.array([len(item) for item in items], np.uint32)
    flat = np.array([token for item in items for token in item], np.int32)
    part = ScorePart(np.empty(0, np.int32), flat, lengths, dimensions=dimensions, normalize=normalize)
    return embed_part(part, size, seed=seed, version=version, digest=digest)
