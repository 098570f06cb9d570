"""The one loader of configurations, and the checks that go past types.

Unknown keys and impossible values are refused with the key's name.
"""

import difflib
import ipaddress
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path, PurePath
from typing import Any, TypeAlias, get_args, get_origin, get_type_hints

import msgspec

from enginepool.config import GPU_SIZES, GroupConfig, Limits, PoolConfig, RestartConfig, Timing, gpus_per_worker, uses_gpus
from enginepool.conversion import TOML, value_at, wrong_type
from enginepool.errors import ConfigError
from enginepool.host.model_folder import holds_model
from enginepool.net.address import wrong_address
from enginepool.net.media_urls import refuse_prefix
from enginepool.protocol.errors import located
from enginepool.protocol.redis_url import is_redis, redis_root

_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
_HUB_NAME = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*", re.ASCII)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")
_MISSING = re.compile(r"Object missing required field `(.*)`")
_NO_CHOICE = re.compile(r"Invalid enum value (.*)", re.DOTALL)

#: The least `limits.max_message_bytes`: the first messages of peers fit. A client's `hello` has about 130 bytes, and a worker's
#: `ready` more.
LEAST_MESSAGE_BYTES = 1000


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
    return _convert(msgspec.to_builtins(given, enc_hook=_path), "configuration")


def _path(given: Any) -> str:
    """What a program gives as a path is a text in a file."""
    if isinstance(given, PurePath):
        return str(given)
    raise TypeError(f"a value of type {type(given).__name__}; what TOML has, or a path")


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
        # A group alone has such keys: one choice, or a list of them.
        hint = get_type_hints(GroupConfig)[key.rpartition(".")[2].partition("[")[0]]
        known = get_args(get_args(hint)[0] if get_origin(hint) is list else hint)
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
    if in_group and name in PoolConfig.__struct_fields__:
        return "; it is a setting of the pool, not of a group"
    struct = GroupConfig if in_group else tables.get(path)
    near = difflib.get_close_matches(name, struct.__struct_fields__ if struct is not None else (), 1)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; a setting of the engine is written as options.{name}" if in_group else ""


Need: TypeAlias = Callable[[bool, str, object, str], None]


def _check_group(name: str, group: GroupConfig, need: Need) -> None:
    at = f"groups.{name}"
    need(bool(_NAME.fullmatch(name)), at, name, "a name has a-z 0-9 _ . - and at most 64 characters")
    need(bool(group.model), f"{at}.model", group.model, "must name a model")
    need(0 <= group.workers <= 4096, f"{at}.workers", group.workers, "0 to 4096")
    caches = group.packing == "on" and group.cached_query_tokens is not None
    need(not caches, f"{at}.packing", group.packing, "auto or off with cached_query_tokens, for which engines do not pack")
    _check_operations(at, group, need)
    _check_media(at, group, need)
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
        sizes = ", ".join(f"{key} = {group.options[key]}" for key in GPU_SIZES if (group.options.get(key) or 1) > 1)
        allowed = f"a worker with options.{sizes} sees {each} GPUs" if each > 1 else "a worker sees 1 GPU"
        right = len(names) == each and all(names) and len(set(names)) == each
        need(right, f"{at}.gpus[{index}]", entry, f"{allowed}, separated by commas, each named once")
    for key, others in (("checkpoint_roots", ""), ("save_roots", ", or redis://HOST:PORT/")):
        for index, root in enumerate(getattr(group, key)):
            right = root.startswith(("/", "~")) or bool(others and redis_root(root))
            need(right, f"{at}.{key}[{index}]", root, f"an absolute path of a directory, or one that begins with ~{others}")
    for index, root in enumerate(group.adapter_roots):
        need("generate" in group.operations, f"{at}.adapter_roots", group.adapter_roots, "only where operations has 'generate'")
        right = root.startswith(("/", "~"))
        need(right, f"{at}.adapter_roots[{index}]", root, "an absolute path of a directory, or one that begins with ~")
    for key in ("profile_root", "kernel_cache"):
        root = getattr(group, key)
        need(not root or root.startswith(("/", "~")), f"{at}.{key}", root, "an absolute path, or one that begins with ~")
    for key in ("max_batch_tokens", "max_batch_rows", "cached_query_tokens"):
        value = getattr(group, key)
        need(value is None or value > 0, f"{at}.{key}", value, "more than 0, or left out")


def _check_operations(at: str, group: GroupConfig, need: Need) -> None:
    asked = group.operations
    need(len(set(asked)) == len(asked), f"{at}.operations", asked, "each of score, embed, logprobs and generate once at most")
    if "generate" not in asked:
        packs = group.packing != "on" or not asked or "score" in asked
        need(packs, f"{at}.packing", group.packing, "auto or off where operations has no 'score': scores alone are packed")
        return
    need("embed" not in asked, f"{at}.operations", asked, "a model that embeds does not generate; give each a group of its own")
    why = "where operations has 'generate': such rows need engines of their own"
    need(group.packing != "on", f"{at}.packing", group.packing, f"auto or off {why}")
    need(not group.cached_query_tokens, f"{at}.cached_query_tokens", group.cached_query_tokens, f"none {why}")
    if len(asked) > 1:
        return
    for key in ("max_batch_tokens", "max_batch_rows"):
        value = getattr(group, key)
        need(not value, f"{at}.{key}", value, "none with operations = ['generate'], which has no batches of rows")


def _check_media(at: str, group: GroupConfig, need: Need) -> None:
    root = group.media_root
    need(not root or root.startswith(("/", "~")), f"{at}.media_root", root, "an absolute path, or one that begins with ~")
    for index, prefix in enumerate(group.media_urls):
        why = refuse_prefix(prefix)
        need(not why, f"{at}.media_urls[{index}]", prefix, why)
    for key in ("media_root", "media_urls"):
        unused = getattr(group, key) and "generate" not in group.operations
        need(not unused, f"{at}.{key}", getattr(group, key), "only where operations has 'generate'")


def check_config(config: PoolConfig, *, where: str) -> PoolConfig:
    """`config` itself, when every value is possible. Raises ConfigError naming the first that is not."""

    def need(ok: bool, key: str, value: object, allowed: str) -> None:
        if not ok:
            raise ConfigError(f"{where}: {key} = {value!r}: {allowed}")

    need(bool(config.groups), "groups", {}, "a pool needs at least one group")
    for name, group in config.groups.items():
        _check_group(name, group, need)
    for part, struct in (("limits", config.limits), ("timing", config.timing), ("restart", config.restart)):
        for key in struct.__struct_fields__:
            value = getattr(struct, key)
            zero_ok = key == "max_restarts"
            allowed = f"{'0 or more' if zero_ok else 'more than 0'} and less than 1e15"
            need(0 < value < 1e15 or (zero_ok and value == 0), f"{part}.{key}", value, allowed)
    least, most = LEAST_MESSAGE_BYTES, config.limits.max_message_bytes
    need(most >= least, "limits.max_message_bytes", most, f"{least} or more: the messages that open a connection must fit")
    need(
        config.limits.max_message_bytes <= config.limits.window_bytes <= config.limits.buffer_bytes // 2,
        "limits.window_bytes",
        config.limits.window_bytes,
        "at least limits.max_message_bytes and at most half of limits.buffer_bytes",
    )
    need(config.limits.queue_items > 1, "limits.queue_items", config.limits.queue_items, "2 or more: a client has half of them")
    timing = config.timing
    for other in ("silence_s", "client_silence_s"):
        need(timing.ping_s * 2 <= getattr(timing, other), "timing.ping_s", timing.ping_s, f"at most half of {other}")
    need(bool(config.state_dir), "state_dir", config.state_dir, "must name a directory")
    apart = config.listen_workers != config.listen or config.listen.endswith((":*", ":0")) or not config.listen
    need(apart, "listen_workers", config.listen_workers, "workers have an address of their own")
    for key in ("listen", "listen_workers"):
        value = getattr(config, key)
        if value:
            check_endpoint(value, config, f"{where}: {key}")
    return config


def resolve_roots(config: PoolConfig) -> PoolConfig:
    """`config` with the roots of each group as absolute paths, and without symbolic links as well; the default of
    `checkpoint_roots` filled in. The coordinator compares paths as texts, and its workers resolve them again."""
    groups: dict[str, GroupConfig] = {}
    for name, group in config.groups.items():
        model = os.path.expanduser(group.model)
        folders = [root for root in group.save_roots if not is_redis(root)]
        given = group.checkpoint_roots or ([model] if os.path.isdir(model) else [])
        groups[name] = msgspec.structs.replace(
            group,
            checkpoint_roots=_resolved(given),
            adapter_roots=_resolved(group.adapter_roots),
            save_roots=[*_resolved(folders), *(root for root in group.save_roots if is_redis(root))],
        )
    return msgspec.structs.replace(config, groups=groups)


def _resolved(given: Iterable[str]) -> list[str]:
    """These directories as absolute paths, and without symbolic links as well."""
    roots = [os.path.abspath(os.path.expanduser(root)) for root in given]
    return list(dict.fromkeys([*roots, *map(os.path.realpath, roots)]))


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
