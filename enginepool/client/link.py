"""The socket of a client: one DEALER on a running asyncio loop, read when its descriptor says so, never blocking.

libzmq's descriptor is edge-triggered: it says once that something happened. So a reader drains until the socket is empty, and
after each send looks again, because sending may swallow the signal. (zmq.asyncio does the same with a future for each message,
at several times the CPU.)
"""

import asyncio
import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from math import prod
from typing import TypeAlias

import msgspec
import zmq

from enginepool.net.dealer import connect
from enginepool.net.descriptors import CONNECTION_FILES, advice, check_free
from enginepool.net.keys import Key
from enginepool.protocol.errors import WireError
from enginepool.protocol.frames import Buffer, check_frames, decode_header, encode_header
from enginepool.protocol.generated import check_tokens
from enginepool.protocol.messages import ErrorReply, FrameSpec, Generated, Message, Result, ToClient, Tokens
from enginepool.protocol.messages.weight_reports import WeightsReport

#: Frames over this many bytes are handed to libzmq, and taken from it, without a copy; below it a copy is cheaper.
_LARGE = 1 << 16
#: Messages that are read before others on the loop have their turn.
_BURST = 256
#: A full socket is tried again after this, in seconds, if its descriptor says nothing sooner.
_RETRY_S = 0.05
_SNDHWM = 1000

WithFrames: TypeAlias = Result | WeightsReport | Generated | Tokens
Received = Callable[[ToClient, Sequence[Buffer]], None]


class ClientLink:
    """A connection to one address, opened again as often as the session asks.

    Args:
        address: `tcp://HOST:PORT` or `ipc://PATH`.
        received: called for each message that can be read; its payload has the lengths that its header says.
        complain: called with one line for each message that cannot be read, and is dropped.
        key: of this client, for TCP.

    Raises:
        OSError: this process has too few file descriptors.
    """

    def __init__(self, address: str, received: Received, complain: Callable[[str], None], key: Key | None = None) -> None:
        self.address = address
        self._key = key
        self._received = received
        self._complain = complain
        self._loop = asyncio.get_running_loop()
        check_free(CONNECTION_FILES)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        #: the open one, closed when this object is garbage-collected with its loop: a context waits for its sockets without end
        self._left: list[zmq.Socket[bytes]] = []
        self._forgotten = weakref.finalize(self, _leave, self._context, self._left)
        self._forgotten.atexit = False
        self._descriptor: int = -1
        self._decoder: msgspec.msgpack.Decoder[ToClient] = msgspec.msgpack.Decoder(ToClient)
        #: messages that the socket did not take; bounded by the session's window and by `open`
        self._outbox: deque[list[Buffer]] = deque()
        self._retry: asyncio.TimerHandle | None = None
        self._process = os.getpid()

    @property
    def is_elsewhere(self) -> bool:
        """This process is a fork. There each call of ZeroMQ is interrupted, and pyzmq repeats it without end."""
        return os.getpid() != self._process

    def open(self) -> None:
        """Close the socket, with everything queued on it, and open a new one.

        Raises:
            OSError: the address is none that ZeroMQ can connect to, or this process has too few file descriptors.
        """
        self._close_socket(0)
        socket = self._new_socket()
        try:
            socket.setsockopt(zmq.SNDHWM, _SNDHWM)
            # The window bounds what comes. What ZeroMQ does not read waits at the coordinator, whose memory all clients share.
            socket.setsockopt(zmq.RCVHWM, 0)
            # What the socket does not take waits in the outbox, and `open` forgets it.
            connect(socket, self.address, self._key, again_ms=50)
        except zmq.ZMQError as error:
            socket.close(0)
            raise OSError(error.errno, error.strerror or str(error)) from None
        except BaseException:
            # A socket that stays open would block `close` without end. The error is raised again.
            socket.close(0)
            raise
        self._socket = socket
        self._left.append(socket)
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self.drain)

    def _new_socket(self) -> "zmq.Socket[bytes]":
        """Raises OSError: too few file descriptors are free."""
        try:
            return self._context.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            raise OSError(error.errno, f"{error.strerror}; {advice()}") from None

    def send(self, message: Message, frames: Sequence[Buffer] = ()) -> None:
        """Send, or park until the socket takes it."""
        socket = self._socket
        if socket is None or self.is_elsewhere:
            return
        parts: list[Buffer] = [encode_header(message), *frames]
        if self._outbox or not _try_send(socket, parts):
            self._outbox.append(parts)
            self._retry_soon()
        elif _readable(socket):
            self._loop.call_soon(self.drain)

    def drain(self, most: int = _BURST) -> None:
        """Read at most `most` waiting messages, and send the parked ones."""
        socket = self._socket
        if socket is None or self.is_elsewhere:
            return
        read = 0
        try:
            while read < most and self._read(socket):
                read += 1
                if self._socket is not socket:
                    return
        except BaseException:
            # An error of a callback, which is raised again, must not lose the edge: what is left in the socket would
            # wait for the next message.
            self._loop.call_soon(self.drain)
            raise
        if read == most:
            self._loop.call_soon(self.drain)
        self._flush()

    def close(self, linger_s: float) -> None:
        """Close. Sent messages have `linger` to leave; this blocks no longer than that."""
        self._flush()
        self._close_socket(int(linger_s * 1000))
        self._forgotten.detach()
        self._context.term()

    def _read(self, socket: "zmq.Socket[bytes]") -> bool:
        """Read one message; False when there is none."""
        try:
            head = socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return False
        message: ToClient | None = None
        try:
            message = decode_header(self._decoder, head)
        except WireError as error:
            self._complain(f"dropped a message that cannot be read: {error.message}")
        specs: Sequence[FrameSpec] = message.frames if isinstance(message, WithFrames) else ()
        frames: list[Buffer] = []
        while socket.getsockopt(zmq.RCVMORE):
            if len(frames) < len(specs) and _is_large(specs[len(frames)]):
                frames.append(socket.recv(copy=False).buffer)
            else:
                frames.append(socket.recv())
        if isinstance(message, WithFrames):
            message = self._checked(message, frames)
        if message is not None:
            self._received(message, frames)
        return True

    def _checked(self, message: WithFrames, frames: list[Buffer]) -> ToClient | None:
        """The message, if its payload is what its header says. An answer that is not becomes an error."""
        try:
            if isinstance(message, Tokens):
                check_tokens(message)
            check_frames(message.frames, frames)
        except WireError as error:
            if isinstance(message, Tokens):
                self._complain(f"dropped tokens that cannot be read: {error.message}")
                return None
            text = f"the answer cannot be read: {error.message}"
            frames.clear()
            return ErrorReply(error.code, text, id=message.id, field=error.field, limit=error.limit)
        return message

    def _flush(self) -> None:
        socket = self._socket
        while self._outbox and socket is not None:
            if not _try_send(socket, self._outbox[0]):
                self._retry_soon()
                return
            self._outbox.popleft()
            if not self._outbox and _readable(socket):
                self._loop.call_soon(self.drain)

    def _retry_soon(self) -> None:
        if self._retry is None:
            self._retry = self._loop.call_later(_RETRY_S, self._retry_now)

    def _retry_now(self) -> None:
        self._retry = None
        self.drain()

    def _close_socket(self, linger_ms: int) -> None:
        self._outbox.clear()
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self._socket is not None:
            self._loop.remove_reader(self._descriptor)
            self._socket.close(linger_ms)
            self._socket = None
            self._left.clear()


def _leave(context: "zmq.Context[zmq.Socket[bytes]]", sockets: "Sequence[zmq.Socket[bytes]]") -> None:
    for socket in sockets:
        socket.close(0)
    context.term()


def _readable(socket: "zmq.Socket[bytes]") -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def _is_large(spec: FrameSpec) -> bool:
    return prod(spec.shape) * 4 > _LARGE


def _try_send(socket: "zmq.Socket[bytes]", parts: Sequence[Buffer]) -> bool:
    """Whether the socket took the whole message; if not it took nothing (libzmq rolls back what it has of it)."""
    last = len(parts) - 1
    try:
        for i, part in enumerate(parts):
            flags = zmq.NOBLOCK if i == last else zmq.NOBLOCK | zmq.SNDMORE
            socket.send(part, flags, copy=len(part) <= _LARGE)
    except zmq.Again:
        return False
    return True
