"""A ROUTER socket of the coordinator: binding, receiving, sending without ever blocking.

A ZeroMQ file descriptor is edge-triggered: it becomes readable once when something changed, and a send may consume that. So a
socket is `unsure` from each send until it was found empty.

ZeroMQ takes every send at once: its high-water mark, which counts messages, is off. `Outbox` counts the bytes that a peer has
not read, wherever they are: in ZeroMQ, in the kernel, or at the peer. A peer with too many unread bytes is disconnected.
"""

import errno
import os
import secrets
import time
from collections.abc import Callable, Sequence
from typing import IO, cast

import zmq

from enginepool.coordinator.core.events import Buffer, Link
from enginepool.coordinator.shell.authentication import Authenticator
from enginepool.coordinator.shell.connections import OPEN_FILES, Connections, disconnect, is_open
from enginepool.coordinator.shell.link_ids import LinkIds, router_socket
from enginepool.coordinator.shell.log import log
from enginepool.coordinator.shell.outbox import Outbox
from enginepool.coordinator.shell.peers import SAME_USER, Peer
from enginepool.coordinator.shell.socket_files import lock_socket_file
from enginepool.errors import ConfigError
from enginepool.net.dealer import keep_alive
from enginepool.protocol.frames import encode_header
from enginepool.protocol.messages import Ping

#: frames over this are not copied into ZeroMQ's own memory; below it a copy is cheaper
COPY_UP_TO = 64 * 1024
#: messages received from one socket before the other one has its turn
ROUND = 64
#: and bytes: all messages of a round are held until the round is acted upon
ROUND_BYTES = 1 << 20
#: messages of one peer that ZeroMQ holds before they are received; behind them the peer waits
UNHANDLED = 16
#: bytes unread for which a client, or a worker, is asked to prove that it has read them. A worker's count to no window; it is
#: sent whole requests, so that many fewer would be a question for each few of them.
CLIENT_PROOF, WORKER_PROOF = 128 * 1024, 1024 * 1024
#: milliseconds in which a connection must prove its key; before that a peer without one can make it take memory
HANDSHAKE_MS = 5000
#: frames of a message that are read; a peer that sends more is cut. A batch has the most, a few for each of its parts.
MOST_FRAMES = 1 << 16

#: stands for a frame that there was no memory for, of a message with a frame 0
LOST = b"lost"

# The plain methods under pyzmq's own, with plain ints for flags: half of the time that a small frame takes is in the wrapper.
Frame = zmq.Frame
NOBLOCK = int(zmq.NOBLOCK)
NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
EVENTS = int(zmq.EVENTS)
POLLIN = int(zmq.POLLIN)
send: Callable[..., object] = zmq.backend.Socket.send
recv: Callable[..., zmq.Frame] = zmq.backend.Socket.recv
# `get` of an option that is a number: its type says `int | bytes` for all options.
get: Callable[..., int] = cast("Callable[..., int]", zmq.backend.Socket.get)

#: link, frames, and the last of them as it came: it knows what the transport has proved of the peer. Returns the bytes that the
#: message counts in its round besides its own, if any: it may ask for more work than messages of its size do
Receive = Callable[[Link, list[bytes], zmq.Frame], int | None]
#: link, and why it was cut; "" where its peer is gone
Cut = Callable[[Link, str], None]


def context() -> "zmq.Context[zmq.Socket[bytes]]":
    """The process's one context."""
    return cast("zmq.Context[zmq.Socket[bytes]]", zmq.Context.instance())


def try_to_listen(endpoint: str) -> None:
    """Listen on this address, and leave it free. Raises ConfigError."""
    with context().socket(zmq.ROUTER) as probe:
        _listen(probe, endpoint)


def _listen(socket: "zmq.Socket[bytes]", endpoint: str) -> None:
    """Bind, or raise ConfigError."""
    try:
        if "[" in endpoint:
            socket.setsockopt(zmq.IPV6, 1)
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        why = "in use by another process" if error.errno == errno.EADDRINUSE else os.strerror(error.errno or 0)
        raise ConfigError(f"{endpoint}: cannot listen: {why}") from None


class Router:
    """One bound ROUTER socket with outboxes.

    Args:
        max_frame: the longest frame that is received.
        proof: bytes unread for which a peer is asked to prove that it has read them.
        max_unread: bytes that one peer may leave unread before it is cut.
        max_silence: seconds after which a peer is cut that does not say whether it has read what it was sent.
        cut: called with the link of a peer that was cut, and why, or that is found to be gone.
        most: connections that may be open.
    """

    def __init__(
        self,
        max_frame: int,
        proof: int,
        max_unread: int,
        max_silence: float,
        cut: Cut,
        most: int = OPEN_FILES,
    ) -> None:
        self._socket = socket = router_socket(context())
        socket.setsockopt(zmq.LINGER, 500)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, max_frame)
        keep_alive(socket, max_silence)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, UNHANDLED)
        socket.setsockopt(zmq.BACKLOG, 1024)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self._ids = LinkIds(context(), socket)
        # So many messages may wait, half as long as a frame at most, and one may be on its way.
        self.connections = Connections(context(), socket, most, (UNHANDLED // 2 + 1) * max_frame)
        self._lock: IO[str] | None = None
        self._gate: Authenticator | None = None
        self._proof, self._max_unread, self._max_silence = proof, max_unread, max_silence
        self._cut = cut
        #: connections from which a message has come since the last sweep
        self._spoke: set[int] = set()
        self._outboxes: dict[Link, Outbox] = {}
        #: bytes that all peers have not read: the sum over the outboxes
        self.unread = 0
        #: a message may be waiting that the file descriptor does not signal again
        self.unsure = True
        #: something was sent since the shell last fell asleep, or was about to
        self.sent = False
        #: why the file of the ipc socket at `endpoint`, which was removed, could not be made again
        self.endpoint, self._unbound = "", ""

    def bind(self, endpoint: str, gate: Authenticator | None = None) -> None:
        """Bind, or raise ConfigError. `gate`: keys, for TCP."""
        if endpoint.startswith("ipc://"):
            self._lock = lock_socket_file(endpoint)
        if gate is not None and endpoint.startswith("tcp://"):
            gate.guard(self._socket)
            self._gate = gate
        _listen(self._socket, endpoint)
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _keep_file(self) -> None:
        """Listen again where the file of the ipc socket was removed; links that stand are not touched."""
        endpoint = self.endpoint
        if not endpoint.startswith("ipc://") or os.path.exists(endpoint.removeprefix("ipc://")):
            return
        if self._lock is not None:
            self._lock.close()
        try:
            # The old socket stays bound as well: its end would remove the file of the new one.
            self.bind(endpoint)
        except ConfigError as error:
            why = f"{error}; its file was removed, and this is tried again every second"
            if why != self._unbound:
                log(why)
            self._unbound = why
        else:
            log(f"{endpoint}: its file was removed: listening again")
            self._unbound = ""

    def peer(self, frame: zmq.Frame) -> Peer:
        """Who sent this frame."""
        return SAME_USER if self._gate is None else self._gate.peer(frame)

    @property
    def fd(self) -> int:
        return int(self._socket.getsockopt(zmq.FD))

    def receive(self, take: Receive, *, told: bool = False) -> int:
        """Hand over at most ROUND messages, fewer once they have ROUND_BYTES; returns how many. `told`: the loop says that
        there is one, and is mostly right."""
        socket = self._socket
        nbytes = 0
        for count in range(ROUND):
            if nbytes >= ROUND_BYTES:
                self.unsure = True
                return count
            # Asking (1.1 µs) is cheaper than failing (2.3 µs), and failing once is cheaper than asking before each of many.
            if (count == 1 or (count == 0 and not told)) and not get(socket, EVENTS) & POLLIN:
                self.unsure = False
                return count
            try:
                # A frame knows whether another one follows; for bytes the socket would be asked each time (0.5 µs).
                frame = recv(socket, NOBLOCK, False)
            except zmq.Again:
                self.unsure = False
                return count
            link = frame.bytes
            frames, lost, wrong = list[bytes](), False, ""
            while frame.more:
                frame = recv(socket, NOBLOCK, False)
                if len(frames) > MOST_FRAMES:
                    continue
                try:
                    data = frame.bytes
                except MemoryError:
                    # The rest of the message must be received: its next frame would be taken for a new message.
                    frames[1:] = []
                    data, lost = LOST, True
                nbytes += len(data)
                frames.append(data)
            if lost:
                frames[1:] = [LOST]
            outbox = self._outboxes.get(link)
            if outbox is None or outbox.fd == -1:
                outbox = self._meet(link, frame)
                wrong = "" if self._ids.given(link, self.connections.accepted) else "it chose its routing id"
            if len(frames) > MOST_FRAMES:
                wrong = f"it sent over {MOST_FRAMES} frames"
            if wrong:
                log(f"{self.endpoint}: a peer is cut: {wrong}", "client")
                self.cut(link, wrong)
                continue
            self._spoke.add(outbox.fd)
            nbytes += take(link, frames, frame) or 0
        self.unsure = True
        return ROUND

    def asked(self) -> bool:
        """Ask whether there is a message."""
        self.unsure = bool(get(self._socket, EVENTS) & POLLIN)
        return self.unsure

    def send(self, link: Link, frames: Sequence[Buffer]) -> bool:
        """Send. False: the peer is gone."""
        outbox = self._outboxes.get(link)
        if outbox is None:
            outbox = self._outboxes[link] = Outbox(self._proof, self._max_unread)
        nbytes = sum(map(len, frames))
        self.unread += nbytes
        outbox.unread += nbytes
        if not self._put(link, frames):
            return False
        if outbox.unread >= outbox.mark:
            self._marked(link, outbox)
        return True

    def _marked(self, link: Link, outbox: Outbox) -> None:
        """So much is unread that the peer is asked, or cut."""
        if not outbox.token:
            self._ask(link, outbox)
        if outbox.unread > self._max_unread and link in self._outboxes:
            self.cut(link, f"it has {outbox.unread} bytes unread, and at most {self._max_unread} are allowed")

    def _put(self, link: Link, frames: Sequence[Buffer]) -> bool:
        socket = self._socket
        self.unsure = self.sent = True
        *firsts, last = frames
        try:
            send(socket, link, NOBLOCK_MORE)
            for frame in firsts:
                send(socket, frame, NOBLOCK_MORE, len(frame) <= COPY_UP_TO)
            send(socket, last, NOBLOCK, len(last) <= COPY_UP_TO)
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            self._forget(link)
            return False
        return True

    # --- what is not read yet ------------------------------------------------------------------------------------------

    def unread_of(self, link: Link) -> int:
        """Bytes that the peer on `link` has not read."""
        outbox = self._outboxes.get(link)
        return 0 if outbox is None else outbox.unread

    def proved(self, link: Link, token: int) -> bool:
        """A `pong` came with this `at`. Whether it proves that the peer has read what it was sent."""
        outbox = self._outboxes.get(link)
        if outbox is None or not (read := outbox.proved(token)):
            return False
        self.unread -= read
        if outbox.unread >= outbox.mark:
            self._ask(link, outbox)
        return True

    def sweep(self) -> None:
        """About once a second: ask peers that were sent little whether they have read it, and cut peers that never answer.
        Listen where the file of the socket was removed."""
        self._keep_file()
        self.connections.cut_endless(self.endpoint, self._spoke)
        now = time.monotonic()
        for link, outbox in list(self._outboxes.items()):
            if outbox.token:
                if not is_open(outbox.fd, outbox.inode):  # it has left before it answered: that is no fault of it
                    self._forget(link)
                elif now - outbox.asked_at > self._max_silence:
                    self.cut(link, f"it did not say for {self._max_silence:g} s whether it reads what it is sent")
            elif outbox.unread != outbox.swept:
                outbox.swept = outbox.unread
            elif outbox.unread:
                self._ask(link, outbox)
            elif not is_open(outbox.fd, outbox.inode):
                self._forget(link)

    def all_read(self) -> bool:
        """Whether all peers have read what they were sent. Others are asked, and forgotten if they have left."""
        for link, outbox in list(self._outboxes.items()):
            if outbox.unread and not is_open(outbox.fd, outbox.inode):
                self._forget(link)
            elif outbox.unread and not outbox.token:
                self._ask(link, outbox)
        return not self.unread

    def cut_largest(self) -> None:
        """Cut the link on which most is unread."""
        link = max(self._outboxes, key=self.unread_of)
        self.cut(link, f"it has {self.unread_of(link)} bytes unread, the most of all, and there is no memory for more")

    def cut(self, link: Link, why: str) -> None:
        """End a connection. ZeroMQ drops what it holds for the peer."""
        outbox = self._outboxes[link]
        self._forget(link)
        if outbox.fd >= 0:
            disconnect(outbox.fd, outbox.inode)
        self._cut(link, why)

    def _ask(self, link: Link, outbox: Outbox) -> None:
        outbox.ask(secrets.randbits(62) | 1, time.monotonic())
        if not self._put(link, [encode_header(Ping(outbox.token))]):
            self._cut(link, "")

    def _forget(self, link: Link) -> None:
        self.unread -= self._outboxes.pop(link).unread

    def _meet(self, link: Link, frame: zmq.Frame) -> Outbox:
        """The first message on a link, or the first after it was forgotten: remember its connection."""
        outbox = self._outboxes[link] = self._outboxes.get(link) or Outbox(self._proof, self._max_unread)
        try:
            outbox.fd = int(frame.get(zmq.SRCFD))
            outbox.inode = os.fstat(outbox.fd).st_ino
        except (OSError, zmq.ZMQError):
            outbox.fd = -2  # it is gone already
        return outbox

    def close(self) -> None:
        """Idempotent. What was sent lingers for half a second at most."""
        self.connections.close()
        self._socket.close()
        if self._lock is not None:
            self._lock.close()
