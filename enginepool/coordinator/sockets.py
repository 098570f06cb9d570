"""The coordinator's two ROUTER sockets: binding, receiving, sending without ever blocking.

Plain sockets on the loop's readers. A ZeroMQ file descriptor is edge-triggered: it says that something changed, once, also
while we send. So in every turn both sockets are asked for their EVENTS until neither has a message; `turn` is the only place
that receives.

A send that would block (`EAGAIN`: the peer's high-water mark, which counts messages) parks in an outbox that counts bytes; a
peer whose outbox runs over is cut. A router cannot wait for one peer to become writable, so parked sends are tried again on a
short timer.
"""

import asyncio
import errno
import fcntl
import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import IO, Self

import zmq

from enginepool.config import ConfigError
from enginepool.coordinator.events import Buffer, Link

#: frames over this are not copied into ZeroMQ's own memory; below it a copy is cheaper
COPY_UP_TO = 64 * 1024
#: messages received from one socket before the other one has its turn
ROUND = 64
#: rounds before the loop may do something else
ROUNDS = 8
RETRY_S = 0.005

Receive = Callable[[Link, list[bytes]], None]


def _context() -> "zmq.Context[zmq.Socket[bytes]]":
    """The process's one context."""
    return zmq.Context.instance()


class Router:
    """One bound ROUTER socket with outboxes."""

    def __init__(self, max_frame: int, max_outbox: int, cut: Callable[[Link], None]) -> None:
        self._socket: zmq.Socket[bytes] = _context().socket(zmq.ROUTER)
        socket = self._socket
        socket.setsockopt(zmq.LINGER, 500)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, max_frame)
        socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 6000)
        socket.setsockopt(zmq.HEARTBEAT_TTL, 10_000)
        socket.setsockopt(zmq.SNDHWM, 1000)
        socket.setsockopt(zmq.RCVHWM, 1000)
        socket.setsockopt(zmq.BACKLOG, 1024)
        self._lock: IO[str] | None = None
        self._max_outbox = max_outbox
        self._cut = cut
        self._parked: dict[Link, deque[tuple[Sequence[Buffer], int]]] = {}
        self._parked_bytes: dict[Link, int] = {}
        self.endpoint = ""

    def bind(self, endpoint: str) -> None:
        """Bind, or raise ConfigError. A lock beside an ipc path is taken first: a second bind would steal the traffic."""
        if endpoint.startswith("ipc://"):
            path = endpoint.removeprefix("ipc://") + ".lock"
            try:
                self._lock = open(path, "a")  # noqa: SIM115 (held for the life of the socket)
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"{endpoint}: in use by another pool (its lock {path} is held)") from None
            except OSError as error:
                raise ConfigError(f"{endpoint}: cannot lock {path}: {error.strerror}") from None
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            why = "in use by another process" if error.errno == errno.EADDRINUSE else os.strerror(error.errno or 0)
            raise ConfigError(f"{endpoint}: cannot listen: {why}") from None
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def fd(self) -> int:
        return int(self._socket.getsockopt(zmq.FD))

    def receive(self, take: Receive) -> bool:
        """Hand over at most ROUND messages; True when more may wait."""
        socket = self._socket
        for _ in range(ROUND):
            if not int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return False
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            take(frames[0], frames[1:])
        return True

    def send(self, link: Link, frames: Sequence[Buffer]) -> bool:
        """Send, or park. False when the peer is not there any more."""
        parked = self._parked.get(link)
        if parked is None:
            try:
                self._send(link, frames)
                return True
            except zmq.Again:
                parked = self._parked[link] = deque()
                self._parked_bytes[link] = 0
            except zmq.ZMQError as error:
                if error.errno != errno.EHOSTUNREACH:
                    raise
                return False
        nbytes = sum(len(frame) for frame in frames)
        parked.append((frames, nbytes))
        self._parked_bytes[link] += nbytes
        if self._parked_bytes[link] > self._max_outbox:
            self._drop(link)
            self._cut(link)
        return True

    def _send(self, link: Link, frames: Sequence[Buffer]) -> None:
        send = self._socket.send
        more = zmq.NOBLOCK | zmq.SNDMORE
        send(link, more)
        last = len(frames) - 1
        for i, frame in enumerate(frames):
            send(frame, more if i < last else zmq.NOBLOCK, copy=len(frame) <= COPY_UP_TO)

    def _drop(self, link: Link) -> None:
        del self._parked[link]
        del self._parked_bytes[link]

    def retry(self) -> bool:
        """Try parked sends again; True while some are left."""
        for link, parked in list(self._parked.items()):
            try:
                while parked:
                    self._send(link, parked[0][0])
                    self._parked_bytes[link] -= parked.popleft()[1]
            except zmq.Again:
                continue
            except zmq.ZMQError as error:
                if error.errno != errno.EHOSTUNREACH:
                    raise
                self._cut(link)
            self._drop(link)
        return bool(self._parked)

    @property
    def has_parked(self) -> bool:
        return bool(self._parked)

    @property
    def parked_bytes(self) -> int:
        return sum(self._parked_bytes.values())

    def close(self) -> None:
        """Idempotent. What was sent lingers for half a second at most."""
        self._socket.close()
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Sockets:
    """Both routers on one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clients: Router, workers: Router) -> None:
        self._loop = loop
        self.clients = clients
        self.workers = workers
        self._take_client: Receive | None = None
        self._take_worker: Receive | None = None
        self._again: asyncio.Handle | None = None
        self._retry: asyncio.Handle | None = None

    def listen(self, take_client: Receive, take_worker: Receive) -> None:
        """Hand every message over from now on."""
        self._take_client, self._take_worker = take_client, take_worker
        self._loop.add_reader(self.clients.fd, self.turn)
        self._loop.add_reader(self.workers.fd, self.turn)
        self.turn()

    def turn(self) -> None:
        """Receive until neither socket has a message, or ROUNDS are over; then ask again as soon as the loop allows."""
        if self._take_client is None or self._take_worker is None:
            return
        for _ in range(ROUNDS):
            more = self.workers.receive(self._take_worker)
            if not self.clients.receive(self._take_client) and not more and not self.workers.receive(self._take_worker):
                break
        else:
            if self._again is None:
                self._again = self._loop.call_soon(self._turn_again)
        if self._retry is None and (self.clients.has_parked or self.workers.has_parked):
            self._retry = self._loop.call_later(RETRY_S, self._retry_parked)

    def _turn_again(self) -> None:
        self._again = None
        self.turn()

    def _retry_parked(self) -> None:
        self._retry = None
        self.clients.retry()
        self.workers.retry()
        self.turn()

    def close(self) -> None:
        """Stop receiving; what was sent lingers for a moment."""
        if self._take_client is not None:
            self._loop.remove_reader(self.clients.fd)
            self._loop.remove_reader(self.workers.fd)
        for handle in (self._again, self._retry):
            if handle is not None:
                handle.cancel()
        self.clients.close()
        self.workers.close()
        # Waits until what was sent has left, or has lingered long enough.
        _context().term()
