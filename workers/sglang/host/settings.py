"""What SGLang is started with, and the budgets that follow from what it really runs with. Pure: no SGLang here.

A batch is one forward pass only if the engine never has to stop filling it. SGLang admits waiting rows to a forward while

- their lengths, each rounded up to a page, sum to less than `max_prefill_tokens`;
- their key-value pages, and one spare page a row, fit what is free in the pool;
- their number fits `max_running_requests`, in which rows of the forward before it may still be counted.

So the sum of all batches at a worker, not the largest of them, must stay within these: two that wait may be admitted together,
and the second must not be cut either. Options that would let SGLang cut, drop or re-run rows are refused with the reason.
"""

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from enginepool.workers.engine_settings import EngineSettings
from enginepool.workers.sglang.host.packing_settings import PACKED, refused_for_packing
from enginepool.workers.sglang.host.processes import STORAGES, replicas_of

#: What SGLang calls for new weights: `weights.load`, in its own processes.
LOADER = "enginepool.workers.sglang.weights.loader.load"
#: Tokens in flight when the config names no `max_batch_tokens`.
CPU_INFLIGHT_TOKENS = 8192
GPU_INFLIGHT_TOKENS = 32768
#: Rows in flight when the config names no `max_batch_rows`.
CPU_INFLIGHT_ROWS = 256
GPU_INFLIGHT_ROWS = 512
#: The same of an engine that packs. A packed row costs no request of its own, but one of the positions at which all of the
#: vocabulary is computed: 10 bytes for each token of it, 3 GB for this many rows of a vocabulary of 150,000.
PACKED_INFLIGHT_ROWS = 2048
#: With cached queries an engine has room for so many times the tokens in flight: a row counts in full, in case that its query
#: is gone, and computes its item alone.
CACHED_ROOM = 4
#: Of the device's memory, for weights and key-value pool. SGLang's own choice sets 1.5 MB aside for each token of
#: `max_prefill_tokens`, which leaves nothing on a small device; a quarter of it holds the activations of a scoring forward.
STATIC_FRACTION = 0.75
#: Tokens of the largest plain forward that runs as CUDA graphs. A small one is bound by the launching of kernels; a large one
#: would only compute the padding to the next captured size.
GRAPH_TOKENS = 6144
#: The same of an engine that packs. Without graphs its host needs 25 ms to launch a packed forward: in that time an H100
#: computes 10,000 tokens of a small model.
PACKED_GRAPH_TOKENS = 12_288

#: Settings that the worker gives itself, and where their values come from.
FIXED = {
    "model_path": "model of the group",
    "model": "model of the group",
    "device": "device of the group",
    "dtype": "dtype of the group",
    "custom_weight_loader": "the pool, whose weight updates have a loader of their own",
    "nccl_port": "the coordinator, which gives each worker its own",
}


class SettingsError(ValueError):
    """The engine cannot be started with these settings, or not run whole batches with them. The message is one line."""


def refuse_impossible(settings: EngineSettings) -> None:
    """Raise SettingsError for values that no engine can have. The device is resolved: never `auto`."""
    for name in ("max_batch_tokens", "max_batch_rows", "forwards_in_flight", "cached_query_tokens"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise SettingsError(f"{name} is {value}; it must be at least 1")
    for name in _DETERMINISTIC:
        if settings.device == "cpu" and (value := settings.options.get(name)):
            raise SettingsError(
                f"engine option {name}={value!r} is refused on a CPU: SGLang's batch-invariant kernels need a GPU"
            )


def refuse_shared_storage(options: Mapping[str, Any]) -> None:
    """Raise SettingsError for options of the user with which a checkpoint would find the KV caches of another one."""
    stored = next((name for name in STORAGES if options.get(name)), "")
    if stored and options.get("served_model_name"):
        raise SettingsError(
            f"engine option served_model_name is refused with {stored}: SGLang stores KV caches by it, and a published "
            "checkpoint would get those of the old weights; without it they are stored by the path of the model"
        )


def is_deterministic(resolved: Mapping[str, Any]) -> bool:
    """Whether an engine that runs with the settings `resolved` gives a row the same bits in every batch."""
    return any(resolved.get(name) for name in _DETERMINISTIC)


def token_room(settings: EngineSettings) -> int:
    """Tokens that the engine should have room for: those of all batches, with every row in full."""
    return inflight_tokens(settings) * (1 if settings.cached_query_tokens is None else CACHED_ROOM)


def inflight_tokens(settings: EngineSettings) -> int:
    """Tokens that this worker may have to compute for all its batches, if the engine has room."""
    if settings.max_batch_tokens is not None:
        return settings.max_batch_tokens * settings.forwards_in_flight
    return CPU_INFLIGHT_TOKENS if settings.device == "cpu" else GPU_INFLIGHT_TOKENS


def inflight_rows(settings: EngineSettings) -> int:
    """Rows that this worker may hold in all its batches, if the engine has room."""
    if settings.max_batch_rows is not None:
        return settings.max_batch_rows * settings.forwards_in_flight
    if settings.packs:
        return PACKED_INFLIGHT_ROWS
    return CPU_INFLIGHT_ROWS if settings.device == "cpu" else GPU_INFLIGHT_ROWS


@dataclass(frozen=True, slots=True)
class Running:
    """What the started engine says of itself.

    settings: SGLang's resolved settings; kv_tokens: size of the key-value pool; max_running: request slots;
    longest: the longest row that the scheduler accepts.
    """

    settings: Mapping[str, Any]
    kv_tokens: int
    max_running: int
    longest: int


@dataclass(frozen=True, slots=True)
class Budgets:
    """Bounds inside which every batch is one forward; the fields of `protocol.messages.Capabilities` of the same names."""

    context: int
    page: int
    batch_tokens: int
    batch_rows: int
    inflight_tokens: int
    inflight_rows: int
    cached_query: int = 0
    cached_tokens: int = 0


def engine_kwargs(settings: EngineSettings, known: Collection[str]) -> dict[str, Any]:
    """The keyword arguments of `sglang.Engine`.

    `known` are the settings that the installed SGLang has: unknown defaults are left out, unknown options are refused.
    The user's options win over the defaults.
    """
    refuse_unknown_options(settings.options, known)
    kwargs = {name: value for name, value in _defaults(settings).items() if name in known}
    kwargs.update(settings.options)
    if settings.packs:
        kwargs.update(PACKED)
    refuse_splitting(kwargs, packs=settings.packs)
    if settings.cached_query_tokens is not None:
        refuse_uncached(kwargs)
    return with_fixed(kwargs, settings)


def refuse_unknown_options(options: Collection[str], known: Collection[str]) -> None:
    """Raise SettingsError for options that the worker sets itself, or that the installed SGLang does not have."""
    for name in options:
        if name in FIXED:
            raise SettingsError(f"engine option {name!r} is not set here: it comes from {FIXED[name]}")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise SettingsError(f"engine option {name!r} is not known to the installed SGLang{hint}")


def with_fixed(kwargs: dict[str, Any], settings: EngineSettings) -> dict[str, Any]:
    """`kwargs` with what the worker sets itself."""
    dtype = "float32" if settings.device == "cpu" and settings.dtype == "auto" else settings.dtype
    # Replicas that are process groups of their own each need a port of their own: SGLang finds them.
    shared = replicas_of(kwargs) == 1 or kwargs.get("enable_dp_attention")
    port = {} if settings.nccl_port is None or not shared else {"nccl_port": settings.nccl_port}
    return kwargs | {"model_path": settings.model, "device": settings.device, "dtype": dtype} | port


def _defaults(settings: EngineSettings) -> dict[str, Any]:
    options = settings.options
    prefill = token_room(settings) + 1
    rows = inflight_rows(settings)
    defaults: dict[str, Any] = {
        "chunked_prefill_size": -1,
        "max_prefill_tokens": prefill,
        "max_running_requests": 2 * rows,
        "mem_fraction_static": STATIC_FRACTION,
        "schedule_policy": "fcfs",
        "enable_priority_scheduling": True,
        "disable_priority_preemption": True,
        "grammar_backend": "none",
        # Rows seldom begin alike, and each would be looked for and kept; long queries that rows share are asked for by name.
        "disable_radix_cache": settings.cached_query_tokens is None,
        # Models with a sliding window keep a second pool; as large as the first, the one rule above covers both.
        "swa_full_tokens_ratio": 1.0,
        "log_level": "error",
        "custom_weight_loader": [LOADER],
        **_graphs(settings),
    }
    if settings.device == "cpu":
        page = options.get("page_size") or 1
        pool = max(prefill, options.get("max_prefill_tokens", 0))
        rows = max(rows, options.get("max_running_requests", 0) // 2)
        defaults |= {
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "disable_overlap_schedule": True,
            # An idle scheduler polls without a pause: a core that a forward needs.
            "sleep_on_idle": True,
            "max_total_tokens": pool + (rows + 2) * page,
        }
    return defaults


def _graphs(settings: EngineSettings) -> dict[str, Any]:
    """A score is a prefill and never a decode, whose graphs would only cost start-up time and memory."""
    if settings.device == "cpu":
        return {"disable_cuda_graph": True, "disable_prefill_cuda_graph": True}
    most = PACKED_GRAPH_TOKENS if settings.packs else GRAPH_TOKENS
    return {"disable_decode_cuda_graph": True, "cuda_graph_max_bs_prefill": min(most, token_room(settings))}


#: The options with which SGLang computes a row with the same bits in every forward.
_DETERMINISTIC = ("enable_deterministic_inference", "rl_on_policy_target")

#: name -> (the values with which batches stay whole, why others are refused). What is absent has SGLang's default: fine.
_WHOLE: dict[str, tuple[tuple[Any, ...], str]] = {
    "dp_size": ((1, None), "SGLang sends the rows of a batch to its replicas one by one; start more workers instead"),
    "pp_size": ((1, None), "pipeline stages take a batch in pieces"),
    "nnodes": ((1, None), "a worker is one process group on one host"),
    "enable_dp_attention": ((False, None), "SGLang sends the rows of a batch to its replicas one by one"),
    "speculative_algorithm": ((None,), "a draft model adds forwards, and a scoring worker does not decode"),
    "dllm_algorithm": ((None,), "diffusion models take several forwards"),
    "disaggregation_mode": (("null", None), "a batch would run on another engine"),
    "enable_mixed_chunk": ((False, None), "rows would share forwards with decoding and be cut"),
    "prefill_max_requests": ((None,), "a batch of more rows would be split"),
    "enable_prefill_delayer": ((False, None), "rows could be held back from their batch"),
    "min_free_slots_delay": ((None, 1), "rows could be held back from their batch"),
    "hicache_storage_backend": ((None,), "rows whose beginnings are still read from there are held back from their batch"),
    "preferred_sampling_params": (
        (None,),
        "SGLang adds its biases and penalties to what is scored: the answers are other scores",
    ),
    "enable_eplb": ((False, None), "experts change places while they serve, and new weights would go to where they were"),
    "max_queued_requests": ((None,), "some rows of a batch would be refused while others run; the pool bounds its own queue"),
    "enable_mis": ((False, None), "the worker sets it where it packs; see packing of the group"),
    "allow_auto_truncate": ((False, None), "a row that is too long would be cut silently instead of refused"),
    "enable_tokenizer_batch_encode": ((False, None), "SGLang then refuses batches of token ids"),
    "tokenizer_worker_num": ((1, None), "it does not work in an engine inside a process"),
    "schedule_policy": (("fcfs",), "other orders put rows of several batches among each other"),
    "enable_priority_scheduling": ((True,), "the pool's priorities would not reach the engine"),
    "disable_priority_preemption": ((True,), "a preempted row runs again, in another forward"),
    "custom_sigquit_handler": ((None,), "the worker needs the signal to learn of the engine's end"),
}


def refuse_uncached(settings: Mapping[str, Any]) -> None:
    """Raise SettingsError when an engine with these settings keeps nothing that it has computed."""
    if settings.get("disable_radix_cache"):
        raise SettingsError("cached queries are kept in the radix cache, which is off; unset cached_query_tokens of the group")


def refuse_values(settings: Mapping[str, Any], rules: Mapping[str, tuple[tuple[Any, ...], str]]) -> None:
    """Raise SettingsError for a setting that has none of the values that its rule allows; a rule ends with the reason."""
    for name, (allowed, reason) in rules.items():
        if name in settings and settings[name] not in allowed:
            raise SettingsError(f"engine option {name}={settings[name]!r} is refused: {reason}")


def refuse_splitting(settings: Mapping[str, Any], *, packs: bool = False, chunks: bool = False) -> None:
    """Raise SettingsError when a batch could be cut, dropped or run again under these settings. `chunks`: a batch is no larger
    than a chunk."""
    refuse_values(settings, {name: rule for name, rule in _WHOLE.items() if not (packs and name == "enable_mis")})
    chunk = settings.get("chunked_prefill_size")
    prefill = settings.get("max_prefill_tokens")
    if not chunks and chunk is not None and chunk > 0 and (prefill is None or chunk < prefill):
        raise SettingsError(
            f"engine option chunked_prefill_size={chunk} is refused: batches of up to max_prefill_tokens={prefill} tokens"
            " would be cut into chunks; set it to -1, or no smaller than max_prefill_tokens"
        )


def reserved(running: Running, context: int, length: int) -> int:
    """Tokens of the model's context `length` that SGLang keeps for what it could generate, if that is why the longest row has
    `context` tokens; 0 where something else bounds it, as the key-value pool."""
    return length - context if context == running.longest and running.kv_tokens >= length else 0


def budgets(settings: EngineSettings, running: Running) -> Budgets:
    """What may be sent to the started engine, from what it really runs with.

    Raises SettingsError when that is nothing, or when SGLang resolved its settings to something that cuts batches.
    """
    resolved = running.settings
    # SGLang says what it resolved: another backend, or no multi-item scoring, would be wrong without a word.
    if settings.packs and (why := refused_for_packing(resolved)):
        raise SettingsError(f"the engine cannot pack: {why}; set packing of the group to off")
    refuse_splitting(resolved, packs=settings.packs)
    if settings.cached_query_tokens is not None:
        refuse_uncached(resolved)
    page = max(1, resolved.get("page_size") or 1)
    slots = min(running.max_running, resolved.get("pp_max_micro_batch_size") or running.max_running)
    rows = min(inflight_rows(settings), slots // 2)
    # In a small pool the spare page of each row may take a quarter at most: better fewer rows than no tokens.
    rows = min(rows, running.kv_tokens // (4 * page))
    room = running.kv_tokens - (rows + 1) * page
    tokens = min(token_room(settings), resolved["max_prefill_tokens"] - 1, room)
    chunk = resolved.get("chunked_prefill_size")
    if chunk is not None and chunk > 0:
        tokens = min(tokens, chunk)
    tokens = tokens // page * page
    if rows < 1 or tokens < 1:
        raise SettingsError(
            f"the engine has no room for one batch: max_running_requests={slots} (two for each row),"
            f" max_prefill_tokens={resolved['max_prefill_tokens']}, key-value pool {running.kv_tokens} tokens, page {page}"
        )
    cached_query = settings.cached_query_tokens or 0
    if cached_query and 2 * (cached_query + 2 * page) > tokens:
        raise SettingsError(f"cached_query_tokens is {cached_query}; two rows of that have no room in {tokens} tokens")
    cached_tokens = max(page, tokens // settings.forwards_in_flight // page * page) if cached_query else 0
    batch_tokens = min(tokens, inflight_tokens(settings)) // settings.forwards_in_flight
    batch_rows = rows // settings.forwards_in_flight
    if settings.max_batch_tokens is not None:
        batch_tokens = min(batch_tokens, settings.max_batch_tokens)
    if settings.max_batch_rows is not None:
        batch_rows = min(batch_rows, settings.max_batch_rows)
    return Budgets(
        context=min(running.longest, tokens, inflight_tokens(settings)),
        page=page,
        batch_tokens=max(page, batch_tokens // page * page),
        batch_rows=max(1, batch_rows),
        inflight_tokens=tokens,
        inflight_rows=rows,
        cached_query=cached_query,
        cached_tokens=cached_tokens,
    )
