"""`Pool.embed`: the call, its arguments in Python's names, and its result."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Unpack, cast

from enginepool.client.arguments import Ids, bad, check_int, check_options, kind, utf8
from enginepool.client.payload import encode_rows
from enginepool.client.results import Floats, RequestTimings, RequestUsage, figures, float_frame
from enginepool.client.row_calls import ROW_NAMES, RowCalls, TruncatedOptions, flag
from enginepool.errors import Malformed
from enginepool.protocol.frames import Buffer
from enginepool.protocol.messages import MAX_DIMENSIONS, Embed, Result

#: What the wire calls the arguments of `embed`.
_NAMES: Final = {**ROW_NAMES, "items": "inputs"}


class EmbedOptions(TruncatedOptions, total=False):
    """The options of `Pool.embed`, which says what each one does."""

    dimensions: int | None
    normalize: bool
    instruction: str | None


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
        truncated: how many rows were cut.
        workers: names of the workers that computed it, as in `enginepool status`; of very many the first ones.
    """

    embeddings: Floats
    version: int
    forwards: tuple[int, ...]
    timings: RequestTimings
    usage: RequestUsage
    truncated: int = 0
    workers: tuple[str, ...] = ()


class EmbedCalls(RowCalls):
    """The calls of a pool that embed."""

    async def embed(self, inputs: Sequence[str] | Sequence[Ids], **options: Unpack[EmbedOptions]) -> EmbedResult:
        """Embed each input: the vector that the model pools from it. Inputs are all text, or all token ids.

        Inputs of one call run as one forward pass if they fit one batch of a worker, else as few whole batches. Where a model
        pools (its last token, its first one, the mean of all) is what its configuration says.

        Args:
            inputs: texts, or token ids of each input (also a two-dimensional array: a row each). None is empty.
            group: may be left out where the pool has one group.
            instruction: a text that goes before each input, such as "Instruct: Find the answer.\\nQuery: ", as many models were
                trained with before queries. Inputs are texts, then. Default: None.
            dimensions: the first so many values of each embedding; a model takes the sizes that its configuration names as
                trained (`matryoshka_dimensions`, or `is_matryoshka` for any). Default: None, which is all.
            normalize: embeddings have length 1, after they were cut to `dimensions`. Default: True.
            truncation: inputs that are longer than the model takes are refused (`error`, the default), or cut on the `left` or
                `right`. Special tokens that the tokenizer adds to a text stay; token ids are cut as they are.
            priority, timeout, retry_busy, min_version, version: as in `score`.

        Returns:
            embeddings float32 [inputs, dimensions], and what it took; see `EmbedResult`.

        Raises:
            BadRequest: an argument cannot be served; `field` names it, `limit` the limit. `group`: the model does not embed.
            EnginepoolError: as in `score`.

        Cancelling the task that awaits it takes the request back.
        """
        check_options("embed", options, EmbedOptions)
        specs, frames = encode_rows("inputs", instructed("inputs", inputs, options.get("instruction")))
        dimensions = options.get("dimensions")
        request = Embed(
            id=0,
            frames=specs,
            dimensions=0 if dimensions is None else check_int("dimensions", dimensions, 1, MAX_DIMENSIONS),
            normalize=flag(options, "normalize", True),
        )
        return _read(*await self._submit(request, frames, _NAMES, options))


def instructed(name: str, texts: Any, instruction: object) -> Any:
    """`texts` with the instruction before each of them."""
    if instruction is None:
        return texts
    if not isinstance(instruction, str):
        raise bad("instruction", f"instruction: {kind(instruction)}; a text that goes before each text of {name}")
    utf8("instruction", instruction)
    if isinstance(texts, str) or not isinstance(texts, Sequence) or not all(isinstance(t, str) for t in cast("Any", texts)):
        raise bad("instruction", f"instruction: {name} are no texts; put the ids of the instruction before each row")
    return [instruction + text for text in cast("Sequence[str]", texts)]


def _read(result: Result, frames: Sequence[Buffer]) -> EmbedResult:
    """The result in an answer whose frames are of the announced lengths; the array is the caller's to change.

    Raises:
        Malformed: there are no embeddings.
    """
    embeddings = float_frame(result, frames, "embeddings")
    if embeddings is None or embeddings.ndim != 2:
        raise Malformed("the answer holds no embeddings float32 [inputs, dimensions]", field="embeddings")
    return EmbedResult(embeddings, *figures(result))
