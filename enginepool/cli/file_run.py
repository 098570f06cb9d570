"""A file of requests through a running pool, into a file of answers: the run behind `enginepool score` and the like.

An operation gives the form of its lines, a subclass of `jsonl.InputLine`, and its call on the pool. All else is here: many
requests in flight, each answer written as it comes, progress, interrupts, and continuing where an earlier run stopped.
"""

import asyncio
import contextlib
import functools
import sys
from collections.abc import AsyncIterator, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic

import typer

from enginepool.cli.answers import AnswerFile, Answers, Checksum
from enginepool.cli.cli_errors import BAD_USAGE, CommandFailed, run_interruptible
from enginepool.cli.connect import open_pool
from enginepool.cli.input_stream import STREAM, Line, PipeLines, file_lines
from enginepool.cli.jsonl import Ask, BadLine, L, checksum, error_columns, output_line, read_line
from enginepool.cli.progress import Progress
from enginepool.client.arguments import check_timeout
from enginepool.errors import BadRequest, EnginepoolError

if TYPE_CHECKING:
    from enginepool.client.pool import Pool

#: After so many lines that need no answer from the pool the connection is served again.
LINES_BETWEEN_TURNS = 256
#: a run ends where so many lines lack a group, and there is no answer at all: all of them lack it
WITHOUT_GROUP = 100
#: Errors that say nothing about the line: the run stops, and the line is asked again when it is resumed.
NOT_OF_THE_LINE = {"closed", "forbidden", "superseded", "unauthorized", "protocol_version"}
#: options that do not change an answer
_WITHOUT_EFFECT = ("priority", "timeout", "min_version", "version")


@contextlib.contextmanager
def options_named() -> Generator[None]:
    """Turn the BadRequest of an argument's check into an error that names the option of the command."""
    try:
        yield
    except BadRequest as error:
        name, _, said = str(error).partition(":")
        option = name.removeprefix("apply_").replace("_", "-")
        raise CommandFailed(f"--{option}:{said}", BAD_USAGE) from None


def run_file(
    form: type[L],
    ask: Ask[L],
    options: dict[str, Any],
    *,
    source: Path,
    target: Path,
    address: str,
    concurrency: int,
    mixed_versions: bool,
    retry_errors: bool,
) -> None:
    """Answer every line of `source` that `target` has no answer to.

    Args:
        ask: asks the pool for the answer to a line of this `form`.
        options: the settings of lines that do not say them themselves, by the names of the fields of `form`.

    Raises:
        CommandFailed: the run cannot begin or go on, or some line has an error.
    """
    piped = STREAM in (source, target)
    _check_files(source, target, piped=piped, retry_errors=retry_errors)
    with options_named():
        check_timeout(options["timeout"])
    # Answers that were made with other options are not answers of this run.
    effective = {name: value for name, value in options.items() if name not in _WITHOUT_EFFECT}
    sum_of = functools.partial(checksum, form=form, options=effective)
    with contextlib.ExitStack() as stack:
        if not piped:
            answers: Answers = stack.enter_context(
                AnswerFile(target, source, checksum=sum_of, retry_errors=retry_errors, mixed_versions=mixed_versions)
            )
        elif target == STREAM:
            answers = Answers(Path("stdout"), sys.stdout.buffer, mixed_versions=mixed_versions)
        else:
            answers = Answers(target, stack.enter_context(open(target, "xb")), mixed_versions=mixed_versions)
        run = _FileRun(form, ask, options, answers, sum_of)
        _answer_all(run, source, address, concurrency)
        _conclude(answers)


def _check_files(source: Path, target: Path, *, piped: bool, retry_errors: bool) -> None:
    if piped and retry_errors:
        raise CommandFailed("--retry-errors: a run through a pipe (-) cannot be resumed; name files", BAD_USAGE)
    if piped and target != STREAM and target.exists():
        raise CommandFailed(f"{target}: exists, and answers to stdin (-) cannot be resumed; name a new file", BAD_USAGE)
    if source != STREAM and not source.is_file():
        raise CommandFailed(
            f"{source}: {'not a file that can be read twice' if source.exists() else 'no such file'}", BAD_USAGE
        )
    if target != STREAM and target.exists() and (not target.is_file() or target.samefile(source)):
        raise CommandFailed(f"{target}: answers go to a file of their own", BAD_USAGE)
    if not target.parent.is_dir():
        raise CommandFailed(f"{target.parent}: no such directory", BAD_USAGE)


def _answer_all(run: "_FileRun[Any]", source: Path, address: str, concurrency: int) -> None:
    """The run itself; an interrupted one says how far it came."""
    answers = run.answers
    earlier = answers.count

    def interrupted() -> str:
        new = answers.count - earlier
        return f"interrupted: {_lines(answers.count)} in {answers.path}, {new:,} of them new; {answers.resumed}"

    with contextlib.ExitStack() as stack:
        size = None
        if source == STREAM:
            lines: AsyncIterator[Line] = PipeLines(sys.stdin.fileno())
        else:
            lines = file_lines(stack.enter_context(open(source, "rb")))
            size = source.stat().st_size

        async def main() -> None:
            async with open_pool(address) as pool:
                with Progress(size, answers) as progress:
                    # Requests wait in the pool while engines load. The user is told what the workers do.
                    loading = asyncio.create_task(pool.ready(group=run.options["group"], report=progress.worker_does))
                    showing = asyncio.create_task(progress.run())
                    takers = [asyncio.create_task(run.take(pool, lines, progress)) for _ in range(concurrency)]
                    try:
                        await asyncio.gather(*takers)
                    finally:
                        for task in (loading, showing, *takers):
                            task.cancel()
                        await asyncio.gather(loading, showing, *takers, return_exceptions=True)

        try:
            run_interruptible(main, interrupted)
        finally:
            if without_group := run.lacks_group and not answers.answered:
                answers.withdraw_errors()
        if without_group:
            raise CommandFailed(f"{run.lacks_group}; choose one with --group", BAD_USAGE)


def _conclude(answers: Answers) -> None:
    typer.echo(f"{answers.path}: {_lines(answers.answered)} answered, {answers.failed} with an error", err=True)
    if mixed := str(answers.versions):
        typer.echo(f"{answers.path}: answers of several weight versions: {mixed}", err=True)
    if answers.failed:
        raise CommandFailed(f'{_lines(answers.failed)} with an error: look for "error" in {answers.path}')


def _lines(count: int) -> str:
    return f"{count:,} line{'' if count == 1 else 's'}"


class _FileRun(Generic[L]):
    """One pass over the input."""

    def __init__(self, form: type[L], ask: Ask[L], options: dict[str, Any], answers: Answers, sum_of: Checksum) -> None:
        self.options = options
        self.answers = answers
        #: what the pool said where neither a line nor the command said which of its groups
        self.lacks_group = ""
        self._without_group = 0
        self._form = form
        self._ask = ask
        self._sum_of = sum_of

    async def take(self, pool: "Pool", lines: AsyncIterator[Line], progress: Progress) -> None:
        """Answer lines from the iterator that all takers share, until it is empty.

        Raises:
            CommandFailed: the pool cannot go on, or the output cannot be written.
        """
        unasked = 0
        async for number, offset, text in lines:
            if number in self.answers or text.isspace() or await self._answer(pool, number, text):
                unasked += 1
                if unasked % LINES_BETWEEN_TURNS == 0:
                    await asyncio.sleep(0)
            progress.at(offset + len(text))

    async def _answer(self, pool: "Pool", number: int, text: bytes) -> bool:
        """Write the answer to one line. Returns whether the pool was not needed for it."""
        answers = self.answers
        crc = self._sum_of(text)
        try:
            line = read_line(text, self._form)
        except BadLine as error:
            answers.add(output_line(number, crc, error.line, error_columns(number, error)), failed=True)
            return True
        try:
            columns = await self._ask(pool, line, line.settings(self.options))
        except EnginepoolError as error:
            if error.retry or error.code in NOT_OF_THE_LINE:
                raise CommandFailed(f"stopped at line {number}: {error}; {answers.resumed}") from None
            if error.code == "unknown_group" and line.group is None:
                self.lacks_group = str(error)
                self._without_group += 1
                if self._without_group >= WITHOUT_GROUP and not answers.answered:
                    raise CommandFailed(f"{error}; choose one with --group", BAD_USAGE) from None
            answers.add(output_line(number, crc, line, error_columns(number, error)), failed=True)
        else:
            answers.versions.check(number, line.group, columns["version"])
            answers.add(output_line(number, crc, line, columns), failed=False)
            answers.versions.note(line.group, columns["version"])
        return False
