"""How soon does a worker that was killed answer again, and how long does a pool take to its first answer?

    python -m bench.restart [--before TREE] [--model DIR] [--device cpu] [--repeat 3] [--kills 1] [--quick]
                            [--json FILE]

A pool of one worker is started and scores. Its worker is killed by SIGKILL, and the next request waits for its successor.
TREE is a checkout of another commit. Its pools and those of this tree take turns, and are compared in pairs.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil

from bench.processes import ROOT
from bench.table import Row, Target, parser, show, write
from enginepool.cli.tiny_model_files import make_tiny_model

PROGRAM = Path(__file__).with_name("restarted_pool.py")
START, AGAIN = "start to first answer", "kill to next answer"
HERE, BEFORE = "this tree", "before"
TARGETS = [Target(AGAIN, BEFORE, 0.6)]


def run(tree: Path, settings: dict[str, object], kills: int) -> tuple[float, list[float]]:
    """Seconds from the start of a pool of `tree` to its first answer, and of each kill to the next one."""
    command = [sys.executable, str(PROGRAM), json.dumps(settings), str(kills)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), *others()])}
    done = subprocess.run(command, env=environment, cwd=tree, stdout=subprocess.PIPE, check=True)
    first, *again = json.loads(done.stdout)
    return first, again


def others() -> list[str]:
    """Folders of PYTHONPATH that are not this tree."""
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and Path(path).resolve() != ROOT]


def rows_of(what: str, found: Sequence[tuple[float, float | None]]) -> list[Row]:
    """Of pairs of seconds: of this tree, and of the one before, if there is one."""
    here = [pair[0] for pair in found]
    rows = [Row(what, HERE, statistics.median(here), "s", spread=(min(here), max(here)), samples=tuple(here))]
    pairs = [(ours, theirs) for ours, theirs in found if theirs is not None]
    if pairs:
        before, ratio = [theirs for _, theirs in pairs], statistics.median(ours / theirs for ours, theirs in pairs)
        spread = (min(before), max(before))
        rows.append(Row(what, BEFORE, statistics.median(before), "s", ratio, spread=spread, samples=tuple(before)))
    return rows


def main() -> None:
    options = parser("restart", "How soon does a worker that was killed answer again?")
    options.add_argument("--before", type=Path, metavar="TREE", help="a checkout of the commit to compare with")
    options.add_argument("--model", help="a checkpoint; left out, a tiny one is made")
    options.add_argument("--device", default="cpu")
    options.add_argument("--repeat", type=int, default=3, help="pools that are started of each tree")
    options.add_argument("--kills", type=int, default=1, help="of the worker of each pool")
    args = options.parse_args()
    trees = [ROOT, args.before.resolve()] if args.before else [ROOT]
    starts: list[list[float]] = [[] for _ in trees]
    kills: list[list[float]] = [[] for _ in trees]
    with tempfile.TemporaryDirectory(prefix="enginepool-restart-") as directory:
        model = args.model or str(make_tiny_model(Path(directory) / "model", seed=1))
        settings: dict[str, object] = {"model": model, "device": args.device}
        for number in range(1 if args.quick else args.repeat):
            turn = range(len(trees))
            for which in reversed(turn) if number % 2 else turn:
                first, again = run(trees[which], settings, args.kills)
                starts[which].append(first)
                kills[which] += again
                sys.stderr.write(f"{trees[which]}: {first:.1f} s; after kills {', '.join(f'{s:.1f}' for s in again)} s\n")
    rows: list[Row] = []
    for what, found in ((START, starts), (AGAIN, kills)):
        before = found[1] if args.before else [None] * len(found[0])
        rows += rows_of(what, list(zip(found[0], before, strict=True)))
    show(f"restart, {args.device}; the machine's load: {psutil.getloadavg()[0]:.1f}", rows, TARGETS if args.before else [])
    if args.json:
        write(args.json, rows)


if __name__ == "__main__":
    main()
