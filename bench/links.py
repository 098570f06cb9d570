"""The client's side of the wire benchmark: one link to a coordinator, over which prepared requests are sent by number."""

import contextlib
import os
import select
import socket
import time
from collections import deque
from typing import Protocol, cast

import msgspec
import zmq

from bench import prepared
from enginepool.protocol.messages import Ack, ErrorReply, Goodbye, Hello, Ping, Pong, Welcome

# plain ints: an operation on pyzmq's flags costs a microsecond
_MORE, _POLLIN = int(zmq.SNDMORE), int(zmq.POLLIN)
#: longest wait in one call for a message
_LOOK_UP_S = 1.0


class Link(Protocol):
    """Sends requests and says which were answered."""

    def send(self, number: int) -> None:
        """Send request `number`; numbers grow."""
        ...

    def receive(self, wait_s: float) -> list[int]:
        """The requests that were answered; [] when `wait_s` is over first (precise to some 50 µs)."""
        ...

    def idle(self) -> None:
        """Called about every half second while nothing is measured."""
        ...

    def close(self) -> None:
        """Leave."""
        ...


class _Answer(msgspec.Struct, tag_field="type", tag="result", gc=False):
    """Of an answer, what the load generator looks at."""

    id: int
    forwards: list[int] = []


class ZmqLink:
    """A DEALER socket; with `group` it speaks the pool's protocol, without it talks through a bare proxy."""

    #: answers that one ack covers
    _ACK_EVERY = 64

    def __init__(self, address: str, group: str | None) -> None:
        self._context = zmq.Context()
        self._sock = self._context.socket(zmq.DEALER)
        self._sock.setsockopt(zmq.LINGER, 0)
        self._sock.setsockopt(zmq.RCVTIMEO, int(_LOOK_UP_S * 1000))
        self._sock.connect(address)
        self._fd = cast(int, self._sock.getsockopt(zmq.FD))
        self._requests = prepared.score_requests(group or "")
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(_Answer | ErrorReply | Welcome | Ping | Pong).decode
        self._speaks = group is not None
        self._answered: list[int] = []
        if self._speaks:
            self._hello()

    def _hello(self) -> None:
        self._sock.send(self._encode(Hello(client=os.urandom(16), token=os.urandom(16), agent="bench")))
        if not self._sock.poll(30_000):
            raise RuntimeError("no welcome within 30 s")
        match self._decode(self._sock.recv_multipart()[0]):
            case Welcome():
                return
            case other:
                raise RuntimeError(f"hello was answered {other}")

    def send(self, number: int) -> None:
        template, frames = self._requests[number % prepared.VARIANTS]
        send = self._sock.send
        send(template.of(prepared.FIRST_ID + number), _MORE)
        for frame in frames[:-1]:
            send(frame, _MORE)
        send(frames[-1])

    def receive(self, wait_s: float) -> list[int]:
        end = time.perf_counter() + wait_s
        found = self._drain()
        while not found:
            left = end - time.perf_counter()
            if left <= 0:
                break
            if left > _LOOK_UP_S:
                # cheaper than select, but it counts in whole milliseconds
                with contextlib.suppress(zmq.Again):
                    self._take(self._sock.recv_multipart(), found)
            else:
                # a ZMQ fd tells of changes only, so what is there already was asked for first
                select.select([self._fd], [], [], left)
            found += self._drain()
        if self._speaks and found:
            self._acknowledge(found)
        return found

    def _drain(self) -> list[int]:
        sock = self._sock
        found: list[int] = []
        while cast(int, sock.getsockopt(zmq.EVENTS)) & _POLLIN:
            self._take(sock.recv_multipart(), found)
        return found

    def _take(self, frames: list[bytes], found: list[int]) -> None:
        """Note an answer, answer a ping."""
        message = self._decode(frames[0])
        if type(message) is _Answer:
            found.append(message.id - prepared.FIRST_ID)
        elif type(message) is Ping:
            self._sock.send(self._encode(Pong(at=message.at)))
        elif type(message) is ErrorReply:
            raise RuntimeError(f"the coordinator said {message.code}: {message.message}")

    def _acknowledge(self, found: list[int]) -> None:
        self._answered += found
        if len(self._answered) >= self._ACK_EVERY:
            self._sock.send(self._encode(Ack([prepared.FIRST_ID + number for number in self._answered])))
            self._answered.clear()

    def idle(self) -> None:
        if self._speaks:
            self._sock.send(self._encode(Ping(at=1)))
            self.receive(0.0)

    def close(self) -> None:
        if self._speaks:
            self._sock.setsockopt(zmq.LINGER, 500)
            self._sock.send(self._encode(Goodbye()))
        self._sock.close()
        self._context.term()


class _Connection:
    """One keep-alive connection with at most one request on the way."""

    def __init__(self, host: str, port: int) -> None:
        self.sock = socket.create_connection((host, port), timeout=10)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.number = -1
        self.unread = b""

    def answered(self) -> bool:
        """Read what is there; True when it completes the answer. Raises on a status other than 200."""
        data = self.sock.recv(65536, socket.MSG_DONTWAIT)
        if not data:
            raise RuntimeError("the coordinator closed a connection")
        unread = self.unread + data if self.unread else data
        self.unread = unread
        end = unread.find(b"\r\n\r\n")
        if end < 0:
            return False
        head = unread[:end].lower()
        at = head.find(b"content-length:")
        if at >= 0:
            whole = len(unread) >= end + 4 + int(head[at + 15 :].split(b"\r\n", 1)[0])
        else:
            whole = unread.endswith(b"\r\n0\r\n\r\n")
        if whole:
            if b" 200 " not in head[:16]:
                raise RuntimeError(f"the coordinator said {unread[:300]!r}")
            self.unread = b""
        return whole


class HttpLink:
    """Keep-alive connections, one for each request in flight; more requests than connections wait their turn."""

    def __init__(self, address: str, connections: int) -> None:
        host, _, port = address.rpartition(":")
        self._requests = prepared.http_requests(address)
        self._epoll = select.epoll()
        self._by_fd: dict[int, _Connection] = {}
        for _ in range(connections):
            connection = _Connection(host, int(port))
            self._by_fd[connection.sock.fileno()] = connection
            self._epoll.register(connection.sock.fileno(), select.EPOLLIN)
        self._free = list(self._by_fd.values())
        self._waiting: deque[int] = deque()

    def send(self, number: int) -> None:
        if not self._free:
            self._waiting.append(number)
            return
        connection = self._free.pop()
        connection.number = number
        connection.sock.sendall(self._requests[number % prepared.VARIANTS])

    def receive(self, wait_s: float) -> list[int]:
        found: list[int] = []
        end = time.perf_counter() + wait_s
        while not found:
            events = self._epoll.poll(0)
            if not events:
                left = end - time.perf_counter()
                if left <= 0:
                    break
                # epoll's own timeout counts in whole milliseconds
                select.select([self._epoll], [], [], left)
                continue
            for fd, _ in events:
                connection = self._by_fd[fd]
                if connection.answered():
                    found.append(connection.number)
                    self._free.append(connection)
        while self._waiting and self._free:
            self.send(self._waiting.popleft())
        return found

    def idle(self) -> None:
        """HTTP needs no sign of life: peers keep an idle connection for longer than a round of the benchmark takes."""

    def close(self) -> None:
        for connection in self._by_fd.values():
            connection.sock.close()
        self._epoll.close()
