"""What tests that attack a pool share: a raw link, which sends any bytes, and the messages of an update."""

import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
import zmq

from tests.process.daemons import PATIENCE_S

Socket = zmq.Socket[bytes]
Header = Mapping[str, Any]


class Raw:
    """A DEALER that speaks for itself: no client code stands between the test and the coordinator."""

    def __init__(self, socket: Socket) -> None:
        self.socket = socket
        self.heard: list[Header] = []

    def say(self, header: Header, *frames: bytes) -> None:
        self.socket.send_multipart([msgspec.msgpack.encode(header), *frames])

    def wait_for(self, *types: str) -> Header:
        """The next message of one of these types; others are noted in `heard`."""
        while True:
            assert self.socket.poll(int(PATIENCE_S * 1000)), f"none of {types} came; so far {self.heard}"
            header, *frames = self.socket.recv_multipart()
            message: dict[str, Any] = msgspec.msgpack.decode(header)
            self.heard.append(message)
            if message["type"] in types:
                return message | {"payload": frames}

    def ask(self, header: Header, *frames: bytes) -> Header:
        """The next message but for what answers nothing."""
        self.say(header, *frames)
        while True:
            answer = self.wait_for(*_ANSWERS)
            if answer["type"] != "phase":
                return answer

    def hello(self, name: bytes = b"c") -> "Raw":
        self.say({"type": "hello", "client": name * 16, "token": b"t" * 16})
        assert self.wait_for("welcome", "error")["type"] == "welcome", self.heard
        return self


_ANSWERS = ("error", "welcome", "phase", "published", "status_report", "weights_report", "pong", "result", "accept", "join")


@contextmanager
def raw(address: str, **options: Any) -> Generator[Raw]:
    """A link to `address`; `options` are of its socket."""
    context: zmq.Context[Socket] = zmq.Context()
    try:
        socket: Socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        for name, value in options.items():
            setattr(socket, name, value)
        socket.connect(address)
        yield Raw(socket)
    finally:
        context.destroy(linger=0)


def publish(id: int, version: int, tensors: list[Any], **fields: Any) -> tuple[Header, bytes]:
    """A `publish` whose manifest is `tensors`."""
    manifest = json.dumps(tensors).encode()
    header = {"type": "publish", "id": id, "version": version, "frames": [["manifest", "utf8", [len(manifest)]]], **fields}
    return header, manifest
