"""The part of `table.py` that is about what SGLang spends on each row."""

from enginepool.workers.sglang.patches.modules import REQUESTS, SAMPLING, TIMES, TRACES
from enginepool.workers.sglang.patches.private_name import Private
from enginepool.workers.sglang.patches.private_name import private as _private

# fmt: off
OF_ROWS: tuple[Private, ...] = (
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
)
# fmt: on
