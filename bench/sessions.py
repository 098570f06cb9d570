"""Do the turns of conversations find their history in a prefix cache: a pool, and users that are set to engines by hand.

    python -m bench.sessions                  # sim engines, which count what a prefix cache would hold
    python -m bench.sessions --device cuda    # two engines on two GPUs
    python -m bench.sessions --kv-events --cache 20000    # caches that are too small, and engines that say what they evict

Each user has a session. All begin with the same system prompt. After each turn the user thinks for a while. The pool is one
group of two workers. By hand, each half of the users has a group of one worker for itself.
"""

import argparse
import asyncio
import json
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from bench.processes import Child, free_port
from bench.score.callers import START_S
from bench.score.contestants import watch
from bench.score_gpu import machine, model_for, say
from bench.table import Row, Target, parser, show, write
from enginepool import Pool
from enginepool.config import GroupConfig, PoolConfig
from enginepool.config_loader import encode_config
from enginepool.protocol.messages import WorkerStatus

POOL, EXACT, BY_HAND = "enginepool", "enginepool with KV events", "one engine per user set by hand"
GROUPS = {POOL: {"all": 2}, EXACT: {"all": 2}, BY_HAND: {"first": 1, "second": 1}}
CACHED, FIRST, BUSIEST = (
    "prompt tokens found in a cache",
    "first token of a turn, p50",
    "turns of the busier worker, of its half",
)
TARGETS = [Target(CACHED, BY_HAND, 0.9, at_most=False), Target(BUSIEST, POOL, 1.2, of_value=True), Target(FIRST, BY_HAND, 1.0)]
#: of the engine, by device; a sim engine: a step of 5 ms, 50,000 tokens/s of prefill, and a cache as on one H200
OPTIONS: dict[str, dict[str, Any]] = {
    "sim": {
        "forward_s": 0.005, "token_s": 2e-5, "inflight_rows": 256, "inflight_tokens": 1 << 22, "context": 1 << 16,
        "end_every": 0, "cache_tokens": 1 << 20,
    },
    "cpu": {"max_total_tokens": 1 << 16},
    "cuda": {"attention_backend": "flashinfer", "sampling_backend": "pytorch", "mem_fraction_static": 0.7},
}  # fmt: skip


@dataclass(frozen=True)
class Talk:
    """What the users do. `system`, `new`: tokens of the system prompt, and of a user's part of a turn, on average; `tokens`: of
    an answer; `think_s`: on average."""

    users: int
    turns: int
    system: int
    new: int
    tokens: int
    think_s: float
    vocab: int
    seed: int = 0


@dataclass
class Heard:
    """What the users saw. `first_ms`: of turns after the first one."""

    cached: int = 0
    prompt: int = 0
    first_ms: list[float] = field(default_factory=list[float])


async def converse(pool: Pool, group: str, user: int, talk: Talk, heard: Heard) -> None:
    """All turns of one user."""
    chance = np.random.default_rng([talk.seed, user])
    system = np.random.default_rng([talk.seed]).integers(10, talk.vocab, talk.system, np.int32)
    async with pool.session(group=group, idle=None) as session:
        for turn in range(talk.turns):
            await asyncio.sleep(chance.exponential(talk.think_s))
            new = chance.integers(10, talk.vocab, chance.integers(1, 2 * talk.new), np.int32)
            asked = time.perf_counter()
            stream = session.stream(
                new if turn else np.concatenate((system, new)), max_new_tokens=talk.tokens, temperature=0.0, ignore_eos=True
            )
            await stream.next_chunk()
            if turn:
                heard.first_ms.append((time.perf_counter() - asked) * 1000)
            usage = (await stream.result()).usage
            heard.cached, heard.prompt = heard.cached + usage.cached_tokens, heard.prompt + usage.prompt_tokens


async def run(address: str, groups: Sequence[str], talk: Talk) -> tuple[Heard, list[int]]:
    """What the users saw, and the turns of each worker."""
    heard = Heard()
    async with Pool.connect(address, connect_timeout=START_S) as pool:
        while any(worker.stage != "ready" for worker in await workers(pool)):  # noqa: ASYNC110 (no event says it of all)
            await asyncio.sleep(0.1)
        other = Talk(4, 2, talk.system, talk.new, min(talk.tokens, 8), 0.0, talk.vocab, talk.seed + 1)
        await asyncio.gather(*(converse(pool, group, user, other, Heard()) for group in groups for user in range(4)))
        before = [worker.done for worker in await workers(pool)]
        await asyncio.gather(*(converse(pool, groups[user % len(groups)], user, talk, heard) for user in range(talk.users)))
        after = [worker.done for worker in await workers(pool)]
    return heard, [now - then for now, then in zip(after, before, strict=True)]


async def workers(pool: Pool) -> list[WorkerStatus]:
    return [worker for group in (await pool.status()).groups for worker in group.workers]


def measure(who: str, chosen: argparse.Namespace, model: str, talk: Talk, scratch: Path) -> tuple[Heard, list[int]]:
    """Start the engines of a contestant, have all users talk, and stop them."""
    sim, options = chosen.device == "sim", dict(OPTIONS[chosen.device])
    if chosen.cache:
        options["cache_tokens" if sim else "max_total_tokens"] = chosen.cache
    if who == EXACT:
        options |= {"kv_events": True} if sim else {"kv_events_config": '{"publisher": "zmq"}'}
    engine: dict[str, Any] = {"engine": "sim"} if sim else {"device": chosen.device}
    groups = {
        name: GroupConfig(model=model, workers=count, operations=["generate"], options=options, **engine)
        for name, count in GROUPS[who].items()
    }
    listen = f"tcp://127.0.0.1:{free_port()}"
    config = PoolConfig(groups=groups, listen=listen, insecure_loopback=True, state_dir=str(scratch / f"state-{len(groups)}"))
    env = {"ENGINEPOOL_CONFIG": encode_config(config).decode()}
    with ExitStack() as stack:
        daemon = Child(["-m", "enginepool.coordinator.shell.daemon"], scratch=scratch, env=env, speaks=False)
        watch(stack, daemon, signal.SIGTERM)
        return uvloop.run(run(listen, list(groups), talk))


def rows_of(found: dict[str, list[tuple[Heard, list[int]]]]) -> list[Row]:
    """The median of the repetitions, and the ratio of the pool to the other in pairs."""
    rows: list[Row] = []
    for who, runs in found.items():
        numbers = {
            (CACHED, "%"): [100 * heard.cached / heard.prompt for heard, _ in runs],
            (FIRST, "ms"): [float(np.median(heard.first_ms)) for heard, _ in runs],
            (BUSIEST, "x"): [max(done) * len(done) / sum(done) for _, done in runs],
        }
        for (what, unit), values in numbers.items():
            ours = [row.samples for row in rows if (row.what, row.who) == (what, POOL)]
            pairs = [mine / value for mine, value in zip(ours[0], values, strict=True)] if ours else []
            ratio = float(np.median(pairs)) if pairs and what != BUSIEST else None
            rows.append(Row(what, who, float(np.median(values)), unit, ratio, (min(values), max(values)), tuple(values)))
    return sorted(rows, key=lambda row: row.what)


def options() -> argparse.Namespace:
    found = parser("sessions", (__doc__ or "").split("\n", 1)[0])
    found.add_argument("--device", choices=tuple(OPTIONS), default="sim", help="sim engines, or real ones (default: sim)")
    found.add_argument("--model", type=Path, metavar="DIR", help="a causal model (default: one of random weights)")
    found.add_argument("--users", type=int, default=64, help="default: 64")
    found.add_argument("--turns", type=int, default=20, help="of each user (default: 20)")
    found.add_argument("--system", type=int, default=128, help="tokens of the system prompt (default: 128)")
    found.add_argument("--new", type=int, default=100, help="new tokens of a user in a turn, on average (default: 100)")
    found.add_argument("--tokens", type=int, default=64, help="tokens of an answer (default: 64)")
    found.add_argument("--think", type=float, default=1.0, help="seconds between turns, on average (default: 1)")
    found.add_argument("--kv-events", action="store_true", help="measure a pool whose engines publish KV events, too")
    found.add_argument("--cache", type=int, help="tokens that an engine has room for (default: enough)")
    found.add_argument("--repetitions", type=int, default=3, help="how often each contestant is measured (default: 3)")
    found.add_argument("--logs", type=Path, metavar="DIR", help="keep logs of all processes there")
    return found.parse_args()


def main() -> None:
    """Measure one after the other, print."""
    chosen = options()
    users, turns, repetitions = (12, 5, 1) if chosen.quick else (chosen.users, chosen.turns, chosen.repetitions)
    contestants = (POOL, EXACT, BY_HAND) if chosen.kv_events else (POOL, BY_HAND)
    found: dict[str, list[tuple[Heard, list[int]]]] = {who: [] for who in contestants}
    with ExitStack() as stack:
        scratch = (chosen.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sessions-")))).resolve()
        scratch.mkdir(parents=True, exist_ok=True)
        models = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="models-")))
        model, vocab = "none", 100_000
        if chosen.device != "sim":
            folder = model_for("causal", chosen.device, chosen.model, models)
            model, vocab = str(folder), json.loads((folder / "config.json").read_text())["vocab_size"]
        for repetition in range(repetitions):
            talk = Talk(users, turns, chosen.system, chosen.new, chosen.tokens, chosen.think, vocab, 10 * repetition)
            for number, (who, runs) in enumerate(found.items(), 1):
                place = scratch / f"{len(runs)}-{number}"
                place.mkdir()
                runs.append(measure(who, chosen, model, talk, place))
                heard, done = runs[-1]
                say(f"{who}: {heard.cached:,} of {heard.prompt:,} prompt tokens were cached; turns by worker: {done}")
    rows = rows_of(found)
    how = f"{users} users x {turns} turns, {chosen.new} in / {chosen.tokens} out a turn, {repetitions} x"
    where = machine("cuda" if chosen.device == "cuda" else "cpu")
    show(f"sessions, {chosen.device} engines; {where}; {how}; median (lowest to highest)", rows, TARGETS)
    if chosen.json:
        write(chosen.json, rows)


if __name__ == "__main__":
    main()
