"""The streams of a client's session: their tokens as they arrive, and the credit that is given for them.

Part of the pure machine in `machine.py`. A stream is a request like all others, which `pending_requests.py` sends, and sends
again; what arrived of it is its `ReceivedTokens`.
"""

from collections.abc import Sequence

import msgspec

from enginepool.client.session.events import Answer, Fail, SendMessage, SessionEffect, StreamPart, TokensTaken
from enginepool.client.session.pending_requests import PendingRequests
from enginepool.client.session.received_tokens import ReceivedTokens
from enginepool.protocol.errors import WireError
from enginepool.protocol.frames import Buffer
from enginepool.protocol.generated import hidden_size, prompt_top, read_columns, read_hidden, read_prompt_columns
from enginepool.protocol.messages import Cancel, Credit, ErrorReply, Generated, SequenceEnd, Tokens


class Streams:
    """The requests among `calls` that are streams."""

    def __init__(self, calls: PendingRequests) -> None:
        self._calls = calls

    def taken(self, event: TokensTaken, out: list[SessionEffect]) -> None:
        """The caller has taken tokens. On a lost link the request says it, when it is sent again."""
        call = self._calls.by_id.get(event.id)
        if call is None or call.stream is None or call.place == "cancelling":
            return
        taken = call.stream.take(event.taken, told=call.place == "sent")
        if taken is not None:
            out.append(SendMessage(Credit(event.id, taken)))

    def received(self, message: Tokens, frames: Sequence[Buffer], now: float, out: list[SessionEffect]) -> None:
        """Tokens of streams arrived; those of requests that were answered or taken back are dropped."""
        columns, top = read_columns(message.frames, frames)
        tokens, logprobs, width = memoryview(frames[0]), memoryview(columns), 1 + 2 * top
        states, hidden = read_hidden(message.frames, frames), hidden_size(message.frames) or 0
        if message.prompts:
            self._prompts(message, memoryview(read_prompt_columns(message.frames, frames)).cast("B"), now, out)
        parts: dict[tuple[int, int], StreamPart] = {}
        end = 0
        for run in message.runs:
            first, end = end, end + 4 * run.count
            if (stream := self._stream(run.id, now)) is not None:
                try:
                    chances, hidden_states = logprobs[width * first : width * end], states[hidden * first : hidden * end]
                    part = stream.run(run, tokens[first:end], chances, hidden_states)
                except WireError as error:
                    self._fail(run.id, error, now, out)
                    continue
                if part is not None:
                    if earlier := parts.pop((run.id, run.sequence), None):
                        out.append(earlier)
                    parts[run.id, run.sequence] = part
        for one in message.ended:
            if (stream := self._stream(one.id, now)) is not None:
                try:
                    part = stream.ended(one.id, SequenceEnd(one.sequence, one.reason, one.matched))
                except WireError as error:
                    self._fail(one.id, error, now, out)
                    continue
                if part is not None:
                    tokens_of = parts.get((one.id, one.sequence), part)
                    parts[one.id, one.sequence] = msgspec.structs.replace(tokens_of, end=part.end)
        out += parts.values()

    def _prompts(self, message: Tokens, columns: memoryview, now: float, out: list[SessionEffect]) -> None:
        """The log-probabilities of prompts."""
        end, width = 0, 1 + 2 * prompt_top(message.frames)
        for id_, number, count in message.prompts:
            first, end = end, end + 4 * width * count
            if (stream := self._stream(id_, now)) is not None:
                try:
                    stream.prompt(id_, number, width, columns[first:end])
                except WireError as error:
                    self._fail(id_, error, now, out)

    def finished(self, message: Generated, frames: Sequence[Buffer], now: float, out: list[SessionEffect]) -> Answer | Fail:
        """The final answer to a request: of a stream, after the parts that are still missing, the whole."""
        if (stream := self._stream(message.id, now)) is None:
            return Answer(message, frames)
        try:
            parts, whole, frames = stream.finish(message, frames)
        except WireError as error:
            return Fail(message.id, _failure(message.id, error))
        out += parts
        return Answer(whole, frames)

    def _stream(self, id_: int, now: float) -> ReceivedTokens | None:
        call = self._calls.by_id.get(id_)
        if call is None or call.stream is None or call.place == "cancelling":
            return None
        call.sent_at = now
        return call.stream

    def _fail(self, id_: int, error: WireError, now: float, out: list[SessionEffect]) -> None:
        """The coordinator sent what cannot be: the request ends here and there."""
        out.append(SendMessage(Cancel(id_)))
        self._calls.answered(id_, Fail(id_, _failure(id_, error)), now, out)


def _failure(id_: int, error: WireError) -> ErrorReply:
    return ErrorReply(error.code, error.message, id=id_, field=error.field)
