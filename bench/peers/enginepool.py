"""The pool's own coordinator, started as its daemon is, before two workers with prepared answers; every feature on."""

import importlib.util
import signal
from contextlib import ExitStack
from pathlib import Path

from bench.peers import Contestant, Peer, begin
from bench.processes import Child, free_port, tree
from bench.workers import GROUP
from enginepool.config import GroupConfig, PoolConfig
from enginepool.config_loader import encode_config

WHO = "enginepool"


def missing() -> str:
    """The daemon is part of this repository."""
    found = importlib.util.find_spec("enginepool.coordinator.shell.daemon")
    return "" if found else "enginepool.coordinator.shell.daemon does not exist"


def start(scratch: Path, stack: ExitStack) -> Contestant:
    """The daemon, two workers that connect, a load generator of prepared messages and one that uses the Python client."""
    listen = f"tcp://127.0.0.1:{free_port()}"
    # Where a pool's own workers connect by default.
    listen_workers = f"ipc://{scratch / 'workers.sock'}"
    config = PoolConfig(
        groups={GROUP: GroupConfig(model="prepared answers", engine="sim", workers=0)},
        listen=listen,
        listen_workers=listen_workers,
        insecure_loopback=True,
        state_dir=str(scratch / "state"),
    )
    argv = ["-m", "enginepool.coordinator.shell.daemon"]
    env = {"ENGINEPOOL_CONFIG": encode_config(config).decode()}
    daemon = Child(argv, scratch=scratch, env=env, speaks=False)
    stack.callback(daemon.stop, hint=signal.SIGTERM)
    workers = [begin(stack, ["-m", "bench.workers", "enginepool", listen_workers], scratch) for _ in range(2)]
    load = begin(stack, ["-m", "bench.load", "enginepool", listen], scratch)
    python = begin(stack, ["-m", "bench.python_load", listen], scratch)
    return Contestant(load, lambda: tree(daemon.pid), [daemon, *workers, load, python], python=python)


PEER = Peer("enginepool", WHO, missing, start)
