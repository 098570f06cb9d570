"""What does SGLang's deterministic mode cost, and does a row then have the same bits in every batch?

    python -m bench.deterministic_gpu [--quick] [--device cpu] [--json FILE]

One pool after the other has the GPU: as it is, deterministic, and deterministic without CUDA graphs. Each is asked for scores
(10 items of 180 tokens with a query of 120) and for log-probabilities (8 responses of 256 tokens, each with a prompt of 256),
by one caller and by many. Then the same short rows are asked for alone, together, and among others, and those are counted of
which a number has other bits than alone. A ratio is that to the pool as it is.

SGLang has no deterministic mode on a CPU: there the first pool is measured alone.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bench.score.model import vocabulary
from bench.score_gpu import machine, model_for, say
from bench.table import Row, parser, show, write
from enginepool import Pool

DEFAULT = "the pool as it is"
#: by its name on the command line: what a pool is called, and the options of its engine
POOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "default": (DEFAULT, {}),
    "deterministic": ("deterministic", {"enable_deterministic_inference": True}),
    "no-graphs": ("deterministic, no CUDA graphs", {
        "enable_deterministic_inference": True, "disable_cuda_graph": True, "disable_prefill_cuda_graph": True,
    }),
}  # fmt: skip
LABELS = [100, 200]
#: Tokens of a prompt and of a response of which the bits are compared. A row alone is a small batch: other kernels compute it
#: than a large one.
COMPARED = 12
READY_S = 900.0

Ids = npt.NDArray[np.int32]
Ask = Callable[[Pool, int], Awaitable[int]]


class Plan(NamedTuple):
    """Seconds of a phase, how often each is measured, requests in flight; rows that are compared, and those among which they
    are; tokens of a query, an item, a prompt and a response."""

    seconds: float
    repetitions: int
    in_flight: int
    compared: int
    among: tuple[int, ...]
    query: int
    item: int
    prompt: int
    response: int


def plan(device: str, quick: bool, seconds: float = 20.0, repetitions: int = 3) -> Plan:
    """What is measured on this device. A CPU is there to see that everything works."""
    if device == "cpu":
        return Plan(1.0 if quick else seconds / 2, 1 if quick else repetitions, 4, 4, (3, 20), 12, 18, 10, 12)
    return Plan(2.0 if quick else seconds, 1 if quick else repetitions, 64, 16, (1, 7, 40), 120, 180, 256, 256)


class Requests:
    """The token ids of requests, the same ones in every run."""

    def __init__(self, plan: Plan, vocab: int) -> None:
        self._plan, self._vocab = plan, vocab

    def ids(self, *key: int, rows: int, length: int) -> Ids:
        return np.random.default_rng(key).integers(0, self._vocab, (rows, length), dtype=np.int32)

    async def score(self, pool: Pool, number: int) -> int:
        """One request; the tokens that it took."""
        query = self.ids(1, number, rows=1, length=self._plan.query)[0]
        items = self.ids(2, number, rows=10, length=self._plan.item)
        return (await pool.score(query, [*items], label_token_ids=LABELS)).usage.tokens

    async def logprobs(self, pool: Pool, number: int) -> int:
        """The same, of log-probabilities."""
        prompts = self.ids(3, number, rows=8, length=self._plan.prompt)
        responses = self.ids(4, number, rows=8, length=self._plan.response)
        return (await pool.logprobs([*prompts], [*responses])).usage.tokens


async def saturate(pool: Pool, ask: Ask, in_flight: int, seconds: float, first: int) -> tuple[float, list[float]]:
    """(tokens a second, seconds that each request took) with so many requests in flight, which are numbered from `first`."""
    took: list[float] = []
    tokens, number = 0, first
    end = (began := time.perf_counter()) + seconds

    async def caller() -> None:
        nonlocal tokens, number
        while time.perf_counter() < end:
            number += 1
            asked = time.perf_counter()
            taken = await ask(pool, number)
            took.append(time.perf_counter() - asked)
            tokens += taken  # not in one statement with `await`, which other callers interrupt

    await asyncio.gather(*(caller() for _ in range(in_flight)))
    return tokens / (time.perf_counter() - began), took


async def differing(pool: Pool, plan: Plan, requests: Requests) -> dict[str, tuple[int, float]]:
    """By operation: rows of which a number has other bits than alone, in some batch; and the largest difference."""
    prompts = requests.ids(5, rows=plan.compared, length=COMPARED)
    responses = requests.ids(6, rows=plan.compared, length=COMPARED)
    most = max(plan.among)
    others = requests.ids(7, rows=most, length=COMPARED), requests.ids(8, rows=most, length=COMPARED)

    async def scores(heads: Ids, tails: Ids) -> list[Any]:
        found = await pool.score_pairs([*heads], [*tails], label_token_ids=LABELS, logprobs=True)
        return [*found.scores]

    async def logprobs(heads: Ids, tails: Ids) -> list[Any]:
        return [*(await pool.logprobs([*heads], [*tails])).logprobs]

    found: dict[str, tuple[int, float]] = {}
    for name, ask in (("score", scores), ("logprobs", logprobs)):
        alone = [(await ask(prompts[i : i + 1], responses[i : i + 1]))[0] for i in range(plan.compared)]
        differ, largest = set[int](), 0.0
        for count in (0, *plan.among):
            # The rows stand at the end of the batch, in another order.
            order = np.random.default_rng(count).permutation(plan.compared)
            heads = np.concatenate((others[0][:count], prompts[order]))
            tails = np.concatenate((others[1][:count], responses[order]))
            for row, values in zip(order.tolist(), (await ask(heads, tails))[count:], strict=True):
                if values.tobytes() != alone[row].tobytes():
                    differ.add(row)
                    largest = max(largest, float(np.abs(values - alone[row]).max()))
        found[name] = len(differ), largest
    return found


async def measure(who: str, options: dict[str, Any], chosen: argparse.Namespace, model: Path) -> list[Row]:
    """The rows of one pool."""
    shape = plan(chosen.device, chosen.quick, chosen.seconds, chosen.repetitions)
    requests = Requests(shape, vocabulary(model))
    if chosen.device == "cuda" and chosen.attention_backend:
        options = {"attention_backend": chosen.attention_backend, **options}
    rows: list[Row] = []
    async with Pool.start(str(model), device=chosen.device, options=options) as pool:
        await pool.ready(READY_S)
        [group] = (await pool.status()).groups
        if options.get("enable_deterministic_inference"):
            assert group.limits is not None and "deterministic" in group.limits.features, group.limits
        number = 0
        for name, ask in (("score", requests.score), ("logprobs", requests.logprobs)):
            samples: dict[tuple[str, str], list[float]] = {}
            await saturate(pool, ask, shape.in_flight, shape.seconds / 2, number)
            for _ in range(shape.repetitions):
                for callers in (1, shape.in_flight):
                    rate, took = await saturate(pool, ask, callers, shape.seconds, number := number + 100_000)
                    if callers == 1:
                        samples.setdefault((f"{name}, 1 in flight: p50", "ms"), []).append(1e3 * statistics.median(took))
                    else:
                        samples.setdefault((f"{name}, {callers} in flight", "tokens/s"), []).append(rate)
            for (what, unit), values in samples.items():
                spread = min(values), max(values)
                rows.append(Row(what, who, statistics.median(values), unit, None, spread, tuple(values)))
        for name, (count, most) in (await differing(pool, shape, requests)).items():
            rows.append(Row(f"{name}, of {shape.compared} rows: with other bits in some batch", who, count, "rows"))
            rows.append(Row(f"{name}, largest difference of a log-probability", who, most, ""))
        [group] = (await pool.status()).groups
        rows.append(Row("batches of more than one forward", who, group.split_batches, ""))
    return rows


def compared(rows: list[Row]) -> list[Row]:
    """The rows in the order of what they say, with the ratio to those of the pool as it is, if it was measured."""
    base = {row.what: row.value for row in rows if row.who == DEFAULT}
    order = list(dict.fromkeys(row.what for row in rows))
    return [
        Row(row.what, row.who, row.value, row.unit, row.value / base[row.what], row.spread, row.samples)
        if row.spread and row.who != DEFAULT and row.what in base
        else row
        for row in sorted(rows, key=lambda row: order.index(row.what))
    ]


def main() -> None:
    """Measure the pools that this device can run."""
    options = parser("deterministic_gpu", (__doc__ or "").split("\n", 1)[0])
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--model", type=Path, metavar="DIR", help="a causal model (default: one of random weights)")
    options.add_argument("--attention-backend", default="flashinfer", help="of all engines; '': what SGLang chooses")
    options.add_argument("--seconds", type=float, default=20.0, help="length of a phase (default: 20)")
    options.add_argument("--repetitions", type=int, default=3, help="how often each phase is measured (default: 3)")
    options.add_argument("--only", default=",".join(POOLS), help=f"pools (default: {','.join(POOLS)})")
    chosen = options.parse_args()
    if unknown := set(str(chosen.only).split(",")) - set(POOLS):
        options.error(f"--only: {', '.join(map(repr, sorted(unknown)))}: there are {','.join(POOLS)}")
    with tempfile.TemporaryDirectory(prefix="deterministic-") as scratch:
        model = model_for("causal", chosen.device, chosen.model, Path(scratch))
        rows: list[Row] = []
        for who, engine in (POOLS[name] for name in (str(chosen.only).split(",") if chosen.device == "cuda" else ["default"])):
            say(who)
            rows += asyncio.run(measure(who, engine, chosen, model))
            if chosen.json:
                write(chosen.json, compared(rows))
    if chosen.device == "cpu":
        say("left out the deterministic pools: SGLang's deterministic mode needs a GPU")
    show(f"deterministic mode; {machine(chosen.device)}; ratio: to the pool as it is", compared(rows))


if __name__ == "__main__":
    main()
