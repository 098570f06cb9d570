"""Generated sequences: their tokens as they come, what a client holds the frames of `tokens` and `generated` to, and the
sequences of a final answer."""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from enginepool.protocol.columns import join_columns, split_columns
from enginepool.protocol.errors import WireError
from enginepool.protocol.frames import Buffer
from enginepool.protocol.messages import FrameSpec, Generate, Generated, SequenceEnd, Tokens

_HIDDEN, _EXPERTS = "hidden_states", "routed_experts"
_NONE = memoryview(b"")


class GeneratedSequence:
    """The output of one sequence, as far as it is known. Positions in it are those of the protocol: the tokens that the request
    brought along come first."""

    __slots__ = ("end", "hidden_states", "logprobs", "routed_experts", "spans", "start", "tokens")

    def __init__(self, brought: Buffer) -> None:
        self.tokens = array("i", bytes(brought))
        #: tokens that the request brought along
        self.start = len(self.tokens)
        #: of the tokens from `start` on; empty unless the request asks for them. With `top_logprobs`: their columns.
        self.logprobs = array("f")
        #: of the same tokens, as bytes of float32; empty unless the request asks for them
        self.hidden_states = bytearray()
        #: of all tokens of prompt and output but the last one, as bytes of int16; empty before its end, or unless asked for
        self.routed_experts: Buffer = b""
        #: [version, count] of the tokens from `start` on
        self.spans: list[list[int]] = []
        self.end: SequenceEnd | None = None

    def extend(self, tokens: Buffer, logprobs: Buffer, version: int, hidden_states: Buffer = b"") -> None:
        """Append tokens, as bytes, which weights of `version` computed; `logprobs` and `hidden_states` are empty where they are
        not asked for."""
        count = len(tokens) // 4
        self.tokens.frombytes(tokens)
        if logprobs:
            self.logprobs.frombytes(logprobs)
        if hidden_states:
            self.hidden_states += hidden_states
        spans = self.spans
        if spans and spans[-1][0] == version:
            spans[-1][1] += count
        else:
            spans.append([version, count])

    def answered(self, end: SequenceEnd) -> "AnsweredSequence":
        """What a final answer says of it."""
        spans = [(version, count) for version, count in self.spans]
        tokens, states = self.tokens[self.start :].tobytes(), memoryview(self.hidden_states)
        return AnsweredSequence(self.start, tokens, self.logprobs.tobytes(), spans, end, states, self.routed_experts)


class AnsweredSequence(NamedTuple):
    """What a final answer says of one sequence: its tokens from position `start` on, as bytes of int32; as many `logprobs`, as
    bytes of float32, or none (with `top_logprobs`: their columns); the spans of these tokens; its end; the hidden states of
    these tokens, as bytes of float32, or none; and the routed experts of prompt and output, as bytes of int16, or none."""

    start: int
    tokens: Buffer
    logprobs: Buffer
    spans: Sequence[tuple[int, int]]
    end: SequenceEnd
    hidden_states: Buffer = b""
    routed_experts: Buffer = b""

    @property
    def stop(self) -> int:
        """The position after its last token."""
        return self.start + len(self.tokens) // 4


def brought_tokens(output: Sequence[Buffer], rows: int) -> Iterator[memoryview]:
    """The tokens that a request brings along for each of its sequences, as bytes. `output`: its frames `output` and
    `output_lengths`, which fit each other, or none."""
    tokens, first = memoryview(output[0] if output else b"").cast("B"), 0
    for length in memoryview(output[1]).cast("B").cast("I") if output else [0] * rows:
        yield tokens[4 * first : 4 * (first + length)]
        first += length


def column_specs(total: int, logprobs: bool, top: int, hidden: int | None = None) -> list[FrameSpec]:
    """The frames of so many tokens, besides their ids. `hidden`: the size of their hidden states; None: they have none."""
    specs = [FrameSpec("logprobs", "float32", (total,))] if logprobs else []
    if top:
        specs += [FrameSpec("top_ids", "int32", (total, top)), FrameSpec("top_logprobs", "float32", (total, top))]
    if hidden is not None:
        specs.append(FrameSpec(_HIDDEN, "float32", (total, hidden)))
    return specs


def hidden_size(specs: Sequence[FrameSpec]) -> int | None:
    """The size of the hidden states in these frames; None: there are none."""
    return next((spec.shape[-1] for spec in specs if spec.name == _HIDDEN and len(spec.shape) == 2), None)


def prompt_specs(prompts: Sequence[Sequence[int]], top: int) -> list[FrameSpec]:
    """The frames with the log-probabilities of these prompts, the last number of each of which is its tokens."""
    specs = column_specs(sum(prompt[-1] for prompt in prompts), True, top) if prompts else []
    return [msgspec.structs.replace(spec, name=f"prompt_{spec.name}") for spec in specs]


def prompt_top(specs: Sequence[FrameSpec]) -> int:
    """The `top_logprobs` of the prompts in these frames."""
    return specs[-1].shape[-1] if specs and specs[-1].name == "prompt_top_logprobs" and specs[-1].shape else 0


def read_prompt_columns(specs: Sequence[FrameSpec], frames: Sequence[Buffer]) -> Buffer:
    """The columns of the tokens of prompts, in frames that fit their header."""
    top = prompt_top(specs)
    return join_columns(frames[-3], frames[-2], frames[-1], top) if top else frames[-1]


def expert_specs(specs: Sequence[FrameSpec], rows: Sequence[int]) -> list[FrameSpec]:
    """The frame of routed experts that these frames must have, of so many tokens of each of some sequences."""
    layers, k = expert_shape(specs, rows)
    if sum(rows):
        layers, k = max(layers, 1), max(k, 1)
    return [FrameSpec(_EXPERTS, "int16", (sum(rows) * layers, k))] if rows else []


def expert_shape(specs: Sequence[FrameSpec], rows: Sequence[int]) -> tuple[int, int]:
    """(layers, k) of the routed experts in these frames, of so many tokens of each of some sequences; 0: not known."""
    shape = next((spec.shape for spec in specs if spec.name == _EXPERTS and len(spec.shape) == 2), (0, 0))
    return shape[0] // max(sum(rows), 1), shape[1]


def check_columns(
    specs: Sequence[FrameSpec], total: int, prompts: Sequence[Sequence[int]], experts: Sequence[Sequence[int]] = ()
) -> None:
    """Hold the frames of `tokens` or `progress` to so many tokens, to prompts, and to routed experts.

    Raises:
        WireError: `malformed`: they are not as long, or not of these names and types.
    """
    for name, entries in (("prompts", prompts), ("experts", experts)):
        if min([entry[-1] for entry in entries], default=1) < 1:
            raise _malformed(name, f"{[list(entry) for entry in entries]}; each has at least 1 token")
    tokens, of_prompts = FrameSpec("tokens", "int32", (total,)), prompt_top(specs)
    last = [*expert_specs(specs, [rows for *_, rows in experts]), *prompt_specs(prompts, of_prompts)]
    top = specs[2].shape[-1] if len(specs) > 3 and len(specs[2].shape) == 2 else 0
    hidden = hidden_size(specs)
    for logprobs, k in ((False, 0), (True, 0), (True, top)):
        wanted = [tokens, *column_specs(total, logprobs, k, hidden), *last]
        if list(specs) == wanted and hidden != 0 and (of_prompts == k or not (total and prompts)):
            return
    raise _malformed("frames", f"{msgspec.to_builtins(specs)} for {total} tokens")


def check_tokens(message: Tokens) -> None:
    """Hold the frames of tokens to their runs.

    Raises:
        WireError: `malformed`: they are not as long, or not of these names and types.
    """
    counts = [run.count for run in message.runs]
    if min(counts, default=1) < 1:
        raise _malformed("runs", f"a run of {min(counts)} tokens; at least 1")
    check_columns(message.frames, sum(counts), message.prompts)


def read_columns(specs: Sequence[FrameSpec], frames: Sequence[Buffer]) -> tuple[Buffer, int]:
    """(columns, `top_logprobs`) of the frames of `tokens` or `progress`, which fit their header. The columns are the logprobs
    alone where `top_logprobs` is 0, and empty without logprobs. Hidden states are none of them: see `read_hidden`."""
    if len(specs) > 3 and specs[2].name == "top_ids":
        top = specs[2].shape[1]
        return join_columns(frames[1], frames[2], frames[3], top), top
    return frames[1] if len(specs) > 1 and specs[1].name == "logprobs" else b"", 0


def read_experts(specs: Sequence[FrameSpec], frames: Sequence[Buffer]) -> memoryview:
    """The routed experts in frames that fit their header, as bytes; empty: there are none."""
    return _named(_EXPERTS, specs, frames)


def read_hidden(specs: Sequence[FrameSpec], frames: Sequence[Buffer]) -> memoryview:
    """The hidden states in frames that fit their header, as bytes; empty: there are none."""
    return _named(_HIDDEN, specs, frames)


def _named(name: str, specs: Sequence[FrameSpec], frames: Sequence[Buffer]) -> memoryview:
    return next((memoryview(frame).cast("B") for spec, frame in zip(specs, frames, strict=True) if spec.name == name), _NONE)


def read_generated(answer: Generated, frames: Sequence[Buffer], rows: int, asked: Generate) -> list[AnsweredSequence]:
    """The sequences of an answer to a request for so many; its frames have the lengths that its header says.

    Raises:
        WireError: `malformed`: it does not answer such a request.
    """
    specs, logprobs, top = answer.frames, asked.logprobs, asked.top_logprobs
    total = specs[0].shape[0] if specs and specs[0].shape else 0
    hidden = (hidden_size(specs) or 0) if asked.hidden_states else None
    expected = [
        FrameSpec("output", "int32", (total,)), FrameSpec("output_lengths", "uint32", (rows,)),
        *column_specs(total, logprobs, top, hidden), *expert_specs(specs, answer.experts), *prompt_specs(answer.prompts, top),
    ]  # fmt: skip
    if len(answer.experts) != rows * asked.routed_experts or min(answer.experts, default=0) < 0:
        raise _malformed("experts", f"of {len(answer.experts)} sequences; {rows * asked.routed_experts} were asked for")
    if list(specs) != expected or (total and hidden == 0):
        raise _malformed("frames", f"{msgspec.to_builtins(specs)} instead of {msgspec.to_builtins(expected)}")
    lengths = memoryview(frames[1]).cast("B").cast("I")
    if sum(lengths) != total:
        raise _malformed("output_lengths", f"sum {sum(lengths)}; frame 'output' has {total}")
    starts = answer.starts or [0] * rows
    ends = {end.sequence: end for end in answer.ended}
    if len(starts) != rows or min(starts, default=0) < 0:
        raise _malformed("starts", f"{len(starts)} positions for {rows} sequences; one each, from 0 on")
    if len(answer.ended) != rows or ends.keys() != set(range(rows)):
        raise _malformed("ended", f"{len(answer.ended)} ends for {rows} sequences; one each")
    if len(answer.spans) != rows:
        raise _malformed("spans", f"of {len(answer.spans)} sequences; {rows} were asked for")
    if answer.places and len(answer.places) != rows:
        raise _malformed("places", f"of {len(answer.places)} sequences; {rows} were asked for")
    if answer.adapters and len(answer.adapters) != rows:
        raise _malformed("adapters", f"of {len(answer.adapters)} sequences; {rows} were asked for")
    columns = (join_columns(frames[2], frames[3], frames[4], top) if top else frames[2]) if logprobs else b""
    tokens, chances, width = memoryview(frames[0]).cast("B"), memoryview(columns).cast("B"), 4 * asked.width
    states, row = read_hidden(specs, frames), 4 * (hidden or 0)
    experts = _experts_of(answer, frames, rows)
    sequences: list[AnsweredSequence] = []
    first = 0
    for number, (start, length, spans) in enumerate(zip(starts, lengths, answer.spans, strict=True)):
        if sum(count for _, count in spans) != length or any(count < 1 for _, count in spans):
            raise _malformed(f"spans[{number}]", f"{spans} for {length} tokens")
        part = slice(4 * first, 4 * (first + length))
        here = chances[width * first : width * (first + length)]
        hidden_states = states[row * first : row * (first + length)]
        sequences.append(AnsweredSequence(start, tokens[part], here, spans, ends[number], hidden_states, experts[number]))
        first += length
    return sequences


def _experts_of(answer: Generated, frames: Sequence[Buffer], rows: int) -> list[memoryview]:
    """The routed experts of each sequence in an answer."""
    layers, k = expert_shape(answer.frames, answer.experts)
    data, found, end = read_experts(answer.frames, frames), list[memoryview](), 0
    for count in answer.experts or [0] * rows:
        first, end = end, end + 2 * layers * k * count
        found.append(data[first:end])
    return found


def read_prompts(answer: Generated, frames: Sequence[Buffer], asked: Generate) -> dict[int, Buffer]:
    """By the number of a prompt, the columns of its tokens in an answer whose frames `read_generated` has checked.

    Raises:
        WireError: `malformed`: it has none to this request.
    """
    numbers = [number for number, _ in answer.prompts]
    prompts = asked.frames[1].shape[0] if asked.prompt_logprobs else 0
    if len(set(numbers)) != len(numbers) or not set(numbers) <= set(range(prompts)) or any(n < 1 for _, n in answer.prompts):
        raise _malformed("prompts", f"{answer.prompts}; each of {prompts} prompts at most once, with its tokens")
    columns = memoryview(read_prompt_columns(answer.frames, frames) if numbers else b"").cast("B")
    found: dict[int, Buffer] = {}
    end = 0
    for number, count in answer.prompts:
        first, end = end, end + asked.prompt_width * 4 * count
        found[number] = columns[first:end]
    return found


def write_generated(
    answer: Generated, sequences: Sequence[AnsweredSequence], logprobs: bool, top: int, prompts: Mapping[int, Buffer],
    *, hidden_states: bool = False, experts: tuple[int, int] | None = None,
) -> tuple[Generated, Sequence[Buffer]]:  # fmt: skip
    """`answer` with these sequences and columns of prompts instead of its own, and its frames. Its version is the
    highest that computed one of their tokens; without tokens it stays what it was. `experts`: (layers, k) of routed experts;
    None: they were not asked for."""
    lengths = array("I", [len(sequence.tokens) // 4 for sequence in sequences])
    total = sum(lengths)
    frames: list[Buffer] = [b"".join(sequence.tokens for sequence in sequences), lengths.tobytes()]
    specs = [FrameSpec("output", "int32", (total,)), FrameSpec("output_lengths", "uint32", (len(lengths),))]
    if logprobs:
        frames += split_columns(b"".join(sequence.logprobs for sequence in sequences), top)
        specs += column_specs(total, logprobs, top)
    if hidden_states:
        frames.append(b"".join(sequence.hidden_states for sequence in sequences))
        specs += column_specs(total, False, 0, len(frames[-1]) // (4 * max(total, 1)))
    routed: list[int] = []
    if experts is not None:
        layers, k = experts
        frames.append(b"".join(sequence.routed_experts for sequence in sequences))
        routed = [len(sequence.routed_experts) // (2 * max(layers * k, 1)) for sequence in sequences]
        specs.append(FrameSpec(_EXPERTS, "int16", (sum(routed) * layers, k)))
    known = [(number, len(prompts[number]) // (4 * (1 + 2 * top))) for number in sorted(prompts)]
    if known:
        frames += split_columns(b"".join(prompts[number] for number, _ in known), top)
        specs += prompt_specs(known, top)
    starts = [sequence.start for sequence in sequences]
    whole = msgspec.structs.replace(
        answer,
        version=max([version for sequence in sequences for version, _ in sequence.spans], default=answer.version),
        ended=[sequence.end for sequence in sequences],
        spans=[list(sequence.spans) for sequence in sequences],
        starts=starts if any(starts) else [],
        frames=specs,
        prompts=known,
        experts=routed,
    )
    return whole, frames


def _malformed(field: str, what: str) -> WireError:
    return WireError("malformed", f"{field}: {what}", field=field)
