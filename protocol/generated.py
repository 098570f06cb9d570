"""Generated sequences: their tokens as they come, what a client holds the frames of `tokens` and `generated` to, and the
sequences of a final answer."""

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from enginepool.protocol.errors import WireError
from enginepool.protocol.frames import Buffer
from enginepool.protocol.messages import FrameSpec, Generated, SequenceEnd, Tokens


class GeneratedSequence:
    """The output of one sequence, as far as it is known. Positions in it are those of the protocol: the tokens that the request
    brought along come first."""

    __slots__ = ("end", "logprobs", "spans", "start", "tokens")

    def __init__(self, brought: Buffer) -> None:
        self.tokens = array("i", bytes(brought))
        #: tokens that the request brought along
        self.start = len(self.tokens)
        #: of the tokens from `start` on; empty unless the request asks for them
        self.logprobs = array("f")
        #: [version, count] of the tokens from `start` on
        self.spans: list[list[int]] = []
        self.end: SequenceEnd | None = None

    def extend(self, tokens: Buffer, logprobs: Buffer, version: int) -> None:
        """Append tokens, as bytes, which weights of `version` computed; `logprobs` is empty where they are not asked for."""
        count = len(tokens) // 4
        self.tokens.frombytes(tokens)
        self.logprobs.frombytes(logprobs)
        spans = self.spans
        if spans and spans[-1][0] == version:
            spans[-1][1] += count
        else:
            spans.append([version, count])

    def answered(self, end: SequenceEnd) -> "AnsweredSequence":
        """What a final answer says of it."""
        spans = [(version, count) for version, count in self.spans]
        return AnsweredSequence(self.start, self.tokens[self.start :].tobytes(), self.logprobs.tobytes(), spans, end)


class AnsweredSequence(NamedTuple):
    """What a final answer says of one sequence: its tokens from position `start` on, as bytes of int32; as many `logprobs`, as
    bytes of float32, or none; the spans of these tokens; and its end."""

    start: int
    tokens: Buffer
    logprobs: Buffer
    spans: Sequence[tuple[int, int]]
    end: SequenceEnd

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


def check_tokens(message: Tokens) -> None:
    """Hold the frames of tokens to their runs.

    Raises:
        WireError: `malformed`: they are not as long, or not of these names and types.
    """
    counts = [run.count for run in message.runs]
    if min(counts, default=1) < 1:
        raise _malformed("runs", f"a run of {min(counts)} tokens; at least 1")
    specs = [FrameSpec("tokens", "int32", (sum(counts),)), FrameSpec("logprobs", "float32", (sum(counts),))]
    if list(message.frames) not in (specs[:1], specs):
        raise _malformed("frames", f"{msgspec.to_builtins(message.frames)} for {sum(counts)} tokens")


def read_generated(answer: Generated, frames: Sequence[Buffer], rows: int, logprobs: bool) -> list[AnsweredSequence]:
    """The sequences of an answer to a request for so many; its frames have the lengths that its header says.

    Raises:
        WireError: `malformed`: it does not answer such a request.
    """
    specs = answer.frames
    total = specs[0].shape[0] if specs and specs[0].shape else 0
    expected = [FrameSpec("output", "int32", (total,)), FrameSpec("output_lengths", "uint32", (rows,))]
    if logprobs:
        expected.append(FrameSpec("logprobs", "float32", (total,)))
    if list(specs) != expected:
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
    tokens, chances = memoryview(frames[0]).cast("B"), memoryview(frames[2] if logprobs else b"").cast("B")
    sequences: list[AnsweredSequence] = []
    first = 0
    for number, (start, length, spans) in enumerate(zip(starts, lengths, answer.spans, strict=True)):
        if sum(count for _, count in spans) != length or any(count < 1 for _, count in spans):
            raise _malformed(f"spans[{number}]", f"{spans} for {length} tokens")
        part = slice(4 * first, 4 * (first + length))
        sequences.append(AnsweredSequence(start, tokens[part], chances[part], spans, ends[number]))
        first += length
    return sequences


def write_generated(
    answer: Generated, sequences: Sequence[AnsweredSequence], logprobs: bool
) -> tuple[Generated, Sequence[Buffer]]:
    """`answer` with these sequences instead of its own, and its frames. Its version is the highest that computed one of their
    tokens; without tokens it stays what it was."""
    lengths = array("I", [len(sequence.tokens) // 4 for sequence in sequences])
    total = sum(lengths)
    frames: list[Buffer] = [b"".join(sequence.tokens for sequence in sequences), lengths.tobytes()]
    specs = [FrameSpec("output", "int32", (total,)), FrameSpec("output_lengths", "uint32", (len(lengths),))]
    if logprobs:
        frames.append(b"".join(sequence.logprobs for sequence in sequences))
        specs.append(FrameSpec("logprobs", "float32", (total,)))
    starts = [sequence.start for sequence in sequences]
    whole = msgspec.structs.replace(
        answer,
        version=max([version for sequence in sequences for version, _ in sequence.spans], default=answer.version),
        ended=[sequence.end for sequence in sequences],
        spans=[list(sequence.spans) for sequence in sequences],
        starts=starts if any(starts) else [],
        frames=specs,
    )
    return whole, frames


def _malformed(field: str, what: str) -> WireError:
    return WireError("malformed", f"{field}: {what}", field=field)
