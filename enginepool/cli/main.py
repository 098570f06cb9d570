"""The `enginepool` command: its sub-commands, each from a file of its own.

These files import what is heavy inside the commands, so that `--help` is quick and works without torch, zmq or an engine.
"""

import os
from pathlib import Path
from typing import Annotated

import typer

from enginepool import __version__
from enginepool.cli.abort import abort
from enginepool.cli.adapters import adapters
from enginepool.cli.chat import chat
from enginepool.cli.cli_errors import OneLineGroup
from enginepool.cli.demo import demo
from enginepool.cli.doctor import doctor
from enginepool.cli.embed import embed
from enginepool.cli.flush import flush
from enginepool.cli.generate import generate
from enginepool.cli.keys import keys as keys_command
from enginepool.cli.logprobs import logprobs
from enginepool.cli.pause import pause, resume
from enginepool.cli.profile import profile
from enginepool.cli.ready import ready
from enginepool.cli.restart import restart
from enginepool.cli.score import score
from enginepool.cli.serve import serve
from enginepool.cli.sleep import sleep, wake
from enginepool.cli.status import status
from enginepool.cli.tiny_model import tiny_model
from enginepool.cli.weights import weights
from enginepool.cli.worker import worker

app = typer.Typer(
    name="enginepool",
    cls=OneLineGroup,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(demo)
app.command()(doctor)
app.command()(serve)
app.command()(ready)
app.command("keys")(keys_command)
app.command()(score)
app.command()(embed)
app.command()(generate)
app.command()(chat)
app.command()(logprobs)
app.command()(status)
app.command()(restart)
app.command()(flush)
app.command()(sleep)
app.command()(wake)
app.command()(pause)
app.command()(resume)
app.command()(abort)
app.command()(profile)
app.command("tiny-model")(tiny_model)
app.add_typer(weights)
app.add_typer(adapters)
app.command()(worker)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"enginepool {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    keys: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Your key, for a pool on TCP: made by `enginepool keys`.  [env: ENGINEPOOL_KEYS]",
        ),
    ] = None,
) -> None:
    """A pool of SGLang engines behind one message queue.

    First time here? `enginepool doctor` says what this machine can run, and `enginepool demo` shows a whole pool at work
    in about a minute.

    \b
    A pool of your own, in three terminals:
      enginepool serve --model Qwen/Qwen3-Reranker-0.6B --workers 2
      enginepool score requests.jsonl scores.jsonl
      enginepool status --watch
    """
    if keys is not None:
        os.environ["ENGINEPOOL_KEYS"] = str(keys)
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
