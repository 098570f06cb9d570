"""Who is measured: how each contestant is started before one model, and which of its processes does what.

A further column is one more entry of `CONTESTANTS`; what starts a pool takes the group's settings, so that a pool that is
configured differently is an entry too.
"""

import signal
import time
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import psutil

from bench.processes import Child, free_port
from bench.score.callers import START_S
from enginepool.config import Device, GroupConfig, PoolConfig
from enginepool.config_loader import encode_config

#: Settings of the engine that every contestant has on a GPU, by their names in Python. What the pool's worker and the bare
#: engine set beyond these is printed with them.
SHARED: Mapping[str, object] = {
    "attention_backend": "flashinfer",
    "sampling_backend": "pytorch",
    "disable_radix_cache": True,
    # Every engine gets the same key-value cache, also where several engines share one GPU and start at the same time.
    "mem_fraction_static": 0.6,
    "max_total_tokens": 131072,
}
#: The flags with which the maintainers measured their score API (SGLang PR #8840), and those with which it is fastest.
PR_FLAGS = ("--chunked-prefill-size", "-1", "--disable-cuda-graph")
BEST_FLAGS = ("--enable-mis", "--max-prefill-tokens", "32768")
#: Settings of a worker's engine that are no flags of a server: the server has its own, or the setting is the pool's.
NOT_FLAGS = frozenset({"model_path", "device", "dtype", "log_level", "custom_weight_loader"})
#: Tokens of the shortest query that the pool's column of cached queries computes once.
CACHED_QUERY, CACHED_QUERY_CPU = 256, 64
#: Seconds for what was stopped to give back the GPU.
STOP_S = 60.0
#: Seconds to settle what an engine is started with.
SETTINGS_S = 30.0
#: Seconds for a server to freeze its garbage collection.
FREEZE_S = 60.0


@dataclass(frozen=True)
class Ground:
    """Where a contestant is started: the model, the device, a scratch folder of its own."""

    model: Path
    device: Device
    scratch: Path

    @property
    def options(self) -> dict[str, object]:
        """Engine settings for this device."""
        return dict(SHARED) if self.device == "cuda" else {}


def nothing() -> None:
    """What most contestants do when they are warm."""


@dataclass(frozen=True)
class Running:
    """A contestant whose processes are started: the process that loads it, the ones that must live, its settings in words.

    ready: waits until the contestant answers; raises RuntimeError when it does not.
    warmed: is called once, after the warm-up.
    engines: how many engines it has; as many times the requests are kept in flight to saturate it.
    """

    load: Child
    children: list[Child]
    settings: str
    ready: Callable[[], object]
    warmed: Callable[[], object] = nothing
    engines: int = 1

    def roles(self) -> dict[str, list[int]]:
        """Process ids by what they do."""
        found: dict[str, list[int]] = {}
        for child in self.children:
            for process in family(child.pid):
                role = role_of(process)
                if role:
                    found.setdefault(role, []).append(process.pid)
        return found


@dataclass(frozen=True)
class Contestant:
    """A column of the table.

    Args:
        name: for the command line.
        who: for the table.
        start: what it starts it hands to the stack, which stops it.
        missing: one line that says what is lacking to run it on this device, or "".
        workloads: the ones it is measured with; empty: all.
    """

    name: str
    who: str
    start: Callable[[Ground, ExitStack], Running]
    missing: Callable[[str], str] = field(default=lambda _device: "")
    workloads: frozenset[str] = frozenset()


#: Part of a command line -> role. The engine's processes name themselves.
_ROLES = (
    ("scheduler", "scheduler"),
    ("detokenizer", "detokenizer"),
    ("enginepool.coordinator", "coordinator"),
    ("enginepool.workers.main", "worker"),
    ("sglang.launch_server", "server"),
    ("bench.peers.bare_engine", "host"),
)


def role_of(process: psutil.Process) -> str:
    """What this process does; "" for those that only wait for others."""
    try:
        words = " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
    return next((role for part, role in _ROLES if part in words), "")


def family(pid: int) -> list[psutil.Process]:
    """A process and all its descendants; none where it has ended."""
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def watch(stack: ExitStack, child: Child, hint: signal.Signals | None) -> None:
    """Have the stack stop this child, and return only when none of its processes holds the GPU any more."""

    def stop() -> None:
        processes = family(child.pid)
        child.stop(STOP_S / 2, hint=hint)
        _, alive = psutil.wait_procs(processes, timeout=STOP_S / 2)
        for process in alive:
            process.kill()
        psutil.wait_procs(alive, timeout=STOP_S / 2)

    stack.callback(stop)


def engine_settings(ground: Ground) -> dict[str, Any]:
    """What a worker of the pool that does not pack starts its engine with, by SGLang's names in Python."""
    wanted = {"model": str(ground.model), "device": ground.device, "options": ground.options}
    child = Child(["-m", "bench.peers.engine_settings", msgspec.json.encode(wanted).decode()], scratch=ground.scratch)
    try:
        return child.hear(SETTINGS_S)
    finally:
        child.stop()


def flags_of(settings: Mapping[str, object]) -> list[str]:
    """Settings as flags of a server: what is true is a flag alone, what is false is left out."""
    flags: list[str] = []
    for name, value in settings.items():
        if value is not False:
            flags += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return flags


def worker_flags(ground: Ground) -> list[str]:
    """The settings of an engine of the pool that does not pack as flags of a server: prefill CUDA graphs, the same limits."""
    return flags_of({name: value for name, value in engine_settings(ground).items() if name not in NOT_FLAGS})


def shared_flags(flags: tuple[str, ...], ground: Ground) -> list[str]:
    """`flags` after the settings that every contestant has."""
    return [*flags_of(ground.options), *flags]


def freeze_gc(address: str) -> None:
    """Take what a server has allocated so far out of its garbage collection. A worker of the pool does so when it is warm."""
    with urllib.request.urlopen(f"http://{address}/freeze_gc", timeout=FREEZE_S) as response:
        response.read()


def start_server(flags: Callable[[Ground], list[str]], freezes: bool, ground: Ground, stack: ExitStack) -> Running:
    """SGLang's own HTTP server. `freezes`: call its `/freeze_gc` after the warm-up."""
    address = f"127.0.0.1:{free_port()}"
    argv = ["-m", "sglang.launch_server", "--model-path", str(ground.model), "--host", "127.0.0.1"]
    argv += ["--port", address.rpartition(":")[2], "--log-level", "warning", "--skip-server-warmup"]
    argv += flags(ground)
    server = Child(argv, scratch=ground.scratch, speaks=False)
    watch(stack, server, signal.SIGTERM)
    load = Child(["-m", "bench.score.load", "http", address], scratch=ground.scratch)
    stack.callback(load.stop)
    words = " ".join(argv[1:]) + ("; /freeze_gc after the warm-up" if freezes else "")
    warmed = partial(freeze_gc, address) if freezes else nothing
    return Running(load, [server], words, partial(connected, load, server), warmed)


def connected(load: Child, contestant: Child) -> None:
    """Wait until the load is connected; raise as soon as the contestant has ended instead."""
    end = time.monotonic() + START_S
    while True:
        contestant.check()
        try:
            load.hear(1.0)
            return
        except RuntimeError as error:
            if "said nothing" not in str(error) or time.monotonic() > end:
                raise


def start_pool(settings: Mapping[str, Any], ground: Ground, stack: ExitStack) -> Running:
    """The pool's daemon with its workers, and a load that uses the Python client."""
    listen = f"tcp://127.0.0.1:{free_port()}"
    group = GroupConfig(model=str(ground.model), device=ground.device, options=ground.options)
    group = msgspec.structs.replace(group, **settings)
    state = str(ground.scratch / "state")
    config = PoolConfig(groups={"score": group}, listen=listen, insecure_loopback=True, state_dir=state)
    env = {"ENGINEPOOL_CONFIG": encode_config(config).decode()}
    daemon = Child(["-m", "enginepool.coordinator.shell.daemon"], scratch=ground.scratch, env=env, speaks=False)
    watch(stack, daemon, signal.SIGTERM)
    load = Child(["-m", "bench.score.load", "pool", listen], scratch=ground.scratch)
    stack.callback(load.stop)
    words = f"groups.score = {msgspec.json.encode(msgspec.to_builtins(group)).decode()}"
    return Running(load, [daemon], words, partial(connected, load, daemon), engines=group.workers)


def start_cached(settings: Mapping[str, Any], ground: Ground, stack: ExitStack) -> Running:
    """The pool with a worker that computes a long query once, and so keeps what it has computed."""
    options = ground.options | {"disable_radix_cache": False}
    cached = CACHED_QUERY if ground.device == "cuda" else CACHED_QUERY_CPU
    return start_pool({"cached_query_tokens": cached, "options": options, **settings}, ground, stack)


def start_bare(ground: Ground, stack: ExitStack) -> Running:
    """The engine in the process that asks it."""
    wanted = {"model": str(ground.model), "device": ground.device, "options": ground.options}
    argv = ["-m", "bench.peers.bare_engine", msgspec.json.encode(wanted).decode()]
    host = Child(argv, scratch=ground.scratch)
    watch(stack, host, None)
    words = ", ".join(f"{name}={value!r}" for name, value in engine_settings(ground).items())
    return Running(host, [host], f"sglang.Engine({words})", partial(host.hear, START_S))


def no_engine(_device: str) -> str:
    """What an engine of one's own needs."""
    return "" if find_spec("sglang") else "sglang is not installed"


def no_server(device: str) -> str:
    """What SGLang's server needs."""
    if device == "cpu":
        return "SGLang's server does not start on a CPU without its CPU kernels"
    return no_engine(device)


OURS, PLAIN = "enginepool", "enginepool, plain"
CACHED = "enginepool, cached queries"
SERVER, BEST, BARE = "SGLang server, flags of PR 8840", "SGLang server, best flags", "Engine.async_score alone"
WORKER_FLAGS = "SGLang server, the worker's flags"
CONTESTANTS = (
    Contestant("worker-flags", WORKER_FLAGS, partial(start_server, worker_flags, True), no_server),
    Contestant("server", SERVER, partial(start_server, partial(shared_flags, PR_FLAGS), False), no_server),
    Contestant("best", BEST, partial(start_server, partial(shared_flags, BEST_FLAGS), True), no_server),
    Contestant("bare", BARE, start_bare, no_engine),
    Contestant("pool", OURS, partial(start_pool, {}), no_engine),
    Contestant("plain", PLAIN, partial(start_pool, {"packing": "off"}), no_engine),
    Contestant("cached", CACHED, partial(start_cached, {}), no_engine, frozenset({"long"})),
)


def with_workers(who: str, workers: int) -> str:
    """The name of a pool's column for so many workers."""
    return who if workers == 1 else f"{who}, {workers} workers"


def wider(contestant: Contestant, workers: int) -> Contestant:
    """A pool like `contestant`, OURS or PLAIN, with as many workers, one to a GPU."""
    plain = {"packing": "off"} if contestant.who == PLAIN else {}
    start = partial(start_pool, {"workers": workers, **plain})
    return Contestant(f"{contestant.name}-{workers}", with_workers(contestant.who, workers), start, contestant.missing)
