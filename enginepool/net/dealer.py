"""The options of sockets: how a peer connects to a coordinator, and how both ends find that the other host is gone."""

from typing import Any

import zmq

from enginepool.net.descriptors import CONNECTION_FILES, check_free
from enginepool.net.keys import Key

#: A connection attempt is given up after so long, and a new one begins. The kernel repeats a SYN after 1, 2, 4, 8 … seconds, so
#: that an attempt that began while the network was down would go on for as long again once the network is back.
CONNECT_MS = 2000
#: the longest pause between two attempts
AGAIN_MS = 1000
#: seconds of silence before the first probe; seconds between probes; probes without an answer after which a peer is lost
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_COUNT = 4, 2, 3
#: the kernel of the peer acknowledges what was sent within this, or the connection ends
UNREAD_S = 10.0


def keep_alive(socket: "zmq.Socket[Any]", unread_s: float = UNREAD_S) -> None:
    """Let the kernel probe a silent peer over TCP, whose host may be gone. Set before the socket connects or binds.

    Never ZMTP heartbeats: libzmq (4.3.5 and before) ends the whole process when it would send a ping or a pong on a connection
    whose peer has left while more messages of that peer wait than `ZMQ_RCVHWM`.
    """
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_INTERVAL_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_COUNT)
    socket.setsockopt(zmq.TCP_MAXRT, min(max(int(1000 * unread_s), 1), 2**31 - 1))


def connect(socket: "zmq.Socket[Any]", address: str, key: Key | None, *, again_ms: int) -> None:
    """Connect `socket` to `address` with `key`, which counts on TCP alone. The first pause between two attempts is `again_ms`.

    Raises:
        zmq.ZMQError: ZeroMQ cannot connect to such an address.
    """
    socket.setsockopt(zmq.LINGER, 0)
    # Nothing is queued for a connection that does not stand.
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.RECONNECT_IVL, again_ms)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, AGAIN_MS)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
    keep_alive(socket)
    if key is not None and address.startswith("tcp://"):
        socket.setsockopt(zmq.CURVE_SERVERKEY, key.server.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, key.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret.encode())
    if "[" in address:
        socket.setsockopt(zmq.IPV6, 1)
    socket.connect(address)


def ask(address: str, key: Key | None, question: bytes, wait_s: float) -> bytes | None:
    """Connect, send the header `question`, and return the header of the first answer; None: there is none within `wait_s`.

    Raises:
        OSError: ZeroMQ cannot connect to such an address, or this process has too few file descriptors.
    """
    check_free(CONNECTION_FILES)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        try:
            connect(socket, address, key, again_ms=100)
        except zmq.ZMQError as error:
            raise OSError(error.errno, error.strerror or str(error)) from None
        wait_ms = int(wait_s * 1000)
        if not socket.poll(wait_ms, zmq.POLLOUT):
            return None
        socket.send(question)
        return socket.recv_multipart()[0] if socket.poll(wait_ms, zmq.POLLIN) else None
