"""The worker's side of the wire benchmark: `python -m bench.workers {enginepool,zmq,http} ADDRESS`.

Each answers at once with bytes prepared before, so that what is measured is what stands in between. They end with the
benchmark: at the end of stdin.
"""

import argparse
import asyncio
import gc
import os
import sys
import uuid
from functools import cache
from typing import cast

import msgspec
import uvloop
import zmq

from bench import prepared
from bench.processes import stdin_ended
from enginepool.protocol.messages import (
    Accept,
    Batch,
    Capabilities,
    Done,
    Drain,
    ErrorReply,
    Idle,
    PartDone,
    Ping,
    Pong,
    Ready,
    Register,
    Stage,
    ToWorker,
)

GROUP = "bench"
#: Five requests of 10 x 300 tokens a batch, two batches in flight: what architecture.md asks of a GPU.
CAPABILITIES = Capabilities(
    kind="causal",
    vocab=prepared.VOCAB,
    context=32_768,
    batch_tokens=16_384,
    batch_rows=128,
    inflight_tokens=32_768,
    inflight_rows=256,
    model="prepared answers",
    engine="bench",
    device="none",
)


class _Numbered(msgspec.Struct, tag_field="type", tag="score", gc=False):
    """The one field of a score request that an echo needs."""

    id: int


def ready() -> None:
    """Tell the benchmark that this process is up."""
    sys.stdout.write("{}\n")
    sys.stdout.flush()


def dial(address: str) -> zmq.Socket[bytes]:
    """A DEALER socket that looks up twice a second, to see whether the benchmark is over."""
    sock = zmq.Context().socket(zmq.DEALER)
    sock.setsockopt(zmq.RCVTIMEO, 500)
    sock.setsockopt(zmq.LINGER, 0)
    sock.connect(address)
    return sock


@cache
def _part_done(rows: int) -> tuple[PartDone, bytes]:
    spec, scores = prepared.scores_frame(rows)
    return PartDone(frames=[spec]), scores


def enginepool(address: str) -> None:
    """A worker of the pool, by PROTOCOL.md, whose engine takes no time."""
    sock = dial(address)
    encode = msgspec.msgpack.Encoder().encode
    decode = msgspec.msgpack.Decoder(ToWorker).decode
    register = Register(group=GROUP, incarnation=uuid.uuid4().hex, pid=os.getpid(), host="localhost")
    sock.send(encode(register))
    ready()
    while True:
        try:
            frames = sock.recv_multipart()
        except zmq.Again:
            if stdin_ended():
                return
            continue
        message: ToWorker = decode(frames[0])
        match message:
            case Batch(batch=batch, parts=parts):
                # the last frame of a part is item_lengths, whose shape says how many rows it has
                done = [_part_done(part.frames[-1].shape[0]) for part in parts]
                sock.send_multipart([encode(Done(batch, [part for part, _ in done])), *[scores for _, scores in done]])
            case Ping(at=at):
                sock.send(encode(Pong(at=at, stage="ready")))
            case Accept(epoch=epoch):
                for say in (Stage("ready"), Ready(CAPABILITIES), Idle(epoch)):
                    sock.send(encode(say))
            case ErrorReply(code="hello_required"):
                sock.send(encode(register))
            case ErrorReply(code=code, message=why):
                raise RuntimeError(f"{code}: {why}")
            case Drain():
                return
            case _:
                pass  # our pings, texts and weights: we send none


def echo(address: str) -> None:
    """Behind zmq.proxy: frame 0 is the client's link, frame 1 its request."""
    sock = dial(address)
    decode = msgspec.msgpack.Decoder(_Numbered).decode
    template, scores = prepared.result()
    ready()
    while True:
        try:
            frames = sock.recv_multipart()
        except zmq.Again:
            if stdin_ended():
                return
            continue
        sock.send_multipart([frames[0], template.of(decode(frames[1]).id), scores])


class Http(asyncio.Protocol):
    """HTTP/1.1 with keep-alive and content-length, as far as a router needs it: POST gets scores, the rest {}."""

    _scores = prepared.http_answer(prepared.http_answer_body())
    _facts = prepared.http_answer(b'{"status":"ok","model_path":"none","is_generation":true}')

    def __init__(self) -> None:
        self._unread = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not derive from asyncio's
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        unread = self._unread + data if self._unread else data
        while (end := unread.find(b"\r\n\r\n")) >= 0:
            head = unread[:end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(unread) < end + 4 + length:
                break
            self._transport.write(self._scores if head.startswith(b"post /generate") else self._facts)
            unread = unread[end + 4 + length :]
        self._unread = unread


async def http(port: int) -> None:
    """Serve on the loopback interface until stdin ends."""
    loop = asyncio.get_running_loop()
    over = asyncio.Event()

    def look() -> None:
        if os.read(0, 4096) == b"":
            over.set()

    server = await loop.create_server(Http, "127.0.0.1", port)
    loop.add_reader(0, look)
    ready()
    async with server:
        await over.wait()


def main() -> None:
    """Run one worker until the benchmark is over."""
    options = argparse.ArgumentParser(prog="python -m bench.workers", description="a worker with prepared answers")
    options.add_argument("kind", choices=("enginepool", "zmq", "http"))
    options.add_argument("address", help="endpoint to dial, or port to serve")
    chosen = options.parse_args()
    gc.freeze()
    gc.disable()
    if chosen.kind == "http":
        uvloop.run(http(int(chosen.address)))
    elif chosen.kind == "zmq":
        echo(chosen.address)
    else:
        enginepool(chosen.address)


if __name__ == "__main__":
    main()
