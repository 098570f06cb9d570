"""A coordinator process that does what STAND_IN says.

`exit CODE` ends at once; `fragile` dies of each score request; `stubborn` ends neither on SIGTERM nor with its lifeline.
"""

import os
import signal
import sys
import time

import msgspec
import zmq

from enginepool.config_loader import decode_config
from enginepool.protocol.messages import ErrorReply, FromClient, Hello, Score, Welcome


def main() -> None:
    mode, _, number = os.environ["STAND_IN"].partition(" ")
    print(f"enginepool: this is the {mode} coordinator", file=sys.stderr, flush=True)  # noqa: T201 (what the test reads)
    if mode == "exit":
        sys.exit(int(number))
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.bind(decode_config(os.environ["ENGINEPOOL_CONFIG"].encode()).listen)
    decoder: msgspec.msgpack.Decoder[FromClient] = msgspec.msgpack.Decoder(FromClient)
    greeted: set[bytes] = set()
    while True:
        link, header, *_ = socket.recv_multipart()
        message = decoder.decode(header)
        if isinstance(message, Hello):
            greeted.add(link)
            socket.send_multipart(
                [link, msgspec.msgpack.encode(Welcome(time.time_ns() // 1000, incarnation=message.incarnation))]
            )
        elif link not in greeted:
            socket.send_multipart([link, msgspec.msgpack.encode(ErrorReply("hello_required", "say hello"))])
        elif isinstance(message, Score):
            print("what a request!", file=sys.stderr, flush=True)  # noqa: T201
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
