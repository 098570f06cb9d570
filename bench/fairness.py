"""How long does a light client wait while greedy clients keep the queue full?

    python -m bench.fairness [--tree DIR] [--seconds S] [--quick] [--json FILE]

One client asks for the score of a single item, again 20 ms after each answer. Next to it 1, 8 and 64 greedy clients of the same
priority keep 1,000 items each in the queue: half of them as one request, the others as 125 requests. One simulated
engine answers, whose forwards of 64 rows take 20 ms. `--tree` measures the coordinator of another checkout.
"""

import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import zmq

from bench.processes import ROOT, Child
from bench.table import Row, Target, parser, show, write

GREEDY = (1, 8, 64)
#: items that each greedy client keeps in the queue, as one request or as requests of so many
ITEMS, SMALL = 1000, 8
#: tokens of a query, and of an item
QUERY, ITEM = 16, 16
THINK_S = 0.02
#: how long anything here may take before the run fails
LIMIT_S = 180.0
ENGINE = {"forward_s": 0.004, "row_s": 0.00025, "batch_rows": 64}


class Peer:
    """A raw client that keeps as many requests of as many items unanswered as it is told to."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, number: int, requests: int, rows: int) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 1000)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.connect(address)
        self.rows = rows
        self.answered = 0
        self.errors: list[str] = []
        #: seconds of each answered request
        self.waits: list[float] = []
        self._asked: dict[int, float] = {}
        self._id = 0
        lengths = np.full(rows, ITEM, np.uint32)
        specs = [["query", "int32", [QUERY]], ["items", "int32", [ITEM * rows]], ["item_lengths", "uint32", [rows]]]
        self._header = {"type": "score", "frames": specs, "labels": [1, 2]}
        self._payload = [bytes(4 * QUERY), bytes(4 * ITEM * rows), lengths.tobytes()]
        self.say({"type": "hello", "client": b"%16d" % number, "token": b"t" * 16, "incarnation": time.monotonic_ns()})
        for _ in range(requests):
            self.ask()

    def say(self, header: object, *frames: bytes) -> None:
        self.socket.send_multipart([msgspec.msgpack.encode(header), *frames])

    def ask(self) -> None:
        self._id += 1
        self._asked[self._id] = time.monotonic()
        self.say({**self._header, "id": self._id}, *self._payload)

    def read(self) -> int:
        """All that has come; how many answers there were."""
        before = self.answered
        done: list[int] = []
        while True:
            try:
                header = self.socket.recv_multipart(zmq.NOBLOCK)[0]
            except zmq.Again:
                break
            message = msgspec.msgpack.decode(header)
            if message["type"] == "ping":
                self.say({"type": "pong", "at": message["at"]})
            elif message["type"] == "result":
                done.append(message["id"])
                self.answered += 1
                self.waits.append(time.monotonic() - self._asked.pop(message["id"]))
            elif message["type"] == "error":
                self.errors.append(message["message"])
        if done:
            self.say({"type": "ack", "ids": done})
        return self.answered - before

    def leave(self) -> None:
        self.say({"type": "goodbye"})
        self.socket.close()


@contextmanager
def pool(tree: Path) -> Generator[str]:
    """The address of a pool with one sim worker, which the code of `tree` runs."""
    with tempfile.TemporaryDirectory(prefix="enginepool-fairness-") as folder:
        address = f"ipc://{folder}/pool.sock"
        # Only what every version knows.
        group = {"model": "sim", "engine": "sim", "workers": 1, "options": ENGINE}
        config = {"groups": {"g": group}, "listen": address, "state_dir": f"{folder}/state"}
        env = {"ENGINEPOOL_CONFIG": msgspec.json.encode(config).decode(), "PYTHONPATH": str(tree)}
        command = ["env", "-C", str(tree), sys.executable, "-m", "enginepool.coordinator.shell.daemon"]
        child = Child(command, scratch=Path(folder), env=env, speaks=False)
        try:
            yield address
        finally:
            child.stop(LIMIT_S, hint=signal.SIGTERM)


def measure(address: str, greedy: int, seconds: float) -> tuple[list[float], float]:
    """The waits of the light client next to so many greedy ones for at least so long, and the items that those got a second."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    poller = zmq.Poller()
    try:
        light = Peer(context, address, 0, 1, 1)
        limit = time.monotonic() + LIMIT_S
        while not light.read():
            # Its first request waits until the worker is ready.
            assert time.monotonic() < limit and not light.errors, light.errors or "the pool is not ready"
            light.socket.poll(100)
        others = [Peer(context, address, 1 + i, *((ITEMS // SMALL, SMALL) if i % 2 else (1, ITEMS))) for i in range(greedy)]
        for peer in (light, *others):
            poller.register(peer.socket, zmq.POLLIN)
        # All that they ask for has come, and forwards are as long as they are going to be.
        ask_at = begin = time.monotonic() + 1.0
        light.waits.clear()
        busy = {peer.socket: peer for peer in others}
        counted = 0
        while time.monotonic() < begin + seconds or not light.waits:
            assert time.monotonic() < limit + seconds, f"no answer in {LIMIT_S:g} s"
            now = time.monotonic()
            if ask_at <= now:
                light.ask()
                ask_at = float("inf")
            for socket, _ in poller.poll(int(max(0.0, min(1.0, ask_at - now)) * 1000)):
                peer = busy.get(socket)
                if peer is None:
                    if light.read():
                        ask_at = time.monotonic() + THINK_S
                    continue
                answers = peer.read()
                counted += answers * peer.rows if now >= begin else 0
                for _ in range(answers):
                    peer.ask()
        spent = time.monotonic() - begin
        errors = [error for peer in (light, *others) for error in peer.errors]
        assert not errors, errors[:3]
        for peer in (light, *others):
            peer.leave()
        return light.waits, counted / spent
    finally:
        context.destroy(linger=1000)


def rows_of(tree: Path, seconds: float, greedy: Sequence[int] = GREEDY) -> list[Row]:
    """Milliseconds that the light client waited; the ratio is to the same figure when it was alone."""
    rows: list[Row] = []
    alone: dict[str, float] = {}
    for number in (0, *greedy):
        with pool(tree) as address:
            waits, rate = measure(address, number, min(seconds, 5.0) if not number else seconds)
        name = f"{number} greedy" if number else "alone"
        spread = (1000 * min(waits), 1000 * max(waits))
        for who, value in (("p50", statistics.median(waits)), ("p99", float(np.quantile(waits, 0.99)))):
            value *= 1000
            rows.append(Row(name, who, value, "ms", value / alone.setdefault(who, value), spread))
        rows.append(Row(name, "requests", len(waits), "requests"))
        if number:
            rows.append(Row(name, "items of the greedy", rate, "items/s"))
    return rows


def main() -> None:
    options = parser("fairness", "How long does a light client wait while greedy clients keep the queue full?")
    options.add_argument("--tree", type=Path, default=ROOT, metavar="DIR", help="measure the coordinator of this checkout")
    options.add_argument("--seconds", type=float, default=20.0, metavar="S", help="of each phase")
    args = options.parse_args()
    rows = rows_of(args.tree.resolve(), 2.0 if args.quick else args.seconds)
    # Two forwards in flight, its own, and one of each competing client.
    forward_ms = 1000 * (ENGINE["forward_s"] + ENGINE["batch_rows"] * ENGINE["row_s"])
    targets = [Target(f"{n} greedy", "p99", (3 + n) * forward_ms, of_value=True) for n in GREEDY]
    show(f"fairness: the light client's wait; ratio: to alone; {os.cpu_count()} cores", rows, targets)
    if args.json:
        write(args.json, rows)


if __name__ == "__main__":
    main()
