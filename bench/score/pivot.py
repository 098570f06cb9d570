"""The wide table of the scoring benchmark: a line for each number, a column for each contestant."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from bench.table import Row, number


def show_wide(title: str, rows: Sequence[Row], ours: str, console: Console | None = None) -> None:
    """Print ours first, then each other contestant with the ratio of ours to it."""
    out = console or Console()
    if not out.is_terminal:
        out.width = max(out.width, 200)
    found = {(row.what, row.who): row for row in rows}
    names = sorted(dict.fromkeys(row.who for row in rows), key=lambda who: who != ours)
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("what")
    table.add_column("unit", no_wrap=True)
    for who in names:
        table.add_column(who, justify="right")
    for what in dict.fromkeys(row.what for row in rows):
        cells = [found.get((what, who)) for who in names]
        unit = next(cell.unit for cell in cells if cell is not None)
        table.add_row(what, unit, *("" if cell is None else _cell(cell) for cell in cells))
    out.print(table)


def _cell(row: Row) -> str:
    spread = "" if row.spread is None else f" ({number(row.spread[0])} to {number(row.spread[1])})"
    return number(row.value) + spread + ("" if row.ratio is None else f"  {number(row.ratio)}x")
