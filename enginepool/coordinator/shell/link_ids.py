"""The ids of links: the routing ids that libzmq gives to connections.

A peer can choose the id of its own connection instead: that of another peer that has just left, whose messages it would then
get; or one that libzmq gives to a later connection, which then ends this process (`Assertion failed: ok (src/socket_base.cpp`).
libzmq counts ids up, from a number of `rand`, which it does not seed. So `rand` is seeded here, and an id that libzmq cannot
have given is known by its number.
"""

import ctypes
import secrets

import zmq

from enginepool.coordinator.shell.connections import AHEAD


def router_socket(context: "zmq.Context[zmq.Socket[bytes]]") -> "zmq.Socket[bytes]":
    """A ROUTER socket whose ids cannot be guessed."""
    ctypes.CDLL(None).srand(secrets.randbits(32))
    return context.socket(zmq.ROUTER)


class LinkIds:
    """The ids that libzmq gives to the connections of one ROUTER socket. Make it before the socket has any."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", socket: "zmq.Socket[bytes]") -> None:
        name = f"inproc://first-{secrets.token_hex(8)}"
        with context.socket(zmq.DEALER) as first:
            socket.bind(name)
            first.connect(name)
            first.send(b"")
            link, _ = socket.recv_multipart()
            socket.unbind(name)
        self._first = int.from_bytes(link[1:], "big")

    def given(self, link: bytes, accepted: int) -> bool:
        """Whether libzmq may have given this id, after it was heard that so many connections were accepted."""
        number = (int.from_bytes(link[1:], "big") - self._first) % 2**32
        return len(link) == 5 and link[0] == 0 and number <= accepted + 2 * AHEAD
