"""`enginepool score`: a file of requests through a running pool, into a file of scores."""

from collections.abc import Container
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from enginepool.cli.choices import Truncation
from enginepool.cli.cli_errors import BAD_USAGE, CommandFailed
from enginepool.cli.file_command import file_command
from enginepool.cli.jsonl import InputLine, answered

if TYPE_CHECKING:
    from enginepool.client.pool import Pool


class ScoreLine(InputLine, forbid_unknown_fields=True):
    """An input line: `query` and `items`, or `prompts` and `responses`, or `messages`."""

    query: str | list[int] | None = None
    items: list[str | list[int]] | None = None
    prompts: list[str | list[int]] | None = None
    responses: list[str | list[int]] | None = None
    messages: list[Any] | None = None  #: the client checks the chats
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    label_token_ids: list[int | list[int]] | None = None
    labels: list[str] | None = None
    apply_softmax: bool | None = None
    item_first: bool | None = None
    return_pooled_hidden_states: bool | None = None
    logprobs: bool | None = None
    raw: bool | None = None
    temperature: float | None = None
    truncation: str | None = None

    def __post_init__(self) -> None:
        """There is one of the three, and no key of the others."""
        given = [name for name in ("query", "items", "prompts", "responses", "messages") if getattr(self, name) is not None]
        if given not in (["query", "items"], ["prompts", "responses"], ["messages"]):
            one = "needs query and items, or prompts and responses, or messages, and only one of these"
            raise ValueError(f"{one}; got {', '.join(given) or 'none'}")

    @classmethod
    def inherited(cls, said: Container[str], options: dict[str, Any]) -> dict[str, Any]:
        """Labels that the line names, as texts or as token ids, replace those of the command."""
        named = ("labels", "label_token_ids")
        left = super().inherited(said, options)
        return {name: left[name] for name in left if name not in named} if any(name in said for name in named) else left


async def _ask(pool: "Pool", line: ScoreLine, settings: dict[str, Any]) -> dict[str, Any]:
    # The client checks that rows are all text or all ids.
    chat = {name: getattr(line, name) for name in ("add_generation_prompt", "chat_template_kwargs")}
    settings |= {name: value for name, value in chat.items() if value is not None}
    if line.messages is not None:
        result = await pool.score(messages=line.messages, **settings)
    elif line.query is None:
        result = await pool.score_pairs(cast("Any", line.prompts), cast("Any", line.responses), **settings)
    else:
        result = await pool.score(line.query, cast("Any", line.items), **settings)
    columns = {"scores": result.scores.tolist()} | answered(result)
    return columns if result.hidden is None else columns | {"hidden": result.hidden.tolist()}


@file_command(ScoreLine, _ask)
def score(
    label_token_ids: Annotated[
        str,
        typer.Option("--label-token-ids", metavar="ID,ID,...", help="For causal models: the tokens to give probabilities of."),
    ] = "",
    labels: Annotated[str, typer.Option(metavar="TEXT,TEXT,...", help="The same tokens by their texts, such as yes,no.")] = "",
    softmax: Annotated[bool, typer.Option("--softmax", help="Let the labels' probabilities sum to 1.")] = False,
    logprobs: Annotated[bool, typer.Option("--logprobs", help="Natural logarithms instead of probabilities.")] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="For cross-encoders: rows need no separator between query and item.")
    ] = False,
    temperature: Annotated[float, typer.Option(metavar="T", help="What --softmax divides logits by: 0.001 to 1000.")] = 1.0,
    item_first: Annotated[bool, typer.Option("--item-first", help="Put the item before the query.")] = False,
    truncation: Truncation = None,
    hidden: Annotated[bool, typer.Option("--hidden", help="Pooled hidden states too, from models that have them.")] = False,
) -> dict[str, Any]:
    """Score a file of requests through a running pool.

    Interrupted, the same command continues where it stopped; nothing is scored twice in OUT. With - that is not possible:
    answers are written once, as they come, and OUT must be a new file. Progress is shown on stderr.

    Scores of different weights cannot be compared: the run stops where another weight version answers than the one that OUT has
    answers of. Each line of OUT has its version.

    A line of IN is {"query": ..., "items": ...} or {"prompts": ..., "responses": ...}: text, or lists of token ids; or
    {"messages": ...}: chats, each a list of {"role": ..., "content": ...}. It may have an "id", which comes back with the
    answer, and any of label_token_ids, labels, apply_softmax, temperature, truncation, logprobs, raw, item_first,
    return_pooled_hidden_states, add_generation_prompt, chat_template_kwargs, group, priority, timeout, min_version, version for
    itself.

    A line of OUT has "line", the number of the line in IN (answers come in any order), and "scores", one row for each item;
    or "error" with a code and a message. Exit code 1 if any line has an error.

    \b
    Examples:
      enginepool score requests.jsonl scores.jsonl --label-token-ids 9693,2152
      enginepool score pairs.jsonl rewards.jsonl --group reward --priority -10
      enginepool score in.jsonl out.jsonl --connect ipc:///run/pool.sock
      make-requests | enginepool score - - | use-scores
    """
    from enginepool.cli.file_run import options_named
    from enginepool.client.payload import check_label_texts, check_labels, check_softmax, check_temperature

    ids, texts = _token_ids(label_token_ids), labels.split(",") if labels else None
    with options_named():
        check_softmax(softmax, len(check_labels(ids) or check_label_texts(texts, ids)))
        check_temperature(temperature, softmax=True)
    settings: dict[str, Any] = {"label_token_ids": ids, "apply_softmax": softmax, "logprobs": logprobs, "raw": raw}
    settings |= {"labels": texts, "temperature": temperature, "truncation": truncation and truncation.value}
    return settings | {"item_first": item_first, "return_pooled_hidden_states": hidden}


def _token_ids(text: str) -> list[int] | None:
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isascii() and part.isdigit() and len(part) < 20 for part in parts):
        raise CommandFailed(f"--label-token-ids = {text[:80]!r}: write token ids with commas, such as 9693,2152", BAD_USAGE)
    return [int(part) for part in parts] or None
