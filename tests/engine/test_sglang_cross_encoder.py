"""Cross-encoders rank as transformers does with its own pairs: separator, token types, truncation, activation."""

import dataclasses
import importlib
import random
from collections.abc import Iterator
from itertools import chain, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from enginepool.protocol.messages import Part, Tokenize
from enginepool.workers import cpu_bridge
from enginepool.workers.engine import BatchOutcome, EngineError, RowBatch, RowPart
from enginepool.workers.sglang.host.settings import SettingsError
from enginepool.workers.sglang.operations.score import head_scores
from enginepool.workers.sglang.score.cross_encoder import activation_of
from enginepool.workers.sglang.score.token_types import send_token_types, types_of
from enginepool.workers.texts import TextTask
from tests.engine.hosted import HostedEngine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(60)))
CLS, SEP = WORDS.index("[CLS]"), WORDS.index("[SEP]")
#: positions of the tiny models, and what their tokenizers cut to
POSITIONS = 48


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


@pytest.mark.parametrize(
    ("keys", "labels", "applied"),
    [
        ({}, 1, "sigmoid"),
        ({}, 2, ""),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, 1, ""),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, 2, "sigmoid"),
        ({"sentence_transformers": {"version": "5.1.0"}}, 1, "sigmoid"),
        (
            {
                "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"},
                "sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid",
            },
            1,
            "",
        ),
    ],
)
def test_the_configuration_names_what_is_applied_to_the_head(keys: dict[str, Any], labels: int, applied: str) -> None:
    assert activation_of(SimpleNamespace(num_labels=labels, **keys)) == applied


@pytest.mark.parametrize("named", ["torch.nn.modules.activation.Tanh", "os.system", "Sigmoid"])
def test_another_function_is_refused_by_name(named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        activation_of(SimpleNamespace(num_labels=1, sbert_ce_default_activation_function=named))


def test_the_outputs_of_a_head_go_through_sigmoid_and_its_logarithm_is_finite() -> None:
    plain = head_scores([0.0, -800.0, 40.0], Part([]), "sigmoid")
    assert plain.tolist() == [[0.5], [0.0], [1.0]]
    logarithms = head_scores([0.0, -800.0, 40.0], Part([], logprobs=True), "sigmoid")
    np.testing.assert_allclose(logarithms, [[-np.log(2)], [-800.0], [-np.exp(-40)]], rtol=1e-6)
    assert np.isnan(head_scores([np.inf, -np.inf, np.nan], Part([]), "sigmoid")).all(), "which is answered with an error"


# --- on the real engine --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library() -> Any:
    cpu_bridge.install()
    return importlib.import_module("transformers")


class CrossEncoder:
    """A checkpoint of random weights in `folder`, and what `CrossEncoder.predict` of sentence-transformers computes with it."""

    def __init__(self, library: Any, folder: Path, family: str) -> None:
        self.torch: Any = importlib.import_module("torch")
        self.family, self.folder = family, folder
        settings: dict[str, Any] = {
            "vocab_size": len(WORDS),
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "num_labels": 1,
            "initializer_range": 0.5,
        }
        if family == "bert":
            config = library.BertConfig(
                **settings, max_position_embeddings=POSITIONS, type_vocab_size=2, pad_token_id=0,
                sentence_transformers={"activation_fn": "torch.nn.modules.linear.Identity"},
            )  # fmt: skip
        else:
            # Its first position is behind that of the padding token.
            config = library.XLMRobertaConfig(
                **settings, max_position_embeddings=POSITIONS + 1, type_vocab_size=1, pad_token_id=0, bos_token_id=CLS,
                eos_token_id=SEP,
            )  # fmt: skip
        self.torch.manual_seed(1)
        kind = "Bert" if family == "bert" else "XLMRoberta"
        getattr(library, f"{kind}ForSequenceClassification")(config).save_pretrained(folder)
        self._tokenizer(family).save_pretrained(folder)
        load = library.AutoModelForSequenceClassification.from_pretrained
        self.model = load(folder, dtype=self.torch.float32).eval()
        self.tokenizer = library.AutoTokenizer.from_pretrained(folder)
        # As CrossEncoder does, which would fail beyond the positions of an XLM-R.
        self.tokenizer.model_max_length = min(self.tokenizer.model_max_length, config.max_position_embeddings)

    def _tokenizer(self, family: str) -> Any:
        tokenizers: Any = importlib.import_module("tokenizers")
        transformers: Any = importlib.import_module("transformers")
        core = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
        core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        pair = "[CLS] $A [SEP] $B:1 [SEP]:1" if family == "bert" else "[CLS] $A [SEP] [SEP] $B [SEP]"
        core.post_processor = tokenizers.processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair=pair, special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
        )
        names: dict[str, Any] = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
        if family == "bert":
            names["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]  # as its own class has them
        return transformers.PreTrainedTokenizerFast(tokenizer_object=core, model_max_length=POSITIONS, **names)

    def predict(self, pairs: list[tuple[str, str]]) -> Any:
        features = self.tokenizer(pairs, padding=True, truncation=True, return_tensors="pt")
        assert ("token_type_ids" in features) == (self.family == "bert")
        with self.torch.no_grad():
            logits = self.model(**features).logits
        return (logits if self.family == "bert" else self.torch.sigmoid(logits)).numpy()


@pytest.fixture(scope="module", params=["bert", "xlm-r"])
def encoder(request: pytest.FixtureRequest, library: Any, tmp_path_factory: pytest.TempPathFactory) -> CrossEncoder:
    return CrossEncoder(library, tmp_path_factory.mktemp("cross-encoder"), request.param)


@pytest.fixture(scope="module")
def engine(encoder: CrossEncoder) -> Iterator[HostedEngine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        hosted = HostedEngine(str(encoder.folder))
        yield hosted.wait_until_started()
    hosted.end()


def words(chance: random.Random, count: int) -> str:
    return " ".join(chance.choice(WORDS[4:]) for _ in range(count))


def scores_of(engine: HostedEngine, rows: list[list[int]]) -> Any:
    """Scores of whole rows, as one part."""
    flat = np.array([*chain.from_iterable(rows)], np.int32)
    [outcome] = engine.score(RowBatch((RowPart(np.array([], np.int32), flat, np.array([*map(len, rows)], np.uint32)),)))
    assert isinstance(outcome, BatchOutcome), outcome
    assert outcome.forwards == 1
    [part] = outcome.parts
    assert isinstance(part, dict), part
    return part["scores"]


def test_text_is_ranked_as_a_cross_encoder_ranks_it(encoder: CrossEncoder, engine: HostedEngine) -> None:
    """20 queries of 8 documents each, some of which are too long; joined without a separator nearly all rank otherwise."""
    chance = random.Random(3)
    equal = raw_equal = 0
    for _ in range(20):
        query = words(chance, chance.choice((2, 5, POSITIONS)))
        pairs = [(query, words(chance, chance.choice((0, 1, 6, 20, 2 * POSITIONS)))) for _ in range(8)]
        expected = encoder.predict(pairs)
        rows = engine.call("tokenize", pairs)
        assert max(map(len, rows)) <= POSITIONS
        found = scores_of(engine, rows)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
        equal += np.array_equal(np.argsort(found[:, 0]), np.argsort(expected[:, 0]))
        cut = [row[:POSITIONS] for row in engine.call("tokenize", pairs, True)]
        raw_equal += np.array_equal(np.argsort(scores_of(engine, cut)[:, 0]), np.argsort(expected[:, 0]))
    assert (equal, raw_equal <= 5) == (20, True), raw_equal


def test_rows_may_take_all_positions_and_no_more(encoder: CrossEncoder, engine: HostedEngine) -> None:
    can = engine.capabilities
    assert can is not None
    assert (can.context, can.separator, can.labels) == (POSITIONS, SEP, 1)
    assert can.activation == ("" if encoder.family == "bert" else "sigmoid")


def test_ids_of_pairs_and_of_single_texts_equal_a_direct_computation(encoder: CrossEncoder, engine: HostedEngine) -> None:
    between = [SEP] if encoder.family == "bert" else [SEP, SEP]
    rows = [[CLS, 10, 11, *between, 20, 21, SEP], [CLS, 10, 11, *between, 22, SEP], [CLS, 30, 31, SEP]]
    pairs = [("w6 w7", "w16 w17"), ("w6 w7", "w18")]
    found = scores_of(engine, rows)
    np.testing.assert_allclose(found[:2], encoder.predict(pairs), rtol=1e-4, atol=1e-5)
    assert engine.call("tokenize", [*pairs, ("", "w26 w27")]) == rows
    single = encoder.predict(["w26 w27"])  # type: ignore[list-item]
    np.testing.assert_allclose(found[2:], single, rtol=1e-4, atol=1e-5)


def test_a_pair_is_cut_in_its_item_as_the_tokenizer_cuts_one_text(encoder: CrossEncoder, engine: HostedEngine) -> None:
    chance = random.Random(5)
    query = words(chance, 6)
    items = [words(chance, 2 * POSITIONS), words(chance, 3), words(chance, POSITIONS)]
    for side, item_first in product(("left", "right"), (False, True)):
        pairs = [(item, query) if item_first else (query, item) for item in items]
        asked = Tokenize((0, 0), [], item_first=item_first, truncation=side, longest=POSITIONS)
        found = engine.call("text_ids", TextTask(pairs, asked))
        encoder.tokenizer.truncation_side = side
        how = "only_first" if item_first else "only_second"
        expected = encoder.tokenizer(*map(list, zip(*pairs, strict=True)), truncation=how, max_length=POSITIONS)["input_ids"]
        encoder.tokenizer.truncation_side = "right"
        assert (found.rows, found.truncated) == (expected, 2)
        assert [len(row) for row in found.rows][::2] == [POSITIONS, POSITIONS]
    default = engine.call("text_ids", TextTask([(query, items[0]), (query, items[1])], Tokenize((0, 0), [])))
    assert default.truncated == 1
    whole = engine.call("text_ids", TextTask([(query, items[0])], Tokenize((0, 0), [], truncation="error", longest=POSITIONS)))
    assert (len(whole.rows[0]) > POSITIONS, whole.truncated) == (True, 0)
    too_much = TextTask([(words(chance, POSITIONS), "w1")], Tokenize((0, 0), [], truncation="left", longest=POSITIONS))
    with pytest.raises(EngineError, match=r"bad_request items\[0\]: .* tokens of its query, which is not truncated; at most"):
        engine.call("text_ids", too_much)


def test_a_query_that_contains_the_separator_is_refused_where_types_tell_texts_apart(
    encoder: CrossEncoder, engine: HostedEngine
) -> None:
    pairs = [("w1", "w2"), ("w1 [SEP] w2", "w3")]
    if encoder.family == "bert":
        with pytest.raises(EngineError, match=r"items\[1\].*contains the separator '\[SEP\]'"):
            engine.call("tokenize", pairs)
    else:
        np.testing.assert_allclose(
            scores_of(engine, engine.call("tokenize", pairs)), encoder.predict(pairs), rtol=1e-4, atol=1e-5
        )


def test_logarithms_of_a_sigmoid_are_those_of_its_logits(encoder: CrossEncoder, engine: HostedEngine) -> None:
    if encoder.family == "bert":
        return
    row = RowPart(np.array([], np.int32), np.array([CLS, 9, SEP], np.int32), np.array([3], np.uint32))
    [outcome] = engine.score(RowBatch((row, dataclasses.replace(row, asked=Part([], logprobs=True)))))
    assert isinstance(outcome, BatchOutcome), outcome
    plain, logarithm = outcome.parts
    assert isinstance(plain, dict) and isinstance(logarithm, dict)
    np.testing.assert_allclose(logarithm["scores"], np.log(plain["scores"]), rtol=1e-4)
