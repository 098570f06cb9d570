"""The operation `generate`: prompts are continued, token by token, each in a slot of a worker's running batch.

Its rows are sequences: `n` samples of each prompt. They are not cut into batches. `scheduling/generation_slots.py` gives them
slots, and `requests/generations.py` takes their tokens.
"""

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from enginepool.coordinator.operations.base import GENERATION, Operation, Work, refuse_ids, signature
from enginepool.coordinator.requests.memory import UNKNOWN_EXPERTS, UNKNOWN_HIDDEN
from enginepool.protocol.basis import ELEMENT_BYTES, EXPERT_BYTES, LABEL_BYTES, REQUEST_BYTES, RESULT_BYTES, SEQUENCE_BYTES
from enginepool.protocol.errors import WireError
from enginepool.protocol.frames import Buffer, check_frames
from enginepool.protocol.generated import brought_tokens
from enginepool.protocol.media import IMAGE_IDS, RequestMedia, read_media
from enginepool.protocol.messages import (
    MAX_CREDIT,
    MAX_MATCHED,
    MAX_SEQUENCES,
    MAX_TOP_LOGPROBS,
    Capabilities,
    FrameSpec,
    Generate,
    Part,
    Sampling,
    SequenceEnd,
    TaskId,
    Tokenize,
)
from enginepool.protocol.ragged import ITEMS, bad, read_rows
from enginepool.protocol.sampling import FEATURES, MASKS, check_sampling, is_constrained

_SIGNATURE = signature(GENERATION)
_OUTPUT = ("output", "output_lengths")
#: of a feature that workers lack, whose name does not say it
_UNTAKEN = {
    "media_url": "a URL, and the workers of this group fetch none: media_urls of the group is empty",
    "media_path": "a path, and the workers of this group read none: media_root of the group is empty",
}


class GenerateWork(Work, frozen=True, gc=False):
    """A request to generate. `output`: the tokens that it brings along, and how many each sequence has; empty without any.
    `output_max`: the largest of them, or -1. `width`: elements of each token in its answer, besides its id and its hidden
    state. `without_details`: its charge without hidden states and routed experts, whose sizes only a worker knows."""

    n: int = 1
    sampling: Sampling = Sampling()
    stream: bool = False
    credit: int = 0
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    partial: bool = False
    output: tuple[Buffer, ...] = ()
    output_max: int = -1
    ended: tuple[SequenceEnd, ...] = ()
    width: int = 0
    media: RequestMedia = RequestMedia()
    adapter: str = ""
    hidden_states: bool = False
    routed_experts: bool = False
    without_details: tuple[int, int] = (0, 0)

    def brought(self) -> Iterator[memoryview]:
        """The tokens that each sequence brings along, as bytes of int32."""
        return brought_tokens(self.output, self.rows)

    @property
    def constrained(self) -> bool:
        """No other engine continues such a sequence exactly."""
        return is_constrained(self.sampling)

    def inexact(self, can: Capabilities | None) -> bool:
        """Whether another engine of these capabilities does not continue such a sequence exactly."""
        others = self.media.needs.keys() & {"video", "audio"}
        kept = can is not None and IMAGE_IDS in can.features and not others
        return self.constrained or (bool(self.media.media) and not kept)


class GenerateOperation(Operation[GenerateWork]):
    """Prompts, continued."""

    name = "generate"

    def open(self, message: Generate, frames: Sequence[Buffer]) -> GenerateWork:
        sampling = message.sampling
        check_sampling(sampling)
        specs = message.frames
        prompts, tokens, longest, max_id, _, text = read_rows(specs[:2], frames[:2], (ITEMS,), "a request to generate")
        rows = prompts * message.n
        if prompts > MAX_SEQUENCES:
            raise bad("items", f"items: {prompts} prompts; at most {MAX_SEQUENCES}", str(MAX_SEQUENCES))
        if message.n < 1 or rows > MAX_SEQUENCES:
            most = str(MAX_SEQUENCES // prompts)
            raise bad("n", f"n: {message.n} for {prompts} prompts; 1 to {most}", most)
        if not 1 <= message.credit <= MAX_CREDIT:
            raise bad("credit", f"credit: {message.credit} is outside 1..{MAX_CREDIT}", str(MAX_CREDIT))
        if not 0 <= message.top_logprobs <= MAX_TOP_LOGPROBS or (message.top_logprobs and not message.logprobs):
            text = f"top_logprobs: {message.top_logprobs}; 0 to {MAX_TOP_LOGPROBS}, and only with logprobs"
            raise bad("top_logprobs", text, str(MAX_TOP_LOGPROBS))
        media = RequestMedia()
        if message.media:
            media = read_media(message.media, specs[2:][-2:], frames[2:][-2:], prompts)
            specs, frames = specs[:-2], frames[:-2]
            if message.prompt_logprobs:
                raise bad("prompt_logprobs", "prompt_logprobs: given with media, whose tokens have none; false", "")
        if message.hidden_states and sampling.stop:
            # SGLang keeps tokens back that may begin a stop string, and then gives one hidden state for several tokens.
            raise bad("sampling.stop", "sampling.stop: given with hidden_states; use stop_token_ids or stop_regex", "")
        if message.routed_experts and message.stream:
            raise bad(
                "routed_experts", "routed_experts: given with stream; a request without stream has them in its answer", "false"
            )
        if message.routed_experts and message.media:
            raise bad("routed_experts", "routed_experts: given with media, whose tokens have none; false", "false")
        output = _read_output(specs[2:], frames[2:], rows) if len(frames) > 2 or len(specs) > 2 else ()
        _check_ended(message.ended, output, rows, sampling.max_new_tokens)
        nbytes = sum(map(len, (*frames, *media.frames)))
        digest = hash(
            (
                self.name, message.group, message.n, msgspec.msgpack.encode(sampling), message.stream, message.logprobs,
                message.top_logprobs, message.prompt_logprobs, message.partial, message.min_version, message.version,
                message.hidden_states, message.routed_experts, message.adapter, tuple(message.media), *media.frames,
                *frames[:2],
            )
        )  # fmt: skip
        answer = RESULT_BYTES + rows * (SEQUENCE_BYTES + ELEMENT_BYTES * message.columns)
        answer += ELEMENT_BYTES * message.prompt_columns
        # Its tokens are kept twice for a moment: as they came, and in the answer.
        held = REQUEST_BYTES + LABEL_BYTES * message.values + nbytes + 2 * answer
        if text:
            held += ELEMENT_BYTES * (tokens + prompts)  # a text becomes at most one id for each byte
        return GenerateWork(
            self, _SIGNATURE, message.group, rows, tokens, longest, max_id, text, nbytes, digest,
            Part(specs[:2], operation=self.name), tuple(frames[:2]), values=message.values,
            charge=None if message.hidden_states or message.routed_experts else (answer, held),
            without_details=(answer, held), n=message.n, sampling=sampling, stream=message.stream, credit=message.credit,
            logprobs=message.logprobs, top_logprobs=message.top_logprobs, prompt_logprobs=message.prompt_logprobs,
            width=message.width, partial=message.partial, output=output, output_max=_largest(output),
            ended=tuple(message.ended), hidden_states=message.hidden_states, routed_experts=message.routed_experts,
            media=media,
            adapter=message.adapter,
        )  # fmt: skip

    def refuse(self, work: GenerateWork, can: Capabilities) -> WireError | None:
        sampling = work.sampling
        for name in ("stop_token_ids", "logit_bias", *MASKS):
            largest = max(map(int, getattr(sampling, name) or ()), default=-1)
            if largest >= can.vocab:
                field = f"sampling.{name}"
                return bad(field, f"{field}: token id {largest} is outside the vocabulary of {can.vocab}", str(can.vocab))
        if wrong := _missing_feature(sampling, can) or _untaken_media(work.media, can):
            return wrong
        if work.adapter and work.adapter not in can.adapters:
            names = ", ".join(can.adapters)
            return bad("adapter", f"adapter: {work.adapter!r}; the workers of this group have {names or 'no adapters'}", names)
        if work.top_logprobs > can.vocab:
            text = f"top_logprobs: {work.top_logprobs}; the vocabulary has {can.vocab} tokens"
            return bad("top_logprobs", text, str(can.vocab))
        if wrong := _missing_details(work, can):
            return wrong
        if work.output_max >= can.vocab:
            return bad("output", f"output: token id {work.output_max} is outside the vocabulary of {can.vocab}", str(can.vocab))
        if wrong := refuse_ids(work, can):
            return wrong
        most = min(can.longest_sequence, can.most_sequence_tokens) - sampling.max_new_tokens
        if not work.text and work.longest > most:
            prompt = int(np.argmax(np.frombuffer(work.frames[1], np.uint32)))
            text = f"items[{prompt}]: {work.longest} tokens, and max_new_tokens = {sampling.max_new_tokens}"
            limit = str(most + sampling.max_new_tokens)
            return bad(f"items[{prompt}]", f"{text}; at most {limit} together", limit)
        return None

    def outputs(self, work: GenerateWork, can: Capabilities | None) -> Sequence[tuple[str, int]]:
        tokens = work.sampling.max_new_tokens
        output = ("output", tokens * (1 + work.width))
        if not work.hidden_states:
            return (output,)
        return output, ("hidden_states", tokens * ((0 if can is None else can.hidden) or UNKNOWN_HIDDEN))

    def knows_outputs(self, work: GenerateWork, can: Capabilities | None) -> bool:
        if can is None:
            return not (work.hidden_states or work.routed_experts)
        return not (work.hidden_states and not can.hidden) and not (work.routed_experts and not can.experts[0])

    def charge(self, work: GenerateWork, can: Capabilities | None) -> tuple[int, int]:
        answer, held = work.without_details
        more = ELEMENT_BYTES * work.rows * sum(columns for name, columns in self.outputs(work, can) if name != "output")
        if work.routed_experts:
            layers, k = (0, 0) if can is None else can.experts
            tokens = work.n * work.tokens + work.rows * work.sampling.max_new_tokens
            more += EXPERT_BYTES * tokens * (layers * k or UNKNOWN_EXPERTS)
        return answer + more, held + 2 * more

    def tokenize(self, work: GenerateWork, task: TaskId) -> Tokenize:
        return Tokenize(task, work.part.frames, operation=self.name)


def _missing_details(work: GenerateWork, can: Capabilities) -> WireError | None:
    if work.hidden_states and not can.hidden:
        text = "hidden_states: the workers of this group return none; SGLang needs the option enable_return_hidden_states"
        return bad("hidden_states", f"{text}, and neither speculative decoding nor pp_size", "")
    if work.routed_experts and not can.experts[0]:
        text = "routed_experts: the workers of this group return none; SGLang needs a model with experts and the option"
        return bad("routed_experts", f"{text} enable_return_routed_experts, and neither speculative decoding nor pp_size", "")
    return None


def _missing_feature(sampling: Sampling, can: Capabilities) -> WireError | None:
    for name, feature in FEATURES.items():
        if getattr(sampling, name) and feature not in can.features:
            return bad(f"sampling.{name}", f"sampling.{name}: the workers of this group have no {feature}", "")
    if len(set(sampling.disallowed_token_ids or ())) >= can.vocab:
        text = f"sampling.disallowed_token_ids: all {can.vocab} tokens of the vocabulary; at least one is left"
        return bad("sampling.disallowed_token_ids", text, str(can.vocab - 1))
    return None


def _untaken_media(media: RequestMedia, can: Capabilities) -> WireError | None:
    for feature, at in media.needs.items():
        if feature not in can.features:
            field = f"media[{at}]"
            why = _UNTAKEN.get(feature, f"the workers of this group take no {feature}")
            return bad(field, f"{field}: {why}", "")
    return None


def _read_output(specs: Sequence[FrameSpec], frames: Sequence[Buffer], rows: int) -> tuple[Buffer, ...]:
    """The frames of tokens that a request brings along, for so many sequences."""
    check_frames(specs, frames)
    names = tuple(spec.name for spec in specs)
    if names != _OUTPUT or [spec.dtype for spec in specs] != ["int32", "uint32"] or any(len(s.shape) != 1 for s in specs):
        got = msgspec.to_builtins(specs)
        text = f"frames: {got} after the prompts; none, or output int32 [tokens] and output_lengths uint32 [sequences]"
        raise WireError("malformed", text, field="frames")
    lengths = np.frombuffer(frames[1], np.uint32)
    if len(lengths) != rows:
        raise WireError("malformed", f"output_lengths: {len(lengths)} for {rows} sequences", field="output_lengths")
    total = int(lengths.sum(dtype=np.int64))
    if total != len(frames[0]) // 4:
        text = f"output_lengths: sum {total}; frame 'output' has {len(frames[0]) // 4}"
        raise WireError("malformed", text, field="output_lengths")
    ids = np.frombuffer(frames[0], np.int32)
    if ids.size and int(ids.min()) < 0:
        at = int(ids.argmin())
        raise bad(f"output[{at}]", f"output[{at}]: token id {int(ids[at])} is negative", "0")
    return tuple(frames)


def _largest(output: tuple[Buffer, ...]) -> int:
    return int(np.frombuffer(output[0], np.int32).max()) if output and len(output[0]) else -1


def _check_ended(ended: Sequence[SequenceEnd], output: tuple[Buffer, ...], rows: int, most: int) -> None:
    """`ended` names sequences of the request, once each; all others have room for one more token."""
    known: set[int] = set()
    for at, end in enumerate(ended):
        if not 0 <= end.sequence < rows or end.sequence in known:
            raise bad(
                f"ended[{at}]", f"ended[{at}]: sequence {end.sequence}; each of 0..{rows - 1} once at most", str(rows - 1)
            )
        if isinstance(end.matched, str) and (size := len(end.matched.encode())) > MAX_MATCHED:
            text = f"ended[{at}]: matched has {size} bytes; at most {MAX_MATCHED}"
            raise bad(f"ended[{at}]", text, str(MAX_MATCHED))
        known.add(end.sequence)
    lengths = np.frombuffer(output[1], np.uint32) if output else np.zeros(0, np.uint32)
    for sequence in np.flatnonzero(lengths >= most).tolist():
        if int(lengths[sequence]) > most or sequence not in known:
            field = f"output_lengths[{sequence}]"
            raise bad(field, f"{field}: {lengths[sequence]} tokens; fewer than max_new_tokens = {most}", str(most - 1))


GENERATE = GenerateOperation()
