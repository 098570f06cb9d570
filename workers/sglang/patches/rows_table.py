"""The part of `table.py` that is about what SGLang spends on each row."""

from enginepool.workers.sglang.patches.modules import BATCH, LOGPROBS, POOL, PREFILL_RESULTS, REQUESTS, SAMPLING, TIMES, TRACES
from enginepool.workers.sglang.patches.private_name import Private
from enginepool.workers.sglang.patches.private_name import private as _private

# fmt: off
OF_ROWS: tuple[Private, ...] = (
    *_private(
        "patches/scheduler.py", LOGPROBS,
        (
            "get_token_ids_logprobs_batch_optimized", "replaced", "labels are picked without waiting",
            "logprobs, token_ids_logprobs",
        ),
        (
            "get_token_ids_logprobs", "replaced", "labels are picked without waiting, of all rows at once",
            "logprobs, token_ids_logprobs, no_copy_to_cpu",
        ),
    ),
    *_private(
        "host/build.py", REQUESTS,
        ("BatchTokenizedGenerateReqInput", "read", "the message of a batch"),
        ("BatchTokenizedEmbeddingReqInput", "read", "the message of a batch"),
    ),
    *_private(
        "host/process.py", REQUESTS,
        ("BatchTokenizedGenerateReqInput", "read", "the message of a batch"),
        ("BatchTokenizedEmbeddingReqInput", "read", "the message of a batch"),
    ),
    *_private(
        "patches/row_messages.py", REQUESTS,
        ("BatchTokenizedGenerateReqInput.__reduce__", "replaced", "what rows share is sent once"),
        ("BatchTokenizedEmbeddingReqInput.__reduce__", "replaced", "what rows share is sent once"),
        ("BatchTokenizedGenerateReqInput.batch", "read", "the rows of a message"),
        ("BatchTokenizedEmbeddingReqInput.batch", "read", "the rows of a message"),
        ("TokenizedGenerateReqInput.sampling_params time_stats", "read", "whether rows share the rest"),
        ("TokenizedEmbeddingReqInput.sampling_params time_stats", "read", "whether rows share the rest"),
    ),
    *_private("patches/row_messages.py", SAMPLING, ("SamplingParams.max_new_tokens", "read", "whether a request generates")),
    *_private("patches/row_messages.py", TIMES, ("ReqTimeStatsBase.trace_ctx", "read", "whether it is traced")),
    *_private("patches/row_messages.py", TRACES, ("TraceReqContext.tracing_enable", "read", "whether it is traced")),
    *_private(
        "patches/row_results.py", PREFILL_RESULTS,
        (
            "SchedulerBatchResultProcessor.process_batch_result_prefill", "replaced", "rows are freed together",
            "self, batch, result",
        ),
        ("SchedulerBatchResultProcessor.token_to_kv_pool_allocator", "read", "rows are freed together"),
    ),
    *_private("patches/row_results.py", BATCH, ("ScheduleBatch.is_prefill_only", "read", "whether all of it are rows")),
    *_private(
        "patches/row_results.py", POOL,
        ("BaseTokenToKVPoolAllocator.free_group_begin free_group_end", "called", "rows are freed together", "self"),
    ),
    *_private("host/process.py", PREFILL_RESULTS, ("SchedulerBatchResultProcessor", "read", "rows are freed together")),
)
# fmt: on
