"""A model without a tokenizer of its own takes token ids only, what one token adds to a text is known, and a long text is
tokenized next to others."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from enginepool.protocol.messages import Tokenize
from enginepool.workers.sglang.host.tokenizer import tokenizer_of
from enginepool.workers.sglang.text.encoded_rows import PIECE, ROW
from enginepool.workers.sglang.text.engine_tokenizer import EngineTokenizer, token_bytes
from enginepool.workers.texts import TextTask
from tests.core.machines import CAN


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


class Slow:
    """A tokenizer that waits at a text of its own, in which it finds the token 1, and finds the token 2 in others."""

    def __init__(self) -> None:
        self.let, self.users, self.calls = threading.Event(), set[str](), list[int]()

    def __call__(self, texts: list[str], **options: Any) -> dict[str, list[list[int]]]:
        self.users.add(threading.current_thread().name)
        self.calls.append(len(texts))
        if texts == ["slow"]:
            assert self.let.wait(10.0)
        return {"input_ids": [[1 if text == "slow" else 2] for text in texts]}

    def __deepcopy__(self, memo: Any) -> "Slow":
        other = Slow()
        other.let, other.calls = self.let, self.calls
        return other


class Whole(Slow):
    """One that cannot be copied."""

    def __deepcopy__(self, memo: Any) -> "Slow":
        raise RuntimeError("it has a thread of its own")


async def _ids(tokenizer: EngineTokenizer, slow: Slow, text: str, *, long: bool = False) -> list[list[int]]:
    tm = SimpleNamespace(tokenizer=slow, model_config=SimpleNamespace(is_embedding_gemma=False))
    task = TextTask([("", text)], Tokenize((1, 1), [], long=long))
    return (await tokenizer.ids(tm, task, CAN)).rows


def test_a_short_text_does_not_wait_for_a_long_one() -> None:
    async def act() -> None:
        tokenizer, slow = EngineTokenizer(), Slow()
        long = asyncio.create_task(_ids(tokenizer, slow, "slow", long=True))
        more = asyncio.create_task(_ids(tokenizer, slow, "more", long=True))
        for _ in range(3):
            assert await asyncio.wait_for(_ids(tokenizer, slow, "short"), 10.0) == [[2]]
        assert not long.done() and not more.done() and len(slow.users) == 1, "the original is used in one thread"
        slow.let.set()
        assert (await long, await more) == ([[1]], [[2]])
        tokenizer.close()

    asyncio.run(act())


def test_a_tokenizer_that_cannot_be_copied_does_one_text_after_the_other_and_says_so_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def act() -> None:
        tokenizer, slow = EngineTokenizer(), Whole()
        long = asyncio.create_task(_ids(tokenizer, slow, "slow", long=True))
        short = asyncio.create_task(_ids(tokenizer, slow, "short"))
        slow.let.set()
        assert (await long, await short) == ([[1]], [[2]])
        assert await _ids(tokenizer, slow, "more", long=True) == [[2]] and len(slow.users) == 1
        assert capsys.readouterr().err.count("cannot be copied: RuntimeError: it has a thread of its own") == 1
        tokenizer.close()

    asyncio.run(act())


#: many short rows, one of more than a piece, and more short ones
ROWS = ["a"] * 1000 + ["b" * (2 * PIECE)] + ["c"] * 10


@pytest.mark.parametrize("long", [False, True])
def test_few_rows_of_a_long_text_go_at_a_time_through_the_threads_that_tokenizers_share(long: bool) -> None:
    async def act() -> None:
        tokenizer, slow = EngineTokenizer(), Slow()
        task = TextTask([("", text) for text in ROWS], Tokenize((1, 1), [], long=long))
        found = await tokenizer.ids(
            SimpleNamespace(tokenizer=slow, model_config=SimpleNamespace(is_embedding_gemma=False)), task, CAN
        )
        assert found.rows == [[2]] * len(ROWS)
        most = PIECE // (ROW + 1)
        whole, rest = divmod(1000, most)
        assert slow.calls == ([*[most] * whole, rest, 1, 10] if long else [len(ROWS)])
        tokenizer.close()

    asyncio.run(act())


def test_a_tokenizer_that_holds_functions_of_its_own_is_not_copied(capsys: pytest.CaptureFixture[str]) -> None:
    """A copy would call those of the original, from another thread."""

    async def act() -> None:
        tokenizer, slow = EngineTokenizer(), Slow()
        vars(slow)["decode"] = tokenizer_of
        assert await _ids(tokenizer, slow, "more", long=True) == [[2]]
        assert len(slow.users) == 1, "the original"
        tokenizer.close()

    asyncio.run(act())
    assert "cannot be copied: it has functions of its own: decode" in capsys.readouterr().err


class Words:
    """A tokenizer that begins with the token 0 and, if it `ends`, closes with 9; each letter is a token of its own."""

    is_fast, eos_token_id = True, 9

    def __init__(self, ends: bool) -> None:
        self.ends = ends

    def __call__(self, texts: Any, add_special_tokens: bool = True, **options: Any) -> dict[str, Any]:
        if isinstance(texts, list):
            return {"input_ids": [self(one, add_special_tokens)["input_ids"] for one in cast("list[str]", texts)]}
        letters = [1 + "abcdefgh".index(letter) for letter in texts]
        end = [9] * self.ends
        return {
            "input_ids": [0, *letters, *end] if add_special_tokens else letters,
            "offset_mapping": [(0, 0), *((place, place + 1) for place in range(len(letters))), *((0, 0) for _ in end)],
            "special_tokens_mask": [1, *(0 for _ in letters), *(1 for _ in end)],
        }


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize(
    ("asked", "gemma", "plain"),
    [
        (Tokenize((1, 1), []), [0, 1, 2, 3, 4, 9], [0, 1, 2, 3, 4]),
        (Tokenize((1, 1), [], truncation="right", longest=5), [0, 1, 2, 3, 9], [0, 1, 2, 3, 4]),
        (Tokenize((1, 1), [], truncation="left", longest=4), [0, 1, 4, 9], [0, 1, 3, 4]),
        (Tokenize((1, 1), [], raw=True, operation="tokenize", add_special_tokens=False), [1, 2, 3, 4], [1, 2, 3, 4]),
    ],
)
def test_a_text_for_embedding_gemma_ends_with_the_token_that_its_tokenizer_leaves_out(
    asked: Tokenize, gemma: list[int], plain: list[int], ends: bool
) -> None:
    async def act(is_gemma: bool) -> list[list[int]]:
        tm = SimpleNamespace(tokenizer=Words(ends), model_config=SimpleNamespace(is_embedding_gemma=is_gemma))
        tokenizer = EngineTokenizer()
        try:
            return (await tokenizer.ids(tm, TextTask([("a", "bcd")], asked), CAN)).rows
        finally:
            tokenizer.close()

    assert asyncio.run(act(True)) == [gemma]
    assert asyncio.run(act(False)) == [gemma if ends else plain]
