"""Who generates: the pool, SGLang's HTTP server, and the engine alone, each with the settings of a pool's worker."""

import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from bench.generate.pools import pool_of
from bench.generate.streams import Phase, Streamed
from bench.processes import Child, free_port
from bench.score.callers import START_S
from bench.score.contestants import NOT_FLAGS, flags_of, freeze_gc, watch
from enginepool.config import Device

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


def start_pool(
    model: Path, device: Device, loads: int, scratch: Path, stack: ExitStack, operations: Sequence[str] = ("generate",)
) -> Running:
    # No weights are published, for which the other contestants keep no memory either.
    address, daemon = pool_of(model, device, [*operations], options_of(device), scratch, stack, reserve_staging=False)
    children = load_processes("pool", address, loads, scratch, stack)
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


def start_bare(
    model: Path, device: Device, loads: int, scratch: Path, stack: ExitStack, who: str = BARE, how: tuple[str, ...] = ()
) -> Running:
    options = {**options_of(device), "incremental_streaming_output": True}
    wanted = {"model": str(model), "device": device, "options": options, "operations": ["generate"]}
    child = Child(["-m", "bench.peers.bare_generation", msgspec.json.encode(wanted).decode(), *how], scratch=scratch)
    watch(stack, child, None)
    return Running(who, [child], partial(hear_all, [child], child))


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
    one: Running,
    streams: int,
    seconds: float,
    shape: tuple[int, int, int],
    seed: int,
    apart: bool = False,
    scores: float = 0.0,
) -> Streamed:
    """One phase: the streams, and scores a second, are shared out among the load processes."""
    count = len(one.loads)
    for place, child in enumerate(one.loads):
        mine = streams // count + (place < streams % count)
        child.tell(msgspec.to_builtins(Phase(mine, seconds, *shape, seed * 100 + place, apart, scores / count)))
    found = [msgspec.convert(child.hear(seconds + PATIENCE_S), Streamed) for child in one.loads]
    first_ms, score_ms = ([value for part in found for value in getattr(part, name)] for name in ("first_ms", "score_ms"))
    failure = next((part.failure for part in found if part.failure), "")
    return Streamed(sum(part.per_second for part in found), first_ms, sum(part.failed for part in found), failure, score_ms)
