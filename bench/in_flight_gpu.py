"""New weights while streams run: how long does the engine stand still, and which weights computed each token?

    python -m bench.in_flight_gpu [--quick] [--device cpu] [--size 4b] [--modes in_place,retract,abort,drain] [--json FILE]

One pool of one worker, and a trainer in a process of its own, which publishes two sets of weights in turn: those of the model,
and the same ones with the rows of each matrix in reverse. With one GPU they share it and the transfer is `ipc`; with two the
trainer has the first one, and the transfer is `staged`. In each mode 64 streams run at all times. First their tokens are timed
without an update, then updates follow each other.

The engine stands still from the last token of the old weights to the first one of the new weights, of the stream that waits
least, as the client receives them, less the usual time between two tokens of a stream. In the end, tokens of some streams are
computed again by transformers, on both sets of weights.
"""

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from bench.generate.pools import add_model_options, pool_of
from bench.in_flight.figures import longest_gap_s, standstill, step_s, tokens_per_s
from bench.in_flight.streams import Finished, WatchedStreams
from bench.processes import Child
from bench.score.callers import START_S
from bench.score.contestants import watch
from bench.score.model import vocabulary
from bench.score.pivot import show_wide
from bench.score_gpu import machine, model_for, say
from bench.table import Row, Target, parser, show, write
from bench.weights_gpu import NCCL
from enginepool import Pool
from enginepool.coordinator.launchers.gpus import visible_gpus

MODES = ("in_place", "retract", "abort", "drain")
WEIGHTS = ("first", "other")
#: A trainer, and staging memory, share the GPU with the engine. Its key-value cache has room for all streams.
OPTIONS: dict[str, Any] = {
    "attention_backend": "flashinfer",
    "sampling_backend": "pytorch",
    "mem_fraction_static": 0.6,
    "max_total_tokens": 128 * 1024,
    "max_running_requests": 128,
}
#: seconds for an update, and for streams to get tokens or to end
PATIENCE_S = 90.0
STILL, LOST, WRONG, OTHERS = "stands still", "tokens lost", "tokens not by the weights named", "tokens by either weights"
BUCKET = 512 << 20


class Scale(NamedTuple):
    """Streams, tokens of a prompt and of an answer, updates in each mode, seconds of rest before each and without any at first,
    streams whose tokens are computed again, and how far log-probabilities of the same weights may differ."""

    streams: int
    prompt: int
    tokens: int
    updates: int
    rest_s: float
    quiet_s: float
    samples: int
    tolerance: float


class Phase(NamedTuple):
    """What was measured in one mode."""

    mode: str
    streams: WatchedStreams
    quiet: tuple[float, float]
    updates: list[tuple[int, float, float, dict[str, int]]]


def targets(mode: str) -> list[Target]:
    """Of one mode."""
    still = [Target(f"{mode}: {STILL}", mode, 15.0, of_value=True)] if mode == "in_place" else []
    return [*still, *(Target(f"{mode}: {what}", mode, 0.0, of_value=True) for what in (LOST, WRONG, OTHERS))]


async def measure(pool: Pool, publish: Callable[[int, str], Any], mode: str, first: int, scale: Scale, vocab: int) -> Phase:
    """Updates in one mode, of which the first one brings version `first`."""
    streams = WatchedStreams(pool, scale.streams, scale.prompt, scale.tokens, vocab, scale.samples, first)
    try:
        await streams.all_have(first - 1, PATIENCE_S)
        began = time.monotonic()
        await asyncio.sleep(scale.quiet_s)
        quiet = began, time.monotonic()
        updates: list[tuple[int, float, float, dict[str, int]]] = []
        for version in range(first, first + scale.updates):
            said = await publish(version, mode)
            await streams.all_have(version, PATIENCE_S)
            updates.append((version, said["began"], said["ended"], said["record"]["phases"]))
            say(f"{mode}, version {version}: {_told(streams, version)}; {said['record']['phases']}")
            await asyncio.sleep(scale.rest_s)
    finally:
        await streams.end(PATIENCE_S)
    return Phase(mode, streams, quiet, updates)


def _told(streams: WatchedStreams, version: int) -> str:
    found = standstill(streams.arrivals, version)
    return "no tokens" if found is None else f"no token for {1000 * found.shortest_s:.1f} ms"


def rows_of(phase: Phase) -> list[Row]:
    """Medians of the updates in one mode."""
    mode, arrivals = phase.mode, phase.streams.arrivals
    step, rate = step_s(arrivals, phase.quiet), tokens_per_s(arrivals, phase.quiet)
    during = phase.updates[0][1], phase.updates[-1][2]
    stood = [found for version, *_ in phase.updates if (found := standstill(arrivals, version)) is not None]
    rows = [
        _row(mode, STILL, "ms", [1000 * (one.shortest_s - step) for one in stood]),
        _row(mode, "no token of any stream", "ms", [1000 * one.all_s for one in stood]),
        _row(mode, "no token of one stream, longest", "ms", [1000 * one.longest_s for one in stood]),
        _row(mode, "without an update: between two tokens of a stream", "ms", [1000 * step]),
        _row(mode, "without an update: no token of any stream, longest", "ms", [1000 * longest_gap_s(arrivals, phase.quiet)]),
        _row(mode, "an update takes", "s", [ended - began for _, began, ended, _ in phase.updates]),
    ]
    for name in ("transfer", "prepare", "drain", "load", "copy", "flush", "journal"):
        values = [phases[name] / 1000 for *_, phases in phase.updates if name in phases]
        rows += [_row(mode, f"phase {name}", "ms", values)] if values else []
    rows.append(_row(mode, "without an update: tokens/s", "tokens/s", [rate]))
    busy = tokens_per_s(arrivals, during)
    rows.append(_row(mode, "from the first update to the last: tokens/s", "tokens/s", [busy]))
    rows.append(_row(mode, "the same, of that without an update", "", [busy / rate]))
    done = phase.streams.finished
    rows.append(_row(mode, "answers", "answers", [len(done)]))
    rows.append(_row(mode, "answers that failed", "answers", [len(phase.streams.failures)]))
    rows.append(_row(mode, LOST, "tokens", [sum(abs(one.wanted - len(one.token_ids)) for one in done)]))
    rows.append(_row(mode, "answers with other spans than their chunks", "answers", [sum(one.span_is_wrong for one in done)]))
    return rows


def _row(mode: str, what: str, unit: str, values: Sequence[float]) -> Row:
    spread = (min(values), max(values)) if len(values) > 1 else None
    return Row(f"{mode}: {what}", mode, float(np.median(values or [float("nan")])), unit, None, spread, tuple(values))


def chosen_answers(finished: Sequence[Finished], count: int) -> list[Finished]:
    """Those with log-probabilities and the most spans."""
    return sorted((one for one in finished if one.logprobs), key=lambda one: -len(one.spans))[:count]


def compared(mode: str, trainer: Child, answers: Sequence[Finished], tolerance: float) -> list[Row]:
    """How the log-probabilities that came with tokens compare with those that transformers computes."""
    apart, confused = [np.zeros(0)], [np.zeros(0)]
    bounds: list[bool] = []
    for answer in answers:
        spans = [(WEIGHTS[version % 2], count) for version, count in answer.spans]
        found = trainer.ask(
            {
                "do": "recompute",
                "prompt": answer.prompt,
                "tokens": answer.token_ids,
                "spans": spans,
                "kept": mode == "in_place",
            },
            PATIENCE_S,
        )
        if "error" in found:
            raise RuntimeError(found["error"])
        said = np.array(answer.logprobs)
        apart.append(np.abs(said - np.array(found["named"])))
        confused.append(np.abs(said - np.array(found["other"])))
        for place, (_, count) in enumerate(answer.spans):
            bounds += [place > 0, *[False] * (count - 2), place < len(answer.spans) - 1][:count]
    named, other = np.concatenate(apart), np.concatenate(confused)
    if not named.size:
        return []
    edges = np.array(bounds, np.bool_)
    return [
        _row(mode, "tokens computed again", "tokens", [named.size]),
        _row(mode, "of them next to a change of weights", "tokens", [int(edges.sum())]),
        _row(mode, "log-probability, by the weights named: largest difference", "", [float(named.max())]),
        _row(mode, "log-probability, by the other weights: smallest difference", "", [float(other.min())]),
        *([_row(mode, "the same, next to a change", "", [float(other[edges].min())])] if edges.any() else []),
        _row(mode, WRONG, "tokens", [int((named > tolerance).sum())]),
        _row(mode, OTHERS, "tokens", [int((other <= tolerance).sum())]),
    ]


def options() -> argparse.Namespace:
    found = parser("in_flight_gpu", (__doc__ or "").split("\n", 1)[0])
    add_model_options(found, "4b")
    found.add_argument("--modes", default=",".join(MODES), metavar="NAMES", help=f"(default: {','.join(MODES)})")
    found.add_argument("--transfer", choices=("staged", "direct", "ipc"), help="(default: ipc on one GPU, else staged)")
    found.add_argument("--streams", type=int, default=64, help="streams at once (default: 64)")
    found.add_argument("--prompt", type=int, default=128, help="tokens of a prompt (default: 128)")
    found.add_argument("--tokens", type=int, default=512, help="new tokens of an answer (default: 512)")
    found.add_argument("--updates", type=int, default=10, help="in each mode; drain has at most 3 (default: 10)")
    return found.parse_args()


def scale_of(chosen: argparse.Namespace) -> Scale:
    """How much is measured on this device. A CPU is there to see that everything works."""
    if chosen.device == "cpu":
        return Scale(6, 12, 160, 2, 0.3, 1.0, 3, 1e-3)
    updates = 3 if chosen.quick else chosen.updates
    return Scale(chosen.streams, chosen.prompt, chosen.tokens, updates, 0.3, 3.0, 8, 0.5)


def start_trainer(model: Path, device: str, gpus: list[str], scratch: Path, stack: ExitStack) -> Child:
    """The process that has both sets of weights; it says hello once it has loaded them."""
    env = {"CUDA_VISIBLE_DEVICES": gpus[0]} if device == "cuda" else {}
    trainer = Child(["-m", "bench.weights.trainer", device, str(model)], scratch=scratch, env=env)
    watch(stack, trainer, None)
    return trainer


async def measure_all(address: str, trainer: Child, transfer: str, chosen: argparse.Namespace, vocab: int) -> list[Row]:
    """The rows of all modes."""
    scale, rows = scale_of(chosen), list[Row]()

    async def publish(version: int, mode: str) -> Any:
        order = {"do": "publish", "version": version, "which": WEIGHTS[version % 2], "in_flight": mode}
        said = await asyncio.to_thread(trainer.ask, order | {"transfer": transfer, "bucket_bytes": BUCKET}, PATIENCE_S)
        if "error" in said:
            raise RuntimeError(said["error"])
        return said

    async with Pool.connect(address, connect_timeout=60.0) as pool:
        await pool.ready(START_S)
        say("the pool is ready")
        await asyncio.to_thread(trainer.ask, {"do": "connect", "address": address}, PATIENCE_S)
        # The first update forms a group, and kernels are compiled when they are first used.
        await publish(1, "drain")
        version = 2
        for place, mode in enumerate(str(chosen.modes).split(",")):
            amount = scale._replace(updates=min(scale.updates, 3)) if mode == "drain" else scale
            if not place:
                warm = scale._replace(updates=1, tokens=max(8, scale.tokens // 8), quiet_s=0.0)
                await measure(pool, publish, mode, version, warm, vocab)
                version += 1
            phase = await measure(pool, publish, mode, version, amount, vocab)
            version += amount.updates
            rows += rows_of(phase)
            answers = chosen_answers(phase.streams.finished, scale.samples)
            rows += await asyncio.to_thread(compared, mode, trainer, answers, scale.tolerance)
            if chosen.json:
                write(chosen.json, rows)
    return rows


def main() -> None:
    """Start the trainer and the pool, measure mode after mode, print."""
    chosen = options()
    os.environ.update(NCCL)
    with ExitStack() as stack:
        scratch = (chosen.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="in-flight-")))).resolve()
        scratch.mkdir(parents=True, exist_ok=True)
        models = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="models-")))
        model = model_for("causal", chosen.device, chosen.model, models, chosen.size)
        gpus = visible_gpus() if chosen.device == "cuda" else []
        trainer = start_trainer(model, chosen.device, gpus, scratch, stack)
        wanted = dict(OPTIONS) if chosen.device == "cuda" else {}
        transfer = chosen.transfer or ("staged" if len(gpus) > 1 else "ipc")
        group: dict[str, Any] = {"gpus": [gpus[min(1, len(gpus) - 1)]]} if gpus else {}
        address, _ = pool_of(
            model, chosen.device, ["generate"], wanted, scratch, stack, reserve_staging=transfer == "staged", **group
        )
        trainer.hear(START_S)
        rows = asyncio.run(measure_all(address, trainer, transfer, chosen, vocabulary(model)))
    scale = scale_of(chosen)
    how = f"{scale.streams} streams of {scale.prompt} in / {scale.tokens} out, {transfer}"
    bounds = [target for mode in str(chosen.modes).split(",") for target in targets(mode)]
    title = f"weights in flight; {machine(chosen.device)}; {how}; tolerance {scale.tolerance:g}; median (lowest to highest)"
    without = [msgspec.structs.replace(row, what=row.what.removeprefix(f"{row.who}: ")) for row in rows]
    show_wide(title, without, rows[0].who)
    aimed = {target.what for target in bounds}
    show("where there is a target", [row for row in rows if row.what in aimed], bounds)


if __name__ == "__main__":
    main()
