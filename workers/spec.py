"""The configuration of one worker process: a JSON object in the environment, written by its launcher."""

import math
from collections.abc import Mapping

import msgspec

from enginepool.workers.engine_settings import EngineSettings

#: the environment variable that holds the JSON of a `WorkerSpec`
VARIABLE = "ENGINEPOOL_WORKER"

ENGINES = ("sglang", "sim")


class SpecError(Exception):
    """The worker cannot be configured from this. The message is one line that names the key and what is allowed."""


class WorkerSpec(EngineSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole configuration of a worker, its engine's settings among it. The environment keeps it off the command line, where
    other users could read it.

    endpoint: where the coordinator listens for workers (`tcp://…` or `ipc://…`).
    group: the group whose work this worker does.
    incarnation: names this process; a restarted worker gets a new one.
    engine: `sglang` or `sim`.
    reserve_staging: whether device memory is taken for staged weight updates before the engine starts; none: if the coordinator
        says that the group had one.
    checkpoint: the directory that the engine starts on in place of `model`, which are the weights of `version` if the digest of
        its files is `checkpoint_digest` once the engine has loaded them.
    stager: path of the Unix socket of this worker's stager; empty: there is none.
    checkpoint_roots: directories under which a published checkpoint may lie; empty: nowhere.
    adapter_roots: directories under which LoRA adapters that are loaded by path may lie; empty: nowhere.
    adapter_store: where the coordinator keeps those that came as tensors; empty: out of reach of this worker.
    media_root: the folder under which media of prompts may be named by path; empty: none is read.
    media_urls: prefixes of URLs from which media of prompts are fetched; empty: none is.
    profile_root: the folder under which profiles of its engine are written; empty: none is.
    save_roots: directories and servers of Redis under which the weights of its engine may be saved; empty: nowhere.
    kernel_cache: the folder for compiled kernels, which variables of the environment name as well; empty: each library has its
        own.
    keys: the file with this worker's key, for a coordinator on TCP; empty: none. The key itself stands nowhere here.
    lifeline_fd: read end of an inherited pipe; at its end of file the owner is gone and the worker ends at once.
    external: no coordinator started this worker: it waits for one without a limit, and its owner ends it.
    orphan_s: seconds without a word from a coordinator before a worker that is not external ends; `accept` may replace it.
    drain_s: seconds that begun work has to finish after SIGTERM or `drain`.
    """

    endpoint: str
    group: str
    incarnation: str
    engine: str
    reserve_staging: bool | None = None
    checkpoint: str = ""
    checkpoint_digest: str = ""
    version: int = 0
    stager: str = ""
    checkpoint_roots: tuple[str, ...] = ()
    adapter_roots: tuple[str, ...] = ()
    adapter_store: str = ""
    media_root: str = ""
    media_urls: tuple[str, ...] = ()
    profile_root: str = ""
    save_roots: tuple[str, ...] = ()
    kernel_cache: str = ""
    keys: str = ""
    lifeline_fd: int | None = None
    external: bool = False
    orphan_s: float = 60.0
    drain_s: float = 10.0


def read_spec(environment: Mapping[str, str]) -> WorkerSpec:
    """The worker's configuration.

    Raises:
        SpecError: the variable is not set, no JSON, or has an unknown key or an impossible value; the line names it.
    """
    text = environment.get(VARIABLE)
    if text is None:
        raise SpecError(f"{VARIABLE} is not set: it holds the worker's configuration as JSON")
    try:
        spec = msgspec.json.decode(text, type=WorkerSpec)
    except msgspec.ValidationError as error:
        raise SpecError(f"{VARIABLE}: {error}") from None
    except msgspec.DecodeError as error:
        raise SpecError(f"{VARIABLE} is not JSON: {error}") from None

    def need(ok: bool, key: str, allowed: str) -> None:
        if not ok:
            raise SpecError(f"{VARIABLE}: {key} = {getattr(spec, key)!r}: {allowed}")

    need("://" in spec.endpoint, "endpoint", "must be a ZeroMQ endpoint such as tcp://127.0.0.1:5756")
    need(bool(spec.group), "group", "must name a group")
    need(bool(spec.incarnation), "incarnation", "must name this process")
    need(spec.engine in ENGINES, "engine", f"must be one of {', '.join(ENGINES)}")
    need(bool(spec.model), "model", "must name a model")
    for key in ("max_batch_tokens", "max_batch_rows", "forwards_in_flight", "cached_query_tokens", "nccl_port"):
        value = getattr(spec, key)
        need(value is None or value > 0, key, "must be more than 0")
    for key in ("orphan_s", "drain_s"):
        value = getattr(spec, key)
        need(math.isfinite(value) and value >= 0, key, "must be seconds, not negative")
    need(not spec.checkpoint or bool(spec.checkpoint_digest), "checkpoint_digest", "must be the digest of `checkpoint`")
    need(spec.lifeline_fd is None or spec.lifeline_fd >= 0, "lifeline_fd", "must be a file descriptor")
    return spec
