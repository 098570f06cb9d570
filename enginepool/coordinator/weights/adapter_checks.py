"""What of a change of adapters can be refused before it begins, with the field and the limit named. Pure."""

from collections.abc import Sequence

from enginepool.coordinator.core.adapter_events import AdapterAsked
from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.events import Buffer
from enginepool.coordinator.core.group import Group
from enginepool.coordinator.core.request import Client
from enginepool.coordinator.weights.publish_validation import check_names, outside
from enginepool.protocol.adapters import (
    LOADS_ADAPTERS,
    MAX_ADAPTER_CONFIG,
    check_adapter_name,
    check_adapter_version,
    is_adapter_digest,
)
from enginepool.protocol.capabilities import MAX_ADAPTERS
from enginepool.protocol.errors import WireError
from enginepool.protocol.frames import check_frames
from enginepool.protocol.messages.adapters import LoadAdapter, UnloadAdapter

#: hexadecimal digits of a digest
_DIGEST = 32
#: names of workers that an error lists
_LISTED = 8


def open_load(message: LoadAdapter, frames: Sequence[Buffer]) -> None:
    """Raise WireError for an adapter that nothing could load: `malformed` for frames that do not fit, else `bad_request`."""
    check_adapter_name(message.name)
    check_adapter_version(message.version)
    check_names(message, "path")
    check_frames(message.frames, frames)
    if bool(message.path) == bool(frames):
        raise WireError("bad_request", "path: expected a path, or the frames config and tensors, and not both", field="path")
    if not frames:
        if message.digest:
            raise WireError("bad_request", "digest: given with a path, whose files workers read; leave it out", field="digest")
        return
    found = [(spec.name, spec.dtype, len(spec.shape)) for spec in message.frames]
    if found != [("config", "uint8", 1), ("tensors", "uint8", 1)]:
        raise WireError("malformed", f"frames: {found}; expected config and tensors, uint8 [n]", field="frames")
    if len(frames[0]) > MAX_ADAPTER_CONFIG:
        text = f"config: {len(frames[0])} bytes; at most {MAX_ADAPTER_CONFIG}"
        raise WireError("bad_request", text, field="config", limit=str(MAX_ADAPTER_CONFIG))
    if not is_adapter_digest(message.digest):
        text = f"digest: {message.digest[:80]!r}: expected {_DIGEST} hexadecimal digits"
        raise WireError("bad_request", text, field="digest", limit=str(_DIGEST))


def why_not_loaded(core: Context, client: Client, group: Group, e: AdapterAsked, stored: int) -> WireError | None:
    """Why a load may not begin now. `stored`: bytes of adapters on the disk."""
    message, limits = e.message, core.config.limits
    assert isinstance(message, LoadAdapter)
    if wrong := misfit(group, message.name) or _asleep(group):
        return wrong
    known = group.adapters.committed.get(message.name)
    if known is not None and message.version <= known.version:
        text = f"version: expected more than {known.version}, which is loaded; got {message.version}"
        return WireError("version_backwards", text, field="version", limit=str(known.version))
    if known is None and (count := len(group.adapters.names)) >= MAX_ADAPTERS:
        text = f"name: {count} adapters are loaded; at most {MAX_ADAPTERS}"
        return WireError("bad_request", text, field="name", limit=str(MAX_ADAPTERS))
    roots = group.config.adapter_roots
    if message.path and (text := outside(message.path, roots, "adapter_roots")):
        return WireError("bad_request", text, field="path", limit=", ".join(roots) or "none")
    nbytes = sum(map(len, e.frames))
    if nbytes > limits.window_bytes:
        text = f"tensors: {nbytes} bytes; at most {limits.window_bytes}"
        return WireError("too_large", text, field="tensors", limit=str(limits.window_bytes))
    if nbytes and stored + nbytes > limits.adapters_bytes:
        text = f"tensors: {nbytes} bytes, and {stored} bytes of adapters are stored; limits.adapters_bytes is"
        text += f" {limits.adapters_bytes}: unload some, or load a folder"
        return WireError("too_large", text, field="tensors", limit=str(limits.adapters_bytes))
    if client.nbytes + nbytes > limits.window_bytes or not core.make_room(nbytes, e.outboxes):
        field = "window_bytes" if client.nbytes + nbytes > limits.window_bytes else "buffer_bytes"
        return WireError("busy", f"{field}: no room for {nbytes} bytes", field=field, limit=str(getattr(limits, field)))
    return None


def why_not_unloaded(group: Group, message: UnloadAdapter) -> WireError | None:
    """Why an adapter may not be unloaded."""
    return _configured(group, message.name) or (_asleep(group) if message.name in group.adapters.committed else None)


def _asleep(group: Group) -> WireError | None:
    sleeping = [worker.name for worker in group.workers.values() if worker.sleeps]
    if not sleeping and not group.holds.asleep:
        return None
    who = ", ".join(sleeping[:_LISTED]) or "engines"
    text = f"group: {who} of {group.name!r} sleep, and adapters are changed only while all engines are awake; wake them first"
    return WireError("update_aborted", text, field="group")


def misfit(group: Group, name: str) -> WireError | None:
    """Why the engines of a group do not load an adapter of this name, as far as a worker has said what they are."""
    if group.capabilities is not None and LOADS_ADAPTERS not in group.capabilities.features:
        text = f"group: the workers of {group.name!r} load no adapters while they run; SGLang needs the option enable_lora, and"
        text += " max_lora_rank and lora_target_modules, and no replicas"
        return WireError("unsupported", text, field="group")
    return _configured(group, name)


def _configured(group: Group, name: str) -> WireError | None:
    if name not in group.adapters.configured:
        return None
    text = f"name: engines of this group start with {name!r} (lora_paths), which cannot be changed while they run"
    return WireError("bad_request", text, field="name")
