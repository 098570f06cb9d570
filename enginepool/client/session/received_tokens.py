"""What the client has of one stream: the tokens of its sequences, kept until the final answer.

So the request can be sent again, after a lost link or to another coordinator, with the tokens that it has. Positions are those
of the protocol: in the output of a sequence, and the tokens that the caller's request brought along come first.
"""

from array import array
from collections.abc import Sequence

import msgspec

from enginepool.client.session.events import StreamPart
from enginepool.protocol.errors import WireError
from enginepool.protocol.frames import Buffer
from enginepool.protocol.generated import (
    AnsweredSequence,
    GeneratedSequence,
    brought_tokens,
    read_generated,
    read_prompts,
    write_generated,
)
from enginepool.protocol.messages import FrameSpec, Generate, Generated, Run, SequenceEnd
from enginepool.protocol.sampling import is_constrained


class ReceivedTokens:
    """The sequences of one stream, and how many of their tokens the caller has taken."""

    def __init__(self, request: Generate, frames: Sequence[Buffer]) -> None:
        self._request = request
        self._frames = frames
        self._most = request.sampling.max_new_tokens
        self._constrained = is_constrained(request.sampling) or bool(request.media)
        #: the last ones of its frames
        self._media = 2 if request.media else 0
        rows = request.frames[1].shape[0] * request.n
        self.sequences = [GeneratedSequence(tokens) for tokens in brought_tokens(frames[2 : len(frames) - self._media], rows)]
        for end in request.ended:
            self.sequences[end.sequence].end = end
        #: bytes of a hidden state; 0: none has arrived
        self._row = 0
        #: by the number of a prompt: the columns of its tokens
        self.prompts: dict[int, Buffer] = {}
        #: tokens that arrived, and that the caller has taken, since the request was first sent; taken <= received
        self.received = self.taken = 0
        #: tokens that had arrived when the request was last sent: the coordinator counts from there
        self._base = 0
        #: tokens that the coordinator takes for taken
        self._said = 0

    # --- tokens --------------------------------------------------------------------------------------------------------

    def run(self, run: Run, tokens: Buffer, logprobs: Buffer, hidden_states: Buffer = b"") -> StreamPart | None:
        """The tokens of `run`, as bytes. None: they had all arrived before.

        Raises:
            WireError: no coordinator that holds to the protocol could have sent them.
        """
        sequence = self._sequence(run.sequence)
        has = len(sequence.tokens)
        old = has - run.at
        if old < 0:
            raise _malformed(run.id, f"sequence {run.sequence}: tokens from position {run.at} on, after {has}")
        if run.at + run.count > self._most:
            text = f"sequence {run.sequence}: {run.at + run.count} tokens, of max_new_tokens = {self._most}"
            raise _malformed(run.id, text)
        if old >= run.count:
            return None
        if sequence.end is not None:
            raise _malformed(run.id, f"sequence {run.sequence}: tokens after its end")
        width = 4 * self._request.width
        if width and len(logprobs) != width * run.count:
            raise _malformed(run.id, f"sequence {run.sequence}: tokens without their logprobs")
        new = bytes(tokens[4 * old :])
        chances = bytes(logprobs[width * old :]) if width else b""
        states = self._states(run, hidden_states, old) if self._request.hidden_states else b""
        sequence.extend(new, chances, run.version, states)
        self.received += run.count - old
        return StreamPart(run.id, run.sequence, new, chances, run.version, hidden_states=states)

    def _states(self, run: Run, hidden_states: Buffer, old: int) -> bytes:
        """The hidden states of the tokens of `run`, of which the first `old` had arrived before. Raises WireError."""
        row = len(hidden_states) // run.count
        if not row or row != (self._row or row):
            raise _malformed(run.id, f"sequence {run.sequence}: tokens without their hidden states")
        self._row = row
        return bytes(hidden_states[row * old :])

    def prompt(self, id_: int, number: int, width: int, columns: Buffer) -> None:
        """The log-probabilities of a prompt, with so many elements for each of its tokens. Raises WireError."""
        if width != self._request.prompt_width or not 0 <= number < self._request.frames[1].shape[0]:
            raise _malformed(id_, f"log-probabilities of prompt {number}")
        if number not in self.prompts or not self._has_begun(number):
            self.prompts[number] = bytes(columns)

    def _has_begun(self, number: int) -> bool:
        """Whether tokens of a prompt arrived. Its log-probabilities are by the weights of the first one: those of another
        coordinator, which continues it, do not replace them."""
        n = self._request.n
        return any(sequence.spans for sequence in self.sequences[number * n : (number + 1) * n])

    def ended(self, id_: int, end: SequenceEnd) -> StreamPart | None:
        """A sequence has ended. None: that was known. Raises WireError."""
        sequence = self._sequence(end.sequence)
        if sequence.end is not None:
            return None
        sequence.end = end
        return StreamPart(id_, end.sequence, version=sequence.spans[-1][0] if sequence.spans else 0, end=end)

    def _sequence(self, number: int) -> GeneratedSequence:
        if not 0 <= number < len(self.sequences):
            raise _malformed(self._request.id, f"sequence {number} of {len(self.sequences)}")
        return self.sequences[number]

    # --- credit --------------------------------------------------------------------------------------------------------

    def take(self, taken: int, *, told: bool) -> int | None:
        """The caller has taken so many tokens in all. Returns what the coordinator is to be told, once that is half of the
        credit, and only if it can be `told`."""
        self.taken = min(max(taken, self.taken), self.received)
        if not told or self.taken - self._said < max(self._request.credit // 2, 1):
            return None
        self._said = self.taken
        return self.taken - self._base

    @property
    def waits(self) -> bool:
        """The coordinator may be waiting for credit: the caller has tokens to take."""
        return self.taken < self.received

    # --- sending again -------------------------------------------------------------------------------------------------

    def message(self) -> tuple[Generate, Sequence[Buffer]]:
        """The request, with the tokens that arrived. A coordinator takes all of them for taken."""
        self._base = self._said = self.received
        if not self.received and all(sequence.end is None for sequence in self.sequences):
            return self._request, self._frames
        output = b"".join(memoryview(sequence.tokens).cast("B") for sequence in self.sequences)
        lengths = array("I", [len(sequence.tokens) for sequence in self.sequences])
        ended = [end for number in range(len(lengths)) if (end := self._end(number)) is not None]
        specs = [
            *self._request.frames[:2],
            FrameSpec("output", "int32", (len(output) // 4,)),
            FrameSpec("output_lengths", "uint32", (len(lengths),)),
            *self._request.frames[len(self._frames) - self._media :],
        ]
        frames = (*self._frames[:2], output, lengths.tobytes(), *self._frames[len(self._frames) - self._media :])
        return msgspec.structs.replace(self._request, frames=specs, ended=ended), frames

    def _end(self, number: int) -> SequenceEnd | None:
        """The end of a sequence, as the request says it when it is sent again. None: it goes on."""
        sequence = self.sequences[number]
        if sequence.end is None and len(sequence.tokens) >= self._most:
            return SequenceEnd(number, "length")  # it has all its tokens; only its end was lost
        if sequence.end is None and sequence.spans and (self._request.partial or self._constrained):
            # A coordinator that runs the sequence goes on with it. Another one could not do so exactly.
            return SequenceEnd(number, "interrupted")
        return sequence.end

    # --- the final answer ----------------------------------------------------------------------------------------------

    def finish(self, answer: Generated, frames: Sequence[Buffer]) -> tuple[list[StreamPart], Generated, Sequence[Buffer]]:
        """The parts that are missing here, and the whole answer: from where the caller's request ended.

        Raises:
            WireError: the answer does not continue what arrived.
        """
        parts: list[StreamPart] = []
        whole: list[AnsweredSequence] = []
        kept = {number: columns for number, columns in self.prompts.items() if self._has_begun(number)}
        rests = read_generated(answer, frames, len(self.sequences), self._request)
        for number, (rest, sequence) in enumerate(zip(rests, self.sequences, strict=True)):
            has = len(sequence.tokens)
            if not sequence.start <= rest.start <= has <= rest.stop or (sequence.end is not None and has < rest.stop):
                text = f"sequence {number}: tokens {rest.start} to {rest.stop} in the final answer, after {has} tokens"
                raise _malformed(answer.id, text)
            parts += self._missing(answer.id, number, rest)
            whole.append(sequence.answered(rest.end))
        prompts = self.prompts | read_prompts(answer, frames, self._request) | kept
        starts = [sequence.start for sequence in self.sequences]
        if answer.workers and not answer.places and starts != [rest.start for rest in rests]:
            # Its first worker generated all of the rest; of the tokens before that nothing is known.
            places = [[(0, rest.start)] if rest.stop > rest.start else [] for rest in rests]
            answer = msgspec.structs.replace(answer, places=places)
        asked = self._request  # no stream has routed experts
        return parts, *write_generated(
            answer, whole, asked.logprobs, asked.top_logprobs, prompts, hidden_states=asked.hidden_states
        )

    def _missing(self, id_: int, number: int, rest: AnsweredSequence) -> list[StreamPart]:
        """The parts of a sequence that only the final answer has. They are appended to it."""
        parts: list[StreamPart] = []
        first = rest.start
        for version, count in rest.spans:
            begin, width = first - rest.start, 4 * self._request.width
            tokens = rest.tokens[4 * begin : 4 * (begin + count)]
            logprobs = rest.logprobs[width * begin : width * (begin + count)]
            row = len(rest.hidden_states) // max(rest.stop - rest.start, 1)
            states = rest.hidden_states[row * begin : row * (begin + count)]
            part = self.run(Run(id_, number, first, count, version), tokens, logprobs, states)
            first += count
            if part is not None:
                parts.append(part)
        if (part := self.ended(id_, rest.end)) is not None:
            parts.append(msgspec.structs.replace(parts.pop(), end=part.end) if parts else part)
        return parts


def _malformed(id_: int, what: str) -> WireError:
    return WireError("malformed", f"request {id_}: the coordinator sent an invalid message: {what}", field="frames")
