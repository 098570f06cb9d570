"""When a weight update that failed is tried again. Pure, but for the clock."""

from collections.abc import Callable

from enginepool.protocol.errors import CODES
from enginepool.protocol.messages import ErrorReply

#: seconds before the second attempt; before each further one it is twice as long, up to the last
_FIRST_S, _LAST_S = 0.5, 5.0


class Retries:
    """The attempts of one `publish`.

    Args:
        limit_s: no attempt begins later than this after the first failure; 0: there is one attempt.
        clock: seconds.
        next_version: each attempt takes the version after the committed one, so that another publisher's does not end it.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float], *, next_version: bool) -> None:
        self._limit_s, self._clock = limit_s, clock
        self._more = {"version_backwards"} if next_version else set[str]()
        self._until: float | None = None
        self._pause_s = _FIRST_S

    def again(self, failure: ErrorReply) -> float | None:
        """In how many seconds to try again after `failure`; None: not at all."""
        facts = CODES.get(failure.code)
        if failure.code not in self._more and (facts is None or not facts.retry):
            return None
        now = self._clock()
        self._until = now + self._limit_s if self._until is None else self._until
        pause_s = max(self._pause_s, (failure.retry_after_ms or 0) / 1000)
        if now + pause_s > self._until:
            return None
        self._pause_s = min(2 * self._pause_s, _LAST_S)
        return pause_s
