"""Configuration: frozen structs with their defaults, and the one loader that reads them.

A pool is described by a TOML file (`enginepool serve --config pool.toml`) or by the same structs made in Python. Unknown keys
and impossible values are refused with the key's name.
"""

import difflib
import ipaddress
import math
import os
import re
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args, get_type_hints

import msgspec

from enginepool.conversion import TOML, located, value_at, wrong_type
from enginepool.errors import ConfigError
from enginepool.host.model_folder import holds_model
from enginepool.net.address import STATE_DIR, wrong_address

#: where engines run
Device: TypeAlias = Literal["auto", "cpu", "cuda"]
#: of weights and activations, by SGLang's names
Dtype: TypeAlias = Literal["auto", "bfloat16", "float16", "half", "float32", "float"]


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds of the coordinator. Past one of them a client gets `busy` (or `too_large`), never a lost request."""

    #: The one total of the coordinator's buffers: requests that are queued or running, with the whole answers that they will
    #: have, answers that are kept, and what was sent and is not read yet. All other bounds in bytes are parts of it.
    buffer_bytes: int = 1 << 30
    #: score items queued or running, over all groups; one client has at most half of them
    queue_items: int = 1_000_000
    #: clients that may be connected; fewer where RLIMIT_NOFILE leaves fewer descriptors
    clients: int = 10_000
    #: unanswered requests that one client may have; what they, their answers and what it has not read take of the total
    window_requests: int = 4096
    window_bytes: int = 256 << 20
    #: the largest message, request or answer; a frame over twice this is not received: ZeroMQ cuts the link
    max_message_bytes: int = 64 << 20
    #: answers are kept for a resend until acknowledged, at most this long and this large in all
    answers_s: float = 60.0
    answers_bytes: int = 64 << 20


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
    """A named set of workers of one model, identical but for those that are packed."""

    #: a checkpoint directory, or a name that SGLang can load: of the model hub, NAME or OWNER/NAME; for engine "sim" any name
    model: str
    engine: Literal["sglang", "sim"] = "sglang"
    #: workers that this pool starts itself; 0: only workers that dial in
    workers: int = 1
    #: of them, the last so many score packed and nothing else: items that share a query in one sequence (multi-item scoring)
    packed_workers: int = 0
    #: on the others, a query of so many tokens or more that rows share is computed once, ahead of them, and kept in SGLang's
    #: radix cache; none: each row computes its query
    cached_query_tokens: int | None = None
    device: Device = "auto"
    dtype: Dtype = "auto"
    #: for each worker the GPUs it sees (CUDA_VISIBLE_DEVICES), as many as its engine needs: options.tp_size; empty: the pool
    #: gives each worker GPUs that no other worker has
    gpus: list[str] = []
    #: seconds of waiting that weigh as much as one level of priority; none: strict priority
    ageing_s: float | None = 1.0
    #: caps on one batch, below what the engine's settings give; what follows from them is halved when an engine of the group
    #: runs out of memory
    max_batch_tokens: int | None = None
    max_batch_rows: int | None = None
    #: forwards of tokens in flight at a worker; where its pace is known, and with cached queries, as many batches
    forwards_in_flight: int = 2
    #: take memory of each GPU for a staged weight update before the engine takes what there is; false where weights only ever
    #: come by `ipc`, `direct`, or not at all: the KV cache has it, and a staged update what it finds, on the host at last
    reserve_staging: bool = True
    #: where committed weights are kept for workers that start: in shared memory of their node, in `state_dir`, or nowhere
    snapshot: Literal["memory", "disk", "none"] = "memory"
    #: how engines that take weights only at their start are restarted for a checkpoint: `rolling`, the others answer on the old
    #: version meanwhile; `at_once`, requests wait
    restart_updates: Literal["rolling", "at_once"] = "rolling"
    #: directories under which a published checkpoint may lie; empty: the folder of `model` itself, where it is one
    checkpoint_roots: list[str] = []
    #: further settings for the engine, by its own names
    options: dict[str, Any] = {}


class PoolConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A pool: where it listens, where it keeps its journal, its groups, its bounds."""

    groups: dict[str, GroupConfig]
    #: where clients connect; empty: the ipc socket at which they look by default, `address.default_address`
    listen: str = ""
    #: where workers dial in; empty: an ipc socket in `state_dir`
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


#: engine options whose product is the number of GPUs of one worker
GPU_SIZES = ("tp_size", "pp_size")


def gpus_per_worker(group: GroupConfig) -> int:
    """GPUs that the engine of one worker runs on."""
    return math.prod(group.options.get(key) or 1 for key in GPU_SIZES)


def uses_gpus(group: GroupConfig) -> bool:
    """Whether the workers of `group` run on GPUs where there are some."""
    return group.engine == "sglang" and group.device != "cpu"


_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
_HUB_NAME = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*", re.ASCII)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")
_MISSING = re.compile(r"Object missing required field `(.*)`")
_NO_CHOICE = re.compile(r"Invalid enum value (.*)", re.DOTALL)


def load_config(path: Path) -> PoolConfig:
    """Read a TOML file.

    Raises:
        ConfigError: the file is missing, no TOML, or has an unknown key or an impossible value; the line names it.
    """
    try:
        raw = msgspec.toml.decode(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None
    return _convert(raw, str(path))


def checked_config(given: Any) -> PoolConfig:
    """The same from what a program gives: a PoolConfig, or mappings like those of the file.

    Raises:
        ConfigError: as `load_config`.
        TypeError: something in it can be in no file.
    """
    return _convert(msgspec.to_builtins(given), "configuration")


def decode_config(data: bytes) -> PoolConfig:
    """The same from JSON, as an embedding program hands it over. Raises ConfigError."""
    try:
        raw = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration: not JSON: {error}") from None
    return _convert(raw, "configuration")


def _convert(raw: Any, where: str) -> PoolConfig:
    try:
        config = msgspec.convert(raw, PoolConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {_say(str(error), raw)}") from None
    return check_config(config, where=where)


def encode_config(config: PoolConfig) -> bytes:
    """JSON that `decode_config` reads."""
    return msgspec.json.encode(config)


def _say(text: str, raw: Any) -> str:
    """The error with the key first. msgspec does not say which group is wrong: that is looked for."""
    key, what = located(text)
    table, path = raw, key
    if key.startswith("groups[...]"):
        for name, group in raw["groups"].items():
            try:
                msgspec.convert(group, GroupConfig)
            except msgspec.ValidationError:
                table, path = group, key.removeprefix("groups[...]")
                key = f"groups.{name}{path}"
                break
    unknown = _UNKNOWN.fullmatch(what)
    if unknown:
        name = unknown.group(1)
        return f"unknown key {f'{key}.' if key else ''}{name}{_meant(path, name, in_group=table is not raw)}"
    choice = _NO_CHOICE.fullmatch(what)
    if choice:
        # A group alone has such keys.
        known = get_args(get_type_hints(GroupConfig)[key.rpartition(".")[2]])
        return f"{key} = {choice.group(1)}: one of {', '.join(known)}"
    missing = _MISSING.fullmatch(what)
    if missing:
        return f"{f'{key}.' if key else ''}{missing.group(1)}: missing, and needed"
    allowed, _ = wrong_type(what, TOML)
    if allowed and key:
        return f"{key} = {value_at(table, path)!r:.80}: must be {allowed}"
    return f"{key}: {what}" if key else what


def _meant(path: str, name: str, *, in_group: bool) -> str:
    """What was probably meant by an unknown key `name` in the table at `path`, as the end of a sentence."""
    tables = {"": PoolConfig, "limits": Limits, "timing": Timing, "restart": RestartConfig}
    struct = GroupConfig if in_group else tables.get(path)
    near = difflib.get_close_matches(name, struct.__struct_fields__ if struct is not None else (), 1)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; a setting of the engine is written as options.{name}" if in_group else ""


def check_config(config: PoolConfig, *, where: str) -> PoolConfig:
    """`config` itself, when every value is possible. Raises ConfigError naming the first that is not."""

    def need(ok: bool, key: str, value: object, allowed: str) -> None:
        if not ok:
            raise ConfigError(f"{where}: {key} = {value!r}: {allowed}")

    need(bool(config.groups), "groups", {}, "a pool needs at least one group")
    for name, group in config.groups.items():
        at = f"groups.{name}"
        need(bool(_NAME.fullmatch(name)), at, name, "a name has a-z 0-9 _ . - and at most 64 characters")
        need(bool(group.model), f"{at}.model", group.model, "must name a model")
        need(0 <= group.workers <= 4096, f"{at}.workers", group.workers, "0 to 4096")
        need(
            0 <= group.packed_workers <= group.workers,
            f"{at}.packed_workers",
            group.packed_workers,
            f"0 to workers, which is {group.workers}",
        )
        aged = group.ageing_s is None or 0 < group.ageing_s < 1e9
        need(aged, f"{at}.ageing_s", group.ageing_s, "more than 0 and less than 1e9, or left out")
        need(group.forwards_in_flight in (1, 2, 3, 4), f"{at}.forwards_in_flight", group.forwards_in_flight, "1 to 4")
        need(
            not group.gpus or len(group.gpus) == group.workers,
            f"{at}.gpus",
            group.gpus,
            f"one entry for each of {group.workers} workers",
        )
        if group.engine == "sglang":
            for key in GPU_SIZES:
                value = group.options.get(key)
                whole = isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 4096
                need(value is None or whole, f"{at}.options.{key}", value, "a whole number, 1 to 4096")
        for index, entry in enumerate(group.gpus if uses_gpus(group) else []):
            names, each = [name.strip() for name in entry.split(",")], gpus_per_worker(group)
            allowed = f"a worker with options.tp_size = {each} sees {each} GPUs" if each > 1 else "a worker sees 1 GPU"
            right = len(names) == each and all(names) and len(set(names)) == each
            need(right, f"{at}.gpus[{index}]", entry, f"{allowed}, separated by commas, each named once")
        for index, root in enumerate(group.checkpoint_roots):
            absolute = root.startswith(("/", "~"))
            need(
                absolute, f"{at}.checkpoint_roots[{index}]", root, "an absolute path of a directory, or one that begins with ~"
            )
        for key in ("max_batch_tokens", "max_batch_rows", "cached_query_tokens"):
            value = getattr(group, key)
            need(value is None or value > 0, f"{at}.{key}", value, "more than 0, or left out")
    for part, struct in (("limits", config.limits), ("timing", config.timing), ("restart", config.restart)):
        for key in struct.__struct_fields__:
            value = getattr(struct, key)
            zero_ok = key == "max_restarts"
            need(0 < value < 1e15 or (zero_ok and value == 0), f"{part}.{key}", value, "more than 0 and less than 1e15")
    need(
        config.limits.max_message_bytes <= config.limits.window_bytes <= config.limits.buffer_bytes // 2,
        "limits.window_bytes",
        config.limits.window_bytes,
        "at least limits.max_message_bytes and at most half of limits.buffer_bytes",
    )
    need(config.limits.queue_items > 1, "limits.queue_items", config.limits.queue_items, "2 or more: a client has half of them")
    need(
        config.timing.ping_s * 2 <= config.timing.silence_s, "timing.ping_s", config.timing.ping_s, "at most half of silence_s"
    )
    need(bool(config.state_dir), "state_dir", config.state_dir, "must name a directory")
    apart = config.listen_workers != config.listen or config.listen.endswith((":*", ":0")) or not config.listen
    need(apart, "listen_workers", config.listen_workers, "workers have an address of their own")
    for key in ("listen", "listen_workers"):
        value = getattr(config, key)
        if value:
            check_endpoint(value, config, f"{where}: {key}")
    return config


def resolve_roots(config: PoolConfig) -> PoolConfig:
    """`config` with the `checkpoint_roots` of each group as absolute paths, and without symbolic links as well; the default
    filled in. The coordinator compares paths as texts, and its workers resolve them again."""
    groups: dict[str, GroupConfig] = {}
    for name, group in config.groups.items():
        model = os.path.expanduser(group.model)
        given = group.checkpoint_roots or ([model] if os.path.isdir(model) else [])
        roots = [os.path.abspath(os.path.expanduser(root)) for root in given]
        roots = list(dict.fromkeys([*roots, *map(os.path.realpath, roots)]))
        groups[name] = msgspec.structs.replace(group, checkpoint_roots=roots)
    return msgspec.structs.replace(config, groups=groups)


def check_models(config: PoolConfig, where: str) -> PoolConfig:
    """`config` itself, when the models of all workers that it starts here can be something: a folder with a model, an address,
    or a name that the model hub may know, NAME or OWNER/NAME. Raises ConfigError naming the first that is not.
    """
    for name, group in config.groups.items():
        model, path = group.model, Path(os.path.expanduser(group.model))
        if group.engine != "sglang" or not group.workers or "://" in model:
            continue
        if path.is_dir():
            wrong = "" if holds_model(path) else f"{path.absolute()} has no config.json"
        elif model.startswith(("/", ".", "~")) or model.count("/") > 1:
            wrong = f"no folder {path.absolute()}"
        else:
            wrong = "" if _HUB_NAME.fullmatch(model) else "no folder here, and no name of a model hub: NAME or OWNER/NAME"
        if wrong:
            raise ConfigError(f"{where}: groups.{name}.model = {model!r}: {wrong}")
    return config


def check_roots(config: PoolConfig, where: str) -> PoolConfig:
    """`config` itself, when the `checkpoint_roots` of groups that start workers are directories. Raises ConfigError."""
    for name, group in config.groups.items():
        for index, root in enumerate(group.checkpoint_roots if group.workers else []):
            if not os.path.isdir(os.path.expanduser(root)):
                raise ConfigError(f"{where}: groups.{name}.checkpoint_roots[{index}] = {root!r}: no such directory")
    return config


def check_endpoint(endpoint: str, config: PoolConfig, where: str) -> None:
    """Refuse what cannot be bound safely: another transport, a bad port, an ipc socket without a directory, TCP without keys.

    Raises:
        ConfigError: says which, and what to do.
    """
    if why := wrong_address(endpoint, listens=True):
        raise ConfigError(f"{where} = {endpoint!r}: {why}")
    if endpoint.startswith("ipc://@"):
        raise ConfigError(f"{where} = {endpoint!r}: an abstract socket is open to every user; name a path")
    if config.keys or endpoint.startswith("ipc://"):
        return
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    try:
        loopback = ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not (loopback and config.insecure_loopback):
        without = "; or insecure_loopback = true, if every user of this host may use the pool" if loopback else ""
        raise ConfigError(f'{where} = {endpoint!r}: TCP needs keys: run `enginepool keys DIR` and set keys = "DIR"{without}')
