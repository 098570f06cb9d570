"""A worker written from the specification alone, with a ZeroMQ and a msgpack library: it imports nothing of the package.

Its engine is a toy: `toy_score` of a row's ids and a label. That never takes long, so one thread is enough: a real engine needs
another one for `ping`.
"""

import contextlib
import math
import os
import secrets
import struct
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

KEPT = 64

CAPABILITIES = {
    "kind": "causal",
    "vocab": 300,
    "context": 64,
    "batch_tokens": 64,
    "batch_rows": 8,
    "inflight_tokens": 128,
    "inflight_rows": 16,
    "model": "toy",
    "engine": "plain",
}


def toy_score(row: Sequence[int], label: int) -> float:
    """A number that depends on every id, on their order and on the label, and is exact in binary32."""
    return (sum((place + 1) * token for place, token in enumerate(row)) + 7 * label) % 64 / 64


def toy_tokens(text: str) -> list[int]:
    """A start token, then a token for each byte."""
    return [1, *(byte + 3 for byte in text.encode())]


def rows_of(specs: Sequence[Sequence[Any]], payload: Sequence[bytes], item_first: bool) -> list[bytes]:
    """Each row's bytes, query and item joined."""
    frames = {spec[0]: data for spec, data in zip(specs, payload, strict=True)}
    width = 1 if specs[0][1] == "utf8" else 4

    def cut(name: str, lengths: str) -> list[bytes]:
        data, at, out = frames[name], 0, list[bytes]()
        for n in struct.unpack(f"<{len(frames[lengths]) // 4}I", frames[lengths]):
            out.append(data[at : at + n * width])
            at += n * width
        return out

    items = cut("items", "item_lengths")
    queries = cut("query", "query_lengths") if "query_lengths" in frames else [frames["query"]] * len(items)
    return [item + query if item_first else query + item for query, item in zip(queries, items, strict=True)]


class PlainWorker:
    """One worker process's worth of protocol. `step` until `ended`."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, group: str, *, silence_s: float = 5.0) -> None:
        self.incarnation = secrets.token_hex(16)
        self.group = group
        self.silence_s = silence_s
        self.epoch = 0
        self.accepted = False
        self.orphan_s = 60.0
        self.ended = ""
        #: the last answers, for work that comes twice
        self.answers: dict[tuple[int, int], list[bytes]] = {}
        self.asked = self.heard = time.monotonic()
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 1000)
        self.socket.setsockopt(zmq.IMMEDIATE, 1)
        self.socket.setsockopt(zmq.SNDTIMEO, 1000)
        self.socket.connect(address)
        self.register()

    def send(self, header: dict[str, Any], payload: Sequence[bytes] = ()) -> list[bytes]:
        """Send, or give up after a second: what matters is sent again when the link is back."""
        frames = [msgspec.msgpack.encode(header), *payload]
        with contextlib.suppress(zmq.Again):
            self.socket.send_multipart(frames)
        return frames

    def register(self) -> None:
        self.accepted = False
        self.asked = time.monotonic()
        self.send(
            {
                "type": "register",
                "group": self.group,
                "incarnation": self.incarnation,
                "pid": os.getpid(),
                "epoch": self.epoch,
            }
        )

    def step(self, wait_ms: int = 50) -> bool:
        """Take one message, or let a short time pass."""
        now = time.monotonic()
        if now - self.heard > self.orphan_s:
            self.end("no word from a coordinator")
            return False
        if now - self.asked > 1.0 and (not self.accepted or now - max(self.heard, self.asked) > self.silence_s):
            self.register()
        if not self.socket.poll(wait_ms):
            return False
        frame0, *payload = self.socket.recv_multipart()
        self.heard = time.monotonic()
        header: dict[str, Any] = msgspec.msgpack.decode(frame0)
        take = getattr(self, f"on_{header.get('type')}", None)
        if take is not None:
            take(header, payload)
        return True

    def end(self, reason: str) -> None:
        self.ended = reason
        self.socket.close()

    def on_accept(self, header: dict[str, Any], payload: list[bytes]) -> None:
        epoch = header["epoch"]
        if epoch < self.epoch:
            return
        self.accepted = True
        self.orphan_s = header.get("orphan_s", 60.0)
        if epoch > self.epoch:
            self.epoch = epoch
            self.answers.clear()
            self.send({"type": "idle", "epoch": epoch})
        self.send({"type": "ready", "capabilities": CAPABILITIES})

    def on_error(self, header: dict[str, Any], payload: list[bytes]) -> None:
        if header["code"] == "hello_required":
            self.register()
        elif header["code"] in ("superseded", "forbidden", "unauthorized", "protocol_version", "unknown_group"):
            self.end(header["code"])

    def on_ping(self, header: dict[str, Any], payload: list[bytes]) -> None:
        self.send({"type": "pong", "at": header.get("at", 0), "stage": "ready"})

    def on_drain(self, header: dict[str, Any], payload: list[bytes]) -> None:
        self.send({"type": "stage", "stage": "draining"})
        self.send({"type": "exiting", "reason": "drained"})
        self.end("drained")

    def takes(self, task: list[int]) -> bool:
        """Whether this is new work of the accepted epoch. Work that comes twice gets the same answer."""
        kept = self.answers.get((task[0], task[1]))
        if kept is not None:
            self.socket.send_multipart(kept)
            return False
        if not self.accepted or task[0] != self.epoch:
            self.send({"type": "error", "code": "hello_required", "message": "another epoch", "id": task[1]})
            return False
        return True

    def answer(self, task: list[int], header: dict[str, Any], payload: Sequence[bytes]) -> None:
        self.answers[task[0], task[1]] = self.send(header, payload)
        while len(self.answers) > KEPT:
            del self.answers[next(iter(self.answers))]

    def on_batch(self, header: dict[str, Any], payload: list[bytes]) -> None:
        if not self.takes(header["batch"]):
            return
        parts: list[dict[str, Any]] = []
        frames: list[bytes] = []
        at = 0
        for part in header["parts"]:
            specs = part["frames"]
            rows = rows_of(specs, payload[at : at + len(specs)], part.get("item_first", False))
            at += len(specs)
            labels: list[int] = part.get("labels", [])
            scores = [self.scores(struct.unpack(f"<{len(row) // 4}i", row), labels, part) for row in rows]
            parts.append({"frames": [["scores", "float32", [len(rows), len(labels)]]]})
            frames.append(b"".join(struct.pack(f"<{len(labels)}f", *row) for row in scores))
        self.answer(header["batch"], {"type": "done", "batch": header["batch"], "parts": parts, "run_us": 1}, frames)

    def scores(self, row: Sequence[int], labels: Sequence[int], part: dict[str, Any]) -> list[float]:
        values = [toy_score(row, label) for label in labels]
        total = sum(values)
        if part.get("softmax", False) and total:
            values = [value / total for value in values]
        return [math.log(value) if value else -math.inf for value in values] if part.get("logprobs", False) else values

    def on_tokenize(self, header: dict[str, Any], payload: list[bytes]) -> None:
        if not self.takes(header["task"]):
            return
        texts = [row.decode() for row in rows_of(header["frames"], payload, header.get("item_first", False))]
        rows = [toy_tokens(text) for text in texts]
        lengths = [len(row) for row in rows]
        specs = [["items", "int32", [sum(lengths)]], ["item_lengths", "uint32", [len(rows)]]]
        ids = b"".join(struct.pack(f"<{len(row)}i", *row) for row in rows)
        frames = [ids, struct.pack(f"<{len(rows)}I", *lengths)]
        self.answer(header["task"], {"type": "tokenized", "task": header["task"], "frames": specs}, frames)
