"""The part of `table.py` that is about FlashInfer's attention."""

from enginepool.workers.sglang.patches.modules import FLASHINFER, FORWARD
from enginepool.workers.sglang.patches.private_name import Private
from enginepool.workers.sglang.patches.private_name import private as _private

# fmt: off
OF_ATTENTION: tuple[Private, ...] = (
    *_private(
        "patches/attention.py", FLASHINFER,
        (
            "FlashInferIndicesUpdaterPrefill.update_single_wrapper",
            "replaced", "prefills are planned from lengths on the host",
            "self, req_pool_indices, seq_lens, seq_lens_cpu, seq_lens_sum, prefix_lens, prefill_wrappers, "
            "use_ragged, encoder_lens, spec_info, fixed_split_size, multi_item_params, "
            "cross_attention_custom_mask, extend_prefix_lens_cpu, custom_kv_indices, ...",
        ),
        (
            "FlashInferIndicesUpdaterPrefill.call_begin_forward", "replaced", "prefills are planned from lengths on the host",
            "self, wrapper_ragged, wrapper_paged, req_pool_indices, paged_kernel_lens, paged_kernel_lens_sum, "
            "seq_lens, prefix_lens, kv_start_idx, kv_indptr, qo_indptr, use_ragged, spec_info, "
            "use_sliding_window_kv_pool, fixed_split_size, multi_item_params, cross_attention_custom_mask, "
            "seq_lens_cpu, custom_kv_indices, ...",
        ),
        (
            "FlashInferAttnBackend._process_multi_item_scoring", "replaced", "places of items are computed on the host",
            "self, forward_batch",
        ),
        (
            "MultiItemScoringParams", "called", "places of items",
            "prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr",
        ),
        ("FlashInferIndicesUpdaterPrefill._prefixes", "added", "lengths for the plan"),
    ),
    *_private(
        "patches/attention.py", FORWARD,
        (
            "ForwardBatch.multi_item_delimiter_indices extend_seq_lens_cpu extend_prefix_lens_cpu positions",
            "read", "the sequences of a forward",
        ),
    ),
    *_private(
        "patches/attention_output.py", FLASHINFER,
        (
            "FlashInferAttnBackend.forward_extend", "replaced", "attention writes where the next CUDA graph reads",
            "self, q, k, v, layer, forward_batch, save_kv_cache",
        ),
    ),
    *_private(
        "patches/attention_output.py", FORWARD,
        ("ForwardBatch._attn_output", "read", "where the next CUDA graph reads"),
    ),
)
# fmt: on
