"""`Pool.embed`: the call, its arguments in Python's names, and its result."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypedDict, Unpack, cast

import numpy as np

from enginepool.client.arguments import Ids, bad, check_flag, check_group, check_options, check_priority, check_version, kind
from enginepool.client.payload import encode_rows
from enginepool.client.results import Floats, RequestTimings, RequestUsage, float_frame, timings_of, usage_of
from enginepool.client.row_calls import RowCalls
from enginepool.errors import Malformed
from enginepool.protocol.frames import Buffer
from enginepool.protocol.messages import MAX_DIMENSIONS, Embed, Result

#: What the wire calls the arguments of `embed`.
_NAMES: Final = {"items": "inputs", "timeout_ms": "timeout"}


class EmbedOptions(TypedDict, total=False):
    """The options of `Pool.embed`, which says what each one does; `retry_busy` is as in `Pool.score`."""

    group: str
    dimensions: int | None
    normalize: bool
    priority: int
    timeout: float | None
    retry_busy: bool
    min_version: int


@dataclass(frozen=True, slots=True, eq=False)
class EmbedResult:
    """The answer of `Pool.embed`.

    Attributes:
        embeddings: float32 [inputs, dimensions].
        version: version of the weights that computed every row.
        forwards: for each batch that held rows of this request, the forward passes that it took, as measured in the engine:
            1 is whole.
        timings: time in the queue and in the engine.
        usage: rows and tokens.
    """

    embeddings: Floats
    version: int
    forwards: tuple[int, ...]
    timings: RequestTimings
    usage: RequestUsage


class EmbedCalls(RowCalls):
    """The calls of a pool that embed."""

    async def embed(self, inputs: Sequence[str] | Sequence[Ids], **options: Unpack[EmbedOptions]) -> EmbedResult:
        """Embed each input: the vector that the model pools from it. Inputs are all text, or all token ids.

        Inputs of one call run as one forward pass if they fit one batch of a worker, else as few whole batches. Where a model
        pools (its last token, its first one, the mean of all) is what its configuration says.

        Args:
            inputs: texts, or token ids of each input (also a two-dimensional array: a row each). None is empty.
            group: may be left out where the pool has one group.
            dimensions: the first so many values of each embedding; a model takes the sizes that its configuration names as
                trained (`matryoshka_dimensions`, or `is_matryoshka` for any). Default: None, which is all.
            normalize: embeddings have length 1, after they were cut to `dimensions`. Default: True.
            priority, timeout, retry_busy, min_version: as in `score`.

        Returns:
            embeddings float32 [inputs, dimensions], and what it took; see `EmbedResult`.

        Raises:
            BadRequest: an argument cannot be served; `field` names it, `limit` the limit. `type`: the model does not embed.
            EnginepoolError: as in `score`.

        Cancelling the task that awaits it takes the request back.
        """
        check_options("embed", options, EmbedOptions)
        return await self._embed(inputs, **options)

    async def _embed(
        self,
        inputs: Sequence[str] | Sequence[Ids],
        *,
        group: str = "",
        dimensions: int | None = None,
        normalize: bool = True,
        priority: int = 0,
        timeout: float | None = None,  # noqa: ASYNC109 (the coordinator keeps this time too)
        retry_busy: bool = True,
        min_version: int = 0,
    ) -> EmbedResult:
        specs, frames = encode_rows("inputs", inputs)
        request = Embed(
            id=0,
            frames=specs,
            group=check_group(group),
            dimensions=_check_dimensions(dimensions),
            normalize=check_flag("normalize", normalize),
            priority=check_priority(priority),
            min_version=check_version(min_version, "min_version"),
        )
        answer = await self._submit(request, frames, _NAMES, timeout, retry_busy)
        return _read(answer.result, answer.frames)


def _check_dimensions(value: Any) -> int:
    """A number of dimensions as the wire has it; None is all of them."""
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise bad("dimensions", f"dimensions: {value if isinstance(value, float) else kind(value)}; an int from 1 on, or None")
    dimensions = int(cast("int", value))
    if not 0 < dimensions <= MAX_DIMENSIONS:
        limit = "1" if dimensions < 1 else str(MAX_DIMENSIONS)
        raise bad("dimensions", f"dimensions: {dimensions}; an int from 1 to {MAX_DIMENSIONS}, or None", limit)
    return dimensions


def _read(result: Result, frames: Sequence[Buffer]) -> EmbedResult:
    """The result in an answer whose frames are of the announced lengths; the array is the caller's to change.

    Raises:
        Malformed: there are no embeddings.
    """
    embeddings = float_frame(result, frames, "embeddings")
    if embeddings is None or embeddings.ndim != 2:
        raise Malformed("the answer holds no embeddings float32 [inputs, dimensions]", field="embeddings")
    return EmbedResult(embeddings, result.version, tuple(result.forwards), timings_of(result), usage_of(result))
