"""`enginepool embed`: a file of texts or token ids through a running pool, into a file of embeddings."""

from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from enginepool.cli.connect import DEFAULT_ADDRESS, Address
from enginepool.cli.file_options import (
    Concurrency,
    Group,
    MinVersion,
    MixedVersions,
    Priority,
    RetryErrors,
    Source,
    Target,
    Timeout,
)
from enginepool.cli.jsonl import BadLine, InputLine

if TYPE_CHECKING:
    from enginepool.client.pool import Pool

Dimensions = Annotated[
    int | None, typer.Option("--dimensions", metavar="N", min=1, help="The first N values of each embedding; all without it.")
]
NoNormalize = Annotated[bool, typer.Option("--no-normalize", help="Embeddings as the model pools them, of any length.")]


def embed(
    source: Source,
    target: Target,
    connect: Address = DEFAULT_ADDRESS,
    group: Group = "",
    priority: Priority = 0,
    dimensions: Dimensions = None,
    no_normalize: NoNormalize = False,
    timeout: Timeout = None,
    concurrency: Concurrency = 64,
    min_version: MinVersion = 0,
    mixed_versions: MixedVersions = False,
    retry_errors: RetryErrors = False,
) -> None:
    """Embed a file of texts or token ids through a running pool.

    It reads, writes, stops and continues as `enginepool score` does.

    A line of IN is {"inputs": ...}: a list of texts, or of lists of token ids. It may have an "id", which comes back with the
    answer, and any of dimensions, normalize, group, priority, timeout, min_version for itself.

    A line of OUT has "line", the number of the line in IN (answers come in any order), and "embeddings", one row for each
    input; or "error" with a code and a message. Exit code 1 if any line has an error.

    \b
    Examples:
      enginepool embed texts.jsonl embeddings.jsonl
      enginepool embed texts.jsonl embeddings.jsonl --group documents --dimensions 256
    """
    from enginepool.cli.file_run import run_file

    options: dict[str, Any] = {"dimensions": dimensions, "normalize": not no_normalize, "group": group}
    options |= {"priority": priority, "timeout": timeout, "min_version": min_version}
    switches = {"mixed_versions": mixed_versions, "retry_errors": retry_errors}
    run_file(EmbedLine, options, source, target, address=connect, concurrency=concurrency, **switches)


class EmbedLine(InputLine, forbid_unknown_fields=True):
    """An input line."""

    inputs: list[str | list[int]] | None = None
    dimensions: int | None = None
    normalize: bool | None = None

    def check(self) -> None:
        """Raise BadLine without inputs."""
        if self.inputs is None:
            raise BadLine("needs inputs")

    async def answer(self, pool: "Pool", settings: dict[str, Any]) -> dict[str, Any]:
        """Have them embedded. The client checks that they are all text or all ids."""
        result = await pool.embed(cast("Any", self.inputs), **settings)
        return {"embeddings": result.embeddings.tolist(), "version": result.version, "tokens": result.usage.tokens}
