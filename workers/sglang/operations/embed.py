"""Embeddings: SGLang pools each row into one vector, by the rule of the model; it is cut and normalized here. No SGLang here.

SGLang's pooler normalizes what it pools, for most models. But a vector is cut to its first dimensions before it is normalized,
and a caller may ask for vectors that are not normalized. So SGLang is made to answer what it pools. Rows of one forward may
then differ in `dimensions`.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from enginepool.protocol.messages import Capabilities, Kind
from enginepool.workers.engine import EngineError, Outputs, RowPart
from enginepool.workers.engine_settings import EngineSettings
from enginepool.workers.sglang.host.sentence_modules import Pooling
from enginepool.workers.sglang.host.settings import SettingsError
from enginepool.workers.sglang.operations.base import SCORING_HEADS, HeadOperation
from enginepool.workers.sglang.patches.pooling import pool_as_the_model_says

#: as in `torch.nn.functional.normalize`: a vector of zeros stays one
_LEAST_LENGTH = 1e-12


class Embeddings(HeadOperation):
    """`embed`, by a model that has neither a next token nor a head that scores."""

    name = "embed"
    kind: Kind = "embedding"
    packs = False

    def serves(self, generates: bool, architecture: str) -> bool:
        return not generates and not any(head in architecture for head in SCORING_HEADS)

    def refuse_settings(self, wanted: EngineSettings, resolved: Mapping[str, Any]) -> None:
        """SGLang pools the tokens that a forward computes: with the radix cache that is not the beginning of a row."""
        if wanted.cached_query_tokens is not None:
            raise SettingsError("cached_query_tokens is for models that score: an embedding model has no query to share")
        if not resolved.get("disable_radix_cache"):
            raise SettingsError(
                "engine option disable_radix_cache=False is refused: an embedding would be pooled from part of a row"
            )

    def change_scheduler(self, pooler: Any, pooling: Pooling) -> None:
        """Have SGLang pool as the model's folder says, and answer that without normalizing it."""
        pool_as_the_model_says(sys.modules[pooler.__module__], pooling)

    def measured(self, can: Capabilities, outputs: Outputs, config: Any) -> Capabilities:
        """The size of its embeddings; its configuration says for which smaller sizes a model was trained."""
        size = outputs["embeddings"].shape[1]
        trained: Sequence[int] = getattr(config, "matryoshka_dimensions", None) or ()
        anything = not trained and bool(getattr(config, "is_matryoshka", False))
        found = [] if anything else sorted({*(one for one in trained if 0 < one <= size), size})
        return replace(can, embedding=size, dimensions=found)

    def check(self, part: RowPart, can: Capabilities) -> None:
        super().check(part, can)
        dimensions = part.asked.dimensions
        if dimensions > can.embedding:
            raise EngineError(f"dimensions: {dimensions}; an embedding of this model has {can.embedding}")

    def outputs(self, entries: Sequence[Any], part: RowPart, can: Capabilities) -> Outputs:
        vectors = np.asarray(entries, dtype=np.float64).reshape(len(entries), -1)
        if part.asked.dimensions:
            vectors = vectors[:, : part.asked.dimensions]
        if part.asked.normalize:
            lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
            with np.errstate(invalid="ignore"):  # infinity gives NaN, which is refused
                vectors = vectors / np.maximum(lengths, _LEAST_LENGTH)
        return {"embeddings": vectors.astype(np.float32)}
