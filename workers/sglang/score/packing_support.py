"""For which models SGLang's multi-item scoring or its cache of prefixes computes another function, told from their
`config.json`. No SGLang here."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, cast

import msgspec

from enginepool.workers.engine_settings import EngineSettings
from enginepool.workers.sglang.host.packing_settings import PACKED, refused_for_packing
from enginepool.workers.sglang.host.settings import SettingsError, is_deterministic
from enginepool.workers.sglang.operations.base import SCORING_HEADS
from enginepool.workers.sglang.operations.table import OPERATIONS

_RECURRENT = ("linear", "mamba", "recurrent", "rwkv", "conv", "ssm", "kda", "gdn", "lightning")
_RECURRENT_KEYS = (
    "ssm_cfg", "mamba_d_state", "mamba_d_ssm", "ssm_state_size", "state_size", "linear_num_value_heads", "linear_attn_config",
    "hybrid_override_pattern", "full_attention_interval", "attn_type_list", "lru_width", "conv_L_cache",
)  # fmt: skip
_RECURRENT_TYPES = ("mamba", "jamba", "rwkv", "falcon_h1", "bamba", "zamba", "recurrent_gemma", "lfm2", "nemotron_h")
_WINDOW_KEYS = ("sliding_window_size", "sliding_window_pattern", "attention_chunk_size", "window_size", "local_attention")
_UNREAD = "its config.json cannot be read"
_ENCODER_TYPES = ("bert", "electra", "roberta", "xlm", "nomic", "jina", "t5", "bart", "whisper", "gte")
#: The models with a head of which SGLang reads the outputs at each item of a sequence; of others those at its last token.
READ_AT_DELIMITERS = ("LlamaForClassification", "Qwen2ForSequenceClassification", "Qwen3ForSequenceClassification")
#: positions that are not written into queries and keys, but added to the attention's scores
_ALIBI_TYPES = ("bloom", "mpt")


def wrong_for_packing(config: Mapping[str, Any]) -> str:
    """Why multi-item scoring computes another function, or none, for a model with this `config.json`; "" where it is right."""
    why = next((why for part in _parts(config) if (why := _wrong(part))), "")
    return why or _reads_one_item(config)


def _reads_one_item(config: Mapping[str, Any]) -> str:
    name = str(next(iter(config.get("architectures") or ()), ""))
    one = any(head in name for head in SCORING_HEADS) and name not in READ_AT_DELIMITERS
    return f"SGLang's {name} reads one item of a sequence" if one else ""


def wrong_for_caching(config: Mapping[str, Any]) -> str:
    """Why a query that was computed alone cannot be reused for rows that begin with it; "" if it can."""
    return "an encoder looks ahead, from the query into the item" if any(map(_looks_ahead, _parts(config))) else ""


def _parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for part in (config, *(config.get(key) for key in ("text_config", "llm_config", "language_config", "thinker_config"))):
        if isinstance(part, Mapping):
            yield cast("Mapping[str, Any]", part)


def refuse_wrong_sharing(settings: EngineSettings, config: Mapping[str, Any]) -> None:
    """Raise SettingsError when rows of a model with this `config.json` cannot share a query as is settings."""
    if settings.packs and (why := wrong_for_packing(config)):
        raise SettingsError(f"this model cannot be packed: {why}; set packing of the group to off")
    if settings.cached_query_tokens is not None and (why := wrong_for_caching(config)):
        raise SettingsError(f"queries of this model cannot be cached: {why}; unset cached_query_tokens of the group")


def why_unpacked(settings: EngineSettings, known: Collection[str]) -> str:
    """Why an engine with these settings cannot pack, or "". The device is resolved; `known`: as `engine_kwargs` has it."""
    if settings.generates:
        return "rows next to sequences are not packed"
    if settings.operations and "score" not in settings.operations:
        return "scores alone are packed"
    if settings.device != "cuda":
        return f"multi-item scoring needs FlashInfer's attention, which runs on CUDA; the device is {settings.device}"
    if settings.cached_query_tokens is not None:
        return "queries are cached (cached_query_tokens)"
    if missing := [name for name in PACKED if name not in known]:
        return f"the installed SGLang has no setting {', '.join(missing)}"
    if is_deterministic(settings.options):
        return "a packed row has other bits than a plain one, and the engine is to be deterministic"
    return refused_for_packing(settings.options)


def with_packing(
    settings: EngineSettings,
    config: Callable[[], Mapping[str, Any]],
    known: Collection[str],
    generates: Callable[[list[str], bool], bool],
) -> EngineSettings:
    """`settings` with `packing` decided: "on" where engine, model and device allow it, else "off".

    Args:
        config: reads the model's `config.json`; empty: it is not known.
        known: as `engine_kwargs` has it.
        generates: SGLang's `is_generation_model`.

    Raises:
        SettingsError: `packing` was "on", and cannot be.
    """
    if settings.packing == "off":
        return settings
    why = why_unpacked(settings, known)
    if not why:
        found = config()
        why = (_unscored(found, settings.options, generates) or wrong_for_packing(found)) if found else _UNREAD
    if why and settings.packs:
        raise SettingsError(f"packing is on, and cannot be: {why}; set packing of the group to auto")
    return msgspec.structs.replace(settings, packing="off" if why else "on")


def _unscored(config: Mapping[str, Any], options: Mapping[str, Any], generates: Callable[[list[str], bool], bool]) -> str:
    """Why no operation of the model with this `config.json` has rows that are packed, or ""."""
    names = list(config.get("architectures") or ["?"])
    generation = generates(names, bool(options.get("is_embedding")))
    packs = any(one.packs for one in OPERATIONS if one.serves(generation, names[0]))
    return "" if packs else "scores alone are packed, and this model embeds"


def _looks_ahead(config: Mapping[str, Any]) -> bool:
    kind = str(config.get("model_type") or "").lower()
    names = " ".join(map(str, config.get("architectures") or ())).lower()
    if config.get("is_encoder_decoder") or config.get("is_causal") is False or config.get("use_bidirectional_attention"):
        return True
    return any(mark in kind for mark in _ENCODER_TYPES) or "bert" in names or "encoder" in names or "crossenc" in names


def _wrong(config: Mapping[str, Any]) -> str:
    kind = str(config.get("model_type") or "").lower()
    layers = [str(layer).lower() for key in ("layer_types", "layers_block_type") for layer in config.get(key) or ()]
    recurrent = any(mark in layer for layer in layers for mark in _RECURRENT) or any(mark in kind for mark in _RECURRENT_TYPES)
    if recurrent or _has(config, _RECURRENT_KEYS):
        return "recurrent or hybrid layers carry state from one item into the next"
    if config.get("kv_lora_rank") is not None:
        return "multi-head latent attention has no kernel that keeps items apart"
    if _looks_ahead(config):
        return "an encoder looks ahead, from one item into the next"
    slides = bool(config.get("sliding_window")) and config.get("use_sliding_window") is not False
    if layers:
        slides = any(layer not in ("full_attention", "attention") for layer in layers)
    if slides or _has(config, _WINDOW_KEYS):
        return "a sliding window counts tokens of other items"
    if _has_mrope(config):
        return "multimodal rotary positions (mrope) are not restarted for each item"
    if config.get("alibi") or config.get("use_alibi") or kind in _ALIBI_TYPES:
        return "positions by attention bias (ALiBi) are not restarted for each item"
    return ""


def _has(config: Mapping[str, Any], keys: Iterable[str]) -> bool:
    return any(config.get(key) not in (None, [], 0) for key in keys)


def _has_mrope(config: Mapping[str, Any]) -> bool:
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.get(key)
        if isinstance(rope, Mapping):
            found = cast("Mapping[str, Any]", rope)
            if found.get("mrope_section") or "mrope" in (found.get("type"), found.get("rope_type")):
                return True
    return False
