"""The offer: what of a `publish` can be refused before a transaction opens, with the field and the limit named."""

from collections.abc import Sequence

from enginepool.coordinator.core.events import Buffer
from enginepool.protocol.basis import MAX_ID, MAX_NAME_BYTES
from enginepool.protocol.errors import WireError
from enginepool.protocol.frames import check_frames
from enginepool.protocol.layout import ALIGNMENT
from enginepool.protocol.manifest import Tensor, decode_manifest
from enginepool.protocol.messages.weights import DESCRIPTOR, MAX_MS, SEAL_BYTES, MemoryRegion, Publish
from enginepool.protocol.redis_url import FORM, below_redis, is_redis, parse_redis

#: transfers whose bytes are broadcast in a process group
BROADCAST = ("staged", "direct")

#: bytes of what torch shares of a GPU's memory; some 200 are usual
MAX_HANDLE = 4096


def check_names(message: object, *fields: str, at: str = "") -> None:
    """Refuse names that are too long to be sent on: a worker drops a message whose header is. Raises WireError."""
    for field in fields:
        nbytes = len(getattr(message, field).encode())
        if nbytes > MAX_NAME_BYTES:
            text = f"{at}{field}: expected at most {MAX_NAME_BYTES} bytes, got {nbytes}"
            raise WireError("bad_request", text, field=at + field, limit=str(MAX_NAME_BYTES))


def open_publish(publish: Publish, frames: Sequence[Buffer]) -> list[Tensor]:
    """The manifest of an offer; none where the transfer has none.

    Raises:
        WireError: `malformed` for frames that do not fit their header, `bad_request` for a value that nothing could serve.
    """
    for field, least, most in (("id", 0, MAX_ID), ("version", 0, MAX_ID), ("drain_ms", 0, MAX_MS), ("lease_ms", 1, MAX_MS)):
        value = getattr(publish, field)
        if not least <= value <= most:
            limit = least if value < least else most
            raise WireError("bad_request", f"{field}: {value} is outside {least}..{most}", field=field, limit=str(limit))
    if publish.after_drain != "abort" and publish.in_flight != "drain":
        text = f"after_drain: {publish.after_drain} goes with in_flight drain, got in_flight {publish.in_flight}"
        raise WireError("bad_request", text, field="after_drain", limit="abort")
    check_names(publish, "address", "gpu", "host", "path", "peer")
    check_frames(publish.frames, frames)
    if publish.transfer in ("checkpoint", "set_version"):
        if frames:
            raise WireError("malformed", f"frames: {publish.transfer} has no manifest", field="frames", limit="0")
        if publish.transfer == "checkpoint" and not publish.path:
            raise WireError("bad_request", "path: checkpoint needs the directory that workers read", field="path")
        return []
    if [(spec.name, spec.dtype) for spec in publish.frames] != [("manifest", "utf8")]:
        raise WireError("malformed", f"frames: {publish.transfer} has one, `manifest` utf8", field="frames", limit="1")
    if publish.transfer in BROADCAST and not publish.address:
        raise WireError("bad_request", f"address: {publish.transfer} needs the publisher's HOST:PORT", field="address")
    if publish.transfer == "ipc" and not publish.host:
        raise WireError("bad_request", "host: handles needs the identity of the publisher's host", field="host")
    size = publish.bucket_bytes
    if size <= 0 or size % ALIGNMENT:
        text = f"bucket_bytes: {size} is no positive multiple of {ALIGNMENT}"
        raise WireError("bad_request", text, field="bucket_bytes", limit=str(ALIGNMENT))
    return decode_manifest(frames[0])


def check_regions(regions: Sequence[MemoryRegion], pid: int | None) -> None:
    """What of lent memory can be refused before a worker opens it. `pid`: of the publisher's process, where it is known.

    Raises:
        WireError: `bad_request`: memory without a seal, or a path that is no descriptor of the publisher's process.
    """
    for i, space in enumerate(regions):
        at = f"regions[{i}]"
        check_names(space, "path", "gpu", at=f"{at}.")
        if len(space.seal) != SEAL_BYTES:
            text = f"{at}.seal: expected {SEAL_BYTES} bytes, got {len(space.seal)}"
            raise WireError("bad_request", text, field=f"{at}.seal", limit=str(SEAL_BYTES))
        if len(space.handle) > MAX_HANDLE:
            text = f"{at}.handle: expected at most {MAX_HANDLE} bytes, got {len(space.handle)}"
            raise WireError("bad_request", text, field=f"{at}.handle", limit=str(MAX_HANDLE))
        if space.kind == "file":
            found = DESCRIPTOR.fullmatch(space.path)
            if found is None or (pid is not None and int(found[1]) != pid):
                whose = "PID" if pid is None else pid
                text = f"{at}.path: must be a descriptor of the publisher's own process, /proc/{whose}/fd/N"
                raise WireError("bad_request", text, field=f"{at}.path", limit=f"/proc/{whose}/fd/N")


def outside(path: str, roots: Sequence[str], setting: str = "checkpoint_roots") -> str:
    """Why `path`, a directory or for `save_roots` a model in Redis, may not be opened, as far as its text tells; or "". Workers
    resolve links. `roots`: the value of `setting` of the group."""
    saves = setting == "save_roots"
    if saves and is_redis(path):
        if parse_redis(path) is None:
            return f"path: {path!r}: must be {FORM}"
        inside = below_redis(path, roots) is not None
    else:
        if not path.startswith("/"):
            # Our clients make a directory that they can see absolute, but what is saved does not exist yet.
            seen = f", or {FORM}" if saves else ", or a directory that exists on the client's host"
            return f"path: {path!r}: must be absolute{seen}"
        if "\0" in path or ".." in path.split("/"):
            return f"path: {path!r}: must not contain '..' or a null character"
        inside = any(path == root or path.startswith(root.rstrip("/") + "/") for root in roots)
    if not roots:
        return f"path: {path!r}: must lie under one of the group's {setting}, and its configuration has none"
    if not inside:
        return f"path: {path!r}: must lie under one of the group's {setting}: {', '.join(roots)}"
    return ""
