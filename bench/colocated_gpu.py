"""A trainer and an engine on one GPU: does the memory come back, and do the published weights generate?

    python -m bench.colocated_gpu [--quick] [--device cpu] [--size 4b] [--cycles 10] [--json FILE]

Ten cycles of: sleep, a training step that takes most of the memory that is free then, wake the weights, publish other ones,
wake the KV cache, generate. Before the cycles each of two sets of weights is published and generates: after a cycle the same
prompts must have the same tokens as then. One of the prompts of each cycle is asked for while the engine sleeps, and waits. The
memory is that of the card, of all processes. In the end transformers computes the log-probabilities of all tokens again, on
both sets of weights.
"""

import argparse
import asyncio
import importlib
import os
import re
import tempfile
import time
from collections.abc import Awaitable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.generate.pools import add_model_options, pool_of
from bench.in_flight_gpu import BUCKET, PATIENCE_S, WEIGHTS, start_trainer
from bench.processes import Child
from bench.score.callers import START_S
from bench.score.model import vocabulary
from bench.score_gpu import machine, model_for, say
from bench.table import Row, Target, parser, show, write
from enginepool import Pool
from enginepool.coordinator.launchers.gpus import visible_gpus

WHO = "enginepool"
OPTIONS: dict[str, Any] = {
    "attention_backend": "flashinfer",
    "sampling_backend": "pytorch",
    "mem_fraction_static": 0.6,
    "max_total_tokens": 128 * 1024,
    "enable_memory_saver": True,
}
PHASES = ("sleep", "train", "wake weights", "update", "wake kv_cache", "generate")
ASLEEP, AWAKE, PEAK = "used while all sleeps", "used while all is awake", "the training step takes"
SPREAD = ": highest less lowest"
FALSE, NAMED, OTHER = (
    "tokens other than before the cycles",
    "log-probabilities by the weights published",
    "by the other weights",
)
#: MiB by which two looks at the card may differ
NOISE_MIB = 64.0


class Generated(NamedTuple):
    """What one set of weights generated for a prompt."""

    which: str
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


class Cycle(NamedTuple):
    """Seconds of each phase; MiB of the card that are used while all sleeps and while all is awake, that the training took,
    and that are free while all is awake; the answers."""

    seconds: dict[str, float]
    asleep: float
    awake: float
    peak: float
    free: float
    generated: list[Generated]


class Cycles:
    """The trainer, the pool, and the prompts. `version`: of the weights that were published last."""

    def __init__(self, pool: Pool, trainer: Child, prompts: list[list[int]], tokens: int, share: float) -> None:
        self._pool, self._trainer = pool, trainer
        self._prompts, self._tokens, self._share = prompts, tokens, share
        self._version = 0

    async def order(self, **order: object) -> Any:
        said = await asyncio.to_thread(self._trainer.ask, order, PATIENCE_S)
        if "error" in said:
            raise RuntimeError(said["error"])
        return said

    async def publish(self) -> None:
        """Bring the pool the other set of weights."""
        self._version += 1
        which = WEIGHTS[self._version % 2]
        await self.order(do="publish", version=self._version, which=which, transfer="ipc", bucket_bytes=BUCKET)

    async def generate(self, prompt: list[int]) -> Generated:
        """By the weights that are committed when it begins; an engine that sleeps begins when it is awake."""
        [[sequence]] = await self._pool.generate(
            [prompt], max_new_tokens=self._tokens, temperature=0.0, ignore_eos=True, logprobs=True
        )
        [(version, _)] = sequence.spans
        assert version == self._version, f"the weights of version {version} generated, and {self._version} is committed"
        logprobs = list[float]() if sequence.logprobs is None else sequence.logprobs.tolist()
        return Generated(WEIGHTS[version % 2], prompt, sequence.token_ids.tolist(), logprobs)

    async def generate_all(self, first: int = 0) -> list[Generated]:
        """One prompt after the other from this one on, so that each forward is the same in each cycle."""
        return [await self.generate(prompt) for prompt in self._prompts[first:]]

    async def cycle(self) -> Cycle:
        """One cycle, from an engine that is awake to one that is awake again."""
        seconds: dict[str, float] = {}

        async def timed(name: str, work: Awaitable[Any]) -> Any:
            began = time.perf_counter()
            found = await work
            seconds[name] = time.perf_counter() - began
            return found

        _all_did(await timed("sleep", self._pool.sleep()))
        asleep = (await self.order(do="used"))["mib"]
        peak = (await timed("train", self.order(do="train", share=self._share)))["peak_mib"]
        waits = asyncio.create_task(self.generate(self._prompts[0]))
        _all_did(await timed("wake weights", self._pool.wake(tags=["weights"])))
        await timed("update", self.publish())
        _all_did(await timed("wake kv_cache", self._pool.wake()))
        began = time.perf_counter()
        answers = [await waits, *await self.generate_all(1)]
        seconds["generate"] = time.perf_counter() - began
        awake = await self.order(do="used")
        return Cycle(seconds, asleep, awake["mib"], peak, awake["free_mib"], answers)

    async def compare(self, generated: Sequence[Generated]) -> tuple[float, float]:
        """(largest difference to the log-probabilities by the weights that were published, smallest difference, of the means of
        an answer, to those by the other weights)."""
        apart, confused = [0.0], [np.inf]
        for one in generated:
            spans = [(one.which, len(one.tokens))]
            found = await self.order(do="recompute", prompt=one.prompt, tokens=one.tokens, spans=spans, kept=False)
            said = np.array(one.logprobs)
            apart.append(float(np.abs(said - np.array(found["named"])).max()))
            confused.append(float(np.abs(said - np.array(found["other"])).mean()))
        return max(apart), min(confused)


def _all_did(report: Any) -> None:
    """Raises RuntimeError: a worker could not do it."""
    if failed := [f"{worker.name}: {worker.code}: {worker.message}" for worker in report.workers if worker.code]:
        raise RuntimeError("; ".join(failed))


def different(before: Sequence[Generated], cycles: Sequence[Cycle]) -> int:
    """Tokens of the cycles that are others than those before them, of the same weights after the same prompt."""
    known = {(one.which, tuple(one.prompt)): one.tokens for one in before}
    return sum(
        mine != theirs
        for cycle in cycles
        for one in cycle.generated
        for mine, theirs in zip(one.tokens, known[one.which, tuple(one.prompt)], strict=True)
    )


def rows_of(before: Sequence[Generated], first_mib: float, cycles: Sequence[Cycle]) -> list[Row]:
    """Medians of the cycles, lowest and highest."""
    rows = [
        _row(AWAKE, "MiB", [cycle.awake for cycle in cycles]),
        _row(AWAKE + SPREAD, "MiB", [_spread([cycle.awake for cycle in cycles])]),
        _row("used before the cycles", "MiB", [first_mib]),
        _row(ASLEEP, "MiB", [cycle.asleep for cycle in cycles]),
        # The first step of a trainer loads kernels, which stay.
        _row(ASLEEP + SPREAD, "MiB", [_spread([cycle.asleep for cycle in cycles[1:]])]),
        _row(PEAK, "MiB", [cycle.peak for cycle in cycles]),
        _row("free while all is awake", "MiB", [cycle.free for cycle in cycles]),
    ]
    rows += [_row(f"{name} takes", "s", [cycle.seconds[name] for cycle in cycles]) for name in PHASES]
    rows.append(_row("tokens generated", "tokens", [sum(len(one.tokens) for cycle in cycles for one in cycle.generated)]))
    rows.append(_row(FALSE, "tokens", [different(before, cycles)]))
    return rows


def _spread(values: Sequence[float]) -> float:
    return max(values, default=0.0) - min(values, default=0.0)


def _row(what: str, unit: str, values: Sequence[float]) -> Row:
    spread = (min(values), max(values)) if len(values) > 1 else None
    return Row(what, WHO, float(np.median(values)), unit, None, spread, tuple(values))


async def measure(address: str, trainer: Child, chosen: argparse.Namespace, vocab: int) -> list[Row]:
    """All cycles, told one by one."""
    on_card = chosen.device == "cuda"
    shape = (8, 128, 64) if on_card else (2, 12, 16)
    prompts = np.random.default_rng(3).integers(0, vocab, shape[:2]).tolist()
    async with Pool.connect(address, connect_timeout=60.0) as pool:
        await pool.ready(START_S)
        say("the pool is ready")
        await asyncio.to_thread(trainer.ask, {"do": "connect", "address": address}, PATIENCE_S)
        work = Cycles(pool, trainer, prompts, shape[2], chosen.share)
        before: list[Generated] = []
        for _ in WEIGHTS:
            await work.publish()
            await work.generate_all()  # kernels are compiled when they are first used
        for _ in WEIGHTS:
            await work.publish()
            before += await work.generate_all()
        first_mib = (await work.order(do="used"))["mib"]
        cycles: list[Cycle] = []
        for number in range(2 if chosen.quick else chosen.cycles):
            cycles.append(cycle := await work.cycle())
            took = ", ".join(f"{name} {cycle.seconds[name]:.2f} s" for name in PHASES)
            memory = f"asleep {cycle.asleep:,.0f} MiB, training {cycle.peak:,.0f} MiB, awake {cycle.awake:,.0f} MiB"
            say(f"cycle {number + 1}: {memory}; {took}; {different(before, [cycle])} other tokens")
            if chosen.json:
                write(chosen.json, rows_of(before, first_mib, cycles))
        rows = rows_of(before, first_mib, cycles)
        named, other = await work.compare([one for cycle in cycles for one in cycle.generated])
    rows.append(_row(f"{NAMED}: largest difference", "", [named]))
    return [*rows, _row(f"{OTHER}: smallest mean difference of an answer", "", [other])]


def find_cuda_runtime() -> None:
    """Let processes find the CUDA runtime that torch brings, to which torch-memory-saver's library is linked."""
    torch: Any = importlib.import_module("torch")

    torch.cuda.is_available()
    for path in re.findall(r"(/\S+/libcudart\.so\S*)", Path("/proc/self/maps").read_text()):
        found = os.environ.get("LD_LIBRARY_PATH", "").split(":")
        if (folder := str(Path(path).parent)) not in found:
            os.environ["LD_LIBRARY_PATH"] = ":".join([folder, *filter(None, found)])


def options() -> argparse.Namespace:
    found = parser("colocated_gpu", (__doc__ or "").split("\n", 1)[0])
    add_model_options(found, "4b")
    found.add_argument("--cycles", type=int, default=10, help="(default: 10)")
    found.add_argument("--share", type=float, default=0.85, help="of the free memory, for the training step (default: 0.85)")
    found.add_argument("--graphs", action="store_true", help="let the memory of CUDA graphs sleep, too")
    return found.parse_args()


def main() -> None:
    """Start the trainer and the pool on one GPU, run the cycles, print."""
    chosen = options()
    with ExitStack() as stack:
        scratch = (chosen.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="colocated-")))).resolve()
        scratch.mkdir(parents=True, exist_ok=True)
        models = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="models-")))
        model = model_for("causal", chosen.device, chosen.model, models, chosen.size)
        gpus = visible_gpus()[:1] if chosen.device == "cuda" else []
        if chosen.graphs:
            os.environ["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = "1"
        if gpus:
            find_cuda_runtime()
        trainer = start_trainer(model, chosen.device, gpus, scratch, stack)
        wanted = dict(OPTIONS) if gpus else {}
        address, _ = pool_of(model, chosen.device, ["generate"], wanted, scratch, stack, reserve_staging=False, gpus=gpus)
        trainer.hear(START_S)
        rows = asyncio.run(measure(address, trainer, chosen, vocabulary(model)))
    if chosen.json:
        write(chosen.json, rows)
    bounds = [
        Target(AWAKE + SPREAD, WHO, NOISE_MIB, of_value=True),
        Target(ASLEEP + SPREAD, WHO, NOISE_MIB, of_value=True),
        Target(FALSE, WHO, 0.0, of_value=True),
    ]
    show(f"a trainer and an engine on one GPU; {machine(chosen.device)}; {model.name}; median of the cycles", rows, bounds)


if __name__ == "__main__":
    main()
