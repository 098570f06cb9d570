"""Every private name of SGLang that is replaced, called or read here: where, why, and with which signatures it was tested.

Private is what SGLang does not document for its users: it may change with any release. `signature_check` holds the installed
SGLang against this table before a model is loaded, so that a changed function is refused by its name; later it would show as a
wrong score or as an engine that ends. A test reads the same table: it fails when a name of SGLang is used that is not here.
"""

from enginepool.workers.sglang.patches.attention_table import OF_ATTENTION
from enginepool.workers.sglang.patches.generation_table import OF_GENERATION
from enginepool.workers.sglang.patches.mixed_table import OF_MIXED
from enginepool.workers.sglang.patches.modules import (
    ADAPTERS,
    BATCH,
    DEEP_GEMM,
    DETOKENIZER,
    ENGINE,
    FORWARD,
    GATHER,
    GRAMMAR,
    LAYERS,
    LAYERS_OF_STAGES,
    LOADER,
    LOGITS,
    LOGPROBS,
    METRICS,
    MODEL,
    MODEL_UPDATER,
    PAGES,
    POOLER,
    PROCESSORS,
    PROFILER,
    RECEIVER,
    REQUESTS,
    RESULTS,
    RUNNER,
    SCHEDULER,
    SETTINGS,
    TIMES,
    TOKENIZER,
    UPDATER,
    WORKER,
)
from enginepool.workers.sglang.patches.packing_table import OF_PACKING
from enginepool.workers.sglang.patches.private_name import Private
from enginepool.workers.sglang.patches.private_name import private as _private
from enginepool.workers.sglang.patches.rows_table import OF_ROWS
from enginepool.workers.sglang.patches.saved_table import OF_SAVED

# fmt: off
PRIVATE: tuple[Private, ...] = (
    *_private(
        "host/build.py", ENGINE,
        ("Engine", "called", "the engine itself", "self, **kwargs"),
        ("ServerArgs", "read", "which settings this version has"),
        ("Engine.run_scheduler_process_func", "replaced", "our entry of a scheduler's process"),
        ("Engine.run_detokenizer_process_func", "replaced", "our entry of the detokenizer's process"),
        ("run_data_parallel_controller_process", "replaced", "our entry of the process that starts replicas"),
    ),
    *_private(
        "host/build.py", ENGINE,
        ("run_scheduler_process_with_init_pipe", "replaced", "our entry of a scheduler that is started before its replica"),
        optional=True,
    ),
    *_private(
        "host/build.py", GRAMMAR,
        ("XGrammarGrammar.apply_vocab_mask", "called", "whether grammars work on a CPU", "self, logits, vocab_mask"),
        (
            "XGrammarGrammar.allocate_vocab_mask", "called", "whether grammars work on a CPU",
            "self, vocab_size, batch_size, device",
        ),
        optional=True,
    ),
    *_private(
        "host/build.py", PAGES, ("alloc_decode_naive", "read", "whether a CPU has pages"), optional=True,
    ),
    *_private("host/build.py", DEEP_GEMM, ("DEEPGEMM_SCALE_UE8M0", "read", "a variable that SGLang sets after its import")),
    *_private(
        "host/process.py", SCHEDULER,
        ("run_scheduler_process", "called", "ports are replaced by place", "server_args, port_args, ..."),
    ),
    *_private("host/process.py", MODEL, ("ModelConfig.is_draft_model", "read", "the load of a draft model is its own affair")),
    *_private("host/process.py", SETTINGS, ("ServerArgs.enable_lora lora_paths", "read", "whether memory is to be pinned")),
    *_private(
        "host/process.py", DETOKENIZER,
        ("run_detokenizer_process", "called", "keeps notes", "server_args, port_args, ..."),
    ),
    *_private(
        "patches/scheduler.py", SETTINGS,
        ("PortArgs.detokenizer_ipc_name tokenizer_ipc_name", "read", "answers skip the detokenizer"),
        ("ServerArgs.tp_size pp_size dp_size", "read", "ranks must decide alike"),
    ),
    *_private(
        "host/engine.py", ENGINE,
        ("Engine.tokenizer_manager loop", "read", "the one way to ask the engine; its unused loop is closed"),
    ),
    *_private("host/host.py", ENGINE, ("Engine.shutdown", "called", "the end", "self")),
    *_private(
        "host/capabilities.py", ENGINE,
        ("Engine._scheduler_init_result", "read", "the size of the key-value pool"),
        ("SchedulerInitResult.scheduler_infos", "read", "the size of the key-value pool"),
    ),
    *_private(
        "host/capabilities.py", TOKENIZER,
        ("TokenizerManager.get_internal_state", "called", "resolved settings", "self"),
        (
            "TokenizerManager.is_generation max_req_input_len context_len num_reserved_tokens model_config",
            "read", "what the model is, and the longest row",
        ),
    ),
    *_private("host/capabilities.py", TOKENIZER, ("TokenizerManager.lora_registry", "read", "adapters")),
    *_private("host/capabilities.py", ADAPTERS, ("LoRARegistry.get_all_adapters", "called", "adapters", "self")),
    *_private("text/engine_tokenizer.py", TOKENIZER, ("TokenizerManager.model_config", "read", "what texts end with")),
    *_private("text/engine_tokenizer.py", MODEL, ("ModelConfig.is_embedding_gemma", "read", "what texts end with")),
    *_private("host/tokenizer.py", TOKENIZER, ("TokenizerManager.tokenizer", "read", "whether the model has one")),
    *_private(
        "host/engine.py", TOKENIZER,
        ("TokenizerManager.flush_cache", "called", "the command flush", "self, timeout_s"),
        ("TokenizerManager.handle_loop", "called", "answers are read on our loop", "self"),
        (
            "TokenizerManager.auto_create_handle_loop",
            "replaced", "SGLang's own way takes SIGTERM and SIGQUIT away from the worker",
            "self",
        ),
        ("TokenizerManager.event_loop", "read", "answers are read on our loop"),
        ("TokenizerManager.freeze_gc", "called", "no collection of what start-up left", "self"),
    ),
    *_private(
        "host/memory.py", TOKENIZER,
        ("TokenizerManager.release_memory_occupation", "called", "the command sleep", "self, obj, request"),
        ("TokenizerManager.resume_memory_occupation", "called", "the command wake", "self, obj, request"),
    ),
    *_private("host/memory.py", REQUESTS, ("ReleaseMemoryOccupationReqInput", "called", "the command sleep")),
    *_private("host/memory.py", REQUESTS, ("ResumeMemoryOccupationReqInput", "called", "the command wake")),
    *_private(
        "host/profiler.py", TOKENIZER,
        ("TokenizerManager.start_profile", "called", "the command start_profile", "self, req"),
        ("TokenizerManager.stop_profile", "called", "the command stop_profile", "self"),
    ),
    *_private("host/profiler.py", REQUESTS, ("ProfileReq", "called", "the command start_profile")),
    *_private("score/scoring.py", TOKENIZER, ("TokenizerManager.generate_request", "called", "scores", "self, obj, request")),
    *_private("host/build.py", PROCESSORS, ("CustomLogitProcessor.to_str", "called", "names a class of ours to SGLang", "")),
    *_private("operations/score.py", REQUESTS, ("GenerateReqInput", "called", "label log-probabilities")),
    *_private("operations/logprobs.py", REQUESTS, ("GenerateReqInput", "called", "log-probabilities of responses")),
    *_private(
        "operations/base.py", REQUESTS,
        ("EmbeddingReqInput", "called", "outputs of a head"),
        ("EmbeddingReqInput.normalize_batch_and_arguments", "called", "0.5.17 does not hand the priority on", "self"),
        ("EmbeddingReqInput.input_ids rid", "read", "the rows of a request"),
    ),
    *_private(
        "score/forward_counter.py", TOKENIZER,
        ("TokenizerManager._handle_batch_output", "replaced", "reads in which forward each row ran", "self, recv_obj"),
        ("TokenizerManager.enable_metrics", "read", "whether SGLang reads the times itself"),
    ),
    *_private(
        "score/forward_counter.py", REQUESTS,
        ("BatchEmbeddingOutput.rids time_stats cached_tokens", "read", "one message per forward"),
        ("BatchTokenIDOutput.rids time_stats cached_tokens", "read", "one message per forward"),
    ),
    *_private("host/engine.py", REQUESTS, ("unwrap_from_pickle", "called", "unpacks the times", "obj")),
    *_private(
        "score/token_types.py", TOKENIZER,
        (
            "TokenizerManager._create_tokenized_object", "replaced", "rows of ids get token types",
            "self, obj, input_text, input_ids, input_embeds, mm_inputs, token_type_ids",
        ),
    ),
    *_private(
        "score/cross_encoder.py", MODEL,
        (
            "ModelConfig._derive_context_length", "replaced", "rows of a cross-encoder take all positions",
            "self, context_length",
        ),
        ("ModelConfig.hf_config context_len", "read", "rows of a cross-encoder take all positions"),
    ),
    *_private(
        "score/cross_encoder.py", POOLER,
        ("get_cross_encoder_activation_function", "replaced", "the engine answers logits", "config"),
    ),
    *_private(
        "patches/pooling.py", POOLER,
        ("Pooler.__init__", "replaced", "rows are pooled as the model says", "self, pooling_type, normalize"),
        ("pool_hidden_states", "replaced", "the mean of each row alone", "pooling_type, hidden_states, forward_batch"),
        ("PoolingType.CLS MEAN LAST", "read", "rows are pooled as the model says"),
    ),
    *_private(
        "patches/pooling.py", FORWARD,
        ("ForwardBatch.extend_seq_lens", "read", "the mean of each row alone"),
    ),
    *_private("host/process.py", POOLER, ("CrossEncodingPooler", "read", "its module has the function")),
    *_private(
        "weights/adapters.py", LAYERS,
        ("BaseLayerWithLoRA.base_layer lora_backend", "read", "new weights go into the model below its adapters"),
    ),
    *_private("weights/completeness.py", LAYERS_OF_STAGES, ("PPMissingLayer", "read", "a layer that another stage has")),
    *_private("weights/updates.py", REQUESTS, ("UpdateWeightsFromTensorReqInput", "called", "carries a ticket")),
    *_private(
        "weights/updates.py", TOKENIZER,
        ("TokenizerManager.update_weights_from_tensor", "called", "takes weights", "self, obj, request"),
        (
            "TokenizerManager.update_weights_from_tensor_communicator",
            "read", "questions are asked while the engine serves, without the writer lock",
        ),
        ("TokenizerManager._update_weight_version_if_provided", "called", "a new version number alone", "self, weight_version"),
    ),
    *_private(
        "patches/scheduler.py", UPDATER,
        (
            "SchedulerWeightUpdaterManager.update_weights_from_tensor", "replaced", "tickets are accepted outside a session",
            "self, recv_req",
        ),
    ),
    *_private(
        "patches/scheduler.py", UPDATER,
        ("SchedulerWeightUpdaterManager.begin_weight_update", "read", "whether there are sessions", "self, recv_req"),
        ("_WeightUpdateSession", "called", "the session of a ticket", "selector, loaded_weights"),
        ("SchedulerWeightUpdaterManager._session", "replaced", "the session of a ticket"),
        optional=True, versions="0.5.21 to 0.5.23",
    ),
    *_private("patches/scheduler.py", REQUESTS, ("UpdateWeightsFromTensorReqInput.load_format", "read", "is it a ticket?")),
    *_private(
        "patches/scheduler.py", MODEL_UPDATER,
        (
            "WeightUpdater.update_weights_from_tensor", "replaced", "tickets reach the loader where SGLang takes no updates",
            "self, named_tensors, load_format",
        ),
        ("WeightUpdater.get_model", "read", "the model of a ticket"),
    ),
    *_private(
        "host/process.py", LOADER,
        (
            "DefaultModelLoader._get_all_weights", "replaced", "notes what the model's own load takes",
            "self, model_config, model",
        ),
    ),
    *_private(
        "patches/scheduler.py", SCHEDULER,
        ("Scheduler.flush_cache", "called", "caches of old weights", "self, empty_cache", "self"),
        ("Scheduler.__init__", "replaced", "keeps the scheduler for `flush_caches`"),
        ("Scheduler.event_loop_overlap", "replaced", "requests are received in a forward", "self"),
        (
            "Scheduler.is_disable_overlap_for_batch",
            "replaced", "a forward that is nearly over is answered before the next launch",
            "self, batch, last_batch",
        ),
        ("Scheduler.request_receiver", "replaced", "requests are received in a forward"),
        (
            "Scheduler.server_args last_batch running_batch waiting_queue result_queue is_generation",
            "read", "whether all that runs are scores",
        ),
        ("Scheduler.tp_worker", "read", "whether forwards are CUDA graphs"),
        (
            "create_load_snapshot_writer", "replaced", "a load that no process reads is not written",
            "port_args, dp_size, dp_rank, publish_interval", "server_args, port_args, dp_size, dp_rank, publish_interval",
        ),
        ("Scheduler.metrics_reporter", "read", "lines that no log takes are not composed"),
    ),
    *_private(
        "patches/scheduler.py", METRICS,
        ("SchedulerMetricsReporter.is_stats_logging_rank", "replaced", "lines that no log takes are not composed"),
    ),
    *_private(
        "patches/profiles.py", PROFILER,
        ("SchedulerProfilerManager._stop_profile", "replaced", "traces that cannot be written end no engine", "self, stage"),
        ("SchedulerProfilerManager.torch_profiler profile_in_progress dp_tp_cpu_group", "read", "a profile that failed"),
        ("SchedulerProfilerManager.unwritten", "added", "why it has no traces"),
    ),
    *_private("host/process.py", REQUESTS, ("ProfileReqOutput", "called", "why a profile has no traces")),
    *_private(
        "patches/scheduler.py", RECEIVER,
        ("SchedulerRequestReceiver.recv_requests", "called", "requests are received in a forward", "self", "self, local_reqs"),
    ),
    *_private("patches/scheduler.py", WORKER, ("TpModelWorker.model_runner", "read", "whether forwards are CUDA graphs")),
    *_private(
        "patches/scheduler.py", RUNNER,
        ("ModelRunner.prefill_cuda_graph_runner decode_cuda_graph_runner", "read", "whether forwards are CUDA graphs"),
    ),
    *_private(
        "patches/scheduler.py", BATCH,
        ("ScheduleBatch.forward_mode is_prefill_only is_empty", "read", "whether all that runs are scores"),
    ),
    *_private("patches/scheduler.py", RESULTS, ("GenerationBatchResult.copy_done", "read", "the end of a forward")),
    *_private(
        "patches/scheduler.py", TIMES,
        ("SchedulerReqTimeStats.__getstate__", "replaced", "says of all rows when they began", "self"),
        ("SchedulerReqTimeStats.enable_metrics forward_entry_time", "read", "when a row's forward began"),
    ),
    *_private(
        "host/process.py", LOGPROBS,
        ("OutputLogprobProcessor", "read", "its module has the function"),
    ),
    *_private("host/process.py", LOGITS, ("LogitsProcessor", "read", "its module has the function")),
    *_private(
        "patches/scheduler.py", LOGITS,
        (
            "get_token_ids_logprobs_raw", "replaced", "labels are picked without waiting",
            "logprobs, token_ids_logprobs_list, stage, extend_logprob_pruned_lens_cpu, no_copy_to_cpu",
        ),
    ),
    *_private(
        "patches/scheduler.py", GATHER,
        (
            "MultimemAllGatherer.__init__", "replaced", "logits are gathered by NCCL alone",
            "self, max_tokens, enabled, skip_entry_sync",
        ),
        optional=True,
    ),
    *_private(
        "patches/scheduler.py", LOGITS,
        ("triton_symm_mem_ag.MultimemAllGatherer", "read", "logits are gathered by NCCL alone"),
        optional=True,
    ),
    *OF_ATTENTION,
    *OF_ROWS,
    *OF_PACKING,
    *OF_GENERATION,
    *OF_MIXED,
    *OF_SAVED,
)
# fmt: on
