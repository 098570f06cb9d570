"""Live requests by priority: which of them a full queue sheds for a request of a higher priority. Pure.

Only requests that were never sent to an engine are shed: the newest of the lowest priority first, because it has waited least.
A request that was sent to an engine stays in its list until a search finds it there and removes it. So each request is found
once, and the cost of shedding does not grow with the queue.
"""

from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from enginepool.coordinator.core.request import Request

#: requests that one request displaces at most, which bounds the time of one `submit`
MOST = 4096


class AdmissionLevel:
    """The live requests of one priority."""

    __slots__ = ("nbytes", "requests", "rows")

    def __init__(self) -> None:
        #: sums over all live requests of this priority
        self.rows = 0
        self.nbytes = 0
        #: requests that were never sent to an engine, and some that were sent since; oldest first
        self.requests: dict[Request, None] = {}


class AdmissionLevels:
    """All live requests by priority. There are as many levels as priorities were ever in use, at most 2,001.

    A request enters its level where it is admitted and leaves it where it is released.
    """

    __slots__ = ("by_priority",)

    def __init__(self) -> None:
        self.by_priority: defaultdict[int, AdmissionLevel] = defaultdict(AdmissionLevel)

    def readmit(self, request: "Request") -> None:
        """Put a suspect back into its list: its text is harmless and no engine has its ids, so it may be shed again."""
        self.by_priority[request.priority].requests.setdefault(request)

    def recharge(self, request: "Request", more: int) -> None:
        """The charge of a live request changes by so many bytes."""
        self.by_priority[request.priority].nbytes += more

    def below(self, priority: int) -> tuple[int, int]:
        """(items, bytes) of the live requests of lower priorities."""
        rows = nbytes = 0
        for key, level in self.by_priority.items():
            if key < priority:
                rows += level.rows
                nbytes += level.nbytes
        return rows, nbytes

    def take(self, priority: int, rows: int, nbytes: int) -> list["Request"]:
        """Requests of lower priorities that together free so many items and bytes; none if even all of them free less.

        If `MOST` requests free less, these are returned: the next attempt of the same request then finds more room.
        """
        found: list[Request] = []
        for key in sorted(key for key in self.by_priority if key < priority):
            requests = self.by_priority[key].requests
            while requests and (rows > 0 or nbytes > 0) and len(found) < MOST:
                request, _ = requests.popitem()
                if _untouched(request):
                    found.append(request)
                    rows -= request.work.rows
                    nbytes -= request.held
        if (rows > 0 or nbytes > 0) and len(found) < MOST:
            for request in reversed(found):
                self.by_priority[request.priority].requests[request] = None
            return []
        return found


def _untouched(request: "Request") -> bool:
    """No part of it was ever sent to an engine; a tokenizer may have its text."""
    return not (request.started or request.suspect)
