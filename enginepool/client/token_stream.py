"""A generation whose tokens are taken as they arrive."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Generic, Self, TypeVar

import numpy as np

from enginepool.client.connection import Connection
from enginepool.client.facade import AsyncItems
from enginepool.client.generations import Continued, Generations, TokenChunk, read_arrays, read_generations, read_states
from enginepool.client.notices import Notices
from enginepool.client.session.events import Answer, Fail, Heard, StreamPart
from enginepool.errors import Malformed
from enginepool.protocol.frames import Buffer
from enginepool.protocol.messages import ErrorReply, Generate, Generated

T = TypeVar("T")


class ChunkIterator(Generic[T]):
    """What `async for` holds while it runs. An async generator would be closed some turns of the loop after a `break`."""

    def __init__(self, stream: AsyncItems[T, Any], loop: asyncio.AbstractEventLoop) -> None:
        self._stream = stream
        self._loop = loop

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        try:
            chunk = await self._stream.next_chunk()
        except BaseException:  # also when cancelled; raised again
            self._stream.cancel()
            raise
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    async def aclose(self) -> None:
        """The loop is left."""
        self._stream.cancel()

    def __del__(self) -> None:
        with suppress(RuntimeError):  # its loop is closed
            if asyncio._get_running_loop() is self._loop:
                self._stream.cancel()
            else:  # the garbage collector found it
                self._loop.call_soon_threadsafe(self._stream.cancel)


class TokenStream:
    """What `Pool.stream` returns. The request is sent when its first chunk is asked for.

        stream = pool.stream("Once upon a time")
        async for chunk in stream:
            print(tokenizer.decode(chunk.token_ids), end="")
        generations = await stream.result()

    Leaving the loop, by `break` or by an exception, takes the request back; `async with stream:` does it at the end of the
    block. The pool sends ahead of the caller at most `credit` tokens.
    """

    def __init__(
        self,
        connection: Connection,
        notices: Notices,
        request: Generate,
        frames: Sequence[Buffer],
        earlier: Continued,
        within: float | None,
        retry_busy: bool,
        names: Mapping[str, str],
    ) -> None:
        """Not for callers: use `Pool.stream`."""
        self._connection = connection
        self._notices = notices
        self._request, self._frames = request, frames
        self._earlier = earlier
        self._within, self._retry_busy, self._names = within, retry_busy, names
        self._id = 0
        self._parts: deque[StreamPart] = deque()
        self._end: Answer | Fail | None = None
        self._result: Generations | None = None
        #: tokens that the caller has taken
        self._taken = 0
        #: it has ended, or was left
        self.over = False
        self._follow: Callable[[TokenChunk | None], None] | None = None
        self._heard = asyncio.Event()

    def __aiter__(self) -> ChunkIterator[TokenChunk]:
        return ChunkIterator(self, asyncio.get_running_loop())

    async def next_chunk(self) -> TokenChunk | None:
        """The next tokens; None: all sequences have ended.

        Raises:
            EnginepoolError: the generation failed.
        """
        if not self._id and self._end is None:
            self._open()
        while not self._parts and self._end is None:
            self._heard.clear()
            await self._heard.wait()
        if not self._parts:
            self._finish()
            self._conclude()
            return None
        part = self._parts.popleft()
        self._taken += len(part.tokens) // 4
        if self._end is None:
            self._connection.tokens_taken(self._id, self._taken)
        request = self._request
        tokens = np.array(np.frombuffer(part.tokens, np.int32))
        logprobs, top_ids, top_logprobs = read_arrays(part.logprobs, request.top_logprobs if request.logprobs else None)
        states = read_states(part.hidden_states, len(tokens)) if request.hidden_states else None
        chunk = TokenChunk(
            part.sequence, tokens, logprobs, part.version, "" if part.end is None else part.end.reason,
            None if part.end is None else part.end.matched, top_ids, top_logprobs, states,
        )  # fmt: skip
        if self._follow is not None:
            self._follow(chunk)
        return chunk

    async def result(self) -> Generations:
        """All tokens of all sequences, once they have ended, as `Pool.generate` returns them. Chunks that were not taken are
        dropped.

        Raises:
            RequestCancelled: the loop over the chunks was left.
            EnginepoolError: as in `Pool.generate`.
        """
        try:
            while await self.next_chunk() is not None:
                continue
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self._conclude()

    def cancel(self) -> None:
        """Take the request back, unless all sequences have ended. Chunks that were not taken are dropped. Idempotent."""
        self._finish()
        if self._end is not None:
            return
        if self._id:
            self._connection.abandon(self._id)
        self._parts.clear()
        self._hear(Fail(self._id, ErrorReply("cancelled", "the stream was left before its end")))

    def follow(self, take: Callable[[TokenChunk | None], None]) -> None:
        """For a session: `take` is called with each chunk that the caller takes, and with None once it is over."""
        self._follow = take

    async def aclose(self) -> None:
        """As `cancel`."""
        self.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.cancel()

    def _finish(self) -> None:
        """It has ended, or its caller has left it: the session that follows it is told so, once."""
        self.over = True
        follow, self._follow = self._follow, None
        if follow is not None:
            follow(None)

    def _open(self) -> None:
        self._connection.now()
        if self._within is None:
            self._notices.begin()
        self._id = self._connection.open_stream(self._request, self._frames, self._within, self._retry_busy, self._hear)

    def _hear(self, effect: Heard) -> None:
        if isinstance(effect, StreamPart):
            self._parts.append(effect)
        elif isinstance(effect, Answer | Fail):
            self._end = effect
            if self._within is None and self._request.id:
                self._notices.end()
        self._heard.set()

    def _conclude(self) -> Generations:
        """The result; raises what ended the generation without one."""
        if self._result is None:
            end = self._end
            if isinstance(end, Fail):
                raise self._connection.error(end.failure, self._names)
            if end is None or not isinstance(end.message, Generated):
                raise Malformed("the answer is none to a request to generate", field="type")
            self._result = read_generations(self._request, self._earlier, end.message, end.frames)
        return self._result
