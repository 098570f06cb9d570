"""Messages that do not end. libzmq holds the frames of a message until the last one has come, and no limit of its own counts
them: a peer that never sends the last one would fill the memory of this process.

The kernel counts the bytes of each TCP connection. A look at one takes microseconds, and so they are looked at only while this
process is so large that one of them may be at fault. On ipc nothing is counted; such a peer is a process of this user.
"""

import fcntl
import os
import socket as sockets
import struct
import termios
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

#: `tcpi_bytes_received` of linux/tcp.h
_RECEIVED, _INT = struct.Struct("=128xQ"), struct.Struct("=i")
_STATM, _PAGE = Path("/proc/self/statm"), os.sysconf("SC_PAGE_SIZE")


class EndlessMessages:
    """Of the connections of one listening socket. `most`: bytes that may come on one between the ends of two messages."""

    def __init__(self, most: int) -> None:
        self.most = most
        #: by connection: bytes that had come on it when a message of it was seen last, or at the first look
        self._seen: dict[int, int] = {}

    def find(self, connections: Iterable[int], spoke: set[int]) -> list[int]:
        """Those of these connections on which more came. `spoke`: from these, whole messages have come since the last look."""
        if _resident() < self.most:
            self._seen.clear()
            return []
        before, self._seen = self._seen, {}
        found: list[int] = []
        for descriptor in connections:
            received = _received(descriptor)
            seen = before.get(descriptor, received)
            if descriptor in spoke or received < seen:  # or it is another connection by now
                seen = received
            self._seen[descriptor] = seen
            if received - seen > self.most:
                found.append(descriptor)
        return found


def _received(descriptor: int) -> int:
    """Bytes that libzmq has read from a TCP connection; 0 for any other. What waits in the kernel takes none of its memory, and
    may be more than messages have where `limits.max_message_bytes` is small."""
    with suppress(OSError):
        connection = sockets.socket(fileno=descriptor)
        try:
            [waits] = _INT.unpack(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(_INT.size)))
            [came] = _RECEIVED.unpack(connection.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, _RECEIVED.size))
            return int(came) - int(waits)
        except struct.error:  # of an old kernel
            return 0
        finally:
            connection.detach()
    return 0


def _resident() -> int:
    """Bytes of memory that this process takes."""
    with suppress(OSError):
        return int(_STATM.read_text().split()[1]) * _PAGE
    return 0
