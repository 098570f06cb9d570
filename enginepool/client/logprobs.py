"""`Pool.logprobs`: the call, its arguments in Python's names, and its result."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Unpack, cast

import numpy as np

from enginepool.client.arguments import Ids, bad, check_int, check_options
from enginepool.client.payload import Ids32, Payload, check_labels, encode_pairs, encode_shared
from enginepool.client.results import Floats, RequestTimings, RequestUsage, figures, frame_of
from enginepool.client.row_calls import ROW_NAMES, RowCalls, TruncatedOptions
from enginepool.errors import Malformed
from enginepool.protocol.basis import Dtype
from enginepool.protocol.frames import Buffer
from enginepool.protocol.messages import MAX_PLACE_LABELS, MAX_TOP_LOGPROBS, Logprobs, Result

#: What the wire calls the arguments of `logprobs`.
_NAMES: Final = {**ROW_NAMES, "query": "prompts", "items": "responses", "labels": "label_token_ids"}


class LogprobsOptions(TruncatedOptions, total=False):
    """The options of `Pool.logprobs`, which says what each one does."""

    label_token_ids: Ids | None
    top_logprobs: int


@dataclass(frozen=True, slots=True, eq=False)
class LogprobsResult:
    """The answer of `Pool.logprobs`.

    Attributes:
        logprobs: for each response, float32 [tokens]: the natural logarithm of the probability of each of its tokens.
        labels: for each response, float32 [tokens, labels]: that of each label in the place of that token, in the order asked;
            None where no labels were asked for.
        top_ids, top_logprobs: for each response, int32 and float32 [tokens, k]: the k most probable tokens in the place of that
            token, the most probable first; None where none were asked for.
        version: version of the weights that computed every row.
        forwards: for each batch that held rows of this request, the forward passes that it took, as measured in the engine:
            1 is whole.
        timings: time in the queue and in the engine.
        usage: rows and tokens.
        truncated: how many rows have a prompt that was cut.
        workers: names of the workers that computed it, as in `enginepool status`; of very many the first ones.
    """

    logprobs: tuple[Floats, ...]
    labels: tuple[Floats, ...] | None
    version: int
    forwards: tuple[int, ...]
    timings: RequestTimings
    usage: RequestUsage
    truncated: int = 0
    workers: tuple[str, ...] = ()
    top_ids: tuple[Ids32, ...] | None = None
    top_logprobs: tuple[Floats, ...] | None = None


class LogprobsCalls(RowCalls):
    """The calls of a pool for log-probabilities of responses."""

    async def logprobs(
        self, prompts: Sequence[Ids] | Ids, responses: Sequence[Ids], **options: Unpack[LogprobsOptions]
    ) -> LogprobsResult:
        """The log-probability of each token of each response, given its prompt and the tokens of the response before it.

        A CausalLM reads prompt and response in one prefill; nothing is generated. Responses of one call run as one forward pass
        if they fit one batch of a worker, else as few whole batches. Probabilities are those of the model: under all tokens, at
        temperature 1.

        Args:
            prompts: token ids of each prompt, one for each response; or of one prompt for all responses. None is empty.
            responses: token ids of each response (also a two-dimensional array: a row each). None is empty.
            label_token_ids: tokens whose log-probabilities are wanted in the place of each token of a response as well, at most
                64. Default: None.
            top_logprobs: so many of the most probable tokens are wanted in the place of each token of a response as well, at
                most 20. Default: 0.
            group: may be left out where the pool has one group.
            truncation: prompts that are too long with their response are refused (`error`, the default), or cut on the `left`:
                one prompt for all responses by the longest of them. No response is cut.
            priority, timeout, retry_busy, min_version, version: as in `score`.

        Returns:
            logprobs, an array float32 [tokens] for each response, and what it took; see `LogprobsResult`.

        Raises:
            BadRequest: an argument cannot be served; `field` names it, `limit` the limit. `group`: the model does not predict
                tokens.
            EnginepoolError: as in `score`.

        Cancelling the task that awaits it takes the request back.
        """
        check_options("logprobs", options, LogprobsOptions)
        labels = check_labels(options.get("label_token_ids"), MAX_PLACE_LABELS)
        specs, frames = _encode(prompts, responses)
        top = check_int("top_logprobs", options.get("top_logprobs", 0), 0, MAX_TOP_LOGPROBS)
        request = Logprobs(id=0, frames=specs, labels=labels, top_logprobs=top)
        lengths = np.frombuffer(frames[-1], np.uint32)
        return _read(*await self._submit(request, frames, _NAMES, options), lengths, len(labels), top)


def _encode(prompts: Any, responses: Any) -> Payload:
    """The frames of token ids of which no prompt and no response is empty.

    Raises:
        BadRequest: they are something else; `field` names the argument.
    """
    one = _is_one(prompts)
    specs, frames = encode_shared(prompts, responses, ("prompts", "responses")) if one else encode_pairs(prompts, responses)
    if specs[0].dtype == "utf8":
        raise bad(
            "prompts",
            "prompts: text; tokenize prompts and responses each for itself, because joined text may have other tokens",
        )
    if one and not frames[0]:
        raise bad("prompts", "prompts: empty; a prompt has at least one token", "1")
    for name, lengths in (("responses", frames[-1]), *([] if one else [("prompts", frames[1])])):
        sizes = np.frombuffer(lengths, np.uint32)
        if not sizes.all():
            where = f"{name}[{int((sizes == 0).argmax())}]"
            raise bad(where, f"{where}: empty; it needs at least one token", "1")
    return specs, frames


def _is_one(prompts: Any) -> bool:
    """Whether this is one prompt, and not one for each response."""
    if isinstance(prompts, str):
        return True
    if (sides := getattr(prompts, "ndim", None)) is not None:
        return sides == 1
    first = next(iter(cast("Sequence[object]", prompts)), None) if isinstance(prompts, Sequence) else None
    return isinstance(first, int | np.integer)


def _read(result: Result, frames: Sequence[Buffer], lengths: Any, labels: int, top: int) -> LogprobsResult:
    """The result in an answer whose frames are of the announced lengths; the arrays are the caller's to change.

    Raises:
        Malformed: there are no log-probabilities, or not as many as responses have tokens.
    """
    sizes: list[int] = lengths.tolist()
    rows = _rows(result, frames, "logprobs", sizes)
    return LogprobsResult(
        tuple(row.reshape(-1) for row in rows),
        _rows(result, frames, "labels", sizes, labels) if labels else None,
        *figures(result),
        top_ids=_rows(result, frames, "top_ids", sizes, top, "int32") if top else None,
        top_logprobs=_rows(result, frames, "top_logprobs", sizes, top) if top else None,
    )


def _rows(
    result: Result, frames: Sequence[Buffer], name: str, sizes: Sequence[int], width: int = 1, dtype: Dtype = "float32"
) -> tuple[Any, ...]:
    """The rows of a frame, each cut to its size: arrays [tokens, width]."""
    found = frame_of(result, frames, name, dtype)
    columns = max(sizes) * width
    if found is None or found.shape != (len(sizes), columns):
        raise Malformed(f"the answer holds no {name} {dtype} [{len(sizes)}, {columns}]", field=name)
    return tuple(row[: size * width].reshape(-1, width) for row, size in zip(found, sizes, strict=True))
