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

from enginepool.protocol.messages import Capabilities
from enginepool.workers.engine import ScorePart, Scores
from enginepool.workers.engine_settings import EngineSettings
from enginepool.workers.sglang.host.settings import SettingsError

#: as in `torch.nn.functional.normalize`: a vector of zeros stays one
_LEAST_LENGTH = 1e-12


def answer_raw(pooler: Any) -> None:
    """Have SGLang answer what it pools, without normalizing it. `pooler` is a class of the module that has `Pooler`."""
    pooling = sys.modules[pooler.__module__].__dict__["Pooler"]
    initialize = pooling.__init__

    def without_normalizing(self: Any, pooling_type: Any, normalize: bool) -> None:
        initialize(self, pooling_type, False)

    pooling.__init__ = without_normalizing


def refuse_partial_pooling(wanted: EngineSettings, settings: Mapping[str, Any]) -> None:
    """Raise SettingsError when an embedding model would pool less than its whole row, or cannot run like this.

    SGLang pools the tokens that a forward computes: with the radix cache that is not the beginning of a row.
    """
    if wanted.packed:
        raise SettingsError("packed_workers is for models that score: an embedding model has no query to share")
    if wanted.cached_query_tokens is not None:
        raise SettingsError("cached_query_tokens is for models that score: an embedding model has no query to share")
    if not settings.get("disable_radix_cache"):
        raise SettingsError(
            "engine option disable_radix_cache=False is refused: an embedding would be pooled from part of a row"
        )


def sized(capabilities: Capabilities, config: Any, size: int) -> Capabilities:
    """The capabilities of a model whose embeddings have this size. `config`: the model's own configuration, which says for
    which smaller sizes it was trained."""
    trained: Sequence[int] = getattr(config, "matryoshka_dimensions", None) or ()
    anything = not trained and bool(getattr(config, "is_matryoshka", False))
    found = [] if anything else sorted({*(one for one in trained if 0 < one <= size), size})
    return replace(capabilities, embedding=size, dimensions=found)


def embedding_rows(rows: Sequence[Sequence[float]], part: ScorePart) -> Scores:
    """What the engine pooled, as the part asks for it: float32 [rows, dimensions]."""
    vectors = np.asarray(rows, dtype=np.float64).reshape(len(rows), -1)
    if part.dimensions:
        vectors = vectors[:, : part.dimensions]
    if part.normalize:
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        with np.errstate(invalid="ignore"):  # infinity gives NaN, which is refused
            vectors = vectors / np.maximum(lengths, _LEAST_LENGTH)
    return vectors.astype(np.float32)
