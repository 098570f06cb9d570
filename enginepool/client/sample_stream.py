"""A stream whose samples are taken whole, each as soon as it ends: for `Pool.rollout`.

A caller that takes every chunk pays for each with a turn of its loop and some arrays. Here tokens alone wake no one.
"""

from typing import Any

import numpy as np

from enginepool.client.generations import Generation, merged, read_arrays, read_states
from enginepool.client.session.events import Heard, StreamPart
from enginepool.client.token_stream import TokenStream
from enginepool.protocol.messages import Generate


class SampleStream(TokenStream):
    """A `TokenStream` that is read with `next_samples` in place of chunks.

    Attributes:
        version: the newest weights that computed a token of it.
    """

    def __init__(self, *args: Any) -> None:
        """Not for callers: `GenerateCalls.sample_stream` makes it."""
        super().__init__(*args)
        self.version = 0
        self._of_sample: list[list[StreamPart]] = [[] for _ in range(self._request.n)]
        self._running = set(range(self._request.n))
        self._ended: list[int] = []
        #: tokens that arrived, and those of them when the caller was last woken
        self._arrived = self._noted = 0
        self._woken = False

    async def next_samples(self) -> list[tuple[int, Generation]] | None:
        """The samples that ended since the last call, by number; none where newer weights compute the tokens now. None: all
        have ended, and `result()` has more of each.

        Raises:
            EnginepoolError: as `TokenStream.next_chunk`.
        """
        if not self._id and self._end is None:
            self._open()
        while not self._woken and self._end is None:
            self._heard.clear()
            await self._heard.wait()
        self._woken = False
        self._noted = self._arrived
        if self._end is None:
            self._connection.tokens_taken(self._id, self._arrived)
        ended, self._ended = self._ended, []
        if not ended and self._end is not None:
            self._finish()
            self._conclude()
            return None
        return [(number, sample_of(self._of_sample[number], self._request)) for number in ended]

    def first_versions(self) -> list[int | None]:
        """Of each sample that has not ended, the weights of its first token; None: it has none."""
        return [self._of_sample[number][0].version if self._of_sample[number] else None for number in self._running]

    def _hear(self, effect: Heard) -> None:
        if not isinstance(effect, StreamPart):
            super()._hear(effect)
            return
        self._of_sample[effect.sequence].append(effect)
        self._arrived += len(effect.tokens) // 4
        if effect.end is not None:
            self._running.discard(effect.sequence)
            if effect.end.reason != "interrupted":
                self._ended.append(effect.sequence)
        elif effect.version > self.version:
            self.version = effect.version
        elif self._arrived - self._noted < self._request.credit // 4:
            return  # tokens alone
        self._woken = True
        self._heard.set()


def sample_of(parts: list[StreamPart], request: Generate) -> Generation:
    """The whole sample of these parts, but for the names of its workers. The arrays are the caller's to change."""
    end = parts[-1].end
    assert end is not None
    some = [part for part in parts if len(part.tokens)]
    tokens = np.array(np.frombuffer(b"".join(part.tokens for part in some), np.int32))
    columns: Any = read_arrays(b"".join(part.logprobs for part in some), 0 if request.logprobs else None)
    if request.top_logprobs and some:
        columns = zip(*(read_arrays(part.logprobs, request.top_logprobs) for part in some), strict=True)
        columns = [np.concatenate(column) for column in columns]
    logprobs, top_ids, top_logprobs = columns
    states = read_states(b"".join(part.hidden_states for part in some), len(tokens)) if request.hidden_states else None
    spans = tuple(merged((part.version, len(part.tokens) // 4) for part in some))
    return Generation(tokens, logprobs, end.reason, end.matched, spans, top_ids, top_logprobs, (), states)
