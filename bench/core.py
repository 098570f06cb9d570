"""What does a decision cost? Events per second of the coordinator's pure machine, and single steps of it.

    python -m bench.core [--quick] [--json FILE]

The mix: requests of 10 rows are submitted, dispatched, answered and acknowledged; 5 % are cancelled instead; a tick comes every
10 ms of the machine's time. The queue is filled first and then held at its depth: each answered or cancelled request is
replaced. `check()` is off, as in production. An event is one `handle` call.

The steps (`core_steps`) are rare ones whose cost must not grow with the queue: the hold and the commit of an update, a client
that leaves, and one part of a large request.
"""

import gc
import statistics

from bench.core_load import Load
from bench.core_steps import COMMIT, HOLD, LEAVE, steps
from bench.table import Row, Target, parser, show, write
from enginepool.coordinator.shell.process_memory import GC_THRESHOLDS

QUEUED = (10, 1_000, 100_000)
WORKERS = (1, 100, 1_000)


def main() -> None:
    args = parser("core", "Events per second of the coordinator's pure machine.").parse_args()
    rounds, requests = (1, 3_000) if args.quick else (3, 30_000)
    cells = [(depth, workers) for depth in QUEUED for workers in WORKERS]
    loads = {cell: Load(*cell) for cell in cells}
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    rates: dict[tuple[int, int], list[float]] = {cell: [] for cell in cells}
    for _ in range(rounds):
        for cell in cells:
            rates[cell].append(loads[cell].run(requests))
    rows: list[Row] = []
    for cell, values in rates.items():
        # The ratio of a cell is its cost per event over that of the smallest cell, of the same round.
        ratio = statistics.median(small / rate for small, rate in zip(rates[cells[0]], values, strict=True))
        rows.append(
            Row(
                f"{cell[0]:,} queued",
                f"{cell[1]:,} workers",
                statistics.median(values),
                "events/s",
                ratio,
                (min(values), max(values)),
            )
        )
    rows += steps(100_000, 7 if args.quick else 101)
    targets = [
        Target("10 queued", "1 workers", 150_000, at_most=False, of_value=True),
        Target("100,000 queued", "1,000 workers", 3.0),
        Target(HOLD, "100,000 queued", 10.0, of_value=True),
        Target(COMMIT, "100,000 queued", 10.0, of_value=True),
        Target(LEAVE, "100,000 answers kept", 1.0, of_value=True),
    ]
    show("core: the pure machine; ratio: cost per event over the first row's", rows, targets)
    if args.json:
        write(args.json, rows)


if __name__ == "__main__":
    main()
