"""What does a hop through the pool cost? One score request of 120 + 10 x 180 token ids: client, coordinator, two workers.

The same is asked of each peer, in turn within each repetition, all on the same two cores, with load generators that send
and answer prepared messages. Ratios are ours divided by the peer's in the same repetition; the table shows medians.
"""

import os
import platform
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import msgspec
import psutil

from bench.load import PATIENCE_S, Closed, Open, Phase
from bench.peers import Contestant, Peer, enginepool, ray_serve, sglang_router, zmq_proxy
from bench.processes import Child, cpu_seconds
from bench.table import Row, Target, parser, show, write

PEERS = (enginepool.PEER, zmq_proxy.PEER, sglang_router.PEER, ray_serve.PEER)
OURS = enginepool.PEER
IN_FLIGHT, RATE = 64, 70.0

THROUGHPUT = f"throughput, {IN_FLIGHT} in flight"
CPU = f"coordinator CPU, {IN_FLIGHT} in flight"
P50_ONE, P99_ONE = "p50, 1 in flight", "p99, 1 in flight"
P50_RATE, P99_RATE = f"p50, {RATE:g} requests/s", f"p99, {RATE:g} requests/s"
PYTHON = f"score calls of the Python client, {IN_FLIGHT} at once"
UNITS = {THROUGHPUT: "requests/s", CPU: "µs/request", P50_ONE: "ms", P99_ONE: "ms", P50_RATE: "ms", P99_RATE: "ms"}
UNITS[PYTHON] = "calls/s"

TARGETS = (
    Target(CPU, sglang_router.PEER.who, 1 / 4),
    Target(CPU, ray_serve.PEER.who, 1 / 2),
    Target(CPU, zmq_proxy.PEER.who, 5),
    Target(THROUGHPUT, sglang_router.PEER.who, 3, at_most=False),
    Target(P50_ONE, sglang_router.PEER.who, 0.7),
    Target(PYTHON, f"{OURS.who}.Pool", 3000, at_most=False, of_value=True),
)


@dataclass(frozen=True)
class Plan:
    """How long everything takes: repetitions, and seconds of each phase."""

    repetitions: int
    warm_s: float
    saturated_s: float
    single_s: float
    rate_s: float


FULL = Plan(repetitions=7, warm_s=2.0, saturated_s=2.0, single_s=1.0, rate_s=3.0)
QUICK = Plan(repetitions=2, warm_s=0.5, saturated_s=0.7, single_s=0.4, rate_s=0.8)

#: One repetition of one contestant: numbers by (what, who).
Sample = dict[tuple[str, str], float]


def drive(load: Child, command: Closed | Open) -> Phase:
    """Run one phase in a load generator."""
    question = msgspec.to_builtins(command)
    phase = msgspec.convert(load.ask(question, command.seconds + 2 * PATIENCE_S), Phase)
    if not phase.answered:
        raise RuntimeError(f"nothing was answered in {command.seconds:g} s")
    return phase


def measure(who: str, running: Contestant, plan: Plan) -> Sample:
    """All phases of one repetition of one contestant."""
    for child in running.children:
        child.check()
    sample: Sample = {}
    measured = {who: running.coordinator, **{f"{who}: {share}": pids for share, pids in running.shares.items()}}
    saturated, spent = saturate(running.load, measured, plan.saturated_s)
    sample[THROUGHPUT, who] = saturated.answered / saturated.seconds
    for share, seconds in spent.items():
        sample[CPU, share] = seconds * 1e6 / saturated.answered
    single = drive(running.load, Closed(plan.single_s, in_flight=1))
    sample[P50_ONE, who], sample[P99_ONE, who] = single.p50_ms, single.p99_ms
    rate = drive(running.load, Open(plan.rate_s, rate=RATE))
    sample[P50_RATE, who], sample[P99_RATE, who] = rate.p50_ms, rate.p99_ms
    if running.python is not None:
        calls = drive(running.python, Closed(plan.saturated_s, in_flight=IN_FLIGHT))
        sample[PYTHON, f"{who}.Pool"] = calls.answered / calls.seconds
    return sample


def saturate(load: Child, measured: dict[str, Callable[[], list[int]]], seconds: float) -> tuple[Phase, dict[str, float]]:
    """Requests in flight all the time, and the CPU seconds that each of `measured` spent meanwhile."""
    pids = {name: find() for name, find in measured.items()}
    before = {name: cpu_seconds(found) for name, found in pids.items()}
    phase = drive(load, Closed(seconds, in_flight=IN_FLIGHT))
    return phase, {name: cpu_seconds(found) - before[name] for name, found in pids.items()}


def say(line: str) -> None:
    """Report the progress."""
    sys.stderr.write(f"bench.wire: {line}\n")


def run(peers: Sequence[Peer], plan: Plan) -> list[Sample]:
    """Start all peers, measure each once per repetition, stop them. The order turns, so that none is always the first."""
    samples: list[Sample] = []
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wire-", ignore_cleanup_errors=True)))
        running: dict[str, Contestant] = {}
        for number, peer in enumerate(peers):
            say(f"starting {peer.who}")
            place = scratch / str(number)  # short: paths of sockets are bounded
            place.mkdir(mode=0o700)  # a pool puts sockets into no folder that others can enter
            running[peer.who] = peer.start(place, stack)
            drive(running[peer.who].load, Closed(plan.warm_s, in_flight=IN_FLIGHT))
        names = list(running)
        for repetition in range(plan.repetitions):
            say(f"repetition {repetition + 1} of {plan.repetitions}")
            turn = repetition % len(names)
            sample: Sample = {}
            for who in names[turn:] + names[:turn]:
                sample |= measure(who, running[who], plan)
            samples.append(sample)
        say("stopping")
    return samples


def rows_of(samples: Sequence[Sample]) -> list[Row]:
    """Medians over the repetitions, and of our ratio to each peer within a repetition."""
    rows: list[Row] = []
    keys = dict.fromkeys(key for sample in samples for key in sample)
    for what in UNITS:
        for who in (who for found, who in keys if found == what):
            value = statistics.median(sample[what, who] for sample in samples)
            pairs = [(sample[what, OURS.who], sample[what, who]) for sample in samples if (what, OURS.who) in sample]
            ratio = statistics.median(ours / theirs for ours, theirs in pairs) if pairs and all(b for _, b in pairs) else None
            rows.append(Row(what, who, value, UNITS[what], ratio))
    return rows


def two_cores() -> str:
    """Keep this process, and all that it starts, on two cores; say which machine this is."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:2])
    busy = psutil.cpu_percent(0.5)
    of = "2 cores" if len(cores) == 2 else f"{len(cores[:2])} of {len(cores)} cores"
    return (
        f"{of}, {busy:.0f} % busy before the run, Python {platform.python_version()}, {platform.system()} {platform.release()}"
    )


def leave(number: int, _frame: FrameType | None) -> None:
    """At a signal: through the stack that stops the peers."""
    sys.exit(128 + number)


def main() -> None:
    """Measure what this machine can run, print the table and write the rows."""
    options = parser("wire", (__doc__ or "").split("\n", 1)[0])
    names = ",".join(peer.name for peer in PEERS)
    options.add_argument("--only", default=names, metavar="NAMES", help=f"peers to run (default: {names})")
    chosen = options.parse_args()
    wanted = set(str(chosen.only).split(","))
    if unknown := wanted - {peer.name for peer in PEERS}:
        options.error(f"--only: {', '.join(sorted(unknown))}: there are {names}")
    peers: list[Peer] = []
    for peer in PEERS:
        lack = peer.missing() if peer.name in wanted else "not asked for"
        if lack:
            say(f"left out {peer.who}: {lack}")
        else:
            peers.append(peer)
    if not peers:
        options.error("there is nothing to measure")
    signal.signal(signal.SIGTERM, leave)
    machine = two_cores()
    rows = rows_of(run(peers, QUICK if chosen.quick else FULL))
    show(f"wire, one score request of 120 + 10 x 180 token ids; {machine}; ratio: ours / theirs", rows, TARGETS)
    if chosen.json:
        write(chosen.json, rows)


if __name__ == "__main__":
    main()
