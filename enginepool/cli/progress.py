"""The progress of a run over a file: a bar on a terminal, a line every few seconds elsewhere. Always on stderr."""

import asyncio
import time
from types import TracebackType
from typing import Self

import typer
from rich import progress as bars
from rich.console import Console

from enginepool.cli.answers import Answers

#: Seconds between two looks on a terminal, and between two lines where there is none.
_LOOK_S, EVERY_S = 0.2, 5.0
#: Seconds without an answer after which the user is told what is being waited for.
QUIET_S = 30.0


class Progress:
    """While entered, shows how much of the input has been read and how many answers there are. `run` keeps it up to date.

    `size`: bytes of the input; None for a pipe, whose end is not known.
    """

    def __init__(self, size: int | None, answers: Answers) -> None:
        self._answers = answers
        self._known = size is not None
        self._size = max(size or 0, 1)
        self._place = 0
        self._began = time.monotonic()
        self._count = self._before = answers.count
        self._counted_at = self._began
        self._told = False
        self._bar: bars.Progress | None = None
        console = Console(stderr=True)
        if console.is_terminal and self._known:
            columns = (bars.BarColumn(), bars.TaskProgressColumn(), bars.TimeRemainingColumn())
            text = bars.TextColumn("{task.description}")
            self._bar = bars.Progress(*columns, text, console=console, auto_refresh=False)
            self._bar.add_task("", total=self._size)

    def at(self, place: int) -> None:
        """The input has been answered up to about byte `place`."""
        self._place = max(self._place, place)

    def worker_does(self, line: str) -> None:
        """Show what a worker does now. Nothing is shown of a pool that is ready at once."""
        if self._told or not line.endswith(" ready"):
            self._told = True
            self._say(line)

    def __enter__(self) -> Self:
        if self._before:
            self._say(f"continuing: {self._before:,} lines are answered already")
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._show(self._bar)
            self._bar.stop()

    async def run(self) -> None:
        """Show the progress until cancelled."""
        while True:
            if self._bar is not None:
                self._show(self._bar)
                await asyncio.sleep(_LOOK_S)
            else:
                await asyncio.sleep(EVERY_S)
                share = f"{100 * self._place / self._size:3.0f} %  " if self._known else ""
                typer.echo(f"{share}{self.text()}", err=True)

    def text(self) -> str:
        """What a user wants to know, in one line."""
        count = self._answers.count
        now = time.monotonic()
        if count != self._count:
            self._count, self._counted_at = count, now
        rate = (count - self._before) / max(now - self._began, 1e-6)
        said = f"{count:,} lines, {rate:,.0f}/s"
        if self._answers.failed:
            said += f", {self._answers.failed:,} with an error"
        quiet = now - self._counted_at
        if quiet > QUIET_S:
            said += f"; no answer for {quiet:.0f} s (`enginepool status` says what the pool is doing)"
        return said

    def _show(self, bar: bars.Progress) -> None:
        bar.update(bar.task_ids[0], completed=self._place, description=self.text(), refresh=True)

    def _say(self, line: str) -> None:
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False)
        else:
            typer.echo(line, err=True)
