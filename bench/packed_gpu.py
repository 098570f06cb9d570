"""Are the answers of packed rows those of plain ones?

    python -m bench.packed_gpu [--quick] [--device cpu] [--sizes 0.6b,8b] [--json FILE]

A pool that packs and one that does not are asked the same, one after the other, on a causal model and on one with a head that
scores. How far their answers are apart is compared with how far those of each pool are apart when the same rows come otherwise:
to the first with their items in another order, to the second one by one. All of it would be 0 in exact arithmetic. Answers are
log-probabilities of two labels, or rewards.

On a CPU nothing is packed: there both pools are plain ones.
"""

import argparse
import asyncio
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from bench.score.model import SIZES, vocabulary
from bench.score.workloads import LABELS, Head
from bench.score_gpu import machine, model_for, say
from bench.table import Row, Target, parser, show, write
from enginepool import Pool

READY_S = 900.0
HEADS: tuple[Head, ...] = ("causal", "reward")
APART, OTHERWISE, ALONE = "packed, against plain", "packed, items in another order", "plain, one by one"
#: How many times as far apart packed and plain answers may be, on average, as packed ones in two orders.
NOISE = 2.0

Ids = npt.NDArray[np.int32]
Answers = npt.NDArray[np.float64]


class Shape(NamedTuple):
    """A request: tokens of its query, its items, and the least and the most tokens of an item."""

    query: int
    items: int
    least: int
    most: int

    def __str__(self) -> str:
        length = str(self.most) if self.least == self.most else f"{self.least} to {self.most}"
        return f"{self.items} items of {length} tokens with a query of {self.query}"

    def drawn(self, vocab: int) -> tuple[Ids, list[Ids]]:
        """The token ids of its query and its items, the same ones in every run."""
        chance = np.random.default_rng(tuple(self))
        lengths = chance.integers(self.least, self.most + 1, self.items)
        return chance.integers(0, vocab, self.query, np.int32), [chance.integers(0, vocab, n, np.int32) for n in lengths]


SHAPES = (Shape(120, 10, 180, 180), Shape(120, 30, 10, 300), Shape(1000, 50, 20, 20), Shape(40, 3, 1, 5))
ON_A_CPU = (Shape(12, 10, 3, 30),)


async def ask(pool: Pool, head: Head, query: Ids, items: Sequence[Ids]) -> Answers:
    """float64 [items, labels], or [items] of a model with a head that scores."""
    options: dict[str, Any] = {"label_token_ids": LABELS, "logprobs": True} if head == "causal" else {}
    found = await pool.score(query, [*items], timeout=READY_S, **options)
    if set(found.forwards) != {1}:
        raise RuntimeError(f"{len(items)} rows took {found.forwards} forwards")
    return np.asarray(found.scores, np.float64)


async def answered(
    first: bool, head: Head, model: Path, chosen: argparse.Namespace, shapes: Sequence[Shape]
) -> list[tuple[Answers, Answers]]:
    """Of each shape: the answers of the `first` pool or the second, and those when the same rows come otherwise."""
    on_gpu = chosen.device == "cuda"
    options = {"attention_backend": chosen.attention_backend} if on_gpu and chosen.attention_backend else {}
    packing: Literal["on", "off"] = "on" if first and on_gpu else "off"
    vocab, found = vocabulary(model), list[tuple[Answers, Answers]]()
    async with Pool.start(str(model), device=chosen.device, packing=packing, options=options, start_timeout=READY_S) as pool:
        await pool.ready(READY_S)
        for shape in shapes:
            query, items = shape.drawn(vocab)
            whole = await ask(pool, head, query, items)
            if first:
                otherwise = (await ask(pool, head, query, items[::-1]))[::-1]
            else:
                otherwise = np.concatenate([await ask(pool, head, query, [item]) for item in items])
            found.append((whole, otherwise))
    return found


def rows_of(what: str, packed: tuple[Answers, Answers], plain: tuple[Answers, Answers]) -> list[Row]:
    """How far answers are apart: on average and at most. The ratio is to packed answers with the items in another
    order, and 1 where neither differ."""

    def apart(one: Answers, other: Answers) -> Answers:
        return np.abs(one - other)

    pairs = {APART: apart(packed[0], plain[0]), OTHERWISE: apart(*packed), ALONE: apart(*plain)}
    rows: list[Row] = []
    measures: tuple[tuple[str, Callable[[Answers], Any]], ...] = (("on average", np.mean), ("at most", np.max))
    for name, measure in measures:
        noise = float(measure(pairs[OTHERWISE]))
        for who, found in pairs.items():
            value = float(measure(found))
            ratio = value / noise if noise else math.inf if value else 1.0
            rows.append(Row(f"{what}: apart {name}", who, value, "", ratio if who == APART else None))
    return rows


def main() -> None:
    """Measure the models that were asked for; the rows are written after each."""
    options = parser("packed_gpu", (__doc__ or "").split("\n", 1)[0])
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--attention-backend", default="flashinfer", help="of both engines; '': what SGLang chooses")
    options.add_argument("--sizes", default="0.6b", metavar="NAMES", help=f"of the models, of {', '.join(SIZES)}")
    chosen = options.parse_args()
    sizes = str(chosen.sizes).split(",")
    if unknown := set(sizes) - set(SIZES):
        options.error(f"--sizes: {', '.join(map(repr, sorted(unknown)))}: there are {', '.join(SIZES)}")
    shapes = ON_A_CPU if chosen.device == "cpu" else SHAPES[:1] if chosen.quick else SHAPES
    rows: list[Row] = []
    for size in sizes:
        for head in HEADS:
            with tempfile.TemporaryDirectory(prefix="packed-") as scratch:
                model = model_for(head, chosen.device, None, Path(scratch), size)
                say(f"{head} model of {size}")
                packed = asyncio.run(answered(True, head, model, chosen, shapes))
                plain = asyncio.run(answered(False, head, model, chosen, shapes))
            for shape, one, other in zip(shapes, packed, plain, strict=True):
                rows += rows_of(f"{head}, {size}, {shape}", one, other)
            if chosen.json:
                write(chosen.json, rows)
    targets = [Target(row.what, APART, NOISE) for row in rows if row.who == APART and "on average" in row.what]
    show(f"packed and plain answers; {machine(chosen.device)}; ratio: to packed ones in two orders", rows, targets)


if __name__ == "__main__":
    main()
