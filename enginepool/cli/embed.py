"""`enginepool embed`: a file of texts or token ids through a running pool, into a file of embeddings."""

from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from enginepool.cli.choices import Truncation
from enginepool.cli.file_command import file_command
from enginepool.cli.jsonl import InputLine, answered

if TYPE_CHECKING:
    from enginepool.client.pool import Pool


class EmbedLine(InputLine, forbid_unknown_fields=True):
    """An input line."""

    inputs: list[str | list[int]] | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    instruction: str | None = None
    truncation: str | None = None

    def __post_init__(self) -> None:
        if self.inputs is None:
            raise ValueError("needs inputs")


async def _ask(pool: "Pool", line: EmbedLine, settings: dict[str, Any]) -> dict[str, Any]:
    # The client checks that inputs are all text or all ids.
    result = await pool.embed(cast("Any", line.inputs), **settings)
    return {"embeddings": result.embeddings.tolist()} | answered(result)


@file_command(EmbedLine, _ask)
def embed(
    dimensions: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="The first N values of each embedding; all without it.")
    ] = None,
    no_normalize: Annotated[
        bool, typer.Option("--no-normalize", help="Embeddings as the model pools them, of any length.")
    ] = False,
    instruction: Annotated[str, typer.Option(metavar="TEXT", help="A text that goes before each input.")] = "",
    truncation: Truncation = None,
) -> dict[str, Any]:
    """Embed a file of texts or token ids through a running pool.

    It reads, writes, stops and continues as `enginepool score` does.

    A line of IN is {"inputs": ...}: a list of texts, or of lists of token ids. It may have an "id", which comes back with the
    answer, and any of dimensions, normalize, instruction, truncation, group, priority, timeout, min_version, version for
    itself.

    A line of OUT has "line", the number of the line in IN (answers come in any order), and "embeddings", one row for each
    input; or "error" with a code and a message. Exit code 1 if any line has an error.

    \b
    Examples:
      enginepool embed texts.jsonl embeddings.jsonl
      enginepool embed texts.jsonl embeddings.jsonl --group documents --dimensions 256
    """
    return {
        "dimensions": dimensions,
        "normalize": not no_normalize,
        "instruction": instruction or None,
        "truncation": truncation and truncation.value,
    }
