"""What do callers notice of a coordinator that is stopped and started again? A rolling upgrade under load, on real processes.

    python -m bench.upgrade [--stops 10] [--rate 200] [--signals USR1,KILL] [--quick] [--json FILE]

Calls of token ids and of text come at a fixed rate, with any answers. Meanwhile the coordinator is sent the signals in
turn; when it has ended, a new one is started with the same configuration. Simulated engines answer, and every score is compared
with the one of the same question before the first stop.
"""

import asyncio
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from bench.table import Row, parser, show, write
from enginepool import Pool
from enginepool.config import GroupConfig, PoolConfig, Timing
from enginepool.config_loader import encode_config
from enginepool.errors import EnginepoolError

LABELS = [5, 6]
#: different questions; the sim's tokenizer gives the byte b the id b + 3
QUESTIONS = 50
BYTE_OFFSET = 3
COMMAND = (sys.executable, "-m", "enginepool.coordinator.shell.daemon")
#: how long anything here may take before the run fails
LIMIT_S = 100.0


@dataclass
class Outcome:
    """What happened. `pids`: of the workers, as the pool says at the start and at the end."""

    calls: int = 0
    errors: list[str] = field(default_factory=list[str])
    waits_s: list[float] = field(default_factory=list[float])
    #: of each question, as they were first
    scores: dict[int, np.ndarray] = field(default_factory=dict[int, np.ndarray])
    #: from the signal until the next coordinator listens
    gaps_s: list[float] = field(default_factory=list[float])
    before: set[int] = field(default_factory=set[int])
    after: set[int] = field(default_factory=set[int])


def pool_config(directory: Path, workers: int = 2) -> PoolConfig:
    group = GroupConfig(model="sim", engine="sim", workers=workers, options={"forward_s": 0.005})
    return PoolConfig(
        groups={"g": group},
        listen=f"ipc://{directory}/pool.sock",
        state_dir=str(directory / "state"),
        timing=Timing(orphan_s=60.0),
    )


class Coordinator:
    """The coordinator's process: one after the other with the same configuration. Its log is read and thrown away."""

    def __init__(self, config: PoolConfig) -> None:
        self._environment = {**os.environ, "ENGINEPOOL_CONFIG": encode_config(config).decode()}

    async def start(self) -> None:
        """Returns when it listens."""
        self.process = await asyncio.create_subprocess_exec(*COMMAND, env=self._environment, stderr=asyncio.subprocess.PIPE)
        log = self.process.stderr
        assert log is not None
        while b"listening on" not in (line := await log.readline()):
            assert line, "the coordinator ended at its start"
        self._reader = asyncio.create_task(log.read())

    async def stop(self, sign: signal.Signals) -> None:
        """Returns when it has ended."""
        self.process.send_signal(sign)
        await self.process.wait()
        self._reader.cancel()


async def one_call(pool: Pool, number: int, outcome: Outcome) -> None:
    """Even numbers ask with token ids, odd ones with text."""
    loop = asyncio.get_running_loop()
    question = number // 2 % QUESTIONS
    query, item = f"question {question}", f"answer {question}"
    began = loop.time()
    try:
        if number % 2:
            result = await pool.score(query, [item], label_token_ids=LABELS)
        else:
            ids = [[BYTE_OFFSET + byte for byte in text.encode()] for text in (query, item)]
            result = await pool.score(ids[0], [ids[1]], label_token_ids=LABELS)
    except EnginepoolError as error:
        outcome.errors.append(f"{type(error).__name__}: {error}")
    else:
        want = outcome.scores.setdefault(question, result.scores)
        if not np.array_equal(result.scores, want):
            outcome.errors.append(f"question {question}: {result.scores} is not {want}")
    outcome.waits_s.append(loop.time() - began)


async def ask(pool: Pool, rate: float, outcome: Outcome, stop: asyncio.Event) -> None:
    """Calls at a fixed rate until `stop` is set; returns when all are answered."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with asyncio.TaskGroup() as calls:
        while not stop.is_set():
            await asyncio.sleep(max(began + outcome.calls / rate - loop.time(), 0))
            calls.create_task(one_call(pool, outcome.calls, outcome))
            outcome.calls += 1


async def worker_pids(pool: Pool, workers: int) -> set[int]:
    """Of the workers, when all are ready."""
    while True:
        found = {worker.pid for worker in (await pool.status()).groups[0].workers if worker.stage == "ready"}
        if len(found) == workers:
            return found
        await asyncio.sleep(0.02)


async def upgrade(directory: Path, *, stops: int, rate: float, signals: Sequence[signal.Signals], every_s: float) -> Outcome:
    """Stop and start the coordinator `stops` times, every `every_s` seconds, under `rate` calls/s."""
    config = pool_config(directory)
    workers = config.groups["g"].workers
    coordinator, outcome, stop = Coordinator(config), Outcome(), asyncio.Event()
    loop = asyncio.get_running_loop()
    await coordinator.start()
    try:
        async with asyncio.timeout(LIMIT_S + stops * (every_s + 10)), Pool.connect(config.listen) as pool:
            outcome.before = await worker_pids(pool, workers)
            load = asyncio.create_task(ask(pool, rate, outcome, stop))
            for number in range(stops):
                await asyncio.sleep(every_s)
                began = loop.time()
                await coordinator.stop(signals[number % len(signals)])
                await coordinator.start()
                outcome.gaps_s.append(loop.time() - began)
            await asyncio.sleep(every_s)
            stop.set()
            await load
            outcome.after = await worker_pids(pool, workers)
    finally:
        await coordinator.stop(signal.SIGTERM)
    return outcome


def rows_of(outcome: Outcome) -> list[Row]:
    waits = sorted(outcome.waits_s)
    kept = len(outcome.before & outcome.after)
    return [
        Row("calls", "in all", outcome.calls, "calls"),
        Row("calls", "errors", len(outcome.errors), "calls"),
        Row("wait", "p50", 1e3 * statistics.median(waits), "ms"),
        Row("wait", "p99", 1e3 * waits[len(waits) * 99 // 100], "ms"),
        Row("wait", "longest", 1e3 * waits[-1], "ms"),
        Row("coordinator", "longest gap", 1e3 * max(outcome.gaps_s), "ms"),
        Row("workers", "the same at the end", kept, "processes", kept / len(outcome.before)),
    ]


def main() -> None:
    arguments = parser("upgrade", "What do callers notice of a coordinator that is stopped and started again?")
    arguments.add_argument("--stops", type=int, default=10)
    arguments.add_argument("--rate", type=float, default=200.0, help="calls/s")
    arguments.add_argument("--signals", default="USR1,KILL", help="sent in turn, such as USR1,KILL or TERM")
    args = arguments.parse_args()
    signals = [signal.Signals[f"SIG{name}"] for name in args.signals.split(",")]
    stops = 2 if args.quick else args.stops
    with tempfile.TemporaryDirectory(prefix="enginepool-upgrade-") as directory:
        outcome = asyncio.run(upgrade(Path(directory), stops=stops, rate=args.rate, signals=signals, every_s=2.0))
    rows = rows_of(outcome)
    title = f"upgrade: {stops} stops by {args.signals}, {args.rate:g} calls/s of ids and text; the machine's load"
    show(f"{title}: {psutil.getloadavg()[0]:.1f}", rows)
    for error in sorted(set(outcome.errors))[:5]:
        sys.stdout.write(f"{error}\n")
    if args.json:
        write(args.json, rows)


if __name__ == "__main__":
    main()
