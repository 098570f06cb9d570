"""What every benchmark shares: its two options, its rows, the table it prints and the file it writes."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table


class Row(msgspec.Struct, frozen=True):
    """One measured number. `ratio` is ours divided by `who`'s, taken in pairs; None where nothing is compared. `spread` is the
    lowest and the highest of the values of which `value` is the median, where it is told; `samples` are these values, oldest
    first."""

    what: str
    who: str
    value: float
    unit: str
    ratio: float | None = None
    spread: tuple[float, float] | None = None
    samples: tuple[float, ...] = ()


@dataclass(frozen=True)
class Target:
    """A bound that a row should keep: on its ratio, or on its value where `of_value`. Shown, never asserted."""

    what: str
    who: str
    bound: float
    at_most: bool = True
    of_value: bool = False


@dataclass(frozen=True)
class Verdict:
    """A target and what was measured; `found` is None, and `met` False, when there is no such row."""

    target: Target
    found: float | None
    met: bool


def parser(name: str, question: str) -> argparse.ArgumentParser:
    """The command line of benchmark `name`, with the options that all of them have."""
    options = argparse.ArgumentParser(prog=f"python -m bench.{name}", description=question)
    options.add_argument("--quick", action="store_true", help="a short run: the shape of the answer, not the answer")
    options.add_argument("--json", type=Path, metavar="FILE", help="write the rows there as well")
    return options


def judge(rows: Sequence[Row], targets: Sequence[Target]) -> list[Verdict]:
    """Hold each target against the row of the same `what` and `who`."""
    by_name = {(row.what, row.who): row for row in rows}
    verdicts: list[Verdict] = []
    for target in targets:
        row = by_name.get((target.what, target.who))
        found = None if row is None else (row.value if target.of_value else row.ratio)
        met = found is not None and (found <= target.bound if target.at_most else found >= target.bound)
        verdicts.append(Verdict(target, found, met))
    return verdicts


def number(value: float) -> str:
    """Three significant digits, thousands grouped."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def show(title: str, rows: Sequence[Row], targets: Sequence[Target] = (), console: Console | None = None) -> None:
    """Print the rows, and below them the targets with what was found."""
    out = console or Console()
    if not out.is_terminal:
        out.width = max(out.width, 120)
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for heading in ("what", "who"):
        table.add_column(heading)
    for heading in ("value", "unit", "ratio"):
        table.add_column(heading, justify="right" if heading != "unit" else "left", no_wrap=True)
    spreads = any(row.spread is not None for row in rows)
    if spreads:
        table.add_column("spread", justify="right", no_wrap=True)
    last = ""
    for row in rows:
        what, last = ("" if row.what == last else row.what), row.what
        cells = [what, row.who, number(row.value), row.unit, "" if row.ratio is None else number(row.ratio)]
        if spreads:
            cells.append("" if row.spread is None else " to ".join(map(number, row.spread)))
        table.add_row(*cells)
    out.print(table)
    if not targets:
        return
    verdicts = Table(title="targets (shown, not asserted)", box=box.SIMPLE_HEAD, title_justify="left")
    for heading in ("what", "against", "target", "found", "met"):
        verdicts.add_column(heading)
    for verdict in judge(rows, targets):
        target = verdict.target
        kind = "" if target.of_value else " x"
        bound = f"{'≤' if target.at_most else '≥'} {number(target.bound)}{kind}"
        found = "not measured" if verdict.found is None else f"{number(verdict.found)}{kind}"
        met = "?" if verdict.found is None else ("yes" if verdict.met else "no")
        verdicts.add_row(target.what, "" if target.of_value else target.who, bound, found, met)
    out.print(verdicts)


def write(path: Path, rows: Sequence[Row]) -> None:
    """Write the rows as a JSON list of {what, who, value, unit, ratio, spread, samples}."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(list(rows)), indent=1) + b"\n")
