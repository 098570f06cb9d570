"""Answers that are kept until the client has acknowledged them, for a resend of the same request.

The cache is bounded in age and in bytes. When bytes run out, the client with the most bytes (within a factor of two) loses its
oldest answer, so that a client with large answers does not displace the answers of other clients. A request whose answer was
dropped runs again when its client resends it: execution is at least once, and the caller still gets one answer.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from enginepool.coordinator.core.events import Buffer
from enginepool.protocol.messages import Generated, Message

if TYPE_CHECKING:
    from enginepool.coordinator.core.request import Client

#: bytes that an answer costs besides its payload, measured
OVERHEAD = 1000
#: of an answer to `generate`, what each sequence costs besides, and each span and place of it, measured: objects of Python
SEQUENCE_OVERHEAD, ENTRY_OVERHEAD = 512, 140


class KeptReply(msgspec.Struct, frozen=True, gc=False):
    """A final answer, and the digest of its request's content."""

    at: float
    digest: int
    nbytes: int
    message: Message
    frames: Sequence[Buffer]


class _Shelf:
    """The answers of one client, oldest first."""

    __slots__ = ("kept", "listed", "nbytes", "top")

    def __init__(self) -> None:
        # Not a plain dict: to find its first entry, a dict skips the slots of all entries that were deleted before it.
        self.kept: OrderedDict[int, KeptReply] = OrderedDict()
        #: equals the sum over `kept`
        self.nbytes = 0
        #: the list by size that this client is in: at least the bit length of `nbytes`; 0: in none. It grows at once, and
        #: shrinks only during a search for a large client. So answers that are added and dropped seldom move a client between
        #: lists.
        self.listed = 0
        #: from this number of bytes on it belongs in a higher list: 1 << listed
        self.top = 1


class ReplyCache:
    """Final answers by client and request id."""

    __slots__ = ("_by_size", "_max_age", "_max_bytes", "_shelves", "nbytes")

    def __init__(self, max_age: float, max_bytes: int) -> None:
        #: of clients that have answers here, or had some and have not left
        self._shelves: dict[Client, _Shelf] = {}
        #: all clients that have answers here, and some that had, by `listed`
        self._by_size: list[OrderedDict[Client, None]] = [OrderedDict() for _ in range(64)]
        self._max_age = max_age
        self._max_bytes = max_bytes
        #: equals the sum over the kept; at most max_bytes
        self.nbytes = 0

    def __len__(self) -> int:
        return sum(len(shelf.kept) for shelf in self._shelves.values())

    def add(self, client: "Client", id: int, digest: int, message: Message, frames: Sequence[Buffer], now: float) -> None:
        """Keep the final answer of request `id`, unless it alone is too large."""
        nbytes = _overhead(message) + sum(map(len, frames))
        if nbytes > self._max_bytes:
            return
        shelf = self._shelves.get(client)
        if shelf is None:
            shelf = self._shelves[client] = _Shelf()
        shelf.kept[id] = KeptReply(now, digest, nbytes, message, frames)
        shelf.nbytes += nbytes
        self.nbytes += nbytes
        if shelf.nbytes >= shelf.top:
            self._list(client, shelf)
        if self.nbytes > self._max_bytes:
            self.shrink(self._max_bytes)

    def get(self, client: "Client", id: int) -> KeptReply | None:
        """The answer of request `id`, when it is still kept."""
        shelf = self._shelves.get(client)
        return None if shelf is None else shelf.kept.get(id)

    def any_of(self, client: "Client") -> bool:
        """Whether an answer of `client` is kept."""
        shelf = self._shelves.get(client)
        return shelf is not None and bool(shelf.kept)

    def drop(self, client: "Client", id: int) -> None:
        """Forget the answer of request `id`."""
        shelf = self._shelves.get(client)
        if shelf is not None and (kept := shelf.kept.pop(id, None)) is not None:
            shelf.nbytes -= kept.nbytes
            self.nbytes -= kept.nbytes

    def shrink(self, nbytes: int) -> None:
        """Forget answers until all together take at most `nbytes`."""
        while self.nbytes > nbytes:
            client = next(iter(next(clients for clients in reversed(self._by_size) if clients)))
            shelf = self._shelves[client]
            if shelf.nbytes < shelf.top >> 1:
                self._list(client, shelf)
            else:
                self.drop(client, next(iter(shelf.kept)))

    def expire(self, now: float) -> None:
        """Forget answers that are too old."""
        for client, shelf in list(self._shelves.items()):
            old: list[int] = []
            for id_, kept in shelf.kept.items():
                if now - kept.at < self._max_age:
                    break
                old.append(id_)
            for id_ in old:
                self.drop(client, id_)

    def drop_client(self, client: "Client") -> None:
        """Forget all answers of a client."""
        shelf = self._shelves.pop(client, None)
        if shelf is not None:
            self.nbytes -= shelf.nbytes
            shelf.nbytes = 0
            self._list(client, shelf)

    def _list(self, client: "Client", shelf: _Shelf) -> None:
        """Put a client into the list of its present size."""
        if shelf.listed:
            del self._by_size[shelf.listed][client]
        shelf.listed = size = shelf.nbytes.bit_length()
        shelf.top = 1 << size
        if size:
            self._by_size[size][client] = None


def _overhead(message: Message) -> int:
    """Bytes that an answer costs besides its payload."""
    if not isinstance(message, Generated):
        return OVERHEAD
    entries = sum(map(len, (*message.spans, *message.places, *message.adapters)))
    return OVERHEAD + SEQUENCE_OVERHEAD * len(message.ended) + ENTRY_OVERHEAD * entries
