"""How fast do new weights reach a pool, and what do its clients notice? One run, with raw NCCL and SGLang's own updates.

    python -m bench.weights_gpu [--quick] [--device cpu] [--sizes 4b] [--receivers 1] [--time 480] [--json FILE] [--plot FILE]

The trainer has the first GPU, each receiver one of the others. Models of random weights are made on the spot: Qwen3's shapes,
on a CPU a tiny one, over gloo. Every figure is told when it is found, and after each step printed and written, so that a run
which is cut off has what it measured; steps for which `--time` does not suffice are left out, and named.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from bench.score import plot as curves
from bench.score.contestants import SHARED, no_engine
from bench.score.model import SIZES, vocabulary
from bench.score.workloads import Shape
from bench.score_gpu import machine, model_for
from bench.table import Row, Target, parser, show, write
from bench.weights.field import Burden, Field, Scale
from bench.weights.figures import ALONE, FLAT, LOADED, LONG, OURS_DIRECT, OURS_STAGED, PER_TENSOR, RAW, SHORT, size_of, targets
from bench.weights.plot import Bar, draw
from bench.weights.steps import STEPS, USUAL, Steps
from bench.wire import leave
from enginepool.config import Device
from enginepool.coordinator.launchers.gpus import visible_gpus

BESIDE_ONE = ", to one receiver"
#: All ranks of a group must agree on these, and SGLang sets them for its engines.
NCCL = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
#: Several engines share a GPU while they start, so none may count on all that is free.
ROOM = {"mem_fraction_static": 0.6, "max_total_tokens": 100_000}


def say(line: str) -> None:
    """Report the progress."""
    sys.stderr.write(f"bench.weights_gpu: {line}\n")
    sys.stderr.flush()


def scale(device: str, quick: bool, buckets: Sequence[int], vocab: int) -> Scale:
    """How much is measured on this device. A CPU is there to see that everything works."""
    if device == "cpu":
        burden = Burden(SHORT, Shape(8, 2, 8, vocab=vocab), 4, 2 if quick else 8)
        return Scale(tuple(buckets), (burden,), 2 if quick else 5, 2, 1.0 if quick else 3.0)
    short = Burden(SHORT, Shape(120, 2, 180, vocab=vocab), 4, 4 if quick else 20)
    long = Burden(LONG, Shape(120, 10, 180, vocab=vocab), 8, 2 if quick else 20)
    return Scale(tuple(buckets), (short, long), 3 if quick else 5, 3, options={**SHARED, **ROOM})


def run(
    setting: str,
    model: Path,
    device: Device,
    receivers: int,
    amount: Scale,
    steps: Sequence[str],
    scratch: Path,
    until: float,
    save: Callable[[Sequence[Row], int], None],
) -> list[Row]:
    """All steps with so many receivers. One that fails is named with the reason, and the others are measured.

    Args:
        until: when to be done, by `time.monotonic`.
        save: called after each step with all rows, and how many of them were there before it.
    """
    say(f"{setting}: starting")
    rows: list[Row] = []
    with ExitStack() as stack:
        try:
            gpus = visible_gpus() if device == "cuda" else []
            if device == "cuda" and len(gpus) < 1 + receivers:
                raise RuntimeError(f"there are {len(gpus)} GPUs")
            field = Field(setting, model, device, gpus, receivers, amount, scratch, stack, say)
            rows = field.rows
            field.ready()
            measured = Steps(field)
            for step in (step for step in STEPS if step in steps):
                began, before = time.monotonic(), len(rows)
                if began + STEPS[step] > until:
                    say(f"left out {step}: {max(0.0, until - began):.0f} s are left, it may take {STEPS[step]}")
                    continue
                try:
                    getattr(measured, step)()
                except (RuntimeError, OSError) as error:
                    say(f"left out {step}: {error}")
                say(f"{step} took {time.monotonic() - began:.1f} s")
                save(rows, before)
        except (RuntimeError, OSError) as error:
            say(f"left out {setting}: {error}")
    return rows


def setting_of(size: str, receivers: int) -> str:
    """What rows begin with."""
    return f"{size}, {receivers} receiver{'s' if receivers > 1 else ''}"


def bars(rows: Sequence[Row], settings: Sequence[str], bucket: str) -> dict[str, list[Bar]]:
    """What the picture shows: warm updates with the first of the bucket sizes."""
    found = {(row.what, row.who): row.value for row in rows}
    pictured: dict[str, list[Bar]] = {}
    for setting in settings:
        for who in (RAW, PER_TENSOR, FLAT, ALONE, OURS_STAGED, LOADED, OURS_DIRECT):
            at = "one call" if who == PER_TENSOR else bucket
            kinds = (f"{setting}, {SHORT}", setting) if who == LOADED else (setting,)
            for kind in kinds:
                warm = f"{kind}, {at}, repeated"
                speed = found.get((f"{warm}: transfer", who))
                if speed is None:
                    continue
                parts = {phase: found.get((f"{warm}: {phase}", who)) for phase in ("drain", "load", "journal", "first answer")}
                hold = {phase: value for phase, value in parts.items() if value is not None}
                pictured.setdefault(setting, []).append(Bar(who, speed, hold))
    return pictured


def compared(rows: Sequence[Row], settings: Sequence[tuple[str, int, str]]) -> list[Row]:
    """Transfer to several receivers and to one, where both were measured."""
    found = {(row.what, row.who): row for row in rows}
    more: list[Row] = []
    alone = {size: setting for size, receivers, setting in settings if receivers == 1}
    for size, receivers, setting in settings:
        if receivers == 1 or size not in alone:
            continue
        for (what, who), row in found.items():
            if what.startswith(f"{setting}, ") and what.endswith("repeated: transfer takes"):
                one = found.get((what.replace(setting, alone[size], 1), who))
                if one is not None:
                    more.append(Row(f"{what}{BESIDE_ONE}", who, one.value, "ms", row.value / one.value))
    return more


def options() -> argparse.Namespace:
    """The command line."""
    found = parser("weights_gpu", (__doc__ or "").split("\n", 1)[0])
    found.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    found.add_argument("--model", type=Path, metavar="DIR", help="a causal model (default: of random weights)")
    found.add_argument("--sizes", default="4b", metavar="NAMES", help=f"of {', '.join(SIZES)} (default: 4b)")
    found.add_argument("--receivers", default="1", metavar="COUNTS", help="one pool after the other (default: 1)")
    found.add_argument("--buckets", default="512", metavar="MIB", help="bucket sizes (default: 512)")
    found.add_argument(
        "--steps", default=",".join(USUAL), metavar="NAMES", help=f"of {', '.join(STEPS)} (default: all but parts)"
    )
    found.add_argument("--time", type=float, default=480.0, metavar="SECONDS", help="be done by then (default: 480)")
    found.add_argument("--models", type=Path, metavar="DIR", help="make models there (default: a temporary folder)")
    found.add_argument("--plot", type=Path, metavar="FILE", help="draw speeds and holds there (needs matplotlib)")
    found.add_argument("--logs", type=Path, metavar="DIR", help="keep logs of all processes there")
    return found.parse_args()


def main() -> None:
    """Measure what this machine can run, print the table, write the rows and the plot."""
    began = time.monotonic()
    chosen = options()
    signal.signal(signal.SIGTERM, leave)
    os.environ.update(NCCL)
    unit = 1 << 20 if chosen.device == "cuda" else 1 << 10
    buckets = [int(size) * unit for size in str(chosen.buckets).split(",")]
    sizes = ["tiny"] if chosen.device == "cpu" else str(chosen.sizes).split(",")
    counts = [int(count) for count in str(chosen.receivers).split(",")]
    steps = str(chosen.steps).split(",")
    lack = no_engine(chosen.device)
    if lack:
        say(lack)
        return
    settings = [(size, count, setting_of(size, count)) for size in sizes for count in counts]
    rows: list[Row] = []

    def save(more: Sequence[Row], before: int) -> None:
        if chosen.json:
            write(chosen.json, [*rows, *more])
        if more[before:]:
            show(f"{time.monotonic() - began:.0f} s after the beginning", more[before:])
            sys.stdout.flush()

    left = len(settings)
    with ExitStack() as stack:
        scratch = chosen.logs
        if scratch is None:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weights-", ignore_cleanup_errors=True)))
        scratch = scratch.resolve()
        models = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="models-", dir=chosen.models)))
        for size in sizes:
            model = model_for("causal", chosen.device, chosen.model, models, size)
            amount = scale(chosen.device, chosen.quick, buckets, vocabulary(model))
            for count in counts:
                now = time.monotonic()
                until = now + (began + chosen.time - now) / left
                left -= 1
                place = scratch / f"{size}-{count}"
                place.mkdir(parents=True)
                rows += run(setting_of(size, count), model, chosen.device, count, amount, steps, place, until, save)
    rows += compared(rows, settings)
    save((), 0)
    title = f"new weights; {machine(chosen.device)}; ratio: to raw broadcast in the same buckets, or as the row says"
    names = [setting for _, _, setting in settings]
    bounds = [target for name in names for target in targets(name, size_of(buckets[0]))]
    bounds += [Target(row.what, row.who, 1.3) for row in rows if row.what.endswith(BESIDE_ONE) and row.who == OURS_STAGED]
    show(title, rows, bounds if chosen.device == "cuda" else ())
    if chosen.plot:
        pictured = bars(rows, names, size_of(buckets[0]))
        lack = curves.missing() or ("" if pictured else "nothing was measured")
        if lack:
            say(f"no plot: {lack}")
        else:
            draw(chosen.plot, title, pictured)


if __name__ == "__main__":
    main()
