"""Connections of the listening sockets: how many there may be, and the end of those above that.

libzmq accepts connections until its process has no descriptor left. Then, on TCP, it tries again without a pause, which takes a
whole core; on ipc it ends the process (`Too many open files (src/ipc_listener.cpp)`). So each accepted connection is counted
here, by libzmq's monitor, and those above a limit are closed at once. libzmq waits while `AHEAD` events are not read, so it
accepts no more connections than that ahead of this count. The limits leave descriptors for those, and for journals, logs and
processes.
"""

import contextlib
import itertools
import os
import re
import resource
import socket as sockets
import struct
from typing import NamedTuple, cast

import zmq

from enginepool.coordinator.shell.endless_messages import EndlessMessages
from enginepool.coordinator.shell.log import log
from enginepool.errors import ConfigError

#: as many files are open at a time, if the system allows it
OPEN_FILES = 65_536
#: descriptors for what is no connection, and for each worker that this pool starts
RESERVE, EACH_WORKER = 64, 4
#: links of each worker that this pool starts
LINKS = 2
#: connections of clients above `limits.clients`, at most: these are told why they are refused, others are closed
TOLD = 256
#: events of one socket that wait, at most: libzmq's default for a socket that sends, and one here
AHEAD = 1001
_EVENTS = int(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
_EVENT = struct.Struct("=hi")
_numbers = itertools.count()
#: how libzmq names an ipc peer: HOST:UID:GID:PID
_IPC_PEER = re.compile(r"[^:]*:[0-9]+:[0-9]+:([0-9]+)", re.ASCII)


class Shares(NamedTuple):
    """How many connections may be open."""

    clients: int
    workers: int
    #: clients that may be connected: `clients`, without those that are told why they are refused
    welcome: int
    #: so many connections at once cannot take all descriptors
    proven: bool


def raise_open_files() -> int:
    """A connection of each client and worker is a file, of which a process may by default have 1,024 although it may ask for
    more. Returns how many it may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return OPEN_FILES if soft == resource.RLIM_INFINITY else soft


def shares(files: int, clients: int, workers: int) -> Shares:
    """What `limits.clients` and the workers that a pool starts get of so many open files. Up to half of them is for connections
    that were accepted and not counted yet. A quarter of the rest is for links of workers, and at least two for each: one that
    is started again may come before the link of the one before it is closed.

    Raises:
        ConfigError: not even these and one client could connect.
    """
    ahead = min(2 * AHEAD, files // 2)
    room = files - ahead - RESERVE - EACH_WORKER * workers
    links = max(room // 4, LINKS * workers)
    room -= links
    told = min(TOLD, room // 8)
    welcome = min(clients, room - told)
    if welcome < 1:
        least = 2 * (RESERVE + (EACH_WORKER + LINKS) * workers + 2) + 2
        raise ConfigError(f"RLIMIT_NOFILE is {files}: a pool of {workers} workers needs {least} or more (ulimit -n)")
    return Shares(welcome + told, links, welcome, ahead == 2 * AHEAD)


class Connections:
    """The connections of one listening socket. Make it before the socket is bound.

    Args:
        most: connections that may be open; the latest ones above that are closed.
        unended: bytes that may come on one before a message ends.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", socket: "zmq.Socket[bytes]", most: int, unended: int) -> None:
        self.most = most
        self._endless = EndlessMessages(unended)
        #: descriptors of those that are open
        self._open: set[int] = set()
        #: connections that were ever accepted, as far as is known
        self.accepted = 0
        self._full = False
        self._socket = socket
        name = f"inproc://connections-{next(_numbers)}"
        socket.monitor(name, _EVENTS)
        self._events = context.socket(zmq.PAIR)
        self._events.setsockopt(zmq.LINGER, 0)
        self._events.setsockopt(zmq.RCVHWM, 1)
        self._events.connect(name)

    @property
    def fd(self) -> int:
        return int(self._events.getsockopt(zmq.FD))

    def __len__(self) -> int:
        return len(self._open)

    def read(self) -> bool:
        """Take in what has happened. True: the limit is reached, for the first time since there were a tenth fewer."""
        while True:
            try:
                event, *_ = self._events.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            kind, descriptor = cast("tuple[int, int]", _EVENT.unpack(event))
            if kind == zmq.EVENT_DISCONNECTED:
                self._open.discard(descriptor)
                continue
            self._open.add(descriptor)
            self.accepted += 1
            if len(self._open) > self.most:
                _end(descriptor)
        if len(self._open) < self.most * 9 // 10:
            self._full = False
        elif len(self._open) >= self.most and not self._full:
            self._full = True
            return True
        return False

    def cut_endless(self, endpoint: str, spoke: set[int]) -> None:
        """End those on which more bytes came than messages have, since the last call. `spoke`: those from which whole messages
        have come since then; empty after the call."""
        for descriptor in self._endless.find(self._open, spoke) if endpoint.startswith("tcp://") else ():
            _end(descriptor)
            log(f"{endpoint}: a peer is cut: {self._endless.most} bytes came, and the message has not ended", "client")
        spoke.clear()

    def close(self) -> None:
        """Idempotent."""
        if not self._events.closed:
            # libzmq's thread may wait for these to be read, and would then not let the monitor go.
            self.read()
            self._socket.disable_monitor()
            self._events.close()


def _end(descriptor: int) -> None:
    """End a connection; libzmq notices the end and closes the descriptor. No new descriptor is needed: there may be none."""
    with contextlib.suppress(OSError):
        connection = sockets.socket(fileno=descriptor)
        try:
            connection.shutdown(sockets.SHUT_RDWR)
        finally:
            connection.detach()


def pid_of(frame: zmq.Frame) -> int | None:
    """The process that sent this frame, by SO_PEERCRED of its ipc connection; None: not over ipc, or unseen here."""
    try:
        found = _IPC_PEER.fullmatch(str(frame.get("Peer-Address")))
    except zmq.ZMQError:
        return None
    return int(found[1]) or None if found else None


def is_open(fd: int, inode: int) -> bool:
    """Whether this descriptor still is the connection with that inode."""
    try:
        return fd >= 0 and os.fstat(fd).st_ino == inode
    except OSError:
        return False


def disconnect(fd: int, inode: int) -> None:
    """End a connection. ZeroMQ has no call for this. It notices the end, and frees what it holds for the peer."""
    # The copy keeps the descriptor from becoming another file between the check and the call.
    with contextlib.suppress(OSError), sockets.socket(fileno=os.dup(fd)) as connection:
        if os.fstat(connection.fileno()).st_ino == inode:
            connection.shutdown(sockets.SHUT_RDWR)
