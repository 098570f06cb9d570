"""`Pool.generate` and `Pool.stream`: the calls, and their arguments in Python's names."""

from collections.abc import Sequence
from typing import Any, Final, Unpack, cast, get_args

import numpy as np
import numpy.typing as npt

from enginepool.client.arguments import Ids, bad, check_adapter, check_int, check_options, kind, kind_of_array, utf8
from enginepool.client.generations import Continued, Generation, Generations, read_generations
from enginepool.client.media import MediaOptions, encode_media, media_names
from enginepool.client.payload import encode_rows
from enginepool.client.row_calls import ROW_NAMES, RowCalls, flag, set_options
from enginepool.client.sample_stream import SampleStream
from enginepool.client.sampling import SAMPLING_NAMES, SamplingOptions, sampling_of
from enginepool.client.token_stream import TokenStream
from enginepool.protocol.frames import Buffer
from enginepool.protocol.messages import (
    DEFAULT_CREDIT,
    MAX_CREDIT,
    MAX_SEQUENCES,
    MAX_TOP_LOGPROBS,
    Ended,
    FrameSpec,
    Generate,
    Generated,
    SequenceEnd,
)

#: What the wire calls the arguments.
_NAMES: Final = {
    **ROW_NAMES,
    "output": "continue_from",
    "output_lengths": "continue_from",
    "ended": "continue_from",
    **SAMPLING_NAMES,
}
_REASONS: Final[tuple[str, ...]] = get_args(Ended)


class GenerateOptions(SamplingOptions, MediaOptions, total=False):
    """The options of `Pool.generate`, which says what each one does."""

    n: int
    logprobs: bool
    top_logprobs: int
    prompt_logprobs: bool
    hidden_states: bool
    routed_experts: bool
    partial: bool
    continue_from: Sequence[Sequence[Generation]] | None
    adapter: str | None


class StreamOptions(GenerateOptions, total=False):
    """The options of `Pool.stream`."""

    credit: int


class GenerateCalls(RowCalls):
    """The calls of a pool that generate."""

    async def generate(
        self, prompts: str | Ids | Sequence[str] | Sequence[Ids], **options: Unpack[GenerateOptions]
    ) -> Generations:
        """Continue each prompt, `n` times.

        A sequence whose worker is lost goes on elsewhere after its last token. One that cannot be continued exactly (a grammar,
        a penalty, or a stop string) begins again.

        Args:
            prompts: texts, or token ids of each prompt (also a two-dimensional array: a row each); or one prompt.
            n: samples of each prompt; at most 4096 in one call. Default: 1.
            max_new_tokens: tokens of each sequence, at most, with those of `continue_from`. Default: 128.
            min_new_tokens, temperature, top_p, top_k, min_p, frequency_penalty, presence_penalty, repetition_penalty, stop,
            stop_token_ids, stop_regex, ignore_eos, logit_bias, sampling_seed, json_schema, regex, ebnf, structural_tag:
                SGLang's sampling parameters, with its defaults, but for `max_new_tokens`. At most one of the last four. A
                `sampling_seed` has no effect in a group without the feature `deterministic`.
            allowed_token_ids, disallowed_token_ids: no token but these, or none of these, is chosen; 1 to 4096 ids. At most one
                of the two, and not with a grammar.
            temperature_schedule: (initial, final, tokens), in place of `temperature`: the temperature goes in equal steps from
                `initial`, for the first token of the output, to `final`, after so many tokens. It counts those of
                `continue_from`.
            require_reasoning: the grammar begins after the thoughts of the model, which end as the `reasoning_parser` of the
                engine says. Default: False.
            logprobs: the natural logarithm of the probability of each token, too: at its temperature (1 where `temperature` is
                0), among the tokens that a mask allows, before top_k, top_p and min_p. Default: False.
            top_logprobs: and of so many of the most probable tokens in its place, by the same distribution: at most 20. It asks
                for `logprobs`, too. Default: 0.
            prompt_logprobs: both of each token of the prompts, too, at temperature 1. The engine computes a whole prompt then,
                also what it has of it in its prefix cache. Default: False.
            hidden_states, routed_experts: and the last hidden state from which each token was chosen (not with `stop`), and the
                experts to which each layer routed each token (not in streams). The engines need the options
                `enable_return_hidden_states` and `enable_return_routed_experts`. Default: False.
            partial: a sequence that is interrupted, by new weights or the loss of its worker, is returned as far as it is,
                instead of going on elsewhere; its `finish_reason` is `interrupted`. Default: False.
            images, videos, audio: of each prompt a medium, a list of media, or None; of one prompt without a list, its media.
                The prompt has a placeholder for each, as the model's chat template writes it. A medium is bytes, an `https:`
                or `data:` URL, or a pathlib path, which is a file on the host of the workers; at most 32 MiB each. URLs
                and paths are for groups with `media_urls` and `media_root`. Default: none.
            continue_from: generations of these prompts, a group of `n` for each: sequences that were interrupted, or that ended
                by their length and have fewer than `max_new_tokens`, go on after their tokens. The result has all tokens.
            adapter: the LoRA adapter that generates, by its name in the group. Default: None, the model alone.
            group, priority, timeout, retry_busy, min_version: as in `score`.
            version: as in `score`; a call of which tokens were generated ends as `interrupted` once a newer one is committed.

        Returns:
            `generations[prompt][sample]`, each with its token ids; see `Generations` and `Generation`. The result has no text:
            the tokenizer of the model decodes the ids.

        Raises:
            BadRequest: an argument cannot be served; `field` names it, `limit` the limit.
            Interrupted: a sequence ended before its time, and `partial` is False; the error has everything so far.
            EnginepoolError: as in `score`.

        Cancelling the task that awaits it takes the request back, and ends its sequences in the engines.
        """
        check_options("generate", options, GenerateOptions, "prompts")
        rows = _as_rows(prompts)
        request, frames, earlier, names = _request("prompts", rows, options, single=rows is not prompts)
        answer, frames = await self._ask(request, frames, Generated, names, options)
        return read_generations(request, earlier, answer, frames)

    def stream(self, prompt: str | Ids, **options: Unpack[StreamOptions]) -> TokenStream:
        """Continue a prompt, and take the tokens as they are generated: `async for chunk in pool.stream(prompt)`.

        Args:
            prompt: a text, or token ids.
            credit: tokens of all samples together that the pool sends ahead of the caller, at most. A caller that is slow slows
                its own stream alone. 1 to 65536; default: 1024.
            images, videos, audio: those of the prompt, one or a list.
            n, sampling parameters, logprobs, top_logprobs, prompt_logprobs, hidden_states, partial, continue_from, adapter,
                group, priority, timeout, retry_busy, min_version, version: as in `generate`; `timeout` is for the whole stream.

        Returns:
            An iterable of `TokenChunk`, each with the next tokens of one sample; its `result()` is what `generate` returns.

        Raises:
            BadRequest: an argument cannot be served; `field` names it, `limit` the limit. All else is raised by the loop.
        """
        check_options("stream", options, StreamOptions, "prompt")
        asked = _stream_request(prompt, options)
        return TokenStream(self._connection, self._notices, *asked)

    def sample_stream(self, prompt: str | Ids, options: StreamOptions) -> SampleStream:
        """For a rollout: as `stream`, with options that were checked."""
        asked = _stream_request(prompt, options)
        return SampleStream(self._connection, self._notices, *asked)


def _stream_request(prompt: str | Ids, options: StreamOptions) -> tuple[Any, ...]:
    """What a `TokenStream` is made of, besides the pool."""
    request, frames, earlier, names = _request("prompt", [prompt], options, single=True)
    if request.routed_experts:
        raise bad("routed_experts", "routed_experts: not for a stream; Pool.generate has them in its answer")
    request.stream = True
    request.credit = check_int("credit", options.get("credit", DEFAULT_CREDIT), 1, MAX_CREDIT)
    within, retry_busy = set_options(request, options)
    return request, frames, earlier, within, retry_busy, names


def _as_rows(prompts: Any) -> Any:
    """Prompts, or one prompt, as rows."""
    if isinstance(prompts, str) or getattr(prompts, "ndim", 0) == 1:
        return [prompts]
    if isinstance(prompts, Sequence) and len(cast("Sequence[Any]", prompts)):
        first = cast("Sequence[Any]", prompts)[0]
        if isinstance(first, int | np.integer) and not isinstance(first, bool):
            return [prompts]
    return cast("Any", prompts)


def _request(
    name: str, rows: Sequence[Any], options: GenerateOptions, *, single: bool
) -> tuple[Generate, Sequence[Buffer], Continued, dict[str, str]]:
    """The request for prompts in the argument `name`, its frames, what it continues, and what the caller calls the fields of
    the wire."""
    specs, frames = encode_rows(name, rows)
    prompts = specs[1].shape[0]
    if prompts > MAX_SEQUENCES:
        raise bad(name, f"{name}: {prompts}; at most {MAX_SEQUENCES} in one request", str(MAX_SEQUENCES))
    top = check_int("top_logprobs", options.get("top_logprobs", 0), 0, MAX_TOP_LOGPROBS)
    request = Generate(
        id=0,
        frames=specs,
        n=check_int("n", options.get("n", 1), 1, MAX_SEQUENCES // prompts),
        sampling=sampling_of(options),
        logprobs=flag(options, "logprobs") or top > 0,
        top_logprobs=top,
        prompt_logprobs=flag(options, "prompt_logprobs"),
        partial=flag(options, "partial"),
        adapter=check_adapter(options.get("adapter")),
        hidden_states=flag(options, "hidden_states"),
        routed_experts=flag(options, "routed_experts"),
    )
    earlier = _earlier(options.get("continue_from"), prompts, request)
    if earlier:
        request.frames, request.ended, frames = _brought(request, frames, earlier)
    request.media, (specs, media) = encode_media(options, prompts, single=single)
    if request.media:
        request.frames, frames = [*request.frames, *specs], (*frames, *media)
        if request.prompt_logprobs:
            raise bad("prompt_logprobs", "prompt_logprobs: given with media, whose tokens have none; leave it out")
    continued = Continued(earlier, _prompts(options.get("continue_from"), request))
    return request, frames, continued, {**_NAMES, "items": name, **media_names(options, prompts, single=single)}


def _earlier(given: Any, prompts: int, request: Generate) -> list[Generation]:
    """The sequences in `continue_from`, in the order of the wire."""
    if given is None:
        return []
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise bad("continue_from", f"continue_from: {kind(given)}; the generations of an earlier call")
    groups = cast("Sequence[Any]", given)
    if len(groups) != prompts:
        text = f"continue_from: expected {prompts} groups (one per prompt), got {len(groups)}"
        raise bad("continue_from", text, str(prompts))
    found: list[Generation] = []
    for at, group in enumerate(groups):
        where = f"continue_from[{at}]"
        if not isinstance(group, Sequence) or isinstance(group, str | bytes):
            raise bad(where, f"{where}: {kind(group)}; a group of generations")
        samples = cast("Sequence[Any]", group)
        if len(samples) != request.n:
            raise bad(where, f"{where}: expected {request.n} generations (n), got {len(samples)}", str(request.n))
        for i, one in enumerate(samples):
            _check_generation(f"{where}[{i}]", one, request)
            found.append(one)
    return found


def _prompts(given: Any, request: Generate) -> list[tuple[Any, Any, Any]]:
    """What `continue_from` has of prompts, if it is what an earlier call returned and has as much as is asked for."""
    if not isinstance(given, Generations) or not request.prompt_logprobs or given.prompt_logprobs is None:
        return []
    none, k = (None,) * len(given), request.top_logprobs
    rows = zip(given.prompt_logprobs, given.prompt_top_ids or none, given.prompt_top_logprobs or none, strict=True)
    return [
        row if row[0] is not None and (0 if row[1] is None else row[1].shape[1]) == k else (None, None, None) for row in rows
    ]


def _check_generation(where: str, one: Any, request: Generate) -> None:
    if not isinstance(one, Generation):
        raise bad(where, f"{where}: {kind(one)}; a Generation")
    ids, chances, most = cast("Any", one.token_ids), cast("Any", one.logprobs), request.sampling.max_new_tokens
    if not isinstance(ids, np.ndarray) or cast("npt.NDArray[Any]", ids).dtype != np.int32 or one.token_ids.ndim != 1:
        raise bad(f"{where}.token_ids", f"{where}.token_ids: {kind_of_array(ids)}; an array int32 [tokens]")
    if len(one.token_ids) and int(one.token_ids.min()) < 0:
        raise bad(f"{where}.token_ids", f"{where}.token_ids: token id {one.token_ids.min()} is negative", "0")
    if len(one.token_ids) > most:
        raise bad(where, f"{where}: {len(one.token_ids)} tokens; at most max_new_tokens = {most}", str(most))
    if request.logprobs and chances is not None:
        found = cast("npt.NDArray[Any] | None", chances) if isinstance(chances, np.ndarray) else None
        if found is None or found.dtype != np.float32 or found.shape != one.token_ids.shape:
            text = (
                f"{where}.logprobs: {kind_of_array(chances)}; None, or an array float32 [{len(one.token_ids)}], one per token"
            )
            raise bad(f"{where}.logprobs", text)
    if request.top_logprobs:
        _check_table(where, one, "top_ids", "int32")
        _check_table(where, one, "top_logprobs", "float32")
    if request.hidden_states:
        _check_table(where, one, "hidden_states", "float32")
    for name in ("spans", "workers", "adapters"):
        _check_spans(f"{where}.{name}", getattr(one, name), len(one.token_ids))
    if not isinstance(cast("object", one.matched), int | str | None):
        raise bad(f"{where}.matched", f"{where}.matched: {kind(one.matched)}; a token id, a text, or None")
    utf8(f"{where}.matched", str(one.matched))
    if one.finish_reason not in _REASONS:
        text = f"{where}.finish_reason: {one.finish_reason!r}; one of {', '.join(_REASONS)}"
        raise bad(f"{where}.finish_reason", text)


def _check_spans(where: str, spans: Any, tokens: int) -> None:
    """Spans of fewer or more tokens would be said of others in the answer. None at all: it is not known."""
    try:
        counted = sum(count for _, count in spans)
    except (TypeError, ValueError):
        raise bad(where, f"{where}: {kind(spans)}; pairs of which the second is a number of tokens") from None
    if spans and counted != tokens:
        raise bad(where, f"{where}: expected {tokens} tokens, as in token_ids, or no spans; got {counted}", str(tokens))


def _check_table(where: str, one: Generation, name: str, dtype: str) -> None:
    found: Any = getattr(one, name)
    array = cast("npt.NDArray[Any]", found) if isinstance(found, np.ndarray) else np.zeros(0)
    if found is not None and (array.ndim != 2 or len(array) != len(one.token_ids) or array.dtype != np.dtype(dtype)):
        text = f"{where}.{name}: {kind_of_array(found)}; None, or an array {dtype} [{len(one.token_ids)}, k]"
        raise bad(f"{where}.{name}", text)


def _brought(
    request: Generate, frames: Sequence[Buffer], earlier: Sequence[Generation]
) -> tuple[list[FrameSpec], list[SequenceEnd], tuple[Buffer, ...]]:
    """Header and frames of a request that brings these tokens along: specs, sequences that have ended, and frames."""
    lengths = np.array([len(one.token_ids) for one in earlier], np.uint32)
    output = np.concatenate([one.token_ids for one in earlier])
    most = request.sampling.max_new_tokens
    ended = [
        SequenceEnd(number, "stop", one.matched) if one.finish_reason == "stop" else SequenceEnd(number, "length")
        for number, one in enumerate(earlier)
        if one.finish_reason == "stop" or len(one.token_ids) == most
    ]
    specs = [
        *request.frames,
        FrameSpec("output", "int32", (len(output),)),
        FrameSpec("output_lengths", "uint32", (len(lengths),)),
    ]
    return specs, ended, (*frames, output.tobytes(), lengths.tobytes())
