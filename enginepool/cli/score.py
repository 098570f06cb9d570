"""`enginepool score`: a file of requests through a running pool, into a file of answers."""

from typing import Annotated, Any

import typer

from enginepool.cli.cli_errors import BAD_USAGE, CommandFailed
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

Labels = Annotated[
    str,
    typer.Option("--label-token-ids", metavar="ID,ID,...", help="For causal models: the tokens to give probabilities of."),
]
Softmax = Annotated[bool, typer.Option("--softmax", help="Let the labels' probabilities sum to 1.")]
Logprobs = Annotated[bool, typer.Option("--logprobs", help="Natural logarithms instead of probabilities.")]
Raw = Annotated[bool, typer.Option("--raw", help="For cross-encoders: rows need no separator between query and item.")]
ItemFirst = Annotated[bool, typer.Option("--item-first", help="Put the item before the query.")]
Hidden = Annotated[bool, typer.Option("--hidden", help="Pooled hidden states too, from models that have them.")]


def score(
    source: Source,
    target: Target,
    connect: Address = DEFAULT_ADDRESS,
    group: Group = "",
    priority: Priority = 0,
    labels: Labels = "",
    softmax: Softmax = False,
    logprobs: Logprobs = False,
    raw: Raw = False,
    item_first: ItemFirst = False,
    hidden: Hidden = False,
    timeout: Timeout = None,
    concurrency: Concurrency = 64,
    min_version: MinVersion = 0,
    mixed_versions: MixedVersions = False,
    retry_errors: RetryErrors = False,
) -> None:
    """Score a file of requests through a running pool.

    Interrupted, the same command continues where it stopped; nothing is scored twice in OUT. With - that is not possible:
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
    from enginepool.cli.file_run import options_named, run_file
    from enginepool.cli.score_line import ScoreLine
    from enginepool.client.payload import check_labels, check_softmax

    ids = _token_ids(labels)
    with options_named():
        check_softmax(softmax, check_labels(ids))
    options: dict[str, Any] = {"label_token_ids": ids, "apply_softmax": softmax, "logprobs": logprobs, "raw": raw}
    options |= {"item_first": item_first, "return_pooled_hidden_states": hidden, "group": group}
    options |= {"priority": priority, "timeout": timeout, "min_version": min_version}
    switches = {"mixed_versions": mixed_versions, "retry_errors": retry_errors}
    run_file(ScoreLine, options, source, target, address=connect, concurrency=concurrency, **switches)


def _token_ids(text: str) -> list[int] | None:
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isascii() and part.isdigit() and len(part) < 20 for part in parts):
        raise CommandFailed(f"--label-token-ids = {text[:80]!r}: write token ids with commas, such as 9693,2152", BAD_USAGE)
    return [int(part) for part in parts] or None
