"""Chats to token ids, by the model's own chat template. No SGLang here."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from enginepool.protocol.chat import MAX_TEMPLATE_TOKENS, read_chats
from enginepool.protocol.errors import WireError
from enginepool.protocol.messages import ChatTemplate, Tokenize
from enginepool.workers.sglang.host.lifetime import one_line


def has_template(tokenizer: Any) -> bool:
    """Whether the model has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def chat_rows(tokenizer: Any, items: Sequence[str], template: ChatTemplate, asked: Tokenize) -> tuple[list[list[int]], int]:
    """(token ids of each chat, how many of them lost tokens at their beginning).

    Raises:
        WireError: `bad_request`: an item is no chat, or the template refuses it.
    """
    _refuse_options(tokenizer, template.kwargs)
    rows: list[list[int]] = []
    truncated = 0
    for i, chat in enumerate(read_chats([*items])):
        row = _render(tokenizer, chat, template, i)
        if len(row) > len(items[i].encode()) + MAX_TEMPLATE_TOKENS:
            raise _refused(i, f"its template makes {len(row)} tokens of {len(items[i].encode())} bytes")
        if asked.truncation == "left" and len(row) > asked.longest:
            row, truncated = row[-asked.longest :], truncated + 1
        rows.append(row)
    return rows, truncated


def _refuse_options(tokenizer: Any, kwargs: Mapping[str, Any]) -> None:
    """Names of `apply_chat_template` itself are no options of the template; one of them is a template, which is a program."""
    taken = {*inspect.signature(tokenizer.apply_chat_template).parameters, "messages"}
    if wrong := sorted(taken & kwargs.keys()):
        text = f"chat: {wrong[0]!r} in kwargs is no option of a chat template"
        raise WireError("bad_request", text, field="chat")


def _render(tokenizer: Any, chat: Sequence[Mapping[str, str]], template: ChatTemplate, row: int) -> list[int]:
    try:
        ids = tokenizer.apply_chat_template(
            chat, add_generation_prompt=template.add_generation_prompt, tokenize=True, return_dict=False,
            tokenizer_kwargs={"verbose": False}, **template.kwargs,
        )  # fmt: skip
    except Exception as error:  # a template is a program of the model's authors, and raises what it likes
        raise _refused(row, f"the model's chat template refuses it: {one_line(error)}") from error
    return [*ids]


def _refused(row: int, why: str) -> WireError:
    at = f"items[{row}]"
    return WireError("bad_request", f"{at}: {why}", field=at)
