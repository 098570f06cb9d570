"""The embeddings of the sim engine: `u - 0.5` of `scores`, cut and normalized in float64 as the real engine's are.

The column c of a dimension is 2**33 + the dimension.
"""

from collections.abc import Sequence

import numpy as np

from enginepool.protocol.messages import Part
from enginepool.workers.engine import Outputs, RowPart
from enginepool.workers.sim.operation import SimOperation, Weights
from enginepool.workers.sim.options import SimOptions
from enginepool.workers.sim.scores import hashes_of, salt_of, uniform

_FIRST = 1 << 33


class SimEmbeddings(SimOperation):
    """`embed`."""

    name = "embed"

    def serves(self, options: SimOptions) -> bool:
        return options.embedding > 0

    def sizes(self, options: SimOptions) -> dict[str, int]:
        return {"embedding": options.embedding}

    def outputs(self, part: RowPart, options: SimOptions, weights: Weights, *, hidden: bool) -> Outputs:
        return embed_part(part, options.embedding, weights)


def embed_part(part: RowPart, size: int, weights: Weights) -> Outputs:
    """Embeddings of every row of `part`, by an engine whose embeddings have this size."""
    columns = range(_FIRST, _FIRST + (part.asked.dimensions or size))
    vectors = uniform(hashes_of(part), columns, salt_of(weights)).astype(np.float64) - 0.5
    if part.asked.normalize:
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return {"embeddings": vectors.astype(np.float32)}


def expected_embeddings(
    items: Sequence[Sequence[int]],
    size: int,
    *,
    dimensions: int = 0,
    normalize: bool = True,
    seed: int = 0,
    version: int = 0,
    digest: str = "",
) -> Outputs:
    """What a sim engine answers to a request, for callers that hold lists of ids."""
    lengths = np.array([len(item) for item in items], np.uint32)
    flat = np.array([token for item in items for token in item], np.int32)
    asked = Part([], operation="embed", dimensions=dimensions, normalize=normalize)
    return embed_part(RowPart(np.empty(0, np.int32), flat, lengths, asked=asked), size, Weights(seed, version, digest))
