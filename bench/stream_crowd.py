"""Does a coordinator stay under its one total, `limits.buffer_bytes`, with thousands of streams whose readers stop?

    python -m bench.stream_crowd [--quick] [--json FILE]

2,000 streams of 4,096 tokens each, of 20 clients: a third of the clients read and give credit, a third read and give none,
a third take nothing from their sockets. Four workers without engines generate 200,000 tokens a second. The resident memory of
the coordinator is measured; over what it was before, it should be at most 1.2 times the total.
"""

import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import zmq

from bench.coordinator_streams import start
from bench.streams.load import Client, Phase
from bench.table import Row, Target, parser, show, write
from enginepool.config import Limits

STREAMS, CLIENTS = 2000, 20
LIMITS = Limits(buffer_bytes=512 << 20, window_bytes=64 << 20, answers_bytes=64 << 20)
#: of the third that reads, of the third that gives no credit, of the third that takes nothing
PHASES = [Phase(CLIENTS, STREAMS, 4096, credit, 0.0, 0.0) for credit in (512, 64, 65_536)]


class Stopped(Client):
    """It reads, and gives no credit."""

    gives_credit = False


class Deaf(Client):
    """It takes nothing."""

    unread = 1

    def read(self) -> None:
        """Nothing."""


def crowd(address: str, coordinator: int, seconds: float) -> list[Row]:
    """Stream from a pool for so long, and say what became of its coordinator, the process of this id."""
    process = psutil.Process(coordinator)
    before = peak = process.memory_info().rss
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    kinds = (Client, Stopped, Deaf)
    clients = [kinds[i % 3](context, address, PHASES[i % 3]) for i in range(CLIENTS)]
    try:
        for i in range(STREAMS):
            clients[i % CLIENTS].ask()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for client in clients:
                client.read()
            peak = max(peak, process.memory_info().rss)
            time.sleep(0.001)
    finally:
        context.destroy(linger=0)
    counted = {kind: sum(client.tokens for client in clients if type(client) is kind) for kind in kinds}
    ended = sum(client.ended for client in clients if type(client) is Client)
    return [
        Row("coordinator", "before", before / 1e6, "MB"),
        Row("coordinator", "peak over that", (peak - before) / 1e6, "MB", (peak - before) / LIMITS.buffer_bytes),
        Row("its total", "buffer_bytes", LIMITS.buffer_bytes / 1e6, "MB", 1.0),
        Row("tokens", "to those who read", counted[Client], "tokens"),
        Row("tokens", "to those without credit", counted[Stopped], "tokens"),
        Row("streams", "of those who read, ended", ended, "streams"),
    ]


def main() -> None:
    args = parser("stream_crowd", "Does a coordinator stay under its total with streams whose readers stop?").parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stream-crowd-")))
        folder.chmod(0o700)
        daemon, _, load = start(folder, stack, 200_000.0, slots=STREAMS, limits=LIMITS)
        load.stop()
        rows = crowd(f"ipc://{folder}/pool.sock", daemon.pid, 8.0 if args.quick else 40.0)
    targets = [Target("coordinator", "peak over that", 1.2)]
    show("stream crowd: resident memory of the coordinator; ratio: to its total", rows, targets)
    if args.json:
        write(args.json, rows)


if __name__ == "__main__":
    main()
