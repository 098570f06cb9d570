"""What SGLang is started with where it generates, and the bounds that follow. Pure: no SGLang here.

A sequence needs no whole batches: SGLang puts it into the forwards of its running batch, in pieces and next to others. So an
engine that only generates takes SGLang's own defaults, and the options that would cut batches of rows. One that runs rows as
well has the bounds of `mixed.py`.
"""

from collections.abc import Collection, Mapping
from typing import Any

from enginepool.workers.engine_settings import EngineSettings
from enginepool.workers.sglang.generate.mixed import mixed_defaults, refuse_mixed, refuse_options, wanted_rows
from enginepool.workers.sglang.host.processes import replicas_of
from enginepool.workers.sglang.host.settings import (
    LOADER,
    Budgets,
    Running,
    SettingsError,
    inflight_tokens,
    is_deterministic,
    refuse_unknown_options,
    refuse_values,
    with_fixed,
)

#: Tokens of the key-value pool, and sequences at once, on a CPU. SGLang's own choice there is most of the host's memory.
CPU_POOL_TOKENS = 8192
CPU_SEQUENCES = 64

#: SGLang's own `max_prefill_tokens`
DEFAULT_PREFILL_TOKENS = 16_384

#: name -> (the values that work, why others are refused). What is absent has SGLang's default: fine.
_WORKS: dict[str, tuple[tuple[Any, ...], str]] = {
    "nnodes": ((1, None), "a worker is one process group on one host"),
    "disaggregation_mode": (("null", None), "a sequence would go on in another engine"),
    "enable_eplb": ((False, None), "experts change places while they serve, and new weights would go to where they were"),
    "enable_mis": ((False, None), "rows next to sequences are not packed; see packing of a group that scores"),
    "preferred_sampling_params": ((None,), "they would replace what a request leaves at its default, which it means"),
    "max_queued_requests": ((None,), "a sequence over it would fail instead of wait; the pool bounds its own queue"),
    "allow_auto_truncate": ((False, None), "a prompt that is too long would be cut silently instead of refused"),
    "tokenizer_worker_num": ((1, None), "it does not work in an engine inside a process"),
    "custom_sigquit_handler": ((None,), "the worker needs the signal to learn of the engine's end"),
}
#: With these SGLang calls no logit processor for some tokens, or does not say at which position.
_WITHOUT_PROCESSORS = ("speculative_algorithm", "dllm_algorithm", "enable_mixed_chunk")
#: With these a step may give a sequence several tokens.
_SEVERAL = ("speculative_algorithm", "dllm_algorithm")
#: With these a token that was computed comes back in another place of the key-value pool.
_OTHER_PLACES = ("enable_hierarchical_cache", "hicache_storage_backend", "enable_lmcache")
#: the orders of SGLang's queue in which a priority can come first
_WITH_PRIORITY = ("fcfs", "lof")


def refuse_scoring(settings: EngineSettings) -> None:
    """Raise SettingsError for settings that only an engine that scores has."""
    if settings.mixed:
        refuse_mixed(settings)
        return
    for name in ("cached_query_tokens", "max_batch_tokens", "max_batch_rows"):
        if getattr(settings, name):
            raise SettingsError(f"{name} is {getattr(settings, name)}; a worker that generates has no batches of rows")


def generation_kwargs(settings: EngineSettings, known: Collection[str], *, grammars: bool) -> dict[str, Any]:
    """The keyword arguments of `sglang.Engine` where it generates. As `engine_kwargs`; `grammars`: whether SGLang's default
    grammar backend works here."""
    refuse_scoring(settings)
    refuse_unknown_options(settings.options, known)
    kwargs = {name: value for name, value in _defaults(settings, grammars).items() if name in known}
    kwargs.update(settings.options)
    refuse_values(kwargs, _WORKS)
    if settings.mixed:
        refuse_options(kwargs)
    if not grammars and kwargs.get("grammar_backend") in (None, "xgrammar"):
        raise SettingsError("engine option grammar_backend='xgrammar' is refused: it does not work here; use 'none'")
    return with_fixed(kwargs, settings)


def _defaults(settings: EngineSettings, grammars: bool) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "enable_priority_scheduling": settings.options.get("schedule_policy", "fcfs") in _WITH_PRIORITY,
        "log_level": "error",
        "custom_weight_loader": [LOADER],
        # SGLang refuses both together.
        "enable_custom_logit_processor": not settings.options.get("enable_watermark"),
    }
    if settings.mixed:
        defaults |= mixed_defaults(settings)
    if not grammars:
        defaults["grammar_backend"] = "none"
    if settings.options.get("enable_return_hidden_states"):
        # Not those of whole prompts, which no caller gets.
        defaults["return_hidden_states_mode"] = "last"
    if settings.device == "cpu":
        rows, tokens = (wanted_rows(settings), inflight_tokens(settings)) if settings.mixed else (0, 0)
        page = settings.options.get("page_size") or 1
        defaults |= {
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "lora_backend": "torch_native",
            "disable_overlap_schedule": True,
            "disable_cuda_graph": True,
            "disable_prefill_cuda_graph": True,
            # An idle scheduler polls without a pause: a core that a forward needs.
            "sleep_on_idle": True,
            "max_total_tokens": CPU_POOL_TOKENS + tokens + (rows + 1) * page * bool(rows),
            "max_running_requests": CPU_SEQUENCES + rows,
            # The fast ones are torchvision's, which a CPU environment has no build of.
            "disable_fast_image_processor": True,
        }
    return defaults


def generation_budgets(running: Running) -> Budgets:
    """What the started engine runs at once. Raises SettingsError when that is nothing, or when SGLang resolved its settings to
    something that does not work here.

    `context` bounds prompt and new tokens together: SGLang cuts what a sequence may get silently where its context, or its
    key-value pool with a page to spare on both sides, ends before.
    """
    refuse_values(running.settings, _WORKS)
    if running.settings.get("enable_return_routed_experts") and (running.settings.get("chunked_prefill_size") or -1) < 1:
        why = "SGLang notes routed experts of so many tokens of a forward"
        raise SettingsError(
            f"engine option chunked_prefill_size={running.settings.get('chunked_prefill_size')!r} is refused: {why}"
        )
    page = max(1, running.settings.get("page_size") or 1)
    context = min(running.longest + 1, running.kv_tokens - 2 * page)
    if context < 2 or running.max_running < 1:
        raise SettingsError(
            f"the engine has no room for one sequence: max_running_requests={running.max_running},"
            f" key-value pool {running.kv_tokens} tokens, page {page}"
        )
    # What it runs is spread over its replicas; no sequence is.
    replicas = replicas_of(running.settings)
    rows, tokens = replicas * running.max_running, replicas * running.kv_tokens
    return Budgets(context, page, batch_tokens=tokens, batch_rows=rows, inflight_tokens=tokens, inflight_rows=rows)


def prefill_tokens(settings: Mapping[str, Any]) -> int:
    """Tokens of prompts that SGLang computes in one forward of each replica, from its resolved `settings`."""
    most, chunk = settings.get("max_prefill_tokens") or DEFAULT_PREFILL_TOKENS, settings.get("chunked_prefill_size") or -1
    return replicas_of(settings) * (min(most, chunk) if chunk > 0 else most)


def hidden_of(settings: Mapping[str, Any], size: int) -> int:
    """The size of the hidden states that this engine gives with each token; 0: it gives none, or one for several tokens."""
    several = settings.get("stream_interval", 1) != 1 or any(settings.get(name) for name in _SEVERAL)
    return size if settings.get("enable_return_hidden_states") and not several and not _in_stages(settings) else 0


def _in_stages(settings: Mapping[str, Any]) -> bool:
    """Whether no process of the engine has all layers."""
    return (settings.get("pp_size") or 1) > 1


def experts_of(settings: Mapping[str, Any], config: Any) -> tuple[int, int]:
    """(layers, k) of the routed experts that this engine gives with each sequence; (0, 0): none. `config`: of the model.

    SGLang notes them by the place of a token in its key-value pool. What a hierarchical cache brings back has another place.
    """
    without = any(settings.get(name) for name in (*_SEVERAL, *_OTHER_PLACES, "enable_dp_attention"))
    if not settings.get("enable_return_routed_experts") or without or _in_stages(settings):
        return 0, 0
    return config.num_hidden_layers, config.num_experts_per_tok


def generation_features(settings: Mapping[str, Any], tokenizer: bool) -> tuple[str, ...]:
    """What this engine's `generate` has besides tokens, from SGLang's resolved `settings`."""
    features: list[str] = []
    if tokenizer and not settings.get("skip_tokenizer_init"):
        features = ["stop_text"] if settings.get("grammar_backend") in (None, "none") else ["grammar", "stop_text"]
        if "grammar" in features and settings.get("reasoning_parser"):
            features.append("reasoning_parser")
    if settings.get("enable_custom_logit_processor") and not any(settings.get(name) for name in _WITHOUT_PROCESSORS):
        features.append("logit_processors")
    if is_deterministic(settings):
        features.append("deterministic")
    return tuple(features)
