"""How a peer connects to a coordinator: the options of its DEALER socket, the same for clients and workers."""

from typing import Any

import zmq

from enginepool.keepalive import keep_alive
from enginepool.keys import Key

#: A connection attempt is given up after so long, and a new one begins. The kernel repeats a SYN after 1, 2, 4, 8 … seconds, so
#: that an attempt that began while the network was down would go on for as long again once the network is back.
CONNECT_MS = 2000
#: the longest pause between two attempts
AGAIN_MS = 1000


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
        OSError: ZeroMQ cannot connect to such an address.
    """
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
