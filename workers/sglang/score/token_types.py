"""Token types: by them a BERT tells the second text of a pair from the first one. No SGLang here."""

from collections.abc import Callable, Sequence
from typing import Any

from enginepool.workers.sglang.host.tokenizer import tokenizer_of


def types_of(row: Sequence[int], separator: int) -> list[int]:
    """The type of each token: 0 up to the first separator, 1 behind it. So does the tokenizer of such a model, for a pair and
    for a text alone, which ends with the only separator."""
    first = next((place + 1 for place, token in enumerate(row) if token == separator), len(row))
    return [0] * first + [1] * (len(row) - first)


def send_token_types(tm: Any) -> None:
    """Have rows of a model with token types say them: SGLang knows those of texts that it takes for pairs alone, and of rows
    that say none takes all tokens for those of a first text.

    Args:
        tm: SGLang's tokenizer manager, whose maker of messages to the scheduler is wrapped.
    """
    separator = getattr(tokenizer_of(tm), "sep_token_id", None)
    if separator is None or getattr(tm.model_config.hf_config, "type_vocab_size", 1) < 2:
        return
    create: Callable[..., Any] = tm._create_tokenized_object

    def create_with_types(
        asked: Any,
        text: Any,
        row: Sequence[int] | None,
        embeddings: Any = None,
        more: Any = None,
        token_types: Sequence[int] | None = None,
    ) -> Any:
        if token_types is None and row is not None:
            token_types = types_of(row, separator)
        return create(asked, text, row, embeddings, more, token_types)

    tm._create_tokenized_object = create_with_types
