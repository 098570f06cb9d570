"""The part of `table.py` that is about engines which pack some batches and others not."""

from enginepool.workers.sglang.patches.modules import BATCH, FLASHINFER, GRAPHS, MODEL, POLICY, RESOLUTION, SCHEDULER, SETTINGS
from enginepool.workers.sglang.patches.private_name import Private
from enginepool.workers.sglang.patches.private_name import private as _private

# fmt: off
OF_PACKING: tuple[Private, ...] = (
    *_private(
        "patches/packed_forwards.py", SCHEDULER,
        ("Scheduler.get_new_batch_prefill", "replaced", "a forward has packed rows alone, or none", "self, running_batch"),
        ("Scheduler.waiting_queue", "replaced", "rows of the other kind wait for the next forward"),
        ("Scheduler.policy", "read", "which kind is first"),
    ),
    *_private("patches/packed_forwards.py", POLICY, ("SchedulePolicy.priority_sign", "read", "which kind is first")),
    *_private(
        "patches/packed_forwards.py", BATCH,
        ("Req.multi_item_delimiter_indices priority", "read", "whether a row is packed, and which is first"),
    ),
    *_private(
        "patches/packed_forwards.py", FLASHINFER,
        (
            "FlashInferAttnBackend.init_forward_metadata", "replaced", "only packed forwards are planned as such",
            "self, forward_batch",
        ),
        ("FlashInferAttnBackend.enable_mis", "replaced", "only packed forwards are planned as such"),
    ),
    *_private(
        "patches/packed_forwards.py", GRAPHS,
        (
            "PrefillCudaGraphRunner.can_run_graph", "replaced", "packed forwards run as no graph that has attention in it",
            "self, forward_batch",
        ),
        (
            "PrefillCudaGraphRunner._prepare_forward_metadata_for_replay", "replaced", "graphs get the positions of items",
            "self, forward_batch, static_forward_batch, num_tokens", "self, forward_batch, static_forward_batch, shape_key",
        ),
        ("PrefillCudaGraphRunner._is_full_backend", "read", "packed forwards run as no graph that has attention in it"),
    ),
    *_private(
        "host/build.py", RESOLUTION,
        ("handle_multi_item_scoring", "replaced", "plain forwards keep their CUDA graphs", "server_args"),
        optional=True, versions="0.5.21 to 0.5.23",
    ),
    *_private(
        "host/build.py", SETTINGS,
        ("ServerArgs._handle_multi_item_scoring", "replaced", "plain forwards keep their CUDA graphs", "self"),
        optional=True, versions="0.5.17 to 0.5.20",
    ),
    *_private(
        "host/build.py", MODEL,
        ("is_generation_model", "called", "a model that embeds is not packed", "model_architectures, is_embedding"),
    ),
    *_private("host/process.py", SETTINGS, ("ServerArgs.enable_mis", "read", "whether some forwards are packed")),
)
# fmt: on
