"""Does a coordinator stay under its one total, `limits.buffer_bytes`, even with greedy clients?

    python -m bench.crowd [--quick] [--json FILE]

20 clients ask and never read; 20 ask for the largest answers that are allowed, as many at once as they may, and read them. The
resident memory of the coordinator's process is measured for 60 s. Over what it was before, it should be at most 1.2 times the
total.
"""

import argparse
import contextlib
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np
import psutil
import zmq

from bench.processes import Child
from bench.table import Row, parser, show, write
from enginepool.config import GroupConfig, Limits, PoolConfig
from enginepool.config_loader import encode_config

CLIENTS = 20
#: seconds until answers are not waited for any more
PATIENCE_S = 100.0
LABELS = list(range(4096))
LIMITS = Limits(
    buffer_bytes=256 << 20, window_bytes=64 << 20, max_message_bytes=16 << 20, answers_bytes=32 << 20, window_requests=64
)  # fmt: skip


def pool_of(directory: Path) -> PoolConfig:
    """Two sim workers that answer at once."""
    group = GroupConfig(model="sim", engine="sim", workers=2, options={"forward_s": 0.0, "row_s": 0.0, "token_s": 0.0})
    return PoolConfig(
        groups={"g": group}, listen=f"ipc://{directory}/pool.sock", state_dir=str(directory / "state"), limits=LIMITS
    )


class Peer:
    """A raw client. One that `reads` answers pings and acknowledges; the other never takes a message from its socket."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, number: int, *, reads: bool, rows: int) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, 1000 if reads else 1)
        self.socket.connect(address)
        self.reads = reads
        self.busy = self.answered = self.answer_bytes = 0
        self._number = number
        self._id = 0
        specs = [["query", "int32", [1]], ["items", "int32", [rows]], ["item_lengths", "uint32", [rows]]]
        self._header = {"type": "score", "frames": specs, "labels": LABELS}
        self._payload = [bytes(4), np.ones(rows, np.int32).tobytes(), np.ones(rows, np.uint32).tobytes()]
        self.hello()

    def hello(self) -> None:
        self.say({"type": "hello", "client": b"%16d" % self._number, "token": b"t" * 16, "incarnation": time.monotonic_ns()})

    def say(self, header: object, *frames: bytes) -> None:
        with contextlib.suppress(zmq.Again):
            self.socket.send_multipart([msgspec.msgpack.encode(header), *frames], zmq.NOBLOCK)

    def ask(self) -> None:
        self._id += 1
        self.say({**self._header, "id": self._id}, *self._payload)

    def read(self) -> None:
        """All that is there; another request for each answer."""
        while True:
            try:
                header, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = msgspec.msgpack.decode(header)
            if message["type"] == "ping":
                self.say({"type": "pong", "at": message["at"]})
            elif message["type"] == "result":
                self.answered += 1
                self.answer_bytes += sum(map(len, frames))
                self.say({"type": "ack", "ids": [message["id"]]})
            elif message.get("code") == "busy":
                self.busy += 1
            elif message.get("code") == "hello_required":
                self.hello()


def crowd(address: str, coordinator: int, seconds: float, least: int = 0) -> list[Row]:
    """Press a pool of `pool_of` that is ready, and say what became of its coordinator, the process of this id.

    It takes longer where the greedy have not had `least` answers by then, up to `PATIENCE_S`.
    """
    process = psutil.Process(coordinator)
    before = peak = process.memory_info().rss
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    largest = (LIMITS.max_message_bytes - 4096) // (4 * len(LABELS) + 2)
    try:
        deaf = [Peer(context, address, i, reads=False, rows=100) for i in range(CLIENTS)]
        greedy = [Peer(context, address, 100 + i, reads=True, rows=largest) for i in range(CLIENTS)]
        began = time.monotonic()
        while (now := time.monotonic()) < began + seconds or (
            now < began + PATIENCE_S and sum(peer.answered for peer in greedy) < least
        ):
            for peer in (*deaf, *greedy):
                peer.ask()
                if peer.reads:
                    peer.read()
            peak = max(peak, process.memory_info().rss)
            time.sleep(0.02)
    finally:
        context.destroy(linger=0)
    total = LIMITS.buffer_bytes
    return [
        Row("coordinator", "before", before / 1e6, "MB"),
        Row("coordinator", "peak over that", (peak - before) / 1e6, "MB", (peak - before) / total),
        Row("its total", "buffer_bytes", total / 1e6, "MB", 1.0),
        Row("answers", "to the greedy", sum(peer.answered for peer in greedy), "answers"),
        Row("answers", "to the greedy", sum(peer.answer_bytes for peer in greedy) / 1e6, "MB"),
        Row("busy", "to the greedy", sum(peer.busy for peer in greedy), "answers"),
    ]


def main() -> None:
    args: argparse.Namespace = parser("crowd", "Does a coordinator stay under its one total?").parse_args()
    with tempfile.TemporaryDirectory(prefix="enginepool-crowd-") as folder:
        config = pool_of(Path(folder))
        env = {"ENGINEPOOL_CONFIG": encode_config(config).decode()}
        child = Child(
            ["-m", "enginepool.coordinator.shell.daemon"], scratch=Path(folder), env=env, speaks=False, tethered=False
        )
        try:
            wait_until_ready(config.listen)
            rows = crowd(config.listen, child.pid, 10.0 if args.quick else 60.0)
        finally:
            child.process.terminate()
            child.process.wait(120.0)
    show("crowd: resident memory of the coordinator; ratio: to its total", rows)
    if args.json:
        write(args.json, rows)


def wait_until_ready(address: str) -> None:
    """Until the pool's workers are ready."""
    from enginepool.client.blocking import BlockingPool

    with BlockingPool.connect(address, connect_timeout=60.0) as pool:
        pool.ready(timeout=60.0)


if __name__ == "__main__":
    main()
