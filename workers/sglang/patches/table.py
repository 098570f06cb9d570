"""Every private name of SGLang that is replaced, called or read here: where, why, and with which signatures it was tested.

Private is what SGLang does not document for its users: it may change with any release. `refuse_unknown` holds the installed
SGLang against this table before a model is loaded, so that a changed function is refused by its name; later it would show as a
wrong score or as an engine that ends. A test reads the same table: it fails when a name of SGLang is used that is not here.
"""

import importlib
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from enginepool.workers.sglang.host.settings import SettingsError

#: the versions that all of this was tested with
TESTED = "0.5.17 to 0.5.23"

ENGINE = "sglang.srt.entrypoints.engine"
SCHEDULER = "sglang.srt.managers.scheduler"
RECEIVER = "sglang.srt.managers.scheduler_components.request_receiver"
UPDATER = "sglang.srt.managers.scheduler_components.weight_updater"
MODEL_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"
WORKER = "sglang.srt.managers.tp_worker"
RUNNER = "sglang.srt.model_executor.model_runner"
BATCH = "sglang.srt.managers.schedule_batch"
RESULTS = "sglang.srt.managers.utils"
DETOKENIZER = "sglang.srt.managers.detokenizer_manager"
TOKENIZER = "sglang.srt.managers.tokenizer_manager"
REQUESTS = "sglang.srt.managers.io_struct"
TIMES = "sglang.srt.observability.req_time_stats"
LOGPROBS = "sglang.srt.layers.logprob_processor"
LOGITS = "sglang.srt.layers.logits_processor"
GATHER = "sglang.srt.distributed.device_communicators.triton_symm_mem_ag"
LOADER = "sglang.srt.model_loader.loader"
SETTINGS = "sglang.srt.server_args"
FLASHINFER = "sglang.srt.layers.attention.flashinfer_backend"
MODEL = "sglang.srt.configs.model_config"
POOLER = "sglang.srt.layers.pooler"
VERSION = "sglang.version"


@dataclass(frozen=True, slots=True)
class Private:
    """One private name of SGLang.

    file: the file here that uses it.
    module, name: where SGLang has it; `Class.name` is a method, or an attribute of the class or of its instances.
    how: `replaced` by ours, `called`, or `read`; `added` is a name that is set on an object of SGLang.
    why: what it is used for.
    signatures: the names of its parameters in each tested version; `...` at the end stands for any further ones, which are
        handed on. None at all: it is a class, or data.
    optional: versions that lack it are supported, too.
    """

    file: str
    module: str
    name: str
    how: Literal["replaced", "called", "read", "added"]
    why: str
    signatures: tuple[str, ...] = ()
    optional: bool = False
    versions: str = TESTED


def _read(file: str, module: str, owner: str, names: str, why: str, *, optional: bool = False) -> list[Private]:
    return [Private(file, module, f"{owner}.{name}", "read", why, optional=optional) for name in names.split()]


PRIVATE: tuple[Private, ...] = (
    # --- the process of the worker ------------------------------------------------------------------------------------------
    Private("host/build.py", ENGINE, "Engine", "called", "the engine itself", ("self, **kwargs",)),
    Private("host/build.py", ENGINE, "ServerArgs", "read", "which settings this version has"),
    Private("host/build.py", ENGINE, "Engine.run_scheduler_process_func", "replaced", "our entry of a scheduler's process"),
    Private(
        "host/build.py", ENGINE, "Engine.run_detokenizer_process_func", "replaced", "our entry of the detokenizer's process"
    ),
    Private(
        "host/process.py",
        SCHEDULER,
        "run_scheduler_process",
        "called",
        "ports are replaced by place",
        ("server_args, port_args, ...",),
    ),
    Private(
        "host/process.py", DETOKENIZER, "run_detokenizer_process", "called", "keeps notes", ("server_args, port_args, ...",)
    ),
    *_read(
        "patches/scheduler.py", SETTINGS, "PortArgs", "detokenizer_ipc_name tokenizer_ipc_name", "answers skip the detokenizer"
    ),
    *_read(
        "host/engine.py", ENGINE, "Engine", "tokenizer_manager loop", "the one way to ask the engine; its unused loop is closed"
    ),
    Private("host/host.py", ENGINE, "Engine.shutdown", "called", "the end", ("self",)),
    *_read("host/capabilities.py", ENGINE, "Engine", "_scheduler_init_result", "the size of the key-value pool"),
    *_read("host/capabilities.py", ENGINE, "SchedulerInitResult", "scheduler_infos", "the size of the key-value pool"),
    Private("host/capabilities.py", TOKENIZER, "TokenizerManager.get_internal_state", "called", "resolved settings", ("self",)),
    *_read(
        "host/capabilities.py",
        TOKENIZER,
        "TokenizerManager",
        "is_generation max_req_input_len context_len num_reserved_tokens model_config",
        "what the model is, and the longest row",
    ),
    *_read("host/tokenizer.py", TOKENIZER, "TokenizerManager", "tokenizer", "whether the model has one"),
    Private("host/engine.py", TOKENIZER, "TokenizerManager.flush_cache", "called", "the command flush", ("self, timeout_s",)),
    Private("host/engine.py", TOKENIZER, "TokenizerManager.handle_loop", "called", "answers are read on our loop", ("self",)),
    Private(
        "host/engine.py",
        TOKENIZER,
        "TokenizerManager.auto_create_handle_loop",
        "replaced",
        "SGLang's own way takes SIGTERM and SIGQUIT away from the worker",
        ("self",),
    ),
    *_read("host/engine.py", TOKENIZER, "TokenizerManager", "event_loop", "answers are read on our loop"),
    Private(
        "host/engine.py", TOKENIZER, "TokenizerManager.freeze_gc", "called", "no collection of what start-up left", ("self",)
    ),
    # --- requests and answers -----------------------------------------------------------------------------------------------
    Private("score/scoring.py", TOKENIZER, "TokenizerManager.generate_request", "called", "scores", ("self, obj, request",)),
    Private("host/requests.py", REQUESTS, "GenerateReqInput", "called", "label log-probabilities"),
    Private("host/requests.py", REQUESTS, "EmbeddingReqInput", "called", "outputs of a head"),
    Private(
        "host/requests.py",
        REQUESTS,
        "EmbeddingReqInput.normalize_batch_and_arguments",
        "called",
        "0.5.17 does not hand the priority on",
        ("self",),
    ),
    *_read("host/requests.py", REQUESTS, "EmbeddingReqInput", "input_ids rid", "the rows of a request"),
    Private(
        "score/forward_counter.py",
        TOKENIZER,
        "TokenizerManager._handle_batch_output",
        "replaced",
        "reads in which forward each row ran",
        ("self, recv_obj",),
    ),
    *_read(
        "score/forward_counter.py", TOKENIZER, "TokenizerManager", "enable_metrics", "whether SGLang reads the times itself"
    ),
    *_read(
        "score/forward_counter.py", REQUESTS, "BatchEmbeddingOutput", "rids time_stats cached_tokens", "one message per forward"
    ),
    *_read(
        "score/forward_counter.py", REQUESTS, "BatchTokenIDOutput", "rids time_stats cached_tokens", "one message per forward"
    ),
    Private("host/engine.py", REQUESTS, "unwrap_from_pickle", "called", "unpacks the times", ("obj",)),
    Private(
        "score/token_types.py",
        TOKENIZER,
        "TokenizerManager._create_tokenized_object",
        "replaced",
        "rows of ids get token types",
        ("self, obj, input_text, input_ids, input_embeds, mm_inputs, token_type_ids",),
    ),
    Private(
        "score/cross_encoder.py",
        MODEL,
        "ModelConfig._derive_context_length",
        "replaced",
        "rows of a cross-encoder take all positions",
        ("self, context_length",),
    ),
    *_read(
        "score/cross_encoder.py", MODEL, "ModelConfig", "hf_config context_len", "rows of a cross-encoder take all positions"
    ),
    Private(
        "score/cross_encoder.py",
        POOLER,
        "get_cross_encoder_activation_function",
        "replaced",
        "the engine answers logits",
        ("config",),
    ),
    Private("host/build.py", POOLER, "CrossEncodingPooler", "read", "its module has the function"),
    Private(
        "embed.py", POOLER, "Pooler.__init__", "replaced", "embeddings are normalized here", ("self, pooling_type, normalize",)
    ),
    # --- weight updates -----------------------------------------------------------------------------------------------------
    Private("weights/updates.py", REQUESTS, "UpdateWeightsFromTensorReqInput", "called", "carries a ticket"),
    Private(
        "weights/updates.py",
        TOKENIZER,
        "TokenizerManager.update_weights_from_tensor",
        "called",
        "takes weights",
        ("self, obj, request",),
    ),
    *_read(
        "weights/updates.py",
        TOKENIZER,
        "TokenizerManager",
        "update_weights_from_tensor_communicator",
        "questions are asked while the engine serves, without the writer lock",
    ),
    Private(
        "weights/updates.py",
        TOKENIZER,
        "TokenizerManager._update_weight_version_if_provided",
        "called",
        "a new version number alone",
        ("self, weight_version",),
    ),
    Private(
        "patches/scheduler.py",
        UPDATER,
        "SchedulerWeightUpdaterManager.update_weights_from_tensor",
        "replaced",
        "tickets are accepted outside a session",
        ("self, recv_req",),
    ),
    Private(
        "patches/scheduler.py",
        UPDATER,
        "SchedulerWeightUpdaterManager.begin_weight_update",
        "read",
        "whether there are sessions",
        ("self, recv_req",),
        optional=True,
        versions="0.5.21 to 0.5.23",
    ),
    Private(
        "patches/scheduler.py",
        UPDATER,
        "_WeightUpdateSession",
        "called",
        "the session of a ticket",
        ("selector, loaded_weights",),
        optional=True,
        versions="0.5.21 to 0.5.23",
    ),
    Private(
        "patches/scheduler.py",
        UPDATER,
        "SchedulerWeightUpdaterManager._session",
        "replaced",
        "the session of a ticket",
        optional=True,
        versions="0.5.21 to 0.5.23",
    ),
    *_read("patches/scheduler.py", REQUESTS, "UpdateWeightsFromTensorReqInput", "load_format", "whether a request is a ticket"),
    Private(
        "patches/scheduler.py",
        MODEL_UPDATER,
        "WeightUpdater.update_weights_from_tensor",
        "replaced",
        "tickets reach the loader where SGLang takes no updates",
        ("self, named_tensors, load_format",),
    ),
    *_read("patches/scheduler.py", MODEL_UPDATER, "WeightUpdater", "get_model", "the model of a ticket"),
    Private(
        "host/process.py",
        LOADER,
        "DefaultModelLoader._get_all_weights",
        "replaced",
        "notes what the model's own load takes",
        ("self, model_config, model",),
    ),
    Private(
        "patches/scheduler.py",
        SCHEDULER,
        "Scheduler.flush_cache",
        "called",
        "caches of old weights",
        ("self, empty_cache", "self"),
    ),
    Private("patches/scheduler.py", SCHEDULER, "Scheduler.__init__", "replaced", "keeps the scheduler for `flush_caches`"),
    # --- forwards -----------------------------------------------------------------------------------------------------------
    Private(
        "patches/scheduler.py",
        SCHEDULER,
        "Scheduler.event_loop_overlap",
        "replaced",
        "requests are received in a forward",
        ("self",),
    ),
    Private(
        "patches/scheduler.py",
        SCHEDULER,
        "Scheduler.is_disable_overlap_for_batch",
        "replaced",
        "a forward that is nearly over is answered before the next launch",
        ("self, batch, last_batch",),
    ),
    Private("patches/scheduler.py", SCHEDULER, "Scheduler.request_receiver", "replaced", "requests are received in a forward"),
    Private(
        "patches/scheduler.py",
        RECEIVER,
        "SchedulerRequestReceiver.recv_requests",
        "called",
        "requests are received in a forward",
        ("self", "self, local_reqs"),
    ),
    *_read(
        "patches/scheduler.py",
        SCHEDULER,
        "Scheduler",
        "server_args last_batch running_batch waiting_queue result_queue is_generation",
        "whether all that runs are scores",
    ),
    *_read("patches/scheduler.py", SCHEDULER, "Scheduler", "tp_worker", "whether forwards are CUDA graphs"),
    *_read("patches/scheduler.py", WORKER, "TpModelWorker", "model_runner", "whether forwards are CUDA graphs"),
    *_read(
        "patches/scheduler.py",
        RUNNER,
        "ModelRunner",
        "prefill_cuda_graph_runner decode_cuda_graph_runner",
        "whether forwards are CUDA graphs",
    ),
    *_read("patches/scheduler.py", SETTINGS, "ServerArgs", "tp_size pp_size dp_size", "ranks must decide alike"),
    *_read(
        "patches/scheduler.py",
        BATCH,
        "ScheduleBatch",
        "forward_mode is_prefill_only is_empty",
        "whether all that runs are scores",
    ),
    *_read("patches/scheduler.py", RESULTS, "GenerationBatchResult", "copy_done", "the end of a forward"),
    Private(
        "patches/scheduler.py",
        TIMES,
        "SchedulerReqTimeStats.__getstate__",
        "replaced",
        "says of all rows when they began",
        ("self",),
    ),
    *_read(
        "patches/scheduler.py",
        TIMES,
        "SchedulerReqTimeStats",
        "enable_metrics forward_entry_time",
        "when a row's forward began",
    ),
    Private("host/build.py", LOGPROBS, "OutputLogprobProcessor", "read", "finds its module again in the scheduler's process"),
    Private("host/build.py", LOGITS, "LogitsProcessor", "read", "finds its module again in the scheduler's process"),
    Private(
        "patches/scheduler.py",
        LOGPROBS,
        "get_token_ids_logprobs_batch_optimized",
        "replaced",
        "labels are picked without waiting",
        ("logprobs, token_ids_logprobs",),
    ),
    Private(
        "patches/scheduler.py",
        LOGITS,
        "get_token_ids_logprobs_raw",
        "replaced",
        "labels are picked without waiting",
        ("logprobs, token_ids_logprobs_list, stage, extend_logprob_pruned_lens_cpu, no_copy_to_cpu",),
    ),
    Private(
        "patches/scheduler.py",
        GATHER,
        "MultimemAllGatherer.__init__",
        "replaced",
        "logits are gathered by NCCL alone",
        ("self, max_tokens, enabled, skip_entry_sync",),
        optional=True,
    ),
    *_read(
        "patches/scheduler.py",
        LOGITS,
        "triton_symm_mem_ag",
        "MultimemAllGatherer",
        "logits are gathered by NCCL alone",
        optional=True,
    ),
    # --- FlashInfer, on a GPU alone -----------------------------------------------------------------------------------------
    Private(
        "patches/attention.py",
        FLASHINFER,
        "FlashInferIndicesUpdaterPrefill.update_single_wrapper",
        "replaced",
        "prefills are planned from lengths on the host",
        (
            "self, req_pool_indices, seq_lens, seq_lens_cpu, seq_lens_sum, prefix_lens, prefill_wrappers, use_ragged,"
            " encoder_lens, spec_info, fixed_split_size, multi_item_params, cross_attention_custom_mask,"
            " extend_prefix_lens_cpu, custom_kv_indices, ...",
        ),
    ),
    Private(
        "patches/attention.py",
        FLASHINFER,
        "FlashInferIndicesUpdaterPrefill.call_begin_forward",
        "replaced",
        "prefills are planned from lengths on the host",
        (
            "self, wrapper_ragged, wrapper_paged, req_pool_indices, paged_kernel_lens, paged_kernel_lens_sum, seq_lens,"
            " prefix_lens, kv_start_idx, kv_indptr, qo_indptr, use_ragged, spec_info, use_sliding_window_kv_pool,"
            " fixed_split_size, multi_item_params, cross_attention_custom_mask, seq_lens_cpu, custom_kv_indices, ...",
        ),
    ),
    Private(
        "patches/attention.py",
        FLASHINFER,
        "FlashInferAttnBackend._process_multi_item_scoring",
        "replaced",
        "places of items are computed on the host",
        ("self, forward_batch",),
    ),
    Private(
        "patches/attention.py",
        FLASHINFER,
        "MultiItemScoringParams",
        "called",
        "places of items",
        ("prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr",),
    ),
    Private("patches/attention.py", FLASHINFER, "FlashInferIndicesUpdaterPrefill._prefixes", "added", "lengths for the plan"),
    *_read(
        "patches/attention.py",
        "sglang.srt.model_executor.forward_batch_info",
        "ForwardBatch",
        "multi_item_delimiter_indices extend_seq_lens_cpu extend_prefix_lens_cpu positions",
        "the sequences of a forward",
    ),
)


def refuse_unknown(version: str, private: Iterable[Private] = PRIVATE, *, flashinfer: bool) -> None:
    """Raise SettingsError, with their names, when the installed SGLang has changed some of these.

    Args:
        version: SGLang's.
        flashinfer: whether FlashInfer's attention will be used; without it, that module is not imported.
    """
    wrong = list(unknown(one for one in private if flashinfer or one.module != FLASHINFER))
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise SettingsError(f"SGLang {version} is not supported: {wrong[0]}{more}; tested are {TESTED}")


def unknown(private: Iterable[Private]) -> Iterator[str]:
    """Of each name that the installed SGLang lacks, or has with another signature: what is wrong with it."""
    for one in private:
        if one.how == "added":
            continue
        where = f"{one.module}.{one.name}"
        try:
            found = _found(importlib.import_module(one.module), one.name)
        except ImportError as error:
            found, where = None, f"{where} ({error})"
        if found is None:
            if not one.optional:
                yield f"{where} does not exist"
        elif one.signatures and not any(_fits(_parameters(found), known) for known in one.signatures):
            yield f"{where}({_parameters(found)}) has another signature than ({' or '.join(one.signatures)})"


def _found(module: Any, name: str) -> Any:
    """The object of that name; of an attribute that only instances have, True. None: there is none."""
    found = module
    for part in name.split("."):
        owner, found = found, getattr(found, part, None)
        if found is None:
            return True if isinstance(owner, type) and part in _instance_names(owner) else None
    return found


def _instance_names(owner: type) -> set[str]:
    """What methods of a class mention, among them the attributes that they set, and the fields that it declares."""
    names: set[str] = set()
    for base in owner.__mro__:
        names.update(inspect.get_annotations(base))
        for method in vars(base).values():
            code = getattr(inspect.unwrap(method) if callable(method) else method, "__code__", None)
            names.update(code.co_names if code is not None else ())
    return names


def _parameters(found: Any) -> str:
    """The names of its parameters, `*` and `**` before those that collect."""
    function = found.__init__ if isinstance(found, type) and not hasattr(found, "__struct_fields__") else found
    marks = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    names = [marks.get(one.kind, "") + one.name for one in inspect.signature(function).parameters.values()]
    if function is not found and names[:1] == ["self"] and "**kwargs" not in names:
        names = names[1:]  # what a dataclass is made from
    return ", ".join(names)


def _fits(parameters: str, known: str) -> bool:
    return parameters == known or (known.endswith("...") and f"{parameters}, ".startswith(known.removesuffix("...")))
