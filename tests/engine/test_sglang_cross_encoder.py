"""A cross-encoder of BERT's kind is told which tokens are of the second text: its scores equal a direct computation."""

import importlib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from enginepool.workers import cpu_bridge
from enginepool.workers.engine import BatchScores, PartScores, ScoreBatch, ScorePart
from enginepool.workers.sglang.token_types import send_token_types, types_of
from tests.engine.hosted import HostedEngine
from tests.engine.test_sglang_scores import assert_close

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(60)))
CLS, SEP = WORDS.index("[CLS]"), WORDS.index("[SEP]")


def test_types_tell_what_is_behind_the_first_separator() -> None:
    assert types_of([CLS, 7, SEP, 8, 9, SEP], SEP) == [0, 0, 0, 1, 1, 1]
    assert types_of([CLS, 7, SEP], SEP) == [0, 0, 0], "a text alone"
    assert types_of([CLS, 7], SEP) == [0, 0]
    assert types_of([], SEP) == []


@pytest.mark.parametrize(("separator", "kinds", "sent"), [(SEP, 2, [0, 0, 1]), (SEP, 1, None), (None, 2, None)])
def test_only_a_model_with_types_and_a_tokenizer_with_a_separator_is_sent_them(
    separator: int | None, kinds: int, sent: list[int] | None
) -> None:
    seen: list[Any] = []

    def create(asked: Any, text: Any, row: Any, embeddings: Any = None, more: Any = None, token_types: Any = None) -> None:
        seen.append(token_types)

    config = SimpleNamespace(hf_config=SimpleNamespace(type_vocab_size=kinds))
    tokenizer = SimpleNamespace(sep_token_id=separator)
    tm = SimpleNamespace(tokenizer=tokenizer, model_config=config, _create_tokenized_object=create)
    send_token_types(tm)
    tm._create_tokenized_object(None, None, [7, SEP, 8], None, None, None)
    tm._create_tokenized_object(None, None, [7, SEP, 8], None, None, [1, 1, 1])
    tm._create_tokenized_object(None, "a text", None)
    assert seen == [sent, [1, 1, 1], None]


@pytest.fixture(scope="module")
def library() -> Any:
    cpu_bridge.install()
    return importlib.import_module("transformers")


@pytest.fixture(scope="module")
def folder(library: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of random weights, whose two types differ."""
    torch: Any = importlib.import_module("torch")
    tokenizers: Any = importlib.import_module("tokenizers")
    folder = tmp_path_factory.mktemp("cross-encoder")
    config = library.BertConfig(
        vocab_size=len(WORDS), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=128, type_vocab_size=2, num_labels=1, pad_token_id=0,
        initializer_range=0.5,
    )  # fmt: skip
    config.position_embedding_type = "absolute"  # SGLang asks for it
    torch.manual_seed(1)
    library.BertForSequenceClassification(config).save_pretrained(folder)
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    core.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    library.PreTrainedTokenizerFast(tokenizer_object=core, **names).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[HostedEngine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        hosted = HostedEngine(str(folder))
        yield hosted.wait_until_started()
    hosted.end()


def test_scores_of_pairs_and_of_single_texts_equal_a_direct_computation(
    library: Any, folder: Path, engine: HostedEngine
) -> None:
    torch: Any = importlib.import_module("torch")
    model = library.BertForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    query = [CLS, 10, 11, 12, SEP]
    items = [[20, 21, SEP], [22, SEP], [23, 24, 25, 26, SEP]]
    part = ScorePart(
        np.array(query, np.int32),
        np.array([*chain.from_iterable(items)], np.int32),
        np.array([len(i) for i in items], np.uint32),
    )
    alone = ScorePart(np.array([], np.int32), np.array([CLS, 30, 31, SEP], np.int32), np.array([4], np.uint32))
    [scores] = engine.score(ScoreBatch((part, alone)))
    assert isinstance(scores, BatchScores), scores
    assert scores.forwards == 1
    pairs, single = scores.parts
    assert isinstance(pairs, PartScores) and isinstance(single, PartScores)

    def direct(first: list[int], second: list[int]) -> float:
        types = torch.tensor([[0] * len(first) + [1] * len(second)])
        with torch.no_grad():
            return float(model(input_ids=torch.tensor([first + second]), token_type_ids=types).logits)

    expected = [[direct(query, item)] for item in items]
    untold = [[direct(query + item, [])] for item in items]
    assert np.abs(np.subtract(expected, untold)).min() > 0.01, "types matter to this model"
    assert_close(pairs.scores, expected)
    assert_close(single.scores, [[direct([CLS, 30, 31, SEP], [])]])
