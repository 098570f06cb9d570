"""What does it cost to reward each sample as soon as it ends: `pool.rollout` with a reward group, and `pool.generate` alone.

    python -m bench.rollout [--phases N] [--quick] [--json FILE]

Two simulated engines generate 8 samples of each prompt, 150 tokens long on average and 512 at most; a step takes 15 ms and runs
64 sequences. A third engine scores, in forwards of 4 ms. Phases take turns: the same prompts, as many in flight, by
`pool.rollout`, by `pool.generate`, and by `pool.generate` for all prompts before all samples are scored. Which samples a prompt
gets depends a little on the engines that run it, so times are compared for as many tokens.
"""

import argparse
import asyncio
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import uvloop

from bench.processes import Child
from bench.table import Row, Target, parser, show, write
from enginepool import Pool
from enginepool.config import GroupConfig, PoolConfig
from enginepool.config_loader import encode_config

ALONE, ROLLOUT, BARRIER = "generate alone", "rollout with a reward group", "generate all, then score all"
WALL, FIRST = "seconds for 10,000 tokens", "seconds to the first group"
TARGETS = [Target(WALL, ROLLOUT, 1.1)]
SAMPLES, IN_FLIGHT = 8, 24
#: how long anything here may take before the run fails
LIMIT_S = 120.0
ASKED: dict[str, Any] = {"group": "policy", "max_new_tokens": 512, "temperature": 1.0, "logprobs": True}
POLICY = {"forward_s": 0.015, "inflight_rows": 64, "inflight_tokens": 1 << 20, "end_every": 150}
JUDGE = {"kind": "classifier", "forward_s": 0.004}


class Phase(msgspec.Struct):
    """What one phase took, and how many tokens it generated."""

    wall_s: float
    first_s: float
    tokens: int


def pool_of(folder: Path) -> PoolConfig:
    policy = GroupConfig(model="sim", engine="sim", workers=2, operations=["generate"], options=POLICY)
    judge = GroupConfig(model="sim", engine="sim", options=JUDGE)
    groups = {"policy": policy, "judge": judge}
    return PoolConfig(groups=groups, listen=f"ipc://{folder}/pool.sock", state_dir=str(folder / "state"))


async def rollout(pool: Pool, prompts: list[list[int]]) -> Phase:
    began, first, tokens = time.perf_counter(), 0.0, 0
    async for group in pool.rollout(prompts, SAMPLES, reward="judge", max_in_flight=IN_FLIGHT, **ASKED):
        first = first or time.perf_counter() - began
        assert not group.errors and not np.isnan(group.rewards).any()
        tokens += sum(len(sample.token_ids) for sample in group.samples)
    return Phase(time.perf_counter() - began, first, tokens)


async def _generated(pool: Pool, prompts: list[list[int]], rewards: bool) -> Phase:
    began, first, tokens = time.perf_counter(), 0.0, 0
    room = asyncio.Semaphore(IN_FLIGHT)
    items: list[tuple[list[int], Any]] = []

    async def one(prompt: list[int]) -> None:
        nonlocal first, tokens
        async with room:
            [samples] = await pool.generate(prompt, n=SAMPLES, **ASKED)
        first = first or time.perf_counter() - began
        tokens += sum(len(sample.token_ids) for sample in samples)
        items.append((prompt, [sample.token_ids for sample in samples]))

    await asyncio.gather(*map(one, prompts))
    if rewards:
        await asyncio.gather(*(pool.score(prompt, outputs, group="judge") for prompt, outputs in items))
        first = time.perf_counter() - began
    return Phase(time.perf_counter() - began, first, tokens)


async def alone(pool: Pool, prompts: list[list[int]]) -> Phase:
    return await _generated(pool, prompts, rewards=False)


async def barrier(pool: Pool, prompts: list[list[int]]) -> Phase:
    return await _generated(pool, prompts, rewards=True)


#: in the order in which they take turns
CONTESTANTS: dict[str, Callable[[Pool, list[list[int]]], Awaitable[Phase]]] = {
    ROLLOUT: rollout, ALONE: alone, BARRIER: barrier,
}  # fmt: skip


async def measure(address: str, count: int, phases: int) -> dict[str, list[Phase]]:
    """So many phases of each contestant, with so many prompts."""
    found: dict[str, list[Phase]] = {who: [] for who in CONTESTANTS}
    async with Pool.connect(address, connect_timeout=LIMIT_S) as pool:
        await pool.ready(LIMIT_S)
        for number in range(phases):
            chance = np.random.default_rng(number)
            prompts: list[list[int]] = [chance.integers(10, 1000, 64).tolist() for _ in range(count)]
            for who, contestant in CONTESTANTS.items():
                found[who].append(await contestant(pool, prompts))
    return found


def rows_of(found: dict[str, list[Phase]]) -> list[Row]:
    """The ratio is to the phase of `generate` alone with the same prompts."""
    rows: list[Row] = []
    figures: dict[str, Callable[[Phase], float]] = {
        WALL: lambda phase: 10_000 * phase.wall_s / phase.tokens,
        FIRST: lambda phase: phase.first_s,
    }
    for what, figure in figures.items():
        for who, phases in found.items():
            values = [figure(phase) for phase in phases]
            pairs = [value / figure(other) for value, other in zip(values, found[ALONE], strict=True)]
            rows.append(Row(what, who, statistics.median(values), "s", None, (min(values), max(values)), tuple(values)))
            if who != ALONE:
                rows[-1] = msgspec.structs.replace(rows[-1], ratio=statistics.median(pairs))
                spread = (min(pairs), max(pairs))
                rows.append(Row(f"{what}, of generate alone", who, statistics.median(pairs), "x", None, spread, tuple(pairs)))
    return rows


def main() -> None:
    options: argparse.ArgumentParser = parser("rollout", "What does it cost to reward each sample as soon as it ends?")
    options.add_argument("--phases", type=int, default=5, metavar="N", help="of each contestant")
    args = options.parse_args()
    count, phases = (24, 2) if args.quick else (48, args.phases)
    with tempfile.TemporaryDirectory(prefix="enginepool-rollout-") as folder:
        config = pool_of(Path(folder))
        env = {"ENGINEPOOL_CONFIG": encode_config(config).decode()}
        child = Child(["-m", "enginepool.coordinator.shell.daemon"], scratch=Path(folder), env=env, speaks=False)
        try:
            found = uvloop.run(asyncio.wait_for(measure(config.listen, count, phases), LIMIT_S * phases))
        finally:
            child.stop(LIMIT_S, hint=signal.SIGTERM)
    rows = rows_of(found)
    tokens = found[ALONE][0].tokens
    show(f"rollout: {count} prompts of {SAMPLES} samples, about {tokens} tokens; {os.cpu_count()} cores", rows, TARGETS)
    if args.json:
        write(args.json, rows)


if __name__ == "__main__":
    main()
