"""`enginepool tiny-model`: a small random model with a tokenizer, for trying things out."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from enginepool.cli.cli_errors import BAD_USAGE, CommandFailed


class Head(StrEnum):
    """What stands on top of the model."""

    causal = "causal"
    reward = "reward"


def tiny_model(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty directory.")],
    head: Annotated[
        Head, typer.Option(help="causal: scores are probabilities of label tokens; reward: one number for each item.")
    ] = Head.causal,
) -> None:
    """Make a small random model to try things with.

    A checkpoint with tokenizer, in DIR; nothing is downloaded.

    \b
    Examples:
      enginepool tiny-model my-model
      enginepool tiny-model my-reward-model --head reward
      enginepool serve --model ./my-model --device cpu
    """
    if directory.exists() and not directory.is_dir():
        raise CommandFailed(f"{directory}: a file stands there; name a new directory", BAD_USAGE)
    if directory.is_dir() and any(directory.iterdir()):
        raise CommandFailed(f"{directory}: not empty; name a new directory", BAD_USAGE)
    from enginepool.cli.tiny_model_files import make_tiny_model

    try:
        make_tiny_model(directory, head=head.value)
    except RuntimeError as error:
        raise CommandFailed(f"tiny-model: {error}") from None
    size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    typer.echo(f"{directory}: a {head.value} model of {size / 1e6:.1f} MB")
