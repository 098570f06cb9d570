"""For which models SGLang's multi-item scoring computes another function, told from their `config.json`. No SGLang here."""

from collections.abc import Mapping
from typing import Any, cast

from enginepool.workers.sglang.settings import SettingsError

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


def refuse_wrong_packing(config: Mapping[str, Any]) -> None:
    """Raise SettingsError when a model with this `config.json` cannot be scored packed."""
    if why := wrong_for_packing(config):
        raise SettingsError(f"this model cannot be scored packed: {why}; let packed_workers of the group be 0")


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
