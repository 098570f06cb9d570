"""The progress of a run over a file: a bar on a terminal, a line every few seconds elsewhere. Always on stderr."""

import threading
import time
from types import TracebackType
from typing import Self

import typer
from rich import progress as bars
from rich.console import Console

from enginepool.cli.answers import Answers

#: Seconds between two lines where there is no terminal.
EVERY_S = 5.0
#: Seconds without an answer after which the user is told what is being waited for.
QUIET_S = 30.0


class Progress:
    """While entered, shows how much of the input has been read and how many answers there are.

    `size`: bytes of the input; None for a pipe, whose end is not known.
    """

    def __init__(self, size: int | None, answers: Answers) -> None:
        self._answers = answers
        self._known = size is not None
        self._size = max(size or 0, 1)
        self._place = min(answers.start[1], self._size)
        self._began = time.monotonic()
        self._count = self._before = answers.count
        self._counted_at = self._began
        self._closed = threading.Event()
        self._told = False
        console = Console(stderr=True)
        self._bar = _Bar(console) if console.is_terminal and self._known else None
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

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
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._closed.set()
        self._thread.join()
        if self._bar is not None:
            self._bar.show(self._place / self._size, self.text())
            self._bar.stop()

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

    def _run(self) -> None:
        while not self._closed.wait(0.2 if self._bar is not None else EVERY_S):
            if self._bar is not None:
                self._bar.show(self._place / self._size, self.text())
            else:
                share = f"{100 * self._place / self._size:3.0f} %  " if self._known else ""
                typer.echo(f"{share}{self.text()}", err=True)

    def _say(self, line: str) -> None:
        if self._bar is not None:
            self._bar.say(line)
        else:
            typer.echo(line, err=True)


class _Bar:
    """rich's progress bar over the share of the input, with a line of text."""

    def __init__(self, console: Console) -> None:
        self._bars = bars.Progress(
            bars.BarColumn(),
            bars.TaskProgressColumn(),
            bars.TimeRemainingColumn(),
            bars.TextColumn("{task.description}"),
            console=console,
            auto_refresh=False,
        )
        self._task = self._bars.add_task("", total=1.0)

    def start(self) -> None:
        self._bars.start()

    def stop(self) -> None:
        self._bars.stop()

    def say(self, line: str) -> None:
        self._bars.console.print(line, markup=False, highlight=False)

    def show(self, share: float, text: str) -> None:
        self._bars.update(self._task, completed=share, description=text, refresh=True)
