"""Packed batches as SGLang takes and answers them, in recorded shapes; the models for which packing is wrong. No SGLang."""

import asyncio
import importlib.util
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from enginepool.protocol import packing
from enginepool.protocol.messages import Capabilities, Part
from enginepool.workers.engine import EngineError, Outputs, RowPart
from enginepool.workers.engine_settings import EngineSettings
from enginepool.workers.sglang.host.settings import SettingsError
from enginepool.workers.sglang.operations.score import HeadScores, LabelScores
from enginepool.workers.sglang.score.packing_support import (
    READ_AT_DELIMITERS,
    refuse_wrong_sharing,
    wrong_for_caching,
    wrong_for_packing,
)
from enginepool.workers.sglang.score.prompts import packed_prompts
from enginepool.workers.sglang.score.scoring import DELIMITER, EngineScoring
from tests.engine.forked import run_code


def part(query: list[int], items: list[list[int]], *labels: int, softmax: bool = False, **asked: Any) -> RowPart:
    flat = np.array([token for item in items for token in item], np.int32)
    lengths = np.array([len(item) for item in items], np.uint32)
    return RowPart(np.array(query, np.int32), flat, lengths, asked=Part([], list(labels), softmax, **asked))


@pytest.fixture
def behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries are never so short that rows are placed whole."""
    monkeypatch.setattr(packing, "WHOLE_QUERY", 0)


class Request(SimpleNamespace):
    """Stands for SGLang's request types: keeps what it is given."""

    def normalize_batch_and_arguments(self) -> None:
        self.items = [SimpleNamespace(priority=None) for _ in self.input_ids]

    def __getitem__(self, i: int) -> SimpleNamespace:
        return self.items[i]


TYPES = SimpleNamespace(GenerateReqInput=Request, EmbeddingReqInput=Request)
D = DELIMITER


@pytest.mark.usefixtures("behind")
def test_a_request_is_what_sglangs_own_multi_item_scoring_makes() -> None:
    """Two callers with one query and other labels, and one with another query."""
    parts = [part([1, 2], [[3], [4, 5]], 8, 9), part([6], [[7]], 8), part([1, 2], [[3]], 9, 10)]
    request = LabelScores().request(TYPES, packed_prompts(parts, 100, D), 5, False)
    assert request.input_ids == [[1, 2, D, 3, D, 4, 5, D, 3, D], [6, D, 7, D]]
    assert request.multi_item_delimiter_indices == [[2, 4, 7, 9], [1, 3]]
    assert request.token_ids_logprob == [[8, 9, 10], [8]]
    assert (request.return_logprob, request.logprob_start_len, request.stream) == (True, 0, False)
    assert request.sampling_params == {"max_new_tokens": 0}
    assert request.priority == 5
    assert len({len(rid) for rid in request.rid}) == 1 and len(set(request.rid)) == 2


def test_rows_that_share_no_query_are_one_request_for_each_set_of_labels() -> None:
    """The item first; a query of their own; a short query, which the next part has, too; and other labels."""
    own = part([1, 2, 3], [[4], [5, 6]], 8, 9)
    own = replace(own, query_lengths=np.array([1, 2], np.uint32))
    parts = [part([1], [[3]], 8, 9, item_first=True), own, part([7], [[6]], 8, 9), part([7], [[5]], 8, 9), part([], [[2]], 8)]
    prompts = packed_prompts(parts, 100, D)
    request = LabelScores().request(TYPES, prompts, 0, False)
    assert request.input_ids == [[D, 3, 1, D, 1, 4, D, 2, 3, 5, 6, D, 7, 6, D], [7, D, 5, D], [D, 2, D]]
    assert request.multi_item_delimiter_indices == [[0, 3, 6, 11, 14], [1, 3], [0, 2]]
    assert request.token_ids_logprob == [[8, 9], [8, 9], [8]]
    assert prompts.take_apart([["first", "a", "b", "c", "d"], ["first", "e"], ["first", "f"]], 5) == [
        ["a"], ["b", "c"], ["d"], ["e"], ["f"],
    ]  # fmt: skip


@pytest.mark.usefixtures("behind")
def test_a_request_for_a_head_carries_its_priority_in_each_sequence() -> None:
    prompts = packed_prompts([part([1], [[3]]), part([2], [[3]])], 100, D)
    request = HeadScores().request(TYPES, prompts, -3, hidden=True)
    assert request.return_pooled_hidden_states is True
    assert [request[i].priority for i in range(2)] == [-3, -3]
    assert request.multi_item_delimiter_indices == [[1, 3], [1, 3]]


def computed(kind: Any, parts: list[RowPart], answers: list[dict[str, Any]], *, hidden: bool = False) -> list[Outputs]:
    """What an engine makes of these answers of SGLang to a packed batch."""

    async def generate(request: Any, _: None) -> AsyncIterator[list[dict[str, Any]]]:
        yield answers

    def popped(rows: list[str]) -> list[Any]:
        return [SimpleNamespace(time=1.0, cached=0) for _ in rows]

    entries: Any = SimpleNamespace(expect=len, pop=popped)
    can = Capabilities(kind, 10_000, 100, 500, 50, 1000, 100, max_item=90)
    tm = SimpleNamespace(generate_request=generate)
    scoring = EngineScoring(tm, TYPES, entries, can, SimpleNamespace(settings={}, kv_tokens=0))  # type: ignore[arg-type]
    [operation] = scoring.operations.values()
    return asyncio.run(scoring.compute(operation, parts, hidden=hidden, packed=True))[0]


def at(**probabilities: float) -> list[tuple[float, int, None]]:
    """SGLang's entry of one delimiter: (log-probability, token id, no text)."""
    return [(float(np.log(p)), int(label[1:]), None) for label, p in probabilities.items()]


@pytest.mark.usefixtures("behind")
def test_labels_are_read_at_the_delimiters_behind_items_and_the_first_is_skipped() -> None:
    parts = [part([1], [[3], [4]], 8, 9), part([1], [[5]], 9, 10, softmax=True), part([2], [[6]], 8)]
    answers: list[dict[str, Any]] = [
        {
            "meta_info": {
                "input_token_ids_logprobs": [
                    at(t8=0.9, t9=0.9, t10=0.9),
                    at(t8=0.5, t9=0.25, t10=0.1),
                    at(t8=0.125, t9=0.5, t10=0.1),
                    at(t8=0.3, t9=0.3, t10=0.1),
                ]
            }
        },
        {"meta_info": {"input_token_ids_logprobs": [at(t8=0.9), at(t8=0.75)]}},
    ]
    first, second, third = computed("causal", parts, answers)
    np.testing.assert_allclose(first["scores"], [[0.5, 0.25], [0.125, 0.5]], rtol=1e-6)
    np.testing.assert_allclose(second["scores"], [[0.75, 0.25]], rtol=1e-6)
    np.testing.assert_allclose(third["scores"], [[0.75]], rtol=1e-6)
    assert first["scores"].dtype == np.float32
    peaked: list[dict[str, Any]] = [{"meta_info": {"input_token_ids_logprobs": [[], [(-900.0, 8, None)]]}}]
    alone = [part([1], [[3]], 8, logprobs=True)]
    [logarithm] = computed("causal", alone, peaked)
    assert logarithm["scores"].tolist() == [[-900.0]], "no probability of it fits into float32"


def test_packed_rows_are_softened_by_the_temperature() -> None:
    answers: list[dict[str, Any]] = [{"meta_info": {"input_token_ids_logprobs": [[], at(t8=0.5, t9=0.25)]}}]
    asked = Part([], [8, 9], softmax=True, temperature=0.5)
    rows = part([1], [[3]])
    [found] = computed("causal", [RowPart(rows.query, rows.items, rows.item_lengths, asked=asked)], answers)
    np.testing.assert_allclose(found["scores"], [[0.8, 0.2]], rtol=1e-6)


class Tensor:
    """As much of a tensor as is used: rows, `float().numpy()`."""

    def __init__(self, values: Any) -> None:
        self.values = np.array(values, np.float64)

    def __iter__(self) -> Any:
        return (Tensor(row) for row in self.values)

    def float(self) -> "Tensor":
        return self

    def numpy(self) -> np.ndarray[Any, Any]:
        return self.values


@pytest.mark.usefixtures("behind")
def test_heads_and_hidden_states_are_read_at_the_delimiters_behind_items() -> None:
    parts = [part([1], [[3], [4]]), part([1], [[5]], softmax=True)]
    answers: list[dict[str, Any]] = [
        {
            "meta_info": {},
            "embedding": [[9.0, 9.0], [1.0, 2.0], [3.0, 4.0], [0.0, 0.0]],
            "pooled_hidden_state": Tensor([[9, 9, 9], [1, 2, 3], [4, 5, 6], [7, 8, 9]]),
        }
    ]
    first, second = computed("classifier", parts, answers, hidden=True)
    assert first["scores"].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert second["scores"].tolist() == [[0.5, 0.5]]
    assert first["hidden"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert second["hidden"].tolist() == [[7, 8, 9]]
    assert list(computed("classifier", parts, answers)[0]) == ["scores"]


def test_a_head_without_hidden_states_is_an_error_that_says_so() -> None:
    parts = [part([1], [[3]])]
    answers: list[dict[str, Any]] = [{"meta_info": {}, "embedding": [[9.0], [1.0]]}]
    with pytest.raises(EngineError, match="no pooled hidden states"):
        computed("classifier", parts, answers, hidden=True)


QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 28,
    "rope_scaling": None,
    "is_encoder_decoder": False,
    "layer_types": ["full_attention"] * 2,
}


@pytest.mark.parametrize(
    "config",
    [
        QWEN3,
        QWEN3 | {"architectures": ["Qwen3ForSequenceClassification"]},
        {"model_type": "qwen2", "sliding_window": 32768, "use_sliding_window": False},
        {"model_type": "llama", "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "mixtral", "sliding_window": None, "num_local_experts": 8},
        {"model_type": "qwen3_moe", "rope_scaling": {"type": "yarn"}, "num_experts": 128},
    ],
)
def test_models_of_full_causal_attention_may_be_packed(config: dict[str, Any]) -> None:
    assert wrong_for_packing(config) == ""


def test_these_classes_of_the_installed_sglang_read_each_item_of_a_sequence() -> None:
    found = importlib.util.find_spec("sglang")
    assert found is not None and found.submodule_search_locations is not None
    names = set[str]()
    for file in (Path(found.submodule_search_locations[0]) / "srt/models").glob("*.py"):
        if "score_and_pool(" in (text := file.read_text()):
            names |= {*re.findall(r"\w+", text.partition("\nEntryClass")[2])}
    assert names == {*READ_AT_DELIMITERS}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding window"),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True}, "sliding window"),
        ({"model_type": "gemma2", "sliding_window": 4096}, "sliding window"),
        ({"model_type": "gemma3_text", "layer_types": ["sliding_attention", "full_attention"]}, "sliding window"),
        ({"model_type": "gpt_oss", "layer_types": ["sliding_attention", "full_attention"]}, "sliding window"),
        ({"model_type": "llama4_text", "attention_chunk_size": 8192}, "sliding window"),
        ({"model_type": "qwen2_vl", "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, "mrope"),
        ({"model_type": "qwen3_vl", "text_config": {"rope_parameters": {"mrope_section": [24, 20, 20]}}}, "mrope"),
        ({"model_type": "mamba2", "state_size": 128}, "recurrent or hybrid"),
        ({"model_type": "jamba"}, "recurrent or hybrid"),
        ({"model_type": "falcon_h1"}, "recurrent or hybrid"),
        ({"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]}, "recurrent or hybrid"),
        ({"model_type": "qwen3_5", "text_config": {"full_attention_interval": 4}}, "recurrent or hybrid"),
        ({"model_type": "kimi_linear", "linear_attn_config": {"kda_layers": [1]}}, "recurrent or hybrid"),
        ({"model_type": "minimax", "attn_type_list": [0, 1]}, "recurrent or hybrid"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*"}, "recurrent or hybrid"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "latent attention"),
        ({"model_type": "kimi_vl", "text_config": {"kv_lora_rank": 512}}, "latent attention"),
        ({"model_type": "bert", "architectures": ["BertForSequenceClassification"]}, "encoder"),
        ({"model_type": "xlm-roberta"}, "encoder"),
        ({"model_type": "modernbert"}, "encoder"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder"),
        ({"model_type": "qwen2", "is_causal": False}, "encoder"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "encoder"),
        ({"model_type": "bloom"}, "ALiBi"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "SGLang's LlamaForSequenceClassification reads one item"),
        ({"architectures": ["Qwen2ForRewardModel"]}, "reads one item"),
    ],
)
def test_models_for_which_multi_item_scoring_is_wrong_are_refused_with_the_reason(config: dict[str, Any], said: str) -> None:
    assert said in wrong_for_packing(config)
    # Of what looks back alone, a query's states do not depend on what follows.
    assert bool(wrong_for_caching(config)) == (said == "encoder")


@pytest.mark.parametrize(
    "config", [{"architectures": ["BertForSequenceClassification"]}, {"text_config": {"model_type": "xlm-roberta"}}]
)
def test_queries_of_an_encoder_are_not_cached(config: dict[str, Any]) -> None:
    wanted = EngineSettings(model="model", device="cpu", cached_query_tokens=64)
    with pytest.raises(SettingsError, match=r"looks ahead.*unset cached_query_tokens"):
        refuse_wrong_sharing(wanted, config)
    refuse_wrong_sharing(wanted, {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"})
    refuse_wrong_sharing(EngineSettings(model="model", device="cpu"), config)


REAL = """
import numpy as np
from enginepool.protocol import packing
from sglang.srt.constants import MIS_DELIMITER_TOKEN_ID
from sglang.srt.managers import io_struct
from enginepool.protocol.messages import Part
from enginepool.workers.engine import RowPart
from enginepool.workers.sglang.operations.score import HeadScores, LabelScores
from enginepool.workers.sglang.score.prompts import packed_prompts
from enginepool.workers.sglang.score.scoring import DELIMITER

def part(query, *labels):
    lengths, asked = np.array([1, 2], np.uint32), Part([], list(labels))
    return RowPart(np.array(query, np.int32), np.array([3, 4, 5], np.int32), lengths, asked=asked)

assert DELIMITER == MIS_DELIMITER_TOKEN_ID
packing.WHOLE_QUERY = 0
prompts = packed_prompts([part([1, 2], 7, 8), part([6], 9)], 100, DELIMITER)
for operation in (LabelScores(), HeadScores()):
    request = operation.request(io_struct, prompts, 5, True)
    request.normalize_batch_and_arguments()
    assert request.batch_size == 2 and not request.is_single
    first, second = request[0], request[1]
    assert first.input_ids == [1, 2, DELIMITER, 3, DELIMITER, 4, 5, DELIMITER]
    assert first.multi_item_delimiter_indices == [2, 4, 7] and second.multi_item_delimiter_indices == [1, 3, 6]
    assert first.priority == second.priority == 5
    if hasattr(first, "token_ids_logprob"):
        assert first.token_ids_logprob == [7, 8] and second.token_ids_logprob == [9]
        assert first.logprob_start_len == 0 and first.return_logprob is True
        assert first.sampling_params["max_new_tokens"] == 0
    else:
        assert first.return_pooled_hidden_states is True
packing.WHOLE_QUERY = 256
prompts = packed_prompts([part([1, 2]), part([6])], 100, DELIMITER)
request = HeadScores().request(io_struct, prompts, 5, True)
assert request.batch_size == 1 and not request.is_single
d = DELIMITER
assert request[0].input_ids == [d, 1, 2, 3, d, 1, 2, 4, 5, d, 6, 3, d, 6, 4, 5, d]
assert request[0].multi_item_delimiter_indices == [0, 4, 9, 12, 16]
"""


@pytest.mark.engine
def test_the_installed_sglang_reads_packed_requests_as_they_are_meant() -> None:
    status, said = run_code(REAL)
    assert status == 0, said


WITHOUT_A_QUERY = """
from types import SimpleNamespace
import numpy as np
import torch
from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend, MultiItemScoringParams
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.pooler import pool_at_delimiter_positions
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from enginepool.workers.sglang.patches.attention import placed

chance = np.random.default_rng(3)
for _ in range(20):
    places, lengths = [], []
    for query in chance.integers(0, 3, chance.integers(1, 4)):
        steps = chance.integers(2, 6, chance.integers(1, 4))
        places.append(query + np.concatenate(([0], np.cumsum(steps))))
        lengths.append(int(places[-1][-1]) + 1)
    total = sum(lengths)
    batch = SimpleNamespace(
        forward_mode=ForwardMode.EXTEND, multi_item_delimiter_indices=[torch.tensor(one) for one in places],
        extend_prefix_lens_cpu=[0] * len(places), extend_seq_lens_cpu=lengths, input_ids=torch.zeros(total, dtype=torch.int64),
        positions=torch.cat([torch.arange(length) for length in lengths]),
    )
    params = FlashInferAttnBackend._process_multi_item_scoring(SimpleNamespace(enable_mis=True), batch)
    queries, items, longest, positions = placed(places, lengths)
    assert params.prefix_len_ptr.tolist() == queries.tolist() and params.token_pos_in_items_len == items.shape[1]
    assert params.token_pos_in_items_ptr.tolist() == items.reshape(-1).tolist()
    assert params.max_item_len_ptr.tolist() == longest.tolist()
    assert batch.positions.clamp(min=0).tolist() == positions.tolist()

    # Each value is the place at which it was read.
    states = torch.arange(total, dtype=torch.float32)[:, None]
    ends = np.split(np.arange(total), np.cumsum(lengths)[:-1])
    rows = [[float(mine[place - 1]) for place in one[1:]] for mine, one in zip(ends, places)]
    found = pool_at_delimiter_positions(states, batch, torch.device("cpu"))
    assert [values[1:, 0].tolist() for values in found] == rows
    metadata = SimpleNamespace(
        extend_seq_lens_cpu=lengths, token_ids_logprobs=[[0, 1]] * len(places), extend_return_top_logprob=False,
        extend_token_ids_logprob=True, extend_logprob_pruned_lens_cpu=None, mm_input_embeds=None,
    )
    head = SimpleNamespace(_get_logits=lambda hidden, *_: torch.cat((hidden / 100, torch.zeros_like(hidden)), 1))
    answer = LogitsProcessor.compute_logprobs_for_multi_item_scoring(
        head, batch.input_ids, states, None, metadata, batch.multi_item_delimiter_indices
    )
    for values, expected in zip(answer.input_token_ids_logprobs_val, rows):
        difference = [round(100 * float(one[0] - one[1])) for one in values[1:]]
        assert difference == expected, (difference, expected)
"""


@pytest.mark.engine
@pytest.mark.every_version
def test_the_installed_sglang_reads_each_row_of_a_sequence_without_a_query_at_its_end() -> None:
    status, said = run_code(WITHOUT_A_QUERY)
    assert status == 0, said
