"""The part of `table.py` that is about generation."""

from enginepool.workers.sglang.patches.modules import (
    ADAPTER,
    ADAPTER_CONFIG,
    ADAPTER_MANAGER,
    ADAPTERS,
    BATCH,
    CAPTURER,
    CHANNELS,
    GRAMMAR,
    GRAMMAR_BACKENDS,
    GRAMMARS,
    LOGITS,
    MEDIA,
    MEDIA_CACHE,
    MODEL,
    MODEL_UPDATER,
    PROCESSORS,
    RELAY,
    REQUESTS,
    RUNNER,
    SAMPLER,
    SAMPLING,
    SCHEDULER,
    TOKENIZER,
    VIDEO,
)
from enginepool.workers.sglang.patches.private_name import Private
from enginepool.workers.sglang.patches.private_name import private as _private

# fmt: off
OF_GENERATION: tuple[Private, ...] = (
    *_private(
        "weights/updates.py", REQUESTS,
        ("UpdateWeightsFromTensorReqInput.disable_draft_model selector", "read", "a ticket is not for a model that drafts"),
        optional=True,
    ),
    *_private("generate/sequences.py", ADAPTERS, ("LoRARef.pinned", "read", "adapters with a place of their own in a batch")),
    *_private(
        "generate/adapter_loads.py", TOKENIZER,
        ("TokenizerManager.lora_registry", "read", "how many adapters are loaded"),
        ("TokenizerManager.load_lora_adapter unload_lora_adapter", "called", "adapters, while it serves", "self, obj, _"),
    ),
    *_private("generate/adapter_loads.py", ADAPTERS, ("LoRARegistry.get_all_adapters", "called", "how many there are", "self")),
    *_private("generate/adapter_loads.py", ADAPTERS, ("LoRARegistry._counters", "read", "users of an adapter that are gone")),
    *_private("generate/adapter_loads.py", TOKENIZER, ("ReqState.obj", "read", "users of an adapter that are gone")),
    *_private("generate/adapter_loads.py", TOKENIZER, ("TokenizerManager.rid_to_state", "read", "users of an adapter")),
    *_private("patches/adapter_layers.py", ADAPTER, ("LoRAAdapter.config layers", "read", "adapters that would be others")),
    *_private("patches/adapter_layers.py", ADAPTER_CONFIG, ("LoRAConfig.hf_config", "read", "adapters that would be others")),
    *_private(
        "patches/adapter_layers.py", ADAPTER_MANAGER,
        (
            "LoRAManager.init_state", "replaced", "adapters of the start whose layers have no place",
            "self, max_lora_rank, target_modules, lora_paths",
        ),
        ("LoRAManager.load_lora_weights", "replaced", "adapters whose layers have no place", "self, lora_ref"),
        ("LoRAManager.loras target_modules memory_pool", "read", "which layers have a place"),
        ("get_target_module_name", "called", "which layers have a place", "full_module_name, target_modules"),
    ),
    *_private(
        "generate/adapter_loads.py", REQUESTS,
        ("LoadLoRAAdapterReqInput", "called", "adapters, while it serves"),
        ("UnloadLoRAAdapterReqInput", "called", "adapters, while it serves"),
        ("LoRAUpdateOutput.success error_message", "read", "whether it did"),
    ),
    *_private(
        "generate/sequences.py", TOKENIZER,
        ("TokenizerManager.generate_request", "called", "sequences", "self, obj, request"),
        ("TokenizerManager.abort_request", "called", "a sequence that is no longer wanted", "self, rid, abort_all"),
        ("TokenizerManager.rid_to_state", "read", "whether the scheduler was sent a sequence"),
        ("ReqState.dispatched", "read", "whether the scheduler was sent a sequence"),
        ("TokenizerManager.mm_processor", "read", "whether the model takes media"),
    ),
    *_private(
        "generate/media.py", TOKENIZER,
        ("TokenizerManager.mm_processor model_config max_req_input_len", "read", "which media the model takes"),
    ),
    *_private(
        "generate/media.py", MODEL,
        ("ModelConfig.is_image_understandable_model is_audio_understandable_model", "read", "which media the model takes"),
        ("ModelConfig.hf_config", "read", "how long a clip the model takes"),
    ),
    *_private(
        "generate/media.py", MEDIA,
        (
            "BaseMultimodalProcessor.process_mm_data_async", "replaced", "media without a placeholder are refused",
            "self, image_data, audio_data, input_text, request_obj, **kwargs",
        ),
        ("BaseMultimodalProcessor._processor", "read", "how long a clip the model takes"),
    ),
    *_private("generate/media.py", BATCH, ("MultimodalDataItem.audio_feature_lens", "added", "of clips after the first")),
    *_private(
        "generate/video.py", VIDEO,
        ("VideoDecoderWrapper.get_frames_at get_frames_as_tensor", "replaced", "frames have bounds", "self, indices"),
    ),
    *_private("generate/video.py", VIDEO, ("VideoDecoderWrapper.frame_shape", "read", "the size of a frame"), optional=True),
    *_private(
        "generate/new_tokens.py", TOKENIZER,
        ("TokenizerManager._handle_batch_output", "replaced", "new tokens of all sequences", "self, recv_obj"),
        ("TokenizerManager.enable_metrics", "read", "whether SGLang counts tokens itself"),
    ),
    *_private(
        "generate/new_tokens.py", REQUESTS,
        (
            "BatchTokenIDOutput.rids output_ids output_token_logprobs_val finished_reasons time_stats",
            "read", "one message per step",
        ),
    ),
    *_private("generate/media.py", REQUESTS, ("GenerateReqInput", "called", "whether a processor keeps token ids")),
    *_private("generate/sequences.py", REQUESTS, ("BatchTokenIDOutput.prompt_tokens", "read", "tokens of a prompt with media")),
    *_private(
        "generate/sequences.py", REQUESTS, ("GenerateReqInput", "called", "sequences"),
        ("BatchTokenIDOutput.input_token_logprobs_val output_top_logprobs_val output_top_logprobs_idx", "read", "on request"),
        ("BatchTokenIDOutput.output_hidden_states routed_experts", "read", "on request"),
        ("BatchTokenIDOutput.input_top_logprobs_val input_top_logprobs_idx", "read", "of prompts, on request"),
    ),
    *_private(
        "generate/logit_processor.py", PROCESSORS,
        ("CustomLogitProcessor", "called", "the form in which SGLang takes a class"),
        ("DisallowedTokensLogitsProcessor.__call__", "called", "a mask of tokens", "self, logits, custom_param_list"),
    ),
    *_private("generate/logit_processor.py", BATCH, ("Req.decode_batch_idx output_ids", "read", "the position of a token")),
    *_private(
        "generate/pausing.py", TOKENIZER,
        ("TokenizerManager.pause_generation continue_generation", "called", "pauses", "self, obj"),
    ),
    *_private(
        "generate/pausing.py", REQUESTS,
        ("PauseGenerationReqInput", "called", "pauses"),
        ("ContinueGenerationReqInput", "called", "the end of a pause"),
    ),
    *_private(
        "patches/pausing.py", SCHEDULER,
        ("Scheduler.pause_generation", "replaced", "a pause is between two steps", "self, recv_req"),
        ("Scheduler.process_batch_result", "replaced", "a pause is between two steps", "self, batch, result"),
        ("Scheduler.enable_overlap last_batch result_queue", "read", "the forward that was launched last"),
        ("Scheduler.abort_request", "replaced", "a cancel in a pause", "self, recv_req"),
        ("Scheduler._engine_paused grammar_manager waiting_queue", "read", "a cancel in a pause"),
    ),
    *_private("patches/pausing.py", GRAMMARS, ("GrammarManager.grammar_queue", "replaced", "a cancel in a pause")),
    *_private("patches/pausing.py", BATCH, ("Req.rid grammar", "read", "a cancel in a pause")),
    *_private("patches/pausing.py", REQUESTS, ("AbortReq.rid abort_all", "read", "a cancel in a pause")),
    *_private(
        "patches/new_weights.py", SCHEDULER,
        ("Scheduler._add_request_to_queue", "replaced", "prefixes of other weights are not used", "self, req, is_retracted"),
        ("Scheduler._engine_paused", "read", "whether it has paused"),
        ("Scheduler.continue_generation", "called", "the end of a pause, with a load", "self, recv_req"),
        ("Scheduler.waiting_queue grammar_manager", "replaced", "a flush while requests wait"),
    ),
    *_private(
        "patches/new_weights.py", MEDIA_CACHE,
        ("MultiModalStaticCache.__init__", "replaced", "keeps the cache of media", "self, max_size"),
        ("MultiModalStaticCache.clear", "called", "what old weights made of media", "self"),
    ),
    *_private(
        "patches/not_finite.py", RUNNER,
        ("ModelRunner.sample", "replaced", "NaN ends a sequence", "self, logits_output, forward_batch"),
        ("ModelRunner.sampler spec_algorithm", "read", "NaN ends a sequence"),
    ),
    *_private(
        "patches/not_finite.py", SAMPLER,
        ("Sampler._preprocess_logits", "replaced", "rows with NaN are sampled as zeros", "self, logits, sampling_info"),
        ("Sampler.not_finite_rows", "added", "rows with NaN"),
    ),
    *_private("patches/not_finite.py", LOGITS, ("LogitsProcessorOutput.next_token_logits", "read", "whether there is NaN")),
    *_private(
        "patches/not_finite.py", RELAY,
        ("FutureMap.stash", "replaced", "the token of NaN is no input", "self, future_indices, payload"),
        ("FutureMap.spec_algo", "read", "the token of NaN is no input"),
        ("RelayPayload.bonus_tokens", "replaced", "the token of NaN is no input"),
    ),
    *_private(
        "patches/not_finite.py", BATCH,
        ("Req._check_vocab_boundary_finish", "replaced", "a grammar is not given token -1", "self, new_accepted_tokens"),
        ("Req.grammar", "replaced", "a grammar is not given token -1"),
    ),
    *_private(
        "patches/request_limits.py", BATCH,
        ("re", "replaced", "a search for a stop pattern ends"),
        ("Req._check_str_based_finish", "replaced", "a search for a stop pattern ends", "self, new_accepted_len"),
        ("FINISH_ABORT", "called", "a search for a stop pattern ended"),
        ("Req.finished_reason", "replaced", "a search for a stop pattern ended"),
        ("Req._searched", "added", "how long its searches took"),
        ("Req.sampling_params output_ids", "read", "how long its searches may take"),
    ),
    *_private("patches/request_limits.py", SAMPLING, ("SamplingParams.stop_regex_strs", "read", "whether there is a search")),
    *_private("patches/request_limits.py", GRAMMAR, ("XGrammarGrammar.ctx", "read", "bytes of grammars that are kept")),
    *_private(
        "patches/request_limits.py", GRAMMAR_BACKENDS,
        ("BaseGrammarBackend.set_cache", "replaced", "grammars that are kept are few", "self, key, value"),
        ("BaseGrammarBackend.cache", "read", "how many grammars are kept"),
        ("BaseGrammarBackend.reset", "called", "grammars that are kept are few", "self"),
    ),
    *_private("patches/new_weights.py", GRAMMARS, ("GrammarManager.grammar_queue", "replaced", "a flush while requests wait")),
    *_private(
        "patches/new_weights.py", BATCH,
        ("Req.extra_key", "replaced", "prefixes of other weights are not used"),
        ("Req.key_without_weights", "added", "the key that the request came with"),
    ),
    *_private(
        "patches/new_weights.py", MODEL_UPDATER,
        (
            "WeightUpdater.update_weights_from_tensor", "replaced", "an answer says that the scheduler went on",
            "self, named_tensors, load_format",
        ),
    ),
    *_private(
        "generate/new_tokens.py", TOKENIZER,
        ("TokenizerManager._result_dispatcher", "replaced", "where tokens of new weights begin"),
    ),
    *_private(
        "generate/new_tokens.py", REQUESTS,
        ("UpdateWeightsFromTensorReqOutput.message", "read", "where tokens of new weights begin"),
    ),
    *_private("patches/pausing.py", REQUESTS, ("PauseGenerationReqInput.mode", "read", "how it pauses")),
    *_private(
        "patches/pausing.py", CHANNELS,
        (
            "SchedulerIpcChannels.create", "replaced", "tokens and answers leave in order",
            "port_args, is_rank_zero, skip_tokenizer_init, metrics_enabled, enable_scripted_runtime",
        ),
        ("SchedulerIpcChannels.send_to_detokenizer", "replaced", "tokens and answers leave in order"),
        ("SchedulerIpcChannels.send_to_tokenizer", "read", "tokens and answers leave in order"),
    ),
    *_private(
        "patches/scheduler.py", CAPTURER,
        (
            "BaseTopkCapturer.on_forward_end", "replaced", "routed experts are copied before the next forward writes its own",
            "self, forward_batch, can_run_graph, cuda_graph_batch, no_copy_to_cpu",
        ),
        ("TopkCaptureOutput.topk out_cache_loc", "read", "what is copied"),
        (
            "BaseHostCache.__init__", "replaced", "on a CPU no memory is pinned",
            "self, num_tokens, num_layers, topk_size, name", "self, num_tokens, num_layers, topk_size, name, device",
        ),
        ("BaseHostCache.buffer num_tokens num_layers topk_size name", "added", "on a CPU no memory is pinned"),
    ),
)
