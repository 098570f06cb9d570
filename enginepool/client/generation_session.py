"""`Session`: a history of tokens that calls append to and continue, as the turns of a conversation do.

The history is held here, as token ids, and each call brings all of it along. So nothing is lost with a worker or a coordinator:
another worker computes the history again. The pool gives a call to the worker that had the call before, whose engine has the
history in its prefix cache, unless that worker has much more to do than the others.
"""

import asyncio
import time
import weakref
from array import array
from collections.abc import Callable
from typing import Unpack

import numpy as np

from enginepool.client.arguments import Ids, bad, check_group, check_int, check_timeout
from enginepool.client.generate import GenerateCalls, GenerateOptions, StreamOptions
from enginepool.client.generations import Generations, TokenChunk
from enginepool.client.payload import Ids32, token_ids
from enginepool.client.token_stream import TokenStream
from enginepool.errors import Interrupted, SessionBusy, SessionClosed, SessionExpired

#: options of `Pool.generate` that a session has for itself, and why
_OWN = {
    "group": "the session has its group",
    "n": "a session continues one sequence; branch() for more",
    "continue_from": "a session goes on after its history",
    **dict.fromkeys(("images", "videos", "audio"), "its history is token ids alone"),
}


class Session:
    """What `Pool.session` returns: a history of token ids, and calls that continue it. One call at a time; `branch` for others.

        async with pool.session() as session:
            answer = await session.generate(tokenizer.encode("Once upon a time"), max_new_tokens=64)
            async for chunk in session.stream(more_ids):
                ...

    A session that had no call for `idle` seconds drops its history: its calls raise SessionExpired from then on.
    """

    def __init__(self, pool: GenerateCalls, group: str, idle: float | None) -> None:
        """Not for callers: use `Pool.session`."""
        self._pool = pool
        self._group = group
        self._idle = idle
        self._tokens = array("i")
        self._turns: list[int] = []
        #: where the tokens begin that belong to the next turn
        self._next = 0
        #: a call of `generate` runs; the stream that runs, while its caller has it
        self._generates = False
        self._stream: Callable[[], TokenStream | None] = lambda: None
        self._used = time.monotonic()
        #: why it has ended; None: it has not
        self._ended: SessionClosed | None = None
        self._watched = False

    def __repr__(self) -> str:
        return f"<Session {len(self._turns)} turns, {len(self._tokens)} tokens{', ended' if self._ended else ''}>"

    @property
    def history(self) -> Ids32:
        """All tokens, int32 [tokens]: a copy. Raises SessionClosed."""
        self._must_live()
        return np.array(self._tokens, np.int32)

    @property
    def turns(self) -> tuple[int, ...]:
        """The positions in the history at which turns begin. A turn is the new tokens of a call, and then the tokens that the
        call generated. Raises SessionClosed."""
        self._must_live()
        return tuple(self._turns)

    async def generate(self, prompt: Ids = (), **options: Unpack[GenerateOptions]) -> Generations:
        """Append tokens to the history, continue it, and append what was generated.

        Args:
            prompt: token ids to append; none: the history goes on as it is. Text is tokenized by the caller, with the tokenizer
                of the model, and without its special tokens (`add_special_tokens=False`) after the first turn.
            options: those of `Pool.generate`, but for `group`, `n` and `continue_from`. `max_new_tokens` counts from here.

        Returns:
            As `Pool.generate`: one prompt, which is the whole history, and one sample. `usage.cached_tokens` says how much of
            the history was in the engine's prefix cache.

        Raises:
            Interrupted: the sequence was interrupted. The history has its tokens: `generate()` goes on after them.
            SessionExpired: there was no call for `idle` seconds. SessionClosed: `close` was called.
            SessionBusy: a call of this session runs.
            EnginepoolError: as in `Pool.generate`. The history is as it was before the call, also when it is cancelled.
        """
        new = self._begin(prompt, options)
        options["group"] = self._group
        self._generates = True
        try:
            answer = await self._pool.generate(self._whole(new), **options)
            self._append(new, answer[0][0].token_ids)
            return answer
        except Interrupted as error:
            self._append(new, error.generations[0][0].token_ids)
            raise
        finally:
            self._generates = False
            self._touch()

    def stream(self, prompt: Ids = (), **options: Unpack[StreamOptions]) -> TokenStream:
        """As `generate`, with the tokens as they come: `async for chunk in session.stream(ids)`.

        The history has what the caller has taken, also when the stream fails or is left before its end; before the first chunk
        it is as it was. The session is busy until the stream has ended, or is left.

        Returns:
            As `Pool.stream`.

        Raises:
            SessionExpired, SessionClosed, SessionBusy: as in `generate`. All else is raised by the loop.
        """
        new = self._begin(prompt, options)
        options["group"] = self._group
        stream = self._pool.stream(self._whole(new), **options)
        begun = False

        def take(chunk: TokenChunk | None) -> None:
            nonlocal begun
            if chunk is None:
                self._touch()
            elif begun:
                self._extend(chunk.token_ids)
            else:
                begun = True
                self._append(new, chunk.token_ids)

        stream.follow(take)
        self._stream = weakref.ref(stream)
        return stream

    def branch(self) -> "Session":
        """An independent session with the history of now: of a stream that runs, with the tokens that were taken.

        Raises:
            SessionExpired, SessionClosed: this session has no history any more.
        """
        self._must_live()
        other = Session(self._pool, self._group, self._idle)
        other._tokens, other._turns, other._next = self._tokens[:], self._turns[:], self._next
        other._touch()
        self._touch()
        return other

    def replace(self, at: int, tokens: Ids = ()) -> None:
        """Cut the history at a position, and append `tokens` there. `session.replace(session.turns[-1])` takes the last turn
        back.

        Args:
            at: tokens of the history that stay.
            tokens: token ids; the next call goes on after them, and they belong to its turn.

        Raises:
            BadRequest: `at` is not in the history, or `tokens` are not token ids.
            SessionExpired, SessionClosed, SessionBusy: as in `generate`.
        """
        self._must_be_free()
        at, new = check_int("at", at, 0, len(self._tokens)), token_ids("tokens", tokens)
        del self._tokens[at:]
        self._tokens.frombytes(new.tobytes())
        self._turns = [turn for turn in self._turns if turn < at]
        self._next = min(self._next, at)
        self._touch()

    def close(self) -> None:
        """Drop the history; a stream that runs is left. Idempotent."""
        self._end(SessionClosed("the session is closed"))
        if (stream := self._stream()) is not None:
            stream.cancel()

    async def __aenter__(self) -> "Session":
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    # --- calls -----------------------------------------------------------------------------------------------------------

    def _begin(self, prompt: Ids, options: GenerateOptions | StreamOptions) -> Ids32:
        """The new tokens of a call that may begin now."""
        for name, why in _OWN.items():
            if name in options:
                raise bad(name, f"{name}: not for a call of a session: {why}")
        new = token_ids("prompt", prompt)
        self._must_be_free()
        if not len(new) and not self._tokens:
            raise bad("prompt", "prompt: empty, and so is the history; at least one token")
        return new

    def _whole(self, new: Ids32) -> Ids32:
        return np.concatenate((np.array(self._tokens, np.int32), new))

    def _append(self, new: Ids32, generated: Ids32) -> None:
        """A turn: what the caller appended, and the first tokens that were generated after it."""
        if self._ended is None:
            self._turns.append(self._next)
            self._tokens.frombytes(new.tobytes())
            self._extend(generated)

    def _extend(self, generated: Ids32) -> None:
        """Further tokens of the last turn."""
        if self._ended is None:
            self._tokens.frombytes(generated.tobytes())
            self._next = len(self._tokens)

    def _must_live(self) -> None:
        self._expire()
        if self._ended is not None:
            raise type(self._ended)(*self._ended.args)

    def _must_be_free(self) -> None:
        self._must_live()
        if self._busy:
            raise SessionBusy("the session has a call that runs; wait for its end, leave its stream, or branch() before it")

    # --- its end ---------------------------------------------------------------------------------------------------------

    @property
    def _busy(self) -> bool:
        stream = self._stream()
        return self._generates or (stream is not None and not stream.over)

    def _touch(self) -> None:
        """It was used: it expires `idle` seconds from now."""
        self._used = time.monotonic()
        self._watch()

    def _watch(self) -> None:
        """Look when it may have expired. One timer at a time, which keeps no session alive."""
        if self._idle is not None and not self._watched and self._tokens:
            self._watched = True
            due = max(0.0, self._used + self._idle - time.monotonic())
            me: weakref.ref[Session] = weakref.ref(self)
            asyncio.get_running_loop().call_later(self._idle if self._busy else due, _look, me)

    def _looked(self) -> None:
        self._watched = False
        self._expire()
        self._watch()

    def _expire(self) -> None:
        if self._idle is not None and self._tokens and not self._busy and time.monotonic() - self._used >= self._idle:
            text = f"the session had no call for {self._idle:g} s; its history of {len(self._tokens)} tokens was dropped"
            self._end(SessionExpired(text))

    def _end(self, why: SessionClosed) -> None:
        if self._ended is None:
            self._ended, self._tokens, self._turns = why, array("i"), []


def _look(session: "weakref.ref[Session]") -> None:
    if (found := session()) is not None:
        found._looked()  # pyright: ignore[reportPrivateUsage]


class SessionCalls(GenerateCalls):
    """The calls of a pool that generate, and its sessions."""

    def session(self, *, group: str = "", idle: float | None = 600.0) -> Session:
        """A session: a history of token ids, to which each call appends. `async with pool.session() as session:` closes it.

        Args:
            group: as in `score`, for all its calls.
            idle: seconds without a call after which it drops its history; None: never.

        Raises:
            BadRequest: an argument is invalid; `field` names it.
        """
        return Session(self, check_group(group), check_timeout(idle, "idle"))
