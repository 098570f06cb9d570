"""Scores next to generation on one engine: how long do scores wait, and how many tokens a second are left for the streams?

    python -m bench.mixed_gpu [--quick] [--device cpu] [--json FILE]

128 streams, and 30 score requests a second, through a pool whose one group does both, and through SGLang's engine alone, which
is given both. SGLang 0.5.17 ends then, as `--only bare` shows; "repaired" is an engine with the correction of 0.5.23. Both are
loaded at once, and measured in turn: with streams alone, and with streams and scores.
"""

import argparse
import json
import os
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from bench.generate.contestants import Running, measure, start_bare, start_pool
from bench.generate.pools import add_model_options, add_stream_options
from bench.generate.streams import Streamed
from bench.score_gpu import machine, model_for, say
from bench.table import Row, Target, parser, show, write

POOL, BARE, REPAIRED = "enginepool", "SGLang's engine alone", "SGLang's engine alone, repaired"
ALONE, BOTH = "streams alone", "streams and scores"
STARTS = {
    "pool": partial(start_pool, operations=("generate", "score")),
    "bare": partial(start_bare, who=BARE),
    "repaired": partial(start_bare, who=REPAIRED, how=("repaired",)),
}
Found = dict[tuple[str, str], list[Streamed]]


def targets(who: str) -> list[Target]:
    """Against one engine alone."""
    return [Target("scores: p99", who, 0.5), Target(f"{BOTH}: tokens/s", who, 0.9, at_most=False)]


def rows_of(found: Found) -> list[Row]:
    """Medians of the repetitions, and the ratio of the pool to each engine alone in pairs of phases."""
    rows: list[Row] = []
    for (who, what), phases in found.items():
        alive = [one for one in phases if one.per_second]
        numbers = [(f"{what}: tokens/s", "tokens/s", [one.per_second for one in alive])] if alive else []
        if what == BOTH and alive:
            for percent in (50, 99):
                values = [float(np.percentile(one.score_ms or [0.0], percent)) for one in alive]
                numbers.append((f"scores: p{percent}", "ms", values))
        for name, unit, values in numbers:
            ours = next((list(row.samples) for row in rows if (row.what, row.who) == (name, POOL)), values)
            pairs = [mine / other for mine, other in zip(ours, values, strict=False) if other]
            ratio = float(np.median(pairs)) if who != POOL and pairs else None
            rows.append(Row(name, who, float(np.median(values)), unit, ratio, (min(values), max(values)), tuple(values)))
        if failed := sum(one.failed for one in phases):
            rows.append(Row(f"{what}: failed", who, failed, "requests"))
    return sorted(rows, key=lambda row: row.what)


def options() -> argparse.Namespace:
    found = parser("mixed_gpu", (__doc__ or "").split("\n", 1)[0])
    add_model_options(found, "0.6b")
    add_stream_options(found, "pool,repaired")
    found.add_argument("--streams", type=int, default=128, help="streams at once (default: 128)")
    found.add_argument("--scores", type=float, default=30.0, help="score requests a second, of 10 items (default: 30)")
    return found.parse_args()


def main() -> None:
    """Start all, measure in turn, print."""
    chosen = options()
    seconds, repetitions = (4.0, 1) if chosen.quick else (chosen.seconds, chosen.repetitions)
    found: Found = {}
    with ExitStack() as stack:
        scratch = (chosen.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mixed-")))).resolve()
        models = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="models-")))
        model = model_for("causal", chosen.device, chosen.model, models, chosen.size)
        running: list[Running] = []
        gpus = [gpu for gpu in str(chosen.gpus).split(",") if gpu]
        for place, name in enumerate(str(chosen.only).split(",")):
            (folder := scratch / name).mkdir(parents=True)
            if gpus:
                os.environ["CUDA_VISIBLE_DEVICES"] = gpus[place % len(gpus)]  # its processes inherit it
            # With one process, scores come at equal distances, as in the engine's own.
            running.append(STARTS[name](model, chosen.device, 1, folder, stack))
        for one in running:
            one.ready()
            say(f"{one.who} is ready")
        vocab = json.loads((model / "config.json").read_text())["vocab_size"]
        shape = chosen.prompt, chosen.tokens, vocab
        for repetition in range(-1, repetitions):  # kernels are compiled when they are first used
            for what, scores in ((ALONE, 0.0), (BOTH, chosen.scores)):
                for one in [*running]:
                    length = min(seconds, 5.0) if repetition < 0 else seconds
                    try:
                        phase = measure(one, chosen.streams, length, shape, 2 + repetition, scores=scores)
                    except Exception as error:
                        say(f"{one.who}, {what}: it ended: {error}"[:300])
                        found.setdefault((one.who, what), []).append(Streamed(0.0, [], 1, "it ended"))
                        running.remove(one)
                        continue
                    if repetition < 0:
                        continue
                    found.setdefault((one.who, what), []).append(phase)
                    p99 = float(np.percentile(phase.score_ms or [0.0], 99))
                    say(f"{one.who}, {what}: {phase.per_second:,.0f} tokens/s, scores p99 {p99:.0f} ms {phase.failure}")
                    if chosen.json:
                        write(chosen.json, rows_of(found))
    how = f"{repetitions} x {seconds:g} s in turn, {chosen.streams} streams of {chosen.prompt} in / {chosen.tokens} out"
    rows = rows_of(found)
    title = f"scores and streams; {machine(chosen.device)}; {how}; {chosen.scores:g} scores/s; median"
    show(title, rows, [target for who in dict.fromkeys(row.who for row in rows) if who != POOL for target in targets(who)])
    if chosen.json:
        write(chosen.json, rows)


if __name__ == "__main__":
    main()
