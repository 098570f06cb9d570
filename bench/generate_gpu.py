"""Tokens a second and the time to the first one: the pool, SGLang's HTTP server, and the bare engine, streaming.

    python -m bench.generate_gpu

Each contestant has an engine of its own on one GPU, started as a worker of the pool starts it. All engines are loaded at once
and measured in turn: the others are idle meanwhile. The pool and the servers are loaded by as many processes as `--loads` says.
The bare engine streams in its own. "New tokens only" is a server with `--incremental-streaming-output`: by default each of its
events repeats all tokens so far.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from bench.generate.contestants import BARE, BEST, POOL, SERVER, Running, measure, start_bare, start_pool, start_server
from bench.generate.pools import add_model_options, add_stream_options
from bench.generate.streams import Streamed
from bench.score.contestants import no_server
from bench.score_gpu import machine, model_for, say
from bench.table import Row, Target, parser, show, write

TARGETS = [
    Target("256 streams", SERVER, 1.5, at_most=False),
    Target("256 streams", BEST, 1.5, at_most=False),
    Target("256 streams", BARE, 0.95, at_most=False),
    Target("256 streams: first token, p50", SERVER, 0.8),
    Target("256 streams: first token, p50", BEST, 0.8),
    Target("256 streams apart: first token, p50", SERVER, 0.8),
]


def rows_of(found: dict[tuple[str, str], list[Streamed]]) -> list[Row]:
    """The median of the repetitions, and the ratio of the pool to each contestant in pairs of phases."""
    rows: list[Row] = []
    for (who, streams), phases in found.items():
        ours = found.get((POOL, streams), [])
        numbers: list[tuple[str, str, Callable[[Streamed], float]]] = [
            (streams, "tokens/s", per_second),
            (f"{streams}: first token, p50", "ms", partial(first, 50)),
            (f"{streams}: first token, p99", "ms", partial(first, 99)),
        ]
        for what, unit, value in numbers:
            values = [value(phase) for phase in phases]
            pairs = [value(mine) / one for mine, one in zip(ours, values, strict=False) if one]
            ratio = float(np.median(pairs)) if who != POOL and pairs else None
            rows.append(Row(what, who, float(np.median(values)), unit, ratio, (min(values), max(values)), tuple(values)))
        failed = sum(phase.failed for phase in phases)
        if failed:
            rows.append(Row(f"{streams}: failed", who, failed, "streams"))
    return sorted(rows, key=lambda row: row.what)


def per_second(phase: Streamed) -> float:
    return phase.per_second


def first(percent: int, phase: Streamed) -> float:
    return float(np.percentile(phase.first_ms or [0.0], percent))


def options() -> argparse.Namespace:
    found = parser("generate_gpu", (__doc__ or "").split("\n", 1)[0])
    add_model_options(found, "0.6b")
    add_stream_options(found, "pool,server,best,bare")
    found.add_argument("--streams", default="64,256", metavar="NUMBERS", help="streams at once (default: 64,256)")
    found.add_argument("--apart", action="store_true", help="also measure streams that end at different moments")
    found.add_argument("--loads", type=int, default=4, help="processes that load the pool or the server (default: 4)")
    return found.parse_args()


def main() -> None:
    """Start all, measure in turn, print."""
    chosen = options()
    best = partial(start_server, who=BEST, flags=("--incremental-streaming-output",))
    starts = {"pool": start_pool, "server": start_server, "best": best, "bare": start_bare}
    servers = ("server", "best")
    names = [name for name in str(chosen.only).split(",") if name not in servers or not no_server(chosen.device)]
    seconds, repetitions = (4.0, 1) if chosen.quick else (chosen.seconds, chosen.repetitions)
    found: dict[tuple[str, str], list[Streamed]] = {}
    with ExitStack() as stack:
        scratch = (chosen.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="generate-")))).resolve()
        scratch.mkdir(parents=True, exist_ok=True)
        models = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="models-")))
        model = model_for("causal", chosen.device, chosen.model, models, chosen.size)
        running: list[Running] = []
        gpus = [gpu for gpu in str(chosen.gpus).split(",") if gpu]
        for place, name in enumerate(names):
            folder = scratch / name
            folder.mkdir()
            if gpus:
                os.environ["CUDA_VISIBLE_DEVICES"] = gpus[place % len(gpus)]  # its processes inherit it
            running.append(starts[name](model, chosen.device, chosen.loads, folder, stack))
        for one in running:
            one.ready()
            say(f"{one.who} is ready")
        vocab = json.loads((model / "config.json").read_text())["vocab_size"]
        shape = chosen.prompt, chosen.tokens, vocab
        counts = [int(count) for count in str(chosen.streams).split(",")]
        for one in running:  # kernels are compiled when they are first used
            measure(one, max(counts), min(seconds, 5.0), shape, 0)
        kinds = [(count, apart) for count in counts for apart in ((False, True) if chosen.apart else (False,))]
        for repetition in range(repetitions):
            for count, apart in kinds:
                streams = f"{count} streams apart" if apart else f"{count} streams"
                for one in running[repetition % len(running) :] + running[: repetition % len(running)]:
                    phase = measure(one, count, seconds, shape, 1 + repetition, apart)
                    found.setdefault((one.who, streams), []).append(phase)
                    rate, wait = f"{phase.per_second:,.0f} tokens/s", f"first token p50 {first(50, phase):.0f} ms"
                    say(f"{one.who}, {streams}: {rate}, {wait}{', ' + phase.failure if phase.failure else ''}")
    how = f"{repetitions} x {seconds:g} s in turn, {chosen.prompt} in / {chosen.tokens} out"
    rows = rows_of(found)
    show(f"generation; {machine(chosen.device)}; {how}; median (lowest to highest)", rows, TARGETS)
    if chosen.json:
        write(chosen.json, rows)


if __name__ == "__main__":
    main()
