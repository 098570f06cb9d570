"""Answers that are kept until the client has acknowledged them, for a resend of the same request.

Bounded in age and in bytes; the oldest go first. A client that asks again after that has its request run again: execution is
at least once, and the caller still gets one answer.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from enginepool.coordinator.events import Buffer
from enginepool.protocol.messages import Message

if TYPE_CHECKING:
    from enginepool.coordinator.state import Client

#: what an answer costs beside its payload, measured
OVERHEAD = 1000


class Kept(msgspec.Struct, frozen=True, gc=False):
    """A final answer, and what its request's content was."""

    at: float
    digest: int
    nbytes: int
    message: Message
    frames: Sequence[Buffer]


class Answers:
    """Final answers by client and request id, oldest first."""

    __slots__ = ("_ids", "_kept", "_max_age", "_max_bytes", "nbytes")

    def __init__(self, max_age: float, max_bytes: int) -> None:
        self._kept: OrderedDict[tuple[Client, int], Kept] = OrderedDict()
        #: the same by client, so that a client that leaves costs as much as it has; no client has an empty entry
        self._ids: dict[Client, dict[int, None]] = {}
        self._max_age = max_age
        self._max_bytes = max_bytes
        #: equals the sum over the kept; at most max_bytes
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, client: "Client", id: int, digest: int, message: Message, frames: Sequence[Buffer], now: float) -> None:
        """Keep the final answer of request `id`."""
        nbytes = OVERHEAD + sum(map(len, frames))
        self._kept[client, id] = Kept(now, digest, nbytes, message, frames)
        ids = self._ids.get(client)
        if ids is None:
            ids = self._ids[client] = {}
        ids[id] = None
        self.nbytes += nbytes
        while self.nbytes > self._max_bytes:
            self.drop(*next(iter(self._kept)))

    def get(self, client: "Client", id: int) -> Kept | None:
        """The answer of request `id`, when it is still kept."""
        return self._kept.get((client, id))

    def drop(self, client: "Client", id: int) -> None:
        """Forget the answer of request `id`."""
        kept = self._kept.pop((client, id), None)
        if kept is not None:
            self.nbytes -= kept.nbytes
            ids = self._ids[client]
            del ids[id]
            if not ids:
                del self._ids[client]

    def expire(self, now: float) -> None:
        """Forget answers that are too old."""
        kept = self._kept
        while kept:
            oldest = next(iter(kept))
            if now - kept[oldest].at < self._max_age:
                return
            self.drop(*oldest)

    def drop_client(self, client: "Client") -> None:
        """Forget all answers of a client."""
        for id_ in self._ids.pop(client, ()):
            self.nbytes -= self._kept.pop((client, id_)).nbytes

    def check(self) -> None:
        assert self.nbytes == sum(kept.nbytes for kept in self._kept.values()), self.nbytes
        assert self.nbytes <= self._max_bytes, self.nbytes
        assert {(client, id_) for client, ids in self._ids.items() for id_ in ids} == self._kept.keys(), self._ids
        assert all(self._ids.values()), "a client without answers is listed"
