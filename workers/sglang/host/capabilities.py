"""What an engine that has started runs with, and what it can do as far as that tells. No SGLang here."""

from dataclasses import asdict, replace
from typing import Any

from enginepool.protocol.messages import Capabilities
from enginepool.workers.engine_settings import EngineSettings
from enginepool.workers.packed import MAX_ITEM
from enginepool.workers.sglang.generate.adapter_loads import adapter_features
from enginepool.workers.sglang.generate.adapter_slots import adapter_names
from enginepool.workers.sglang.generate.media import media_features
from enginepool.workers.sglang.generate.mixed import mixed_budgets
from enginepool.workers.sglang.generate.settings import experts_of, generation_budgets, generation_features, hidden_of
from enginepool.workers.sglang.host.settings import Running, SettingsError, budgets, is_deterministic, reserved
from enginepool.workers.sglang.host.tokenizer import tokenizer_of
from enginepool.workers.sglang.operations.table import OPERATIONS
from enginepool.workers.sglang.score.cross_encoder import activation_of, is_cross_encoder, positions
from enginepool.workers.sglang.score.packing_support import refuse_wrong_sharing
from enginepool.workers.sglang.text.chat_rows import has_template
from enginepool.workers.sglang.text.engine_tokenizer import token_bytes


async def what_runs(engine: Any) -> Running:
    """What the `sglang.Engine` says of itself. SGLang's answers must be read meanwhile."""
    tm = engine.tokenizer_manager
    state: dict[str, Any] = (await tm.get_internal_state())[0]
    info: dict[str, Any] = engine._scheduler_init_result.scheduler_infos[0]
    return Running(
        settings=state,
        kv_tokens=info["max_total_num_tokens"],
        max_running=state["effective_max_running_requests_per_dp"],
        # One less than each bound: SGLang's tokenizer manager and its scheduler refuse a row as long as their bound.
        longest=min(tm.max_req_input_len, tm.context_len - tm.num_reserved_tokens) - 1,
    )


def capabilities_of(tm: Any, name: str, version: str, settings: EngineSettings, running: Running) -> Capabilities:
    """Capabilities from what the engine really runs with; the warm-up measures its pace, and the sizes of its outputs.

    Args:
        tm: SGLang's tokenizer manager, which knows the model.
        name: the model, as the pool's config calls it.
        version: SGLang's.

    Raises:
        SettingsError: whole batches cannot be run with these settings.
    """
    if settings.generates:
        return _generating(tm, name, version, settings, running)
    if settings.packs or settings.cached_query_tokens is not None:
        refuse_wrong_sharing(settings, tm.model_config.hf_config.to_dict())
    bounds = budgets(settings, running)
    architectures: list[str] = getattr(tm.model_config.hf_config, "architectures", None) or ["?"]
    operations = [one for one in OPERATIONS if one.serves(tm.is_generation, architectures[0])]
    names = tuple(operation.name for operation in operations)
    if missing := [one for one in settings.operations if one not in names]:
        raise SettingsError(f"operations: this model is for {', '.join(names)}, not for {missing[0]}")
    for operation in operations:
        operation.refuse_settings(settings, running.settings)
    config = tm.model_config.hf_config
    crossing, tokenizer = is_cross_encoder(config), tokenizer_of(tm)
    features = ("chat_template",) if has_template(tokenizer) and not crossing else ()
    features += ("deterministic",) if is_deterministic(running.settings) else ()
    return Capabilities(
        kind=operations[0].kind,
        operations=settings.operations or names,
        vocab=tm.model_config.vocab_size,
        model=name,
        engine=f"sglang {version}",
        device=settings.device,
        **_built(tm, running),
        text=tokenizer is not None,
        token_bytes=token_bytes(tokenizer),
        features=features,
        max_item=min(MAX_ITEM, bounds.context) if settings.packs and "score" in (settings.operations or names) else 0,
        separator=getattr(tokenizer, "sep_token_id", None) if crossing else None,
        activation=activation_of(config) if crossing else "",
        reserved=reserved(running, bounds.context, tm.context_len),
        **asdict(replace(bounds, context=min(bounds.context, positions(config))) if crossing else bounds),
    )


def _built(tm: Any, running: Running) -> dict[str, Any]:
    """How the model lies in the engine's processes."""
    sizes = (running.settings.get(f"{kind}_size") or 1 for kind in ("tp", "pp", "dp", "ep"))
    return {"dtype": str(tm.model_config.dtype).removeprefix("torch."), "parallel": tuple(sizes)}


def adapters_of(tm: Any) -> dict[str, Any]:
    """SGLang's records of the adapters that are loaded, by name."""
    known = tm.lora_registry
    return known.get_all_adapters()


def _generating(tm: Any, name: str, version: str, settings: EngineSettings, running: Running) -> Capabilities:
    """As `capabilities_of`, of an engine that generates."""
    if not tm.is_generation:
        raise SettingsError("operations: this model predicts no next token, so it cannot generate")
    bounds, tokenizer = generation_budgets(running), tokenizer_of(tm)
    text = tokenizer is not None
    ends_by_model = bounds.context == running.longest + 1 and running.kv_tokens >= tm.context_len
    kept = tm.context_len - bounds.context if ends_by_model else 0
    features = (*generation_features(running.settings, text), *media_features(tm), *adapter_features(running.settings))
    if settings.mixed:
        rows = [one.name for one in OPERATIONS if one.serves(True, "")]
        if missing := [name for name in settings.operations if name not in (*rows, "generate")]:
            raise SettingsError(f"operations: this model is for {', '.join(rows)} and generate, not for {missing[0]}")
        bounds = mixed_budgets(settings, running, bounds)
        kept = reserved(running, bounds.context, tm.context_len)
        features += ("chat_template",) if has_template(tokenizer) else ()
    return Capabilities(
        kind="causal",
        operations=settings.operations,
        vocab=tm.model_config.vocab_size,
        model=name,
        engine=f"sglang {version}",
        device=settings.device,
        **_built(tm, running),
        text=text,
        token_bytes=token_bytes(tokenizer),
        features=features,
        hidden=hidden_of(running.settings, tm.model_config.hidden_size),
        experts=experts_of(running.settings, tm.model_config.hf_text_config),
        reserved=kept,
        adapters=adapter_names(adapters_of(tm)),
        **asdict(bounds),
    )
