"""New tokens, read off the scheduler's own messages: one for each step, with the tokens of all sequences. No SGLang here.

A scheduler that goes on with a load says so in its answer. What follows is held back until the weights are committed.

SGLang wakes the reader of each request for each of its tokens. With hundreds of sequences that costs the worker more time than
all the rest, so it is left to requests that end.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from enginepool.workers.sglang.patches.new_weights import WENT_ON

#: Takes the new tokens of a request, their log-probabilities if it asked for some, why it ended, as SGLang says it, how many
#: tokens of its prompt were in SGLang's prefix cache, and the message with the request's place in it. It never raises.
Take = Callable[[list[int], Sequence[float], dict[str, Any] | None, int, Any, int], None]


class SchedulerMessages:
    """Hands on tokens, and to SGLang the requests that end.

    Args:
        tm: SGLang's tokenizer manager, whose readers of answers are wrapped.
        forward_done: called after each message in which tokens were handed on.
    """

    def __init__(self, tm: Any, forward_done: Callable[[], None]) -> None:
        #: by the id of a request
        self.takers: dict[str, Take] = {}
        #: SGLang counts each token itself, where it is asked for metrics.
        self._whole = bool(getattr(tm, "enable_metrics", False))
        self._forward_done = forward_done
        #: messages of weights that are not committed; None: those are not
        self._held: list[Any] | None = None
        self._read: Callable[[Any], Awaitable[None]] = tm._handle_batch_output
        dispatch: Callable[[Any], None] = tm._result_dispatcher

        async def handle(message: Any) -> None:
            if self._held is None:
                await self._handle(message)
            else:
                self._held.append(message)

        def handle_other(message: Any) -> None:
            if getattr(message, "message", "") == WENT_ON and self._held is None:
                self._held = []
            dispatch(message)

        tm._handle_batch_output, tm._result_dispatcher = handle, handle_other

    async def release(self) -> None:
        """Hand on what is held back, and nothing is held back any more."""
        while self._held:
            await self._handle(self._held.pop(0))
        self._held = None

    async def _handle(self, message: Any) -> None:
        left = self._hand_on(message)
        if left or self._whole:
            await self._read(message if self._whole else _only(message, left))

    def _hand_on(self, message: Any) -> list[int]:
        """The places in `message` of requests that end, or are not ours."""
        left: list[int] = []
        reasons, output, cached = message.finished_reasons, message.output_ids, message.cached_tokens
        logprobs = message.output_token_logprobs_val or [()] * len(output)
        for place, rid in enumerate(message.rids):
            take = self.takers.get(rid)
            if take is None:
                left.append(place)
                continue
            reason = reasons[place]
            take(list(output[place]), logprobs[place] or (), reason, cached[place], message, place)
            if reason is not None:
                left.append(place)
        if len(left) < len(message.rids) or any(rid in self.takers for rid in message.rids):
            self._forward_done()  # it was not a forward of rows
        return left


def _only(message: Any, places: list[int]) -> Any:
    """`message` about the requests at these places alone. Its lists have an entry for each request, or are empty."""
    count = len(message.rids)
    message.time_stats = None  # a packed list, which is read for metrics alone
    if len(places) < count:
        for name, value in msgspec.structs.asdict(message).items():
            if isinstance(value, list) and len(value) == count:  # pyright: ignore[reportUnknownArgumentType]
                setattr(message, name, [value[place] for place in places])
    return message
