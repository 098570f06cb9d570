"""What does a streamed token cost the coordinator, and how many a second go through one process?

    python -m bench.coordinator_streams [--tokens N] [--rate R] [--quick] [--json FILE]

Four workers without engines, in one process, generate 50,000 tokens a second each, for 256 streams of one client, of 16 and of
256. The CPU seconds of the coordinator, the workers and the clients are read while the streams run. `--rate` is of all
workers together; 0: as many as they can.
"""

import os
import signal
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path

import msgspec

from bench.peers import begin
from bench.processes import Child, cpu_seconds
from bench.streams.load import Counted, Phase
from bench.table import Row, Target, parser, show, write
from bench.workers import GROUP
from enginepool.config import GroupConfig, Limits, PoolConfig
from enginepool.config_loader import encode_config

WORKERS, STREAMS, CLIENTS = 4, 256, (1, 16, 256)
PATIENCE_S = 60.0
COORDINATOR, WORKER, CLIENT = "coordinator", "workers", "clients"


def start(
    folder: Path, stack: ExitStack, rate: float, slots: int = STREAMS, limits: Limits | None = None
) -> tuple[Child, Child, Child]:
    """The coordinator, the process of its workers, and that of all clients."""
    listen, workers = f"ipc://{folder}/pool.sock", f"ipc://{folder}/workers.sock"
    group = GroupConfig(model="none", engine="sim", workers=0, operations=["generate"])
    config = PoolConfig(
        groups={GROUP: group}, listen=listen, listen_workers=workers, state_dir=str(folder / "state"), limits=limits or Limits()
    )
    env = {"ENGINEPOOL_CONFIG": encode_config(config).decode()}
    daemon = Child(["-m", "enginepool.coordinator.shell.daemon"], scratch=folder, env=env, speaks=False)
    stack.callback(daemon.stop, hint=signal.SIGTERM)
    each = rate / WORKERS if rate else 1e9
    argv = ["-m", "bench.streams.worker", workers, str(WORKERS), str(each), str(slots // WORKERS)]
    return daemon, begin(stack, argv, folder), begin(stack, ["-m", "bench.streams.load", listen], folder)


def measure(daemon: Child, workers: Child, load: Child, phase: Phase) -> tuple[Counted, dict[str, float]]:
    """One phase: what the clients counted, and the CPU seconds of each side meanwhile."""
    pids = {COORDINATOR: [daemon.pid], WORKER: [workers.pid]}
    load.ask(msgspec.to_builtins(phase), PATIENCE_S + phase.ramp_s)
    before = {who: cpu_seconds(found) for who, found in pids.items()}
    load.hear(PATIENCE_S + phase.seconds)
    spent = {who: cpu_seconds(found) - before[who] for who, found in pids.items()}
    counted = msgspec.convert(load.hear(PATIENCE_S), Counted)
    return counted, {**spent, CLIENT: counted.cpu_s}


def rows_of(found: dict[int, list[tuple[Counted, dict[str, float]]]]) -> list[Row]:
    """Medians of the repetitions, for each number of clients."""
    rows: list[Row] = []
    for clients, phases in found.items():
        what = f"{STREAMS} streams of {clients} client{'s' * (clients > 1)}"
        rates = [one.tokens / one.seconds for one, _ in phases]
        rows.append(Row(what, "tokens", statistics.median(rates), "tokens/s", None, (min(rates), max(rates))))
        together = statistics.median(one.tokens / max(one.messages, 1) for one, _ in phases)
        rows.append(Row(what, "tokens in a message", together, "tokens"))
        for who in (COORDINATOR, WORKER, CLIENT):
            costs = [spent[who] * 1e6 / max(one.tokens, 1) for one, spent in phases]
            rows.append(Row(what, f"{who}, CPU", statistics.median(costs), "µs/token", None, (min(costs), max(costs))))
            busy = statistics.median(spent[who] / one.seconds for one, spent in phases)
            rows.append(Row(what, f"{who}, cores", busy, "cores"))
    return rows


def main() -> None:
    options = parser("coordinator_streams", "What does a streamed token cost the coordinator?")
    options.add_argument("--tokens", type=int, default=1024, help="of a stream (default: 1024)")
    options.add_argument("--rate", type=float, default=200_000.0, help="tokens/s of all workers; 0: no limit")
    args = options.parse_args()
    repetitions, ramp_s, seconds = (1, 0.5, 1.0) if args.quick else (3, 1.0, 3.0)
    found: dict[int, list[tuple[Counted, dict[str, float]]]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="streams-")))
        folder.chmod(0o700)
        daemon, workers, load = start(folder, stack, args.rate)
        for _ in range(repetitions):
            for clients in CLIENTS:
                phase = Phase(clients, STREAMS, args.tokens, 512, ramp_s, seconds)
                found.setdefault(clients, []).append(measure(daemon, workers, load, phase))
    one = f"{STREAMS} streams of 1 client"
    targets = [
        Target(one, f"{COORDINATOR}, CPU", 3.0, of_value=True),
        Target(one, "tokens", 200_000, at_most=False, of_value=True),
    ]
    rows = rows_of(found)
    cores = len(os.sched_getaffinity(0))
    show(f"streams through one coordinator; {WORKERS} workers; streams of {args.tokens} tokens; {cores} cores", rows, targets)
    if args.json:
        write(args.json, rows)


if __name__ == "__main__":
    main()
