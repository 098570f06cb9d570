"""How a benchmark starts a pool with one group, and the options that all benchmarks of generation have."""

import argparse
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.processes import Child, free_port
from bench.score.contestants import watch
from bench.score.model import SIZES
from enginepool.config import Device, GroupConfig, PoolConfig
from enginepool.config_loader import encode_config


def pool_of(
    model: Path,
    device: Device,
    operations: list[Any],
    options: dict[str, Any],
    scratch: Path,
    stack: ExitStack,
    *,
    daemon: str = "enginepool.coordinator.shell.daemon",
    **group: Any,
) -> tuple[str, Child]:
    """The address and the process of a pool, which the stack stops.

    Args:
        options: of its engines.
        daemon: the module of its coordinator's process.
        group: further settings of its group.
    """
    listen = f"tcp://127.0.0.1:{free_port()}"
    made = GroupConfig(model=str(model), device=device, options=options, operations=operations, **group)
    config = PoolConfig(groups={"g": made}, listen=listen, insecure_loopback=True, state_dir=str(scratch / "state"))
    env = {"ENGINEPOOL_CONFIG": encode_config(config).decode()}
    process = Child(["-m", daemon], scratch=scratch, env=env, speaks=False)
    watch(stack, process, signal.SIGTERM)
    return listen, process


def add_model_options(found: argparse.ArgumentParser, size: str) -> None:
    """Which model is measured on which device."""
    found.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    found.add_argument("--model", type=Path, metavar="DIR", help="a causal model (default: one of random weights)")
    found.add_argument("--size", choices=tuple(SIZES), default=size, help=f"shape of that model (default: {size})")
    found.add_argument("--logs", type=Path, metavar="DIR", help="keep logs of all processes there")


def add_stream_options(found: argparse.ArgumentParser, contestants: str) -> None:
    """What streams there are, and how long they are measured."""
    found.add_argument("--seconds", type=float, default=20.0, help="length of a phase (default: 20)")
    found.add_argument("--repetitions", type=int, default=3, help="how often each phase is measured (default: 3)")
    found.add_argument("--prompt", type=int, default=512, help="tokens of a prompt (default: 512)")
    found.add_argument("--tokens", type=int, default=256, help="new tokens (default: 256)")
    found.add_argument("--gpus", default="", metavar="NUMBERS", help="GPUs of the contestants, in turn (default: all on one)")
    found.add_argument("--only", default=contestants, help=f"contestants (default: {contestants})")
