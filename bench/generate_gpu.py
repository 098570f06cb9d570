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
import signal
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.generate.streams import Phase, Streamed
from bench.processes import Child, free_port
from bench.score.callers import START_S
from bench.score.contestants import NOT_FLAGS, flags_of, freeze_gc, no_server, watch
from bench.score.model import SIZES
from bench.score_gpu import machine, model_for, say
from bench.table import Row, Target, parser, show, write
from enginepool.config import Device, GroupConfig, PoolConfig
from enginepool.config_loader import encode_config

POOL, SERVER, BARE = "enginepool", "SGLang server", "Engine.async_generate alone"
BEST = "SGLang server, new tokens only"
#: Every engine gets the same key-value cache, with room for 256 sequences of 768 tokens, also where several start on one GPU at
#: the same time.
OPTIONS: dict[str, Any] = {
    "attention_backend": "flashinfer",
    "sampling_backend": "pytorch",
    "mem_fraction_static": 0.85,
    "max_total_tokens": 208 * 1024,
    "max_running_requests": 512,
}
PATIENCE_S = 60.0
TARGETS = [
    Target("256 streams", SERVER, 1.5, at_most=False),
    Target("256 streams", BEST, 1.5, at_most=False),
    Target("256 streams", BARE, 0.95, at_most=False),
    Target("256 streams: first token, p50", SERVER, 0.8),
    Target("256 streams: first token, p50", BEST, 0.8),
    Target("256 streams apart: first token, p50", SERVER, 0.8),
]


@dataclass(frozen=True)
class Running:
    """A contestant that is started. `loads`: the processes that stream; `ready`: waits until it answers."""

    who: str
    loads: list[Child]
    ready: Callable[[], object]


def options_of(device: Device) -> dict[str, Any]:
    """Engine settings of every contestant."""
    return OPTIONS if device == "cuda" else {}


def settings_of(model: Path, device: Device, scratch: Path) -> dict[str, Any]:
    """What a worker that generates starts its engine with, by SGLang's names."""
    wanted = {"model": str(model), "device": device, "options": options_of(device), "operations": ["generate"]}
    child = Child(["-m", "bench.peers.engine_settings", msgspec.json.encode(wanted).decode()], scratch=scratch)
    try:
        return child.hear(60.0)
    finally:
        child.stop()


def start_pool(model: Path, device: Device, loads: int, scratch: Path, stack: ExitStack) -> Running:
    listen = f"tcp://127.0.0.1:{free_port()}"
    group = GroupConfig(model=str(model), device=device, options=options_of(device), operations=["generate"])
    config = PoolConfig(groups={"g": group}, listen=listen, insecure_loopback=True, state_dir=str(scratch / "state"))
    env = {"ENGINEPOOL_CONFIG": encode_config(config).decode()}
    daemon = Child(["-m", "enginepool.coordinator.shell.daemon"], scratch=scratch, env=env, speaks=False)
    watch(stack, daemon, signal.SIGTERM)
    children = load_processes("pool", listen, loads, scratch, stack)
    return Running(POOL, children, partial(hear_all, children, daemon))


def start_server(
    model: Path, device: Device, loads: int, scratch: Path, stack: ExitStack, who: str = SERVER, flags: tuple[str, ...] = ()
) -> Running:
    address = f"127.0.0.1:{free_port()}"
    argv = ["-m", "sglang.launch_server", "--model-path", str(model), "--host", "127.0.0.1", "--port"]
    argv += [address.rpartition(":")[2], "--log-level", "warning", "--skip-server-warmup"]
    settings = settings_of(model, device, scratch)
    argv += [*flags_of({name: value for name, value in settings.items() if name not in NOT_FLAGS}), *flags]
    server = Child(argv, scratch=scratch, speaks=False)
    watch(stack, server, signal.SIGTERM)
    children = load_processes("http", address, loads, scratch, stack)

    def ready() -> None:
        hear_all(children, server)
        freeze_gc(address)

    return Running(who, children, ready)


def start_bare(model: Path, device: Device, loads: int, scratch: Path, stack: ExitStack) -> Running:
    options = {**options_of(device), "incremental_streaming_output": True}
    wanted = {"model": str(model), "device": device, "options": options, "operations": ["generate"]}
    child = Child(["-m", "bench.peers.bare_generation", msgspec.json.encode(wanted).decode()], scratch=scratch)
    watch(stack, child, None)
    return Running(BARE, [child], partial(hear_all, [child], child))


def load_processes(how: str, address: str, count: int, scratch: Path, stack: ExitStack) -> list[Child]:
    children = [Child(["-m", "bench.generate.load", how, address], scratch=scratch) for _ in range(count)]
    for child in children:
        stack.callback(child.stop)
    return children


def hear_all(children: list[Child], contestant: Child) -> None:
    for child in children:
        contestant.check()
        child.hear(START_S)


def measure(
    one: Running, streams: int, seconds: float, shape: tuple[int, int, int], seed: int, apart: bool = False
) -> Streamed:
    """One phase: the streams are shared out among the load processes."""
    count = len(one.loads)
    for place, child in enumerate(one.loads):
        mine = streams // count + (place < streams % count)
        child.tell(msgspec.to_builtins(Phase(mine, seconds, *shape, seed * 100 + place, apart)))
    found = [msgspec.convert(child.hear(seconds + PATIENCE_S), Streamed) for child in one.loads]
    first_ms = [value for part in found for value in part.first_ms]
    failure = next((part.failure for part in found if part.failure), "")
    return Streamed(sum(part.per_second for part in found), first_ms, sum(part.failed for part in found), failure)


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
    found.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    found.add_argument("--model", type=Path, metavar="DIR", help="a causal model (default: one of random weights)")
    found.add_argument("--size", choices=tuple(SIZES), default="0.6b", help="shape of that model (default: 0.6b)")
    found.add_argument("--streams", default="64,256", metavar="NUMBERS", help="streams at once (default: 64,256)")
    found.add_argument("--apart", action="store_true", help="also measure streams that end at different moments")
    found.add_argument("--seconds", type=float, default=20.0, help="length of a phase (default: 20)")
    found.add_argument("--repetitions", type=int, default=3, help="how often each phase is measured (default: 3)")
    found.add_argument("--prompt", type=int, default=512, help="tokens of a prompt (default: 512)")
    found.add_argument("--tokens", type=int, default=256, help="new tokens (default: 256)")
    found.add_argument("--loads", type=int, default=4, help="processes that load the pool or the server (default: 4)")
    found.add_argument("--gpus", default="", metavar="NUMBERS", help="GPUs of the contestants, in turn (default: all on one)")
    found.add_argument("--only", default="pool,server,best,bare", help="contestants (default: pool,server,best,bare)")
    found.add_argument("--logs", type=Path, metavar="DIR", help="keep logs of all processes there")
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
