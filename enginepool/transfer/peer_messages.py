"""The messages between the ranks of a group that copies, over TCP: a length of four bytes, then MessagePack."""

import hmac
import socket
from contextlib import suppress
from typing import Any

import msgspec

from enginepool.protocol.messages.weights import MemoryRegion

#: Seconds for a new connection to send its `PeerHello`.
HELLO_S = 2.0
_LENGTH = 4
#: bytes of the largest message
_LONGEST = 1 << 16


class PeerHello(msgspec.Struct):
    """The first message on a connection."""

    rank: int
    token: str


class BucketReady(msgspec.Struct):
    """To rank 0: the sender has the bucket, at `at` in `space`, which is None if no other rank copies from it. From rank 0: the
    previous rank has it there."""

    number: int
    nbytes: int
    space: MemoryRegion | None = None
    at: int = 0


def greeted(peer: socket.socket, token: str) -> int | None:
    """The rank that has connected; None: it is no rank of this group, or sent nothing in time."""
    peer.settimeout(HELLO_S)
    try:
        hello = receive(peer, PeerHello)
    except (OSError, msgspec.MsgspecError):
        return None
    if hello is None or not hmac.compare_digest(hello.token.encode(), token.encode()):
        return None
    return hello.rank


def prepare(peer: socket.socket) -> None:
    """Messages leave at once, and `receive` has no time limit: with Nagle's algorithm the second of two messages would wait for
    an acknowledgement of the first."""
    peer.settimeout(None)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def send(peer: socket.socket, message: Any) -> None:
    """Send a message. Raises OSError."""
    body = msgspec.msgpack.encode(message)
    peer.sendall(len(body).to_bytes(_LENGTH, "little") + body)


def receive(peer: socket.socket, kind: Any) -> Any:
    """The next message, of type `kind`; None at the end of the connection. Raises OSError, or MsgspecError: it is invalid."""
    head = _read(peer, _LENGTH)
    length = int.from_bytes(head, "little")
    if len(head) < _LENGTH or length > _LONGEST:
        return None
    body = _read(peer, length)
    return msgspec.msgpack.decode(body, type=kind) if len(body) == length else None


def _read(peer: socket.socket, size: int) -> bytes:
    """`size` bytes; fewer at the end of the connection."""
    parts = b""
    while len(parts) < size and (part := peer.recv(size - len(parts))):
        parts += part
    return parts


def hang_up(peer: socket.socket) -> None:
    """Close the connection; threads that read or write there return."""
    with suppress(OSError):  # it may have lost its connection
        peer.shutdown(socket.SHUT_RDWR)
    peer.close()
