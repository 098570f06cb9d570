"""The results of generation: sequences of tokens, by prompt; and the chunks of a stream."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from enginepool.client.payload import Ids32
from enginepool.client.results import Floats, RequestTimings
from enginepool.errors import Interrupted, Malformed
from enginepool.protocol.errors import WireError
from enginepool.protocol.frames import Buffer
from enginepool.protocol.generated import AnsweredSequence, read_generated, read_prompts, split_columns
from enginepool.protocol.messages import Ended, Generate, Generated

#: int32 [tokens, k]
TopIds: TypeAlias = npt.NDArray[np.int32]


class TokenUsage(NamedTuple):
    """Sequences; tokens of the prompts, each prompt counted once; tokens of all sequences, with those that the call continued;
    and, of the tokens of the prompts, those that engines had in their prefix cache."""

    sequences: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """One sequence: a sample of a prompt. It has no text: decode the ids with the tokenizer of the model.

    Attributes:
        token_ids: int32 [tokens], without the prompt.
        logprobs: float32 [tokens], the natural logarithm of the probability of each token, if asked for; NaN for tokens that
            were handed in with `continue_from` without them.
        top_ids, top_logprobs: int32 and float32 [tokens, k], if asked for: in the place of each token the k most probable ones,
            the most probable first; −1 and NaN where `logprobs` is NaN.
        finish_reason: `stop`: a stop token, string or pattern; `length`: `max_new_tokens`; `interrupted`: it could not be
            continued.
        matched: the token id, or the text, that it stopped at; else None.
        spans: (version, count): so many tokens, in order, were computed by weights of this version.
    """

    token_ids: Ids32
    logprobs: Floats | None
    finish_reason: Ended
    matched: int | str | None
    spans: tuple[tuple[int, int], ...]
    top_ids: TopIds | None = None
    top_logprobs: Floats | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Generations(Sequence[tuple[Generation, ...]]):
    """The answer of `Pool.generate`: `generations[prompt][sample]`.

    Attributes:
        groups: for each prompt the tuple of its samples.
        version: the newest weights that computed a token of it.
        usage: sequences and tokens.
        timings: time in the queue, and in the engines.
        prompt_logprobs: if asked for, of each prompt float32 [its tokens]: the logarithm of the probability of each token given
            those before it, NaN for the first one. None in the place of a prompt of which this call generated no token.
        prompt_top_ids, prompt_top_logprobs: if both are asked for, of each prompt int32 and float32 [its tokens, k]: in the
            place of each token the k most probable ones; −1 and NaN for the first one. None as in `prompt_logprobs`.
        workers: names of the workers that generated tokens in this call, as in `enginepool status`; of very many the first
            ones.
    """

    groups: tuple[tuple[Generation, ...], ...]
    version: int
    usage: TokenUsage
    timings: RequestTimings
    prompt_logprobs: tuple[Floats | None, ...] | None = None
    prompt_top_ids: tuple[TopIds | None, ...] | None = None
    prompt_top_logprobs: tuple[Floats | None, ...] | None = None
    workers: tuple[str, ...] = ()

    @overload
    def __getitem__(self, index: int) -> tuple[Generation, ...]: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[tuple[Generation, ...], ...]: ...
    def __getitem__(self, index: int | slice) -> tuple[Generation, ...] | tuple[tuple[Generation, ...], ...]:
        return self.groups[index]

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[tuple[Generation, ...]]:
        return iter(self.groups)


@dataclass(frozen=True, slots=True, eq=False)
class TokenChunk:
    """The next tokens of a stream.

    Attributes:
        sequence: the sample that they belong to, from 0.
        token_ids: int32 [tokens]; empty where a sequence ends without more.
        logprobs: float32 [tokens], if asked for.
        top_ids, top_logprobs: int32 and float32 [tokens, k], if asked for, as in `Generation`.
        version: of the weights that computed them.
        finish_reason: as in `Generation`; "" while the sequence goes on.
        matched: as in `Generation`.
    """

    sequence: int
    token_ids: Ids32
    logprobs: Floats | None
    version: int
    finish_reason: Ended | str
    matched: int | str | None
    top_ids: TopIds | None = None
    top_logprobs: Floats | None = None


def read_generations(
    request: Generate, earlier: Sequence[Generation], answer: Generated, frames: Sequence[Buffer]
) -> Generations:
    """The generations in an answer to `request`; its frames have the announced lengths. The arrays are the caller's to change.

    Args:
        earlier: the sequences that the request continues; empty if it continues none.

    Raises:
        Malformed: the answer does not answer this request.
        Interrupted: a sequence was interrupted, and the request did not ask for partial ones.
    """
    rows = request.frames[1].shape[0] * request.n
    try:
        sequences = read_generated(answer, frames, rows, request)
        prompts = read_prompts(answer, frames, request)
    except WireError as error:
        raise Malformed(f"the answer cannot be read: {error.message}", field=error.field) from None
    found: list[Generation] = []
    for number, sequence in enumerate(sequences):
        before = earlier[number] if earlier else None
        has = 0 if before is None else len(before.token_ids)
        if sequence.start != has:
            text = f"starts[{number}]: {sequence.start} in an answer that continues {has} tokens"
            raise Malformed(text, field=f"starts[{number}]")
        found.append(_joined(before, sequence, request.top_logprobs if request.logprobs else None))
    groups = tuple(tuple(found[first : first + request.n]) for first in range(0, rows, request.n))
    usage, times = answer.usage, answer.timings
    generations = Generations(
        groups,
        answer.version,
        TokenUsage(usage.sequences, usage.prompt_tokens, usage.output_tokens, usage.cached_tokens),
        RequestTimings(times.queued_us / 1e6, times.run_us / 1e6),
        *_of_prompts(prompts, len(groups), request),
        workers=tuple(answer.workers),
    )
    interrupted = sum(one.finish_reason == "interrupted" for one in found)
    if interrupted and not request.partial:
        text = f"{interrupted} of {rows} sequences were interrupted; partial=True returns such sequences, continue_from goes on"
        raise Interrupted(text, generations=generations)
    return generations


def _of_prompts(found: Mapping[int, Buffer], count: int, request: Generate) -> list[Any]:
    """The last three attributes of `Generations`."""
    if not request.prompt_logprobs:
        return [None] * 3
    none: tuple[None, None, None] = (None, None, None)
    rows = [read_arrays(found[at], request.top_logprobs) if at in found else none for at in range(count)]
    columns = [*zip(*rows, strict=True)]
    return columns if request.top_logprobs else [columns[0], None, None]


def read_arrays(columns: Buffer, top: int | None) -> tuple[Floats | None, TopIds | None, Floats | None]:
    """(logprobs, top_ids, top_logprobs) of the columns of tokens. `top`: the k of the last two; None: there are no logprobs."""
    if top is None:
        return None, None, None
    parts = split_columns(columns, top)
    logprobs = np.array(np.frombuffer(parts[0], np.float32))
    if not top:
        return logprobs, None, None
    ids, chances = np.frombuffer(parts[1], np.int32), np.frombuffer(parts[2], np.float32)
    return logprobs, np.array(ids.reshape(-1, top)), np.array(chances.reshape(-1, top))


def _joined(before: Generation | None, sequence: AnsweredSequence, top: int | None) -> Generation:
    """A sequence with the tokens that it continues; `top` as in `read_arrays`."""
    tokens = np.frombuffer(sequence.tokens, np.int32)
    details = read_arrays(sequence.logprobs, top)
    spans = list(sequence.spans)
    if before is not None:
        earlier = before.logprobs, before.top_ids, before.top_logprobs
        details = tuple(_after(old, new, len(before.token_ids)) for old, new in zip(earlier, details, strict=True))
        tokens = np.concatenate((before.token_ids, tokens))
        spans = merged(chain(before.spans, spans))
    logprobs, top_ids, top_logprobs = details
    return Generation(
        np.array(tokens, np.int32), logprobs, sequence.end.reason, sequence.end.matched,
        tuple((version, count) for version, count in spans), top_ids, top_logprobs,
    )  # fmt: skip


def _after(old: npt.NDArray[Any] | None, new: npt.NDArray[Any] | None, count: int) -> npt.NDArray[Any] | None:
    """`new` after what the first `count` tokens have; they have nothing that is a number where that is not known."""
    if new is None:
        return None
    if old is None or old.shape[1:] != new.shape[1:]:
        old = np.full((count, *new.shape[1:]), -1 if new.dtype == np.int32 else np.nan, new.dtype)
    return np.concatenate((old, new))


def merged(spans: Iterator[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans, where those of one version that follow each other are one."""
    out: list[tuple[int, int]] = []
    for version, count in spans:
        if out and out[-1][0] == version:
            count += out.pop()[1]
        out.append((version, count))
    return out
