"""A model without a tokenizer of its own takes token ids only, and what one token adds to a text is known."""

from types import SimpleNamespace
from typing import Any

import pytest

from enginepool.workers.sglang.host.tokenizer import tokenizer_of
from enginepool.workers.sglang.text.engine_tokenizer import token_bytes


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


class Decoder:
    """A tokenizer whose tokens have these names, and these texts."""

    def __init__(self, **texts: str) -> None:
        self.names, self.texts = [*texts], [*texts.values()]
        self.decoded = 0

    def get_vocab(self) -> dict[str, int]:
        return {name: token for token, name in enumerate(self.names)}

    def decode(self, ids: list[int]) -> str:
        self.decoded += 1
        return "".join(self.texts[token] for token in ids)


def test_the_longest_text_of_a_token_is_found_without_decoding_the_whole_vocabulary() -> None:
    many = {f"t{i}": f"t{i}" for i in range(100)}
    decoder = Decoder(**many, ĠĠĠĠĠĠĠĠĠĠĠĠ=" " * 12, Ġabcdefg=" abcdefg", äää="\ufffd" * 3)
    assert token_bytes(decoder) == 13 and decoder.decoded < 5
    assert token_bytes(None) == token_bytes(object()) == 0
