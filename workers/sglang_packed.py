"""Packed batches in SGLang's own request types, and its answers to them, as in its own multi-item scoring. No SGLang here.

One request object is one message to the scheduler; each sequence is one request in it. SGLang answers at every delimiter of a
sequence: log-probabilities for a causal model, the head's outputs and pooled hidden states for the others.
"""

import uuid
from collections.abc import Mapping
from typing import Any, cast

from enginepool.workers.engine import EngineError, PartScores, ScorePart
from enginepool.workers.packed import Sequence, take_apart
from enginepool.workers.sglang_readout import head_scores, hidden_rows, label_shares

#: Token id that SGLang itself puts between items. Positions are sent beside the ids, and no item attends to a delimiter.
DELIMITER = 9999


def packed_labels(types: Any, joined: list[Sequence], priority: int) -> Any:
    """Ask for the log-probabilities of each sequence's labels before each of its delimiters."""
    return types.GenerateReqInput(
        **_common(joined, priority),
        token_ids_logprob=[sequence.labels for sequence in joined],
        return_logprob=True,
        logprob_start_len=0,
        stream=False,
        sampling_params={"max_new_tokens": 0},
    )


def packed_heads(types: Any, joined: list[Sequence], priority: int, hidden: bool) -> Any:
    """Ask for the head's outputs before each delimiter, and with `hidden` for what the head saw."""
    request = types.EmbeddingReqInput(**_common(joined, priority), return_pooled_hidden_states=hidden)
    request.normalize_batch_and_arguments()
    for i in range(len(request.input_ids)):
        request[i].priority = priority  # SGLang 0.5.17 does not hand it on
    return request


def _common(joined: list[Sequence], priority: int) -> dict[str, Any]:
    return {
        "input_ids": [sequence.ids for sequence in joined],
        "multi_item_delimiter_indices": [sequence.delimiters for sequence in joined],
        "rid": [uuid.uuid4().hex for _ in joined],
        "priority": priority,
    }


def packed_label_scores(joined: list[Sequence], answers: list[dict[str, Any]], parts: list[ScorePart]) -> list[PartScores]:
    """Scores of each part from a causal model's answers."""
    rows = take_apart(joined, [answer["meta_info"]["input_token_ids_logprobs"] for answer in answers], len(parts))
    return [PartScores(label_shares(mine, part.labels, part.softmax)) for part, mine in zip(parts, rows, strict=True)]


def packed_head_scores(
    joined: list[Sequence], answers: list[dict[str, Any]], parts: list[ScorePart], hidden: bool
) -> list[PartScores]:
    """Scores, and hidden states, of each part from the answers of a model with a head."""
    rows = take_apart(joined, [answer["embedding"] for answer in answers], len(parts))
    scores = [head_scores(mine, part.softmax) for part, mine in zip(parts, rows, strict=True)]
    if not hidden:
        return [PartScores(mine) for mine in scores]
    if any(answer.get("pooled_hidden_state") is None for answer in answers):
        raise EngineError("the engine returned no pooled hidden states")
    states = take_apart(joined, [list(answer["pooled_hidden_state"]) for answer in answers], len(parts))
    return [PartScores(mine, hidden_rows(pooled)) for mine, pooled in zip(scores, states, strict=True)]


# --- models for which it is wrong ----------------------------------------------------------------------------------------

_RECURRENT = ("linear", "mamba", "recurrent", "rwkv", "conv", "ssm", "kda", "gdn", "lightning")
_RECURRENT_KEYS = (
    "ssm_cfg", "mamba_d_state", "mamba_d_ssm", "ssm_state_size", "state_size", "linear_num_value_heads", "linear_attn_config",
    "hybrid_override_pattern", "full_attention_interval", "attn_type_list", "lru_width", "conv_L_cache",
)  # fmt: skip
_RECURRENT_TYPES = ("mamba", "jamba", "rwkv", "falcon_h1", "bamba", "zamba", "recurrent_gemma", "lfm2", "nemotron_h")
_WINDOW_KEYS = ("sliding_window_size", "sliding_window_pattern", "attention_chunk_size", "window_size", "local_attention")
_ENCODER_TYPES = ("bert", "electra", "roberta", "xlm", "nomic", "jina", "t5", "bart", "whisper", "gte")
#: positions that are not written into queries and keys, but added to the attention's scores
_ALIBI_TYPES = ("bloom", "mpt")


def wrong_for_packing(config: Mapping[str, Any]) -> str:
    """Why multi-item scoring computes another function, or none, for a model with this `config.json`; "" where it is right."""
    for part in (config, *(config.get(key) for key in ("text_config", "llm_config", "language_config", "thinker_config"))):
        if isinstance(part, Mapping) and (why := _wrong(cast("Mapping[str, Any]", part))):
            return why
    return ""


def _wrong(config: Mapping[str, Any]) -> str:
    kind = str(config.get("model_type") or "").lower()
    names = " ".join(map(str, config.get("architectures") or ())).lower()
    layers = [str(layer).lower() for key in ("layer_types", "layers_block_type") for layer in config.get(key) or ()]
    if any(mark in layer for layer in layers for mark in _RECURRENT) or any(
        config.get(key) not in (None, [], 0) for key in _RECURRENT_KEYS
    ):
        return "recurrent or hybrid layers carry state from one item into the next"
    if any(mark in kind for mark in _RECURRENT_TYPES):
        return "recurrent or hybrid layers carry state from one item into the next"
    if config.get("kv_lora_rank") is not None:
        return "multi-head latent attention has no kernel that keeps items apart"
    if config.get("is_encoder_decoder") or config.get("is_causal") is False or config.get("use_bidirectional_attention"):
        return "an encoder looks ahead, from one item into the next"
    if any(mark in kind for mark in _ENCODER_TYPES) or "bert" in names or "encoder" in names or "crossenc" in names:
        return "an encoder looks ahead, from one item into the next"
    if layers:
        if any(layer not in ("full_attention", "attention") for layer in layers):
            return "a sliding window counts tokens of other items"
    elif config.get("sliding_window") and config.get("use_sliding_window") is not False:
        return "a sliding window counts tokens of other items"
    if any(config.get(key) not in (None, [], 0) for key in _WINDOW_KEYS):
        return "a sliding window counts tokens of other items"
    if _has_mrope(config):
        return "multimodal rotary positions (mrope) are not restarted for each item"
    if config.get("alibi") or config.get("use_alibi") or kind in _ALIBI_TYPES:
        return "positions by attention bias (ALiBi) are not restarted for each item"
    return ""


def _has_mrope(config: Mapping[str, Any]) -> bool:
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.get(key)
        if isinstance(rope, Mapping):
            found = cast("Mapping[str, Any]", rope)
            if found.get("mrope_section") or "mrope" in (found.get("type"), found.get("rope_type")):
                return True
    return False
