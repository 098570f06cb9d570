"""The token ids of the texts of one task: chats, pairs of a cross-encoder, or texts that are joined."""

from typing import Any

from enginepool.workers.sglang.score.cross_encoder import pair_rows
from enginepool.workers.sglang.text.chat_rows import chat_rows
from enginepool.workers.sglang.text.joined_rows import joined_rows
from enginepool.workers.sglang.text.label_ids import label_ids
from enginepool.workers.texts import TextIds, TextTask


def text_ids(tokenizer: Any, task: TextTask, cross_encoder: Any, context: int, last: int | None = None) -> TextIds:
    """Tokenize. `cross_encoder`: the configuration of a model that reads pairs; None: of another model. `last`: as in
    `joined_rows`. Raises WireError `bad_request`, and what the tokenizer raises."""
    asked = task.asked
    if asked.chat is not None:
        rows, truncated = chat_rows(tokenizer, [item for _, item in task.pairs], asked.chat, asked)
    elif cross_encoder is not None and not asked.raw:
        rows, truncated = pair_rows(tokenizer, cross_encoder, task.pairs, asked, context)
    else:
        rows, truncated = joined_rows(tokenizer, task.pairs, asked, last)
    return TextIds(rows, truncated, label_ids(tokenizer, asked.labels))
