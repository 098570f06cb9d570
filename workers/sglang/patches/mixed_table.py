"""The part of `table.py` that is about engines which generate and run rows."""

from enginepool.workers.sglang.patches.modules import BATCH, CACHE, POLICY, SCHEDULER
from enginepool.workers.sglang.patches.private_name import Private
from enginepool.workers.sglang.patches.private_name import private as _private

# fmt: off
OF_MIXED: tuple[Private, ...] = (
    *_private(
        "patches/row_forwards.py", SCHEDULER,
        (
            "Scheduler.get_next_batch_to_run", "replaced", "rows do not decode, and sequences have a step between two batches",
            "self, running_batch, last_batch",
        ),
        ("Scheduler.get_new_batch_prefill", "replaced", "a forward has the rows of one batch alone", "self, running_batch"),
        (
            "Scheduler.waiting_queue chunked_req grammar_manager",
            "replaced", "rows are put into a forward as if nothing else were there",
        ),
        (
            "Scheduler.enable_overlap policy page_size tree_cache req_to_token_pool token_to_kv_pool_allocator",
            "read", "whether rows have room",
        ),
    ),
    *_private(
        "patches/row_forwards.py", BATCH,
        (
            "ScheduleBatch.new_tokens_required_next_decode", "replaced", "decodes leave room for rows",
            "self, selected_indices",
        ),
        ("ScheduleBatch.reqs batch_is_full is_prefill_only is_empty", "read", "rows of a forward"),
        ("Req.is_prefill_only rid priority origin_input_ids", "read", "rows of a batch"),
        ("Req.extra_key skip_radix_cache_insert", "replaced", "rows have nothing of the radix cache"),
        ("NextBatchPlan.running_batch", "replaced", "the running batch is as it was"),
    ),
    *_private(
        "patches/row_forwards.py", POLICY,
        ("PrefillAdder.__init__", "replaced", "prompts leave room for rows"),
        ("SchedulePolicy.priority_sign", "read", "which batch of rows is first"),
    ),
    *_private(
        "patches/row_forwards.py", POLICY,
        ("PrefillAdder.rem_total_token_offset", "replaced", "prompts leave room for rows"),
        optional=True, versions="0.5.17",
    ),
    *_private(
        "patches/row_forwards.py", POLICY,
        ("PrefillAdder.memory_budget", "replaced", "prompts leave room for rows"),
        optional=True, versions="0.5.23",
    ),
    *_private("host/process.py", BATCH, ("ScheduleBatch", "read", "the running batch, and one without sequences")),
    *_private("host/process.py", POLICY, ("PrefillAdder", "read", "the class that puts a prefill together")),
    *_private(
        "host/process.py", CACHE,
        ("evict_from_tree_cache", "called", "rows take room of prefixes", "tree_cache, num_tokens"),
    ),
    *_private(
        "generate/mixed.py", SCHEDULER,
        (
            "Scheduler.max_total_num_tokens page_size max_prefill_tokens chunked_prefill_size max_running_requests",
            "read", "how much room rows have",
        ),
    ),
)
# fmt: on
