"""A model without a tokenizer of its own takes token ids only."""

from types import SimpleNamespace
from typing import Any

import pytest

from enginepool.workers.sglang.host.tokenizer import tokenizer_of


class Tokenizer:
    """One of transformers, as far as its vocabulary goes."""

    def __init__(self, words: int, special: list[str]) -> None:
        self._words = words
        self.all_special_tokens = special

    def __len__(self) -> int:
        return self._words + len(set(self.all_special_tokens))


@pytest.mark.parametrize("special", [["<eos>"], ["<eos>", "<eos>"], ["<s>", "</s>", "<unk>"]])
def test_a_tokenizer_of_special_tokens_alone_is_none(special: list[str]) -> None:
    whole = Tokenizer(1, special)
    assert tokenizer_of(SimpleNamespace(tokenizer=Tokenizer(0, special))) is None
    assert tokenizer_of(SimpleNamespace(tokenizer=whole)) is whole


@pytest.mark.parametrize("tokenizer", [None, object()])
def test_an_engine_without_a_tokenizer_and_one_of_another_kind_keep_what_they_have(tokenizer: Any) -> None:
    assert tokenizer_of(SimpleNamespace(tokenizer=tokenizer)) is tokenizer
