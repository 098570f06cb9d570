"""Configuration: frozen structs with their defaults.

A pool is described by a TOML file (`enginepool serve --config pool.toml`) or by the same structs made in Python.
`config_loader.py` reads and checks them.
"""

import math
from typing import Any, Literal, TypeAlias

import msgspec

from enginepool.net.address import STATE_DIR

#: where engines run
Device: TypeAlias = Literal["auto", "cpu", "cuda"]
#: of weights and activations, by SGLang's names
Dtype: TypeAlias = Literal["auto", "bfloat16", "float16", "half", "float32", "float"]


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds of the coordinator. Past one of them a client gets `busy` (or `too_large`), never a lost request."""

    #: The one total of the coordinator's buffers: requests that are queued or running, with the whole answers that they will
    #: have, answers that are kept, and messages that were sent and are not read yet. All other bounds in bytes are parts of it.
    buffer_bytes: int = 1 << 30
    #: score items queued or running, over all groups; one client has at most half of them
    queue_items: int = 1_000_000
    #: clients that may be connected; fewer where RLIMIT_NOFILE leaves fewer descriptors
    clients: int = 10_000
    #: unanswered requests that one client may have; what they, their answers and what it has not read take of the total
    window_requests: int = 4096
    window_bytes: int = 256 << 20
    #: the largest message, request or answer, at least 1000; a frame over twice this is not received: ZeroMQ cuts the link
    max_message_bytes: int = 64 << 20
    #: answers are kept for a resend until acknowledged, at most this long and this large in all
    answers_s: float = 60.0
    answers_bytes: int = 64 << 20
    #: on the disk of `state_dir`: adapters of all groups that came as tensors, until they are unloaded
    adapters_bytes: int = 16 << 30


class Timing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Deadlines of everything that can hang, in seconds."""

    #: pings to workers, and what clients are told to do
    ping_s: float = 1.0
    #: a worker or client that is silent for this long is lost
    silence_s: float = 10.0
    client_silence_s: float = 30.0
    #: process start to Register; then loading; then compiling
    starting_s: float = 120.0
    loading_s: float = 1800.0
    compiling_s: float = 900.0
    #: a forward has max(forward_s, forward_factor x predicted)
    forward_s: float = 30.0
    forward_factor: float = 10.0
    #: daemon workers outlive a dead coordinator by this
    orphan_s: float = 60.0
    #: SIGTERM and close() let begun work finish for this long
    drain_s: float = 10.0
    #: a weight update: workers say whether they can take it; the process group forms; nothing arrives, or nothing is verified;
    #: engines take the weights; engines answer a question about their weights. In `update_prepare_s` workers that
    #: take a checkpoint only at their start hash its files, as fast as the disk reads: about 0.75 GB/s for each file, up to 8
    #: files at once, one per core. 30 s are enough for 22 GB in one file.
    update_prepare_s: float = 30.0
    update_join_s: float = 60.0
    update_stall_s: float = 60.0
    update_load_s: float = 60.0
    update_inspect_s: float = 60.0
    #: a worker that could not restore the committed weights tries again after this
    restore_again_s: float = 10.0


class RestartConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a worker is started again: backoff doubles from `backoff_s` to `backoff_max_s`; more than `max_restarts` within
    `window_s` end that. A worker that says that it can never start is not started again, and neither is one that fails twice in
    the same way before it was ever ready."""

    backoff_s: float = 0.5
    backoff_max_s: float = 30.0
    max_restarts: int = 10
    window_s: float = 600.0
    #: deaths of a request that ran alone before it is `poisoned`
    max_attempts: int = 3


class GroupConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A named set of identical workers of one model."""

    #: a checkpoint directory, or a name that SGLang can load: of the model hub, NAME or OWNER/NAME; for engine "sim" any name
    model: str
    engine: Literal["sglang", "sim"] = "sglang"
    #: what its engines are for: "generate", the rows "score", "embed" and "logprobs", or both; empty: the rows that the model
    #: answers
    operations: list[Literal["score", "embed", "logprobs", "generate"]] = []
    #: workers that this pool starts itself; 0: only external workers
    workers: int = 1
    #: items that share a query, and rows that share none, are scored in one sequence (SGLang's multi-item scoring) where that
    #: takes less time; "auto": if engine, model and device allow it; "on": workers that cannot do it do not start; "off": never
    packing: Literal["auto", "on", "off"] = "auto"
    #: without packing, a query of so many tokens or more that rows share is computed once, ahead of them, and kept in SGLang's
    #: radix cache; none: each row computes its query
    cached_query_tokens: int | None = None
    device: Device = "auto"
    dtype: Dtype = "auto"
    #: for each worker the GPUs it sees (CUDA_VISIBLE_DEVICES), as many as its engine needs: options.tp_size, pp_size and
    #: dp_size, multiplied; empty: the pool gives each worker GPUs that no other worker has
    gpus: list[str] = []
    #: seconds of waiting that weigh as much as one level of priority; none: strict priority
    ageing_s: float | None = 1.0
    #: caps on one batch, below what the engine's settings give; what follows from them is halved when an engine of the group
    #: runs out of memory
    max_batch_tokens: int | None = None
    max_batch_rows: int | None = None
    #: forwards of tokens in flight at a worker; where its pace is known, and with cached queries, as many batches
    forwards_in_flight: int = 2
    #: reserve memory of each GPU for a staged weight update before the engine takes the rest; none: workers that start after
    #: the group's first staged update reserve it, and until then the KV cache has it. Without a reserve a staged update takes
    #: memory of the GPU that is free, or memory of the host
    reserve_staging: bool | None = None
    #: where committed weights are kept for workers that start: in shared memory of their node, in `state_dir`, or nowhere
    snapshot: Literal["memory", "disk", "none"] = "memory"
    #: how engines that take weights only at their start are restarted for a checkpoint: `rolling`, the others answer on the old
    #: version meanwhile; `at_once`, requests wait
    restart_updates: Literal["rolling", "at_once"] = "rolling"
    #: directories under which a published checkpoint may lie; empty: the folder of `model` itself, where it is one
    checkpoint_roots: list[str] = []
    #: directories, on the hosts of the workers, under which LoRA adapters that are loaded by path may lie; empty: nowhere
    adapter_roots: list[str] = []
    #: the folder, on the hosts of the workers, under which prompts may name images, videos and audio by path; empty: nowhere
    media_root: str = ""
    #: prefixes of URLs from which workers fetch them, such as https://images.example.com/public/; empty: none is fetched
    media_urls: list[str] = []
    #: the folder, on the hosts of the workers, under which profiles of their engines are written; empty: none is taken
    profile_root: str = ""
    #: fork workers from a process of their host that has imported SGLang; False: each worker imports it; none: fork those
    #: that use one GPU or none, because it was not measured with several
    fork_server: bool | None = None
    #: the folder, on the hosts of the workers, in which kernels that were compiled are kept; it counts more than variables
    #: such as TRITON_CACHE_DIR, which SGLang itself sets where it is imported; empty: each library has a place
    kernel_cache: str = ""
    #: directories, on the hosts of the workers, under which weights of their engines may be saved, and servers of Redis for
    #: that, as redis://HOST:PORT/; empty: nowhere
    save_roots: list[str] = []
    #: further settings for the engine, by its own names
    options: dict[str, Any] = {}


class PoolConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A pool: where it listens, where it keeps its journal, its groups, its bounds."""

    groups: dict[str, GroupConfig]
    #: where clients connect; empty: the ipc socket at which they look by default, `address.default_address`
    listen: str = ""
    #: where workers connect; empty: an ipc socket in `state_dir`
    listen_workers: str = ""
    #: journal, worker records and logs; one pool at a time
    state_dir: str = STATE_DIR
    #: the directory that `enginepool keys` made: TCP endpoints take connections of its keys alone; ipc sockets need none
    keys: str = ""
    #: listen on TCP of the loopback interface without keys, where every user and every program of this host can connect
    insecure_loopback: bool = False
    limits: Limits = Limits()
    timing: Timing = Timing()
    restart: RestartConfig = RestartConfig()


#: engine options whose product is the number of GPUs of one worker; with attention that is data-parallel, dp_size is part of
#: tp_size
GPU_SIZES = ("tp_size", "pp_size", "dp_size")


def gpus_per_worker(group: GroupConfig) -> int:
    """GPUs that the engine of one worker runs on."""
    within = ("dp_size",) if group.options.get("enable_dp_attention") else ()
    return math.prod(group.options.get(key) or 1 for key in GPU_SIZES if key not in within)


def uses_gpus(group: GroupConfig) -> bool:
    """Whether the workers of `group` run on GPUs where there are some."""
    return group.engine == "sglang" and group.device != "cpu"
