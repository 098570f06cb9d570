"""A client written from PROTOCOL.md alone, with a ZeroMQ and a msgpack library: nothing of the package is imported.

It is an example for other languages, and a check of the specification against the daemon. One thread, blocking: `step` takes
one message, `wait` steps until an answer is there. Times are seconds of this machine's monotonic clock.
"""

import contextlib
import random
import secrets
import struct
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import zmq

ELEMENTS = {"int32": "i", "uint32": "I", "float32": "f"}

Ids = Sequence[int]
Row = Ids | str


class Answer(NamedTuple):
    """The final answer of a request: its header, and its payload frames as numbers by name, row-major."""

    header: dict[str, Any]
    arrays: dict[str, list[float]]

    def rows(self, name: str = "scores") -> list[list[float]]:
        """A two-dimensional frame, row by row."""
        columns = next(shape[1] for frame, _, shape in self.header["frames"] if frame == name)
        flat = self.arrays[name]
        return [flat[start : start + columns] for start in range(0, len(flat), columns)]


class Sent(NamedTuple):
    """A request without an answer: what it takes to send it again."""

    header: dict[str, Any]
    payload: list[bytes]
    deadline: float | None


def pack_rows(name: str, rows: Sequence[Row]) -> tuple[list[list[Any]], list[bytes]]:
    """Ragged rows of ids, or of text, as two frames: their specs and their payload."""
    texts = [row for row in rows if isinstance(row, str)]
    if texts and len(texts) != len(rows):
        raise ValueError("either ids or text")
    pieces = [row.encode() if isinstance(row, str) else struct.pack(f"<{len(row)}i", *row) for row in rows]
    width = 1 if texts else 4
    lengths = [len(piece) // width for piece in pieces]
    specs = [
        [name, "utf8" if texts else "int32", [sum(lengths)]],
        ["item_lengths" if name == "items" else f"{name}_lengths", "uint32", [len(rows)]],
    ]
    return specs, [b"".join(pieces), struct.pack(f"<{len(rows)}I", *lengths)]


def unpack(specs: Sequence[Sequence[Any]], payload: Sequence[bytes]) -> dict[str, list[float]]:
    """Payload frames as numbers, by name."""
    if len(specs) != len(payload):
        raise ValueError("the header lists other frames than came")
    return {
        spec[0]: list(struct.unpack(f"<{len(data) // 4}{ELEMENTS[spec[1]]}", data))
        for spec, data in zip(specs, payload, strict=True)
    }


class PlainClient:
    """One client. `hello` first, then `submit` and `wait`, or `score`, which is both."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, *, silence_s: float = 5.0) -> None:
        self.context = context
        self.address = address
        self.silence_s = silence_s
        self.client = secrets.token_bytes(16)
        self.token = secrets.token_bytes(16)
        self.incarnation = -1
        self.epoch = 0
        self.last_id = 0
        self.welcome: dict[str, Any] = {}
        self.unanswered: dict[int, Sent] = {}
        self.answers: dict[int, Answer] = {}
        self.reports: dict[int, dict[str, Any]] = {}
        #: errors that concern no request
        self.complaints: list[dict[str, Any]] = []
        #: id -> when to send it again after `busy`
        self.later: dict[int, float] = {}
        self.pinged = time.monotonic()
        self.socket = self.open()

    def open(self) -> "zmq.Socket[bytes]":
        """A DEALER without a routing id."""
        socket: zmq.Socket[bytes] = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.SNDTIMEO, 1000)
        socket.connect(self.address)
        self.heard = time.monotonic()  # silence counts from here, not from each `hello`
        return socket

    def send(self, header: dict[str, Any], payload: Sequence[bytes] = ()) -> None:
        """Send, or give up after a second: what matters is sent again when the link is back."""
        with contextlib.suppress(zmq.Again):
            self.socket.send_multipart([msgspec.msgpack.encode(header), *payload])

    # --- what the caller does ------------------------------------------------------------------------------------------

    def hello(self, timeout_s: float = 30.0) -> dict[str, Any]:
        """Say who this is, and wait for `welcome`."""
        self.greet()
        until = time.monotonic() + timeout_s
        while not self.welcome:
            self.step(until)
        return self.welcome

    def submit(self, query: Row | Sequence[Row], items: Sequence[Row], timeout_s: float | None = None, **fields: Any) -> int:
        """Send a score request; a query for each item when `query` is a list of lists or of texts. Returns its id."""
        one = isinstance(query, str) or not query or isinstance(query[0], int)
        queries: Sequence[Any] = [query] if one else query
        text = any(isinstance(item, str) for item in items)
        specs, payload = pack_rows("query", [query or ""] if one and text else queries)
        if one:
            specs, payload = specs[:1], payload[:1]
        item_specs, item_payload = pack_rows("items", items)
        self.last_id += 1
        header = {"type": "score", "id": self.last_id, "frames": specs + item_specs, **fields}
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self.unanswered[self.last_id] = Sent(header, payload + item_payload, deadline)
        if self.welcome:
            self.post(self.last_id)
        return self.last_id

    def wait(self, id_: int, timeout_s: float = 60.0) -> Answer:
        """The final answer of a request."""
        until = time.monotonic() + timeout_s
        while id_ not in self.answers:
            self.step(until)
        return self.answers.pop(id_)

    def score(self, query: Row | Sequence[Row], items: Sequence[Row], **fields: Any) -> Answer:
        return self.wait(self.submit(query, items, **fields))

    def cancel(self, id_: int) -> None:
        self.send({"type": "cancel", "id": id_})

    def status(self, timeout_s: float = 30.0) -> dict[str, Any]:
        """A status report."""
        self.last_id += 1
        self.send({"type": "status", "id": self.last_id})
        until = time.monotonic() + timeout_s
        while self.last_id not in self.reports:
            self.step(until)
        return self.reports.pop(self.last_id)

    def goodbye(self) -> None:
        self.send({"type": "goodbye"})
        self.socket.close()

    # --- the protocol --------------------------------------------------------------------------------------------------

    def greet(self) -> None:
        self.welcome = {}
        self.incarnation += 1
        self.pinged = time.monotonic()
        self.send(
            {
                "type": "hello",
                "client": self.client,
                "token": self.token,
                "incarnation": self.incarnation,
                "agent": "plain",
                "epoch": self.epoch,
            }
        )

    def post(self, id_: int) -> None:
        """Send a request, for the first time or again, with what is left of its time."""
        sent = self.unanswered[id_]
        header = sent.header
        if sent.deadline is not None:
            header = {**header, "timeout_ms": max(1, round(1000 * (sent.deadline - time.monotonic())))}
        self.send(header, sent.payload)

    def step(self, until: float) -> bool:
        """Take one message, or let a short time pass. Raises TimeoutError after `until`."""
        now = time.monotonic()
        if now > until:
            raise TimeoutError(f"{self.address}: no answer; unanswered: {sorted(self.unanswered)}")
        for id_ in [id_ for id_, at in self.later.items() if at <= now and self.welcome]:
            del self.later[id_]
            if id_ in self.unanswered:
                self.post(id_)
        if now - self.heard > self.silence_s:
            self.socket.close(0)
            self.socket = self.open()
            self.greet()
        elif now - self.pinged > self.welcome.get("ping_ms", 1000) / 1000:
            self.pinged = now
            if self.welcome:
                self.send({"type": "ping"})
            else:
                self.greet()
        if not self.socket.poll(50):
            return False
        frame0, *payload = self.socket.recv_multipart()
        self.heard = time.monotonic()
        header: dict[str, Any] = msgspec.msgpack.decode(frame0)
        take = getattr(self, f"on_{header.get('type')}", None)
        if take is not None:
            take(header, payload)
        return True

    def on_welcome(self, header: dict[str, Any], payload: list[bytes]) -> None:
        if header.get("incarnation", 0) != self.incarnation or header["epoch"] < self.epoch:
            return
        self.epoch = header["epoch"]
        self.welcome = header
        for id_ in self.unanswered:
            if id_ not in self.later:
                self.post(id_)

    def on_pong(self, header: dict[str, Any], payload: list[bytes]) -> None:
        if header.get("epoch", 0) > self.epoch:
            self.greet()

    def on_ping(self, header: dict[str, Any], payload: list[bytes]) -> None:
        self.send({"type": "pong", "at": header.get("at", 0)})

    def on_status_report(self, header: dict[str, Any], payload: list[bytes]) -> None:
        self.reports[header.get("id", 0)] = header

    def on_result(self, header: dict[str, Any], payload: list[bytes]) -> None:
        self.finish(Answer(header, unpack(header["frames"], payload)))

    def on_error(self, header: dict[str, Any], payload: list[bytes]) -> None:
        if header.get("incarnation") is not None:
            if header["incarnation"] == self.incarnation:
                self.complaints.append(header)
        elif header["code"] == "hello_required":
            if self.welcome:
                self.greet()
        elif header.get("id") is None:
            self.complaints.append(header)
        elif header["code"] == "busy":
            wait = header.get("retry_after_ms", 100) / 1000
            self.later[header["id"]] = time.monotonic() + wait * random.uniform(1, 2)
        elif header["code"] == "id_reused":
            self.complaints.append(header)
        else:
            self.finish(Answer(header, {}))

    def finish(self, answer: Answer) -> None:
        """One answer for each request: an answer that no call waits for is a duplicate, and only acknowledged."""
        id_ = answer.header["id"]
        if self.unanswered.pop(id_, None) is not None:
            self.answers[id_] = answer
        self.send({"type": "ack", "ids": [id_]})
