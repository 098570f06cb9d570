"""`enginepool score`: a file of requests through a running pool, into a file of answers."""

import asyncio
import contextlib
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from enginepool.cli.cli_errors import BAD_USAGE, INTERRUPTED, TERMINATED, CommandFailed
from enginepool.cli.connect import DEFAULT_ADDRESS, Address, open_pool

if TYPE_CHECKING:
    from enginepool.cli.answers import AnswerWriter
    from enginepool.cli.jsonl import Options
    from enginepool.cli.streams import StreamAnswers


def score(
    source: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="One request on each line, see below; - is stdin.")],
    target: Annotated[
        Path, typer.Argument(metavar="OUT.jsonl", help="One answer on each line, appended as they come; - is stdout.")
    ],
    connect: Address = DEFAULT_ADDRESS,
    group: Annotated[str, typer.Option(help="The group to ask; a pool of one group needs no name.")] = "",
    priority: Annotated[int, typer.Option(min=-1000, max=1000, help="Larger runs first.")] = 0,
    labels: Annotated[
        str,
        typer.Option("--label-token-ids", metavar="ID,ID,...", help="For causal models: the tokens to give probabilities of."),
    ] = "",
    softmax: Annotated[bool, typer.Option("--softmax", help="Let the labels' probabilities sum to 1.")] = False,
    logprobs: Annotated[bool, typer.Option("--logprobs", help="Natural logarithms instead of probabilities.")] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="For cross-encoders: rows need no separator between query and item.")
    ] = False,
    item_first: Annotated[bool, typer.Option("--item-first", help="Put the item before the query.")] = False,
    hidden: Annotated[bool, typer.Option("--hidden", help="Pooled hidden states too, from models that have them.")] = False,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0.001, help="Give a request up after this long.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=4096, help="Requests under way at a time.")] = 64,
    min_version: Annotated[
        int, typer.Option(metavar="VERSION", min=0, help="The oldest weights that may answer; requests wait for them.")
    ] = 0,
    mixed_versions: Annotated[
        bool, typer.Option("--mixed-versions", help="Go on although OUT has answers of another weight version.")
    ] = False,
    retry_errors: Annotated[bool, typer.Option("--retry-errors", help="Ask again what OUT has an error for.")] = False,
) -> None:
    """Score a file of requests through a running pool.

    Interrupted, the same command goes on where it stopped; nothing is scored twice in OUT. With - that is not possible:
    answers are written once, as they come, and OUT must be a new file. Progress is shown on stderr.

    Scores of different weights cannot be compared: the run stops where another weight version answers than the one that OUT has
    answers of. Each line of OUT has its version.

    A line of IN is {"query": ..., "items": ...} or {"prompts": ..., "responses": ...}: text, or lists of token ids. It may
    have an "id", which comes back with the answer, and any of label_token_ids, apply_softmax, logprobs, raw, item_first,
    return_pooled_hidden_states, group, priority, timeout, min_version for itself.

    A line of OUT has "line", the number of the line in IN (answers come in any order), and "scores", one row for each item;
    or "error" with a code and a message. Exit code 1 if any line has an error.

    \b
    Examples:
      enginepool score requests.jsonl scores.jsonl --label-token-ids 9693,2152
      enginepool score pairs.jsonl rewards.jsonl --group reward --priority -10
      enginepool score in.jsonl out.jsonl --connect ipc:///run/pool.sock
      make-requests | enginepool score - - | use-scores
    """
    from enginepool.cli.answers import AnswerWriter
    from enginepool.cli.jsonl import Options
    from enginepool.cli.streams import STREAM

    piped = STREAM in (source, target)
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
    options = Options(
        label_token_ids=_labels(labels),
        apply_softmax=softmax,
        item_first=item_first,
        return_pooled_hidden_states=hidden,
        group=group,
        priority=priority,
        timeout=timeout,
        logprobs=logprobs,
        raw=raw,
        min_version=min_version,
    )
    _check(options)
    if piped:
        _score_piped(source, target, options, connect, concurrency, mixed_versions)
        return
    with AnswerWriter(target, source, seed=options.seed(), retry_errors=retry_errors, mixed_versions=mixed_versions) as answers:
        _score(source, answers, options, connect, concurrency)
        _conclude(answers)


def _score_piped(source: Path, target: Path, options: "Options", address: str, concurrency: int, mixed_versions: bool) -> None:
    """The same from stdin, to stdout, or both."""
    from enginepool.cli.streams import STREAM, StreamAnswers

    with contextlib.ExitStack() as stack:
        file = sys.stdout.buffer if target == STREAM else stack.enter_context(open(target, "xb"))
        answers = StreamAnswers(Path("stdout") if target == STREAM else target, file, mixed_versions=mixed_versions)
        _score(source, answers, options, address, concurrency)
        _conclude(answers)


def _conclude(answers: "AnswerWriter | StreamAnswers") -> None:
    typer.echo(f"{answers.path}: {_count(answers.scored)} scored, {answers.failed} with an error", err=True)
    if mixed := str(answers.versions):
        typer.echo(f"{answers.path}: answers of several weight versions: {mixed}", err=True)
    if answers.failed:
        raise CommandFailed(f'{_count(answers.failed)} with an error: look for "error" in {answers.path}')


def _labels(text: str) -> list[int] | None:
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isascii() and part.isdigit() and len(part) < 20 for part in parts):
        raise CommandFailed(f"--label-token-ids = {text[:80]!r}: write token ids with commas, such as 9693,2152", BAD_USAGE)
    return [int(part) for part in parts] or None


def _check(options: "Options") -> None:
    """Refuse now what every line would fail on."""
    from enginepool.client.arguments import check_timeout
    from enginepool.client.payload import check_labels, check_softmax
    from enginepool.errors import BadRequest

    try:
        named = check_labels(options.label_token_ids)
        check_timeout(options.timeout)
        check_softmax(options.apply_softmax, named)
    except BadRequest as error:
        name, _, said = str(error).partition(":")
        # An option may have another name than the argument of `Pool.score`.
        option = name.removeprefix("apply_").replace("_", "-")
        raise CommandFailed(f"--{option}:{said}", BAD_USAGE) from None


def _count(lines: int) -> str:
    return f"{lines:,} line{'' if lines == 1 else 's'}"


def _score(source: Path, answers: "AnswerWriter | StreamAnswers", options: "Options", address: str, concurrency: int) -> None:
    """Answer every line of `source` that has no answer yet; say so when stopped before that."""
    from enginepool.cli.jsonl import input_lines
    from enginepool.cli.progress import Progress
    from enginepool.cli.scoring import Run
    from enginepool.cli.streams import STREAM, FileLines, PipeLines

    terminated = False
    earlier = answers.scored + answers.failed

    async def run() -> None:
        def terminate(task: "asyncio.Task[None] | None" = asyncio.current_task()) -> None:  # noqa: B008 (this run's task)
            nonlocal terminated
            terminated = True
            if task is not None:
                task.cancel()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate)
        async with open_pool(address) as pool:
            with Progress(size, answers) as progress:
                # Requests wait in the pool while engines load; the user is told what they wait for.
                loading = asyncio.create_task(pool.ready(group=options.group, report=progress.worker_does))
                try:
                    await Run(pool, answers, options, progress).all(lines, concurrency)
                finally:
                    loading.cancel()
                    await asyncio.gather(loading, return_exceptions=True)

    try:
        with contextlib.ExitStack() as stack:
            if source == STREAM:
                lines: PipeLines | FileLines = PipeLines(sys.stdin.fileno())
                size = None
            else:
                file = stack.enter_context(open(source, "rb"))
                lines, size = FileLines(input_lines(file, *answers.start)), source.stat().st_size
            asyncio.run(run())
    except (KeyboardInterrupt, asyncio.CancelledError):
        done = answers.scored + answers.failed
        raise CommandFailed(
            f"interrupted: {_count(done)} in {answers.path}, {done - earlier:,} of them new; {answers.resumed}",
            TERMINATED if terminated else INTERRUPTED,
        ) from None
