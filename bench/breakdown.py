"""Where does each millisecond between a client's call and its answer go?

    python -m bench.breakdown [--quick] [--device cpu] [--rate 70] [--size 0.6b] [--json FILE]

One pool of one worker, with one request in flight and then with an open loop of Poisson arrivals. All processes of the pool
note the time at each boundary that a request passes, on one clock: the client, the coordinator, the worker, and SGLang's
scheduler. The steps follow each other without a gap, so that their means add up to the mean latency. Nothing of it is in the
pool itself: its processes are started by modules of `bench.peers`, which put the marks around its functions, some
microseconds each. `--bare` leaves the marks out, and tells the latency alone.
"""

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from bench.generate.pools import add_model_options, pool_of
from bench.score.callers import START_S
from bench.score.model import vocabulary
from bench.score.pivot import show_wide
from bench.score.workloads import LABELS, Shape, plan
from bench.score_gpu import machine, model_for, say
from bench.table import Row, parser, write
from bench.tracing.marks import VARIABLE, read_marks
from bench.tracing.steps import STEPS, Call, traced
from enginepool import Pool

#: Calls at the beginning of a phase that are left out. At least as many follow.
WARM = 10
TOTAL = "the call, all of it"


class Phase(NamedTuple):
    """Requests per second of an open loop; 0: one in flight."""

    name: str
    rate: float
    seconds: float


async def call(pool: Pool, shape: Shape, number: int, calls: list[Call]) -> None:
    """One request. Calls are noted in the order in which they begin."""
    query, items = shape.request(number)
    place, began = len(calls), time.monotonic()
    calls.append(Call(began, began))
    await pool.score(query, items, label_token_ids=list(LABELS))
    calls[place] = Call(began, time.monotonic())


async def run_phase(pool: Pool, shape: Shape, phase: Phase, first: int, calls: list[Call]) -> None:
    """Send requests for as long as the phase lasts, and wait for their answers."""
    end = time.monotonic() + phase.seconds
    if not phase.rate:
        number = first
        while time.monotonic() < end or number - first < 2 * WARM:
            await call(pool, shape, number, calls)
            number += 1
        return
    chance = np.random.default_rng(first)
    due, number = time.monotonic(), first
    async with asyncio.TaskGroup() as running:
        while due < end or number - first < 2 * WARM:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            running.create_task(call(pool, shape, number, calls))
            due, number = due + chance.exponential(1 / phase.rate), number + 1


async def measure(address: str, shape: Shape, phases: Sequence[Phase]) -> list[list[Call]]:
    """The calls of each phase, by one client."""
    async with Pool.connect(address, connect_timeout=START_S) as pool:
        await pool.ready(START_S)
        calls: list[Call] = []
        ends = [0]
        for phase in phases:
            say(f"{phase.name}: {phase.seconds:g} s")
            await run_phase(pool, shape, phase, len(calls), calls)
            ends.append(len(calls))
        return [calls[begin:end] for begin, end in pairwise(ends)]


def rows_of(name: str, calls: Sequence[Call], steps: Sequence[Sequence[float]] = ()) -> list[Row]:
    """The mean of each step and of the whole in milliseconds; their spread is from the median to the 99th percentile."""
    times = {step.name: [mine[place] for mine in steps] for place, step in enumerate(STEPS)} if steps else {}
    times[TOTAL] = [call.ended - call.began for call in calls]
    rows: list[Row] = []
    for what, seconds in times.items():
        each = np.array(seconds[WARM:]) * 1e3
        spread = (float(np.percentile(each, 50)), float(np.percentile(each, 99)))
        rows.append(Row(what, name, float(each.mean()), "ms", None, spread))
    return rows


def run(chosen: argparse.Namespace, scratch: Path, stack: ExitStack) -> list[Row]:
    """Start the pool, load it, and read the marks."""
    model = model_for("causal", chosen.device, chosen.model, scratch, chosen.size)
    workload = plan(chosen.device, chosen.quick).workloads[0]
    shape = msgspec.structs.replace(workload.shape, vocab=vocabulary(model))
    rate = chosen.rate or workload.rates[0]
    seconds = chosen.seconds or (3.0 if chosen.quick else 40.0)
    phases = [Phase("one in flight", 0.0, seconds), Phase(f"{rate:g} requests/s", rate, seconds)]
    marks = scratch / "marks"
    marks.mkdir()
    os.environ[VARIABLE] = str(marks)
    daemon = "enginepool.coordinator.shell.daemon" if chosen.bare else "bench.peers.traced_coordinator"
    address, _ = pool_of(model, chosen.device, ["score"], {}, scratch, stack, daemon=daemon)
    calls = asyncio.run(measure(address, shape, phases))
    if chosen.bare:
        return [row for phase, mine in zip(phases, calls, strict=True) for row in rows_of(phase.name, mine)]
    steps = traced([one for mine in calls for one in mine], *read_marks(marks))
    rows: list[Row] = []
    for phase, mine in zip(phases, calls, strict=True):
        rows += rows_of(phase.name, mine, steps[: len(mine)])
        steps = steps[len(mine) :]
    return rows


def options() -> argparse.Namespace:
    """The command line."""
    found = parser("breakdown", "Where does each millisecond between a client's call and its answer go?")
    add_model_options(found, "0.6b")
    found.add_argument("--rate", type=float, default=0.0, help="requests a second of the open loop (default: 70, on a CPU 4)")
    found.add_argument("--seconds", type=float, default=0.0, help="length of a phase (default: 40, quick 3)")
    found.add_argument("--bare", action="store_true", help="without marks: the latency alone")
    return found.parse_args()


def main() -> None:
    """Measure, print, write."""
    chosen = options()
    with ExitStack() as stack:
        scratch = chosen.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="enginepool-bench-")))
        rows = run(chosen, scratch, stack)
    title = f"breakdown: where the time of a call goes, mean (p50 to p99); {machine(chosen.device)}"
    show_wide(title, rows, rows[0].who)
    if chosen.json is not None:
        write(chosen.json, rows)


if __name__ == "__main__":
    main()
