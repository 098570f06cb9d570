"""Scores next to generation on one engine: how long do scores wait, and how many tokens a second are left for the streams?

    python -m bench.mixed_gpu [--quick] [--device cpu] [--json FILE]

128 streams, and 30 score requests a second, through a pool whose one group does both, and through SGLang's engine alone, which
is given both (SGLang 0.5.17 ends then: its row says so). Both are loaded at once, and measured in turn: with streams alone, and
with streams and scores.
"""

import argparse
import json
import os
import signal
import tempfile
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np

from bench.generate.mixed import BothMeasured, MixedPhase
from bench.generate_gpu import PATIENCE_S, options_of
from bench.processes import Child, free_port
from bench.score.callers import START_S
from bench.score.contestants import watch
from bench.score.model import SIZES
from bench.score_gpu import machine, model_for, say
from bench.table import Row, Target, parser, show, write
from enginepool.config import Device, GroupConfig, PoolConfig
from enginepool.config_loader import encode_config

POOL, BARE = "enginepool", "SGLang's engine alone"
OPERATIONS = ["generate", "score"]
ALONE, BOTH = "streams alone", "streams and scores"
TARGETS = [
    Target("scores: p99", BARE, 0.5),
    Target(f"{BOTH}: tokens/s", BARE, 0.9, at_most=False),
]
Found = dict[tuple[str, str], list[BothMeasured]]


def start_pool(model: Path, device: Device, scratch: Path, stack: ExitStack) -> Child:
    listen = f"tcp://127.0.0.1:{free_port()}"
    group = GroupConfig(model=str(model), device=device, options=options_of(device), operations=[*OPERATIONS])  # type: ignore[list-item]
    config = PoolConfig(groups={"g": group}, listen=listen, insecure_loopback=True, state_dir=str(scratch / "state"))
    env = {"ENGINEPOOL_CONFIG": encode_config(config).decode()}
    watch(stack, Child(["-m", "enginepool.coordinator.shell.daemon"], scratch=scratch, env=env, speaks=False), signal.SIGTERM)
    return start_load("bench.generate.mixed", listen, scratch, stack)


def start_bare(model: Path, device: Device, scratch: Path, stack: ExitStack) -> Child:
    options = {**options_of(device), "incremental_streaming_output": True}
    wanted = {"model": str(model), "device": device, "options": options, "operations": ["generate"]}
    return start_load("bench.peers.bare_mixed", msgspec.json.encode(wanted).decode(), scratch, stack)


def start_load(module: str, what: str, scratch: Path, stack: ExitStack) -> Child:
    child = Child(["-m", module, what], scratch=scratch)
    stack.callback(child.stop)
    return child


def rows_of(found: Found) -> list[Row]:
    """Medians of the repetitions, and the ratio of the pool to the engine alone in pairs of phases."""
    rows: list[Row] = []
    for (who, what), phases in found.items():
        numbers = [(f"{what}: tokens/s", "tokens/s", [one.per_second for one in phases])]
        if what == BOTH:
            for percent in (50, 99):
                values = [float(np.percentile(one.score_ms or [0.0], percent)) for one in phases]
                numbers.append((f"scores: p{percent}", "ms", values))
        for name, unit, values in numbers:
            ours = next((list(row.samples) for row in rows if (row.what, row.who) == (name, POOL)), values)
            pairs = [mine / other for mine, other in zip(ours, values, strict=False) if other]
            ratio = float(np.median(pairs)) if who != POOL and pairs else None
            rows.append(Row(name, who, float(np.median(values)), unit, ratio, (min(values), max(values)), tuple(values)))
        if failed := sum(one.failed for one in phases):
            rows.append(Row(f"{what}: failed", who, failed, "requests"))
    return sorted(rows, key=lambda row: row.what)


def measure(child: Child, phase: MixedPhase) -> BothMeasured:
    child.tell(msgspec.to_builtins(phase))
    return msgspec.convert(child.hear(phase.seconds + PATIENCE_S), BothMeasured)


def options() -> argparse.Namespace:
    found = parser("mixed_gpu", (__doc__ or "").split("\n", 1)[0])
    found.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    found.add_argument("--model", type=Path, metavar="DIR", help="a causal model (default: one of random weights)")
    found.add_argument("--size", choices=tuple(SIZES), default="0.6b", help="shape of that model (default: 0.6b)")
    found.add_argument("--streams", type=int, default=128, help="streams at once (default: 128)")
    found.add_argument("--scores", type=float, default=30.0, help="score requests a second, of 10 items (default: 30)")
    found.add_argument("--seconds", type=float, default=20.0, help="length of a phase (default: 20)")
    found.add_argument("--repetitions", type=int, default=3, help="how often each phase is measured (default: 3)")
    found.add_argument("--prompt", type=int, default=512, help="tokens of a prompt (default: 512)")
    found.add_argument("--tokens", type=int, default=256, help="new tokens (default: 256)")
    found.add_argument("--gpus", default="", metavar="NUMBERS", help="GPUs of the two, in turn (default: both on one)")
    found.add_argument("--only", default="pool,bare", help="contestants (default: pool,bare)")
    found.add_argument("--logs", type=Path, metavar="DIR", help="keep logs of all processes there")
    return found.parse_args()


def main() -> None:
    """Start both, measure in turn, print."""
    chosen = options()
    seconds, repetitions = (4.0, 1) if chosen.quick else (chosen.seconds, chosen.repetitions)
    starts = {"pool": (POOL, start_pool), "bare": (BARE, start_bare)}
    found: Found = {}
    with ExitStack() as stack:
        scratch = (chosen.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mixed-")))).resolve()
        models = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="models-")))
        model = model_for("causal", chosen.device, chosen.model, models, chosen.size)
        running: dict[str, Child] = {}
        gpus = [gpu for gpu in str(chosen.gpus).split(",") if gpu]
        for place, name in enumerate(str(chosen.only).split(",")):
            (folder := scratch / name).mkdir(parents=True)
            if gpus:
                os.environ["CUDA_VISIBLE_DEVICES"] = gpus[place % len(gpus)]  # its processes inherit it
            who, start = starts[name]
            running[who] = start(model, chosen.device, folder, stack)
        for who, child in running.items():
            child.hear(START_S)
            say(f"{who} is ready")
        vocab = json.loads((model / "config.json").read_text())["vocab_size"]
        for repetition in range(-1, repetitions):  # kernels are compiled when they are first used
            for what, scores in ((ALONE, 0.0), (BOTH, chosen.scores)):
                shape = chosen.prompt, chosen.tokens, vocab
                for who, child in [*running.items()]:
                    length = min(seconds, 5.0) if repetition < 0 else seconds
                    phase = MixedPhase(chosen.streams, length, *shape, 1 + repetition, scores=scores)
                    try:
                        one = measure(child, phase)
                    except Exception as error:
                        say(f"{who}, {what}: it ended: {error}"[:300])
                        found.setdefault((who, what), []).append(BothMeasured(0.0, [], 1, "it ended"))
                        del running[who]
                        continue
                    if repetition < 0:
                        continue
                    found.setdefault((who, what), []).append(one)
                    p99 = float(np.percentile(one.score_ms or [0.0], 99))
                    say(f"{who}, {what}: {one.per_second:,.0f} tokens/s, scores p99 {p99:.0f} ms {one.failure}")
    how = f"{repetitions} x {seconds:g} s in turn, {chosen.streams} streams of {chosen.prompt} in / {chosen.tokens} out"
    rows = rows_of(found)
    show(f"scores and streams; {machine(chosen.device)}; {how}; {chosen.scores:g} scores/s; median", rows, TARGETS)
    if chosen.json:
        write(chosen.json, rows)


if __name__ == "__main__":
    main()
