"""How a link over TCP finds that its peer's host is gone: the kernel asks it. An ipc link ends with its peer.

Never ZMTP heartbeats: libzmq (4.3.5 and before) ends the whole process when it would send a ping or a pong on a connection
whose peer has left while more messages of that peer wait than `ZMQ_RCVHWM`.
"""

from typing import Any

import zmq

#: a silent peer is asked after so long, then so often, and is gone after so many questions without an answer
IDLE_S, AGAIN_S, TIMES = 4, 2, 3
#: what is sent is acknowledged within this, or the connection ends
UNREAD_S = 10.0


def keep_alive(socket: "zmq.Socket[Any]", unread_s: float = UNREAD_S) -> None:
    """Set the options of a socket that is about to connect or to listen."""
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, IDLE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, AGAIN_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, TIMES)
    socket.setsockopt(zmq.TCP_MAXRT, int(1000 * unread_s))
