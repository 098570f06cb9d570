"""`enginepool logprobs`: a file of prompts and responses through a running pool, into a file of log-probabilities."""

from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from enginepool.cli.choices import Truncation
from enginepool.cli.file_command import file_command
from enginepool.cli.jsonl import InputLine, answered

if TYPE_CHECKING:
    from enginepool.client.pool import Pool


class LogprobsLine(InputLine, forbid_unknown_fields=True):
    """An input line."""

    prompts: list[list[int] | int] | None = None
    responses: list[list[int]] | None = None
    label_token_ids: list[int] | None = None
    top_logprobs: int | None = None
    truncation: str | None = None

    def __post_init__(self) -> None:
        if self.prompts is None or self.responses is None:
            raise ValueError("needs prompts and responses")


async def _ask(pool: "Pool", line: LogprobsLine, settings: dict[str, Any]) -> dict[str, Any]:
    result = await pool.logprobs(cast("Any", line.prompts), cast("Any", line.responses), **settings)
    found = {"logprobs": [row.tolist() for row in result.logprobs]} | answered(result)
    more = {"labels": result.labels, "top_ids": result.top_ids, "top_logprobs": result.top_logprobs}
    return found | {name: [row.tolist() for row in rows] for name, rows in more.items() if rows is not None}


@file_command(LogprobsLine, _ask)
def logprobs(
    top_logprobs: Annotated[
        int, typer.Option(metavar="K", min=0, max=20, help="The K likeliest tokens in the place of each token, too.")
    ] = 0,
    truncation: Truncation = None,
) -> dict[str, Any]:
    """Give log-probabilities of a file of responses.

    It reads, writes, stops and continues as `enginepool score` does.

    A line of IN is {"prompts": ..., "responses": ...}: lists of token ids of each, or the ids of one prompt for all responses.
    It may have an "id", which comes back with the answer, and any of label_token_ids, top_logprobs, truncation, group,
    priority, timeout, min_version, version for itself.

    A line of OUT has "line", the number of the line in IN (answers come in any order), and "logprobs", one list for each
    response; or "error" with a code and a message. Exit code 1 if any line has an error.

    \b
    Examples:
      enginepool logprobs rollouts.jsonl logprobs.jsonl
      enginepool logprobs rollouts.jsonl logprobs.jsonl --group policy --priority -10
    """
    return {"label_token_ids": None, "top_logprobs": top_logprobs, "truncation": truncation and truncation.value}
