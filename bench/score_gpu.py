"""Is the pool worth having in front of SGLang? The same model, GPU and load: SGLang's HTTP server, the bare engine, the pool.

    python -m bench.score_gpu [--quick] [--device cpu] [--json FILE] [--plot FILE]

Each contestant is driven from a separate process with the same token ids at the same moments. One contestant after the other
has the device to itself. With `--interleave`, all contestants are loaded at once and measured in turn, phase by phase: each
ratio is of neighboring phases. Only one contestant is asked at a time; the others are idle.

Without `--model` a model of random weights is made on the spot: Qwen3-0.6B's shape, on a CPU a tiny one, where nothing is
packed. The pool with cached queries is asked long ones alone.
`--workers 2,4` also measures pools of so many workers, one to a GPU, and compares them with the pool of one worker.
"""

import argparse
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from bench.processes import Child
from bench.score import plot
from bench.score.contestants import (
    BEST,
    CACHED,
    CONTESTANTS,
    OURS,
    PLAIN,
    WORKER_FLAGS,
    Contestant,
    wider,
    with_workers,
)
from bench.score.gpu import GpuShare
from bench.score.measure import Number, Numbers
from bench.score.pivot import show_wide
from bench.score.run import Run
from bench.score.workloads import PHASES, Head, Plan, plan
from bench.table import Row, Target, parser, show, write
from bench.wire import leave
from enginepool.cli.tiny_model_files import make_tiny_model

WORKLOADS = ("pr", "long", "text", "zipf", "mixed", "single", "reward", "mix")
#: Seconds to make a model.
MODEL_S = 600.0

#: What stands before the rows that compare the pool with cached queries, not the default one, with the others.
OF_CACHED = "cached: "
#: The same tokens as text and as ids.
TEXT = "text, saturation: of that of ids"
#: Workers -> how many times the requests of one worker they should answer.
SCALED = {2: 1.9, 4: 3.7}
OF_MIX = "pr, mix at 120 % of saturation"
HIGH = f"{OF_MIX}, high: p99 / p50 of 1 in flight"

TARGETS = (
    Target("pr, 1 in flight: p50", WORKER_FLAGS, 0.8),
    Target("pr, 70 requests/s: p50", WORKER_FLAGS, 0.4),
    Target("pr, 70 requests/s: p99", WORKER_FLAGS, 0.35),
    Target("pr, saturation", WORKER_FLAGS, 2.2, at_most=False),
    Target("pr, saturation", BEST, 1.1, at_most=False),
    Target("pr, saturation: forwards per batch", OURS, 1.0, of_value=True),
    Target("long, saturation", WORKER_FLAGS, 20, at_most=False),
    Target("long, saturation", BEST, 1.1, at_most=False),
    Target("long, saturation: forwards per batch", OURS, 1.0, of_value=True),
    Target("zipf, saturation", OURS, 3900, at_most=False, of_value=True),
    Target("zipf, saturation", BEST, 1.1, at_most=False),
    Target("mixed, saturation", OURS, 2000, at_most=False, of_value=True),
    Target("mixed, saturation", BEST, 1.1, at_most=False),
    Target("single, saturation", WORKER_FLAGS, 3.5, at_most=False),
    Target(OF_CACHED + "long, saturation", WORKER_FLAGS, 3, at_most=False),
    Target("reward, 500 requests/s: p99", WORKER_FLAGS, 0.3),
    Target("reward, 500 requests/s: answered in time", OURS, 475, at_most=False, of_value=True),
    Target("reward + hidden, 500 requests/s: answered in time", OURS, 475, at_most=False, of_value=True),
    Target("reward + hidden, cost of hidden states", OURS, 10, of_value=True),
    Target(TEXT, OURS, 90, at_most=False, of_value=True),
    Target(HIGH, OURS, 3, of_value=True),
    Target(f"{OF_MIX}: answered in time, of saturation", OURS, 90, at_most=False, of_value=True),
    *(
        Target("pr, saturation: of one worker", with_workers(OURS, workers), bound, at_most=False, of_value=True)
        for workers, bound in SCALED.items()
    ),
)


def say(line: str) -> None:
    """Report the progress."""
    sys.stderr.write(f"bench.score_gpu: {line}\n")


def rows_of(found: dict[str, Numbers]) -> list[Row]:
    """A row for each number, with the ratio of ours to it, taken in pairs; contestants of one number stand together."""
    ours = dict(found.get(OURS, {}))
    found = found | {OURS: ours} if ours else found
    plain, hidden = (ours.get(f"{name}, saturation") for name in ("reward", "reward + hidden"))
    if plain and hidden and hidden.value:
        ours["reward + hidden, cost of hidden states"] = Number(100 * ((plain.over(hidden) or 1.0) - 1), "%")
    for who, numbers in found.items():
        text, ids = (numbers.get(f"{name}, saturation") for name in ("text", "pr"))
        if text and ids and (ratio := text.over(ids)) is not None:
            found = found | {who: numbers | {TEXT: Number(100 * ratio, "%")}}
    for who in (OURS, PLAIN):
        for workers in SCALED:
            one, many = (found.get(with_workers(who, count), {}).get("pr, saturation") for count in (1, workers))
            if one and many and (ratio := many.over(one)) is not None:
                name = with_workers(who, workers)
                found = found | {name: found[name] | {"pr, saturation: of one worker": Number(ratio, "x")}}
    rows: list[Row] = []
    for what in dict.fromkeys(what for numbers in (ours, *found.values()) for what in numbers):
        for who, numbers in found.items():
            if what in numbers:
                mine = ours.get(what)
                rows.append(row_of(what, who, numbers[what], mine.over(numbers[what]) if mine and who != OURS else None))
    return rows


def row_of(what: str, who: str, number: Number, ratio: float | None) -> Row:
    """The row of one number."""
    return Row(what, who, number.value, number.unit, ratio, number.spread, number.samples)


def rows_of_cached(found: dict[str, Numbers]) -> list[Row]:
    """The same with the ratio of the numbers of the pool with cached queries to those of the others."""
    return [
        row_of(OF_CACHED + what, who, numbers[what], mine.over(numbers[what]))
        for what, mine in found.get(CACHED, {}).items()
        for who, numbers in found.items()
        if who != CACHED and what in numbers
    ]


def curves_of(found: dict[str, Numbers], rates: Sequence[float]) -> dict[str, list[plot.Point]]:
    """Latency of the first workload against its load, for each contestant."""
    curves: dict[str, list[plot.Point]] = {}
    for who, numbers in found.items():
        for rate in rates:
            p50, p99 = (numbers.get(f"pr, {rate:g} requests/s: {part}") for part in ("p50", "p99"))
            if p50 and p99:
                curves.setdefault(who, []).append(plot.Point(rate, p50.value, p99.value))
    return curves


def model_for(head: Head, device: str, given: Path | None, scratch: Path, size: str = "0.6b") -> Path:
    """The model that was given, or one made on the spot."""
    if given is not None:
        return given
    directory = scratch / f"model-{head}-{size}"
    if device == "cpu":
        return make_tiny_model(directory, head)
    say(f"making a {head} model of {size}")
    maker = Child(["-m", "bench.score.model", str(directory), head, size], scratch=scratch)
    try:
        maker.hear(MODEL_S)
    finally:
        maker.stop()
    return directory


def machine(device: str) -> str:
    """What this ran on."""
    name = platform.processor() or platform.machine()
    if device == "cuda":
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        name = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().splitlines()[0]
    return f"{name}, Python {platform.python_version()}, {platform.system()} {platform.release()}"


def options() -> argparse.Namespace:
    """The command line."""
    who, what = (",".join(names) for names in ([one.name for one in CONTESTANTS], WORKLOADS))
    found = parser("score_gpu", (__doc__ or "").split("\n", 1)[0])
    found.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    found.add_argument("--model", type=Path, metavar="DIR", help="a causal model (default: one of random weights)")
    found.add_argument("--reward-model", type=Path, metavar="DIR", help="a model with a head that scores, likewise")
    found.add_argument("--only", default=who, metavar="NAMES", help=f"contestants (default: {who})")
    found.add_argument("--workloads", default=what, metavar="NAMES", help=f"what to measure (default: {what})")
    phases = ",".join(PHASES)
    found.add_argument("--phases", default=phases, metavar="NAMES", help=f"phases of each workload (default: {phases})")
    found.add_argument("--seconds", type=float, help="length of a phase under load (default: 40); others are shorter")
    found.add_argument("--repetitions", type=int, metavar="NUMBER", help="how often each phase is measured (default: 3)")
    found.add_argument("--interleave", action="store_true", help="load all contestants at once and measure them in turn")
    found.add_argument("--rates", default="", metavar="NUMBERS", help="loads of `pr`, in requests/s, such as 70,120")
    found.add_argument("--workers", default="", metavar="NUMBERS", help="pools of so many workers too, such as 2,4")
    found.add_argument("--plot", type=Path, metavar="FILE", help="draw latency against load there (needs matplotlib)")
    found.add_argument("--logs", type=Path, metavar="DIR", help="keep logs of all processes there")
    chosen = found.parse_args()
    lists = (("--only", chosen.only, who), ("--workloads", chosen.workloads, what), ("--phases", chosen.phases, phases))
    for option, given, known in lists:
        if unknown := set(given.split(",")) - set(known.split(",")):
            found.error(f"{option}: {', '.join(map(repr, sorted(unknown)))}: there are {known}")
    if chosen.repetitions is not None and chosen.repetitions < 1:
        found.error(f"--repetitions: got {chosen.repetitions}; use 1 or more")
    loads = set(chosen.workloads.split(","))
    if "mix" in loads and not ("pr" in loads and {"alone", "saturation"} <= set(chosen.phases.split(","))):
        found.error("--workloads: the mix is of 120 % of what saturates pr: measure pr,mix in the phases alone,saturation")
    return chosen


def main() -> None:
    """Measure what this machine can run; the rows are written after each phase."""
    chosen = options()
    names = set(str(chosen.workloads).split(","))
    whole = plan(chosen.device, chosen.quick).only(names | ({"reward + hidden"} if "reward" in names else set[str]()))
    if chosen.seconds:
        whole = replace(whole, seconds=chosen.seconds)
    whole = replace(whole, phases=frozenset(str(chosen.phases).split(",")))
    if chosen.repetitions:
        whole = replace(whole, repetitions=chosen.repetitions)
    if chosen.rates:
        whole = whole.at(tuple(float(rate) for rate in str(chosen.rates).split(",")))
    wanted = set(str(chosen.only).split(","))
    contestants: list[Contestant] = []
    for one in CONTESTANTS:
        lack = one.missing(chosen.device) if one.name in wanted else "not asked for"
        if lack:
            say(f"left out {one.who}: {lack}")
        else:
            contestants.append(one)
            if one.who in (OURS, PLAIN):
                contestants += [wider(one, int(workers)) for workers in str(chosen.workers).split(",") if workers]
    signal.signal(signal.SIGTERM, leave)
    with ExitStack() as stack:
        scratch = chosen.logs
        if scratch is None:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="score-", ignore_cleanup_errors=True)))
        scratch = scratch.resolve()
        scratch.mkdir(parents=True, exist_ok=True)
        models = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="models-")))
        gpu = GpuShare()
        gpu.start()
        stack.callback(gpu.stop)

        def save(found: dict[str, Numbers]) -> None:
            if chosen.json:
                write(chosen.json, rows_of(found) + rows_of_cached(found))

        run = Run(whole, chosen.device, scratch, gpu, save, say, chosen.interleave)
        # Also when the run is ended early.
        stack.callback(lambda: report(chosen, whole, run))
        given: tuple[tuple[Head, Path | None], ...] = (("causal", chosen.model), ("reward", chosen.reward_model))
        for head, model in given:
            if whole.of(head):
                run.on(head, model_for(head, chosen.device, model, models), contestants)


def report(chosen: argparse.Namespace, whole: Plan, run: Run) -> None:
    """Print the settings and the tables of what was measured, and draw the plot."""
    rows = rows_of(run.found)
    how = f"{whole.repetitions} x {whole.seconds:g} s{', contestants in turn' if chosen.interleave else ''}"
    title = f"scoring; {machine(chosen.device)}; phases of {how}; median (lowest to highest), ratio of the pool to it"
    for line in run.settings:
        say(line)
    show_wide(title, rows, OURS)
    if chosen.device == "cuda":
        aimed = {(target.what, target.who) for target in TARGETS}
        judged = [row for row in rows + rows_of_cached(run.found) if (row.what, row.who) in aimed]
        show("where there is a target", judged, TARGETS)
    if chosen.plot:
        rates = next((workload.rates for workload in whole.workloads if workload.name == "pr"), ())
        curves = curves_of(run.found, rates)
        lack = plot.missing() or ("" if curves else "nothing was measured under several loads")
        if lack:
            say(f"no plot: {lack}")
        else:
            plot.draw(chosen.plot, title, curves)


if __name__ == "__main__":
    main()
