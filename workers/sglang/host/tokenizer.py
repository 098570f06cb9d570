"""Whether a model has a tokenizer. No SGLang here."""

from typing import Any


def tokenizer_of(tm: Any) -> Any:
    """The model's tokenizer, or None where the model has none.

    For a model folder without tokenizer files, transformers makes a tokenizer that has special tokens and no words. Of any text
    it makes unknown tokens, or no tokens at all: the scores would be wrong, without an error.

    Args:
        tm: SGLang's tokenizer manager.
    """
    tokenizer = tm.tokenizer
    special = getattr(tokenizer, "all_special_tokens", None)
    return None if special is not None and len(tokenizer) <= len(set(special)) else tokenizer
