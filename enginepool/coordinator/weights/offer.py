"""The offer: what of a `publish` can be refused before a transaction opens, with the field and the limit named."""

from collections.abc import Sequence

from enginepool.coordinator.events import Buffer
from enginepool.protocol.basis import MAX_ID
from enginepool.protocol.errors import WireError
from enginepool.protocol.frames import check_frames
from enginepool.protocol.layout import ALIGNMENT
from enginepool.protocol.manifest import Tensor, decode_manifest
from enginepool.protocol.updates import MAX_MS, Publish

#: transfers whose bytes are broadcast in a process group
BROADCAST = ("staged", "direct")


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
    check_frames(publish.frames, frames)
    if publish.transfer in ("checkpoint", "relabel"):
        if frames:
            raise WireError("malformed", f"frames: {publish.transfer} has no manifest", field="frames", limit="0")
        if publish.transfer == "checkpoint" and not publish.path:
            raise WireError("bad_request", "path: checkpoint needs the directory that workers read", field="path")
        return []
    if [(spec.name, spec.dtype) for spec in publish.frames] != [("manifest", "utf8")]:
        raise WireError("malformed", f"frames: {publish.transfer} has one, `manifest` utf8", field="frames", limit="1")
    if publish.transfer in BROADCAST and not publish.address:
        raise WireError("bad_request", f"address: {publish.transfer} needs the publisher's HOST:PORT", field="address")
    if publish.transfer == "handles" and not publish.host:
        raise WireError("bad_request", "host: handles needs the identity of the publisher's host", field="host")
    size = publish.bucket_bytes
    if size <= 0 or size % ALIGNMENT:
        text = f"bucket_bytes: {size} is no positive multiple of {ALIGNMENT}"
        raise WireError("bad_request", text, field="bucket_bytes", limit=str(ALIGNMENT))
    return decode_manifest(frames[0])
