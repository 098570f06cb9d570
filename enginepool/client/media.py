"""Images, videos and audio of the Python API to frames."""

import base64
import binascii
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, TypeAlias, TypedDict, cast

import numpy as np

from enginepool.client.arguments import bad, kind, utf8
from enginepool.client.payload import Payload
from enginepool.protocol.errors import WireError
from enginepool.protocol.media import check_medium, media_specs
from enginepool.protocol.messages import MAX_MEDIA, Medium, MediumKind

#: a medium: its bytes, a URL (`https:` or `data:`), or a path on the host of the workers
MediumArgument: TypeAlias = bytes | bytearray | memoryview | str | PurePath
#: of each prompt: none, one or several
MediaArgument: TypeAlias = MediumArgument | Sequence[MediumArgument | Sequence[MediumArgument] | None] | None

#: option -> what the wire calls it; in the order in which they are sent
_KINDS: dict[str, MediumKind] = {"images": "image", "videos": "video", "audio": "audio"}
_ALLOWED = "bytes, a URL (https:, http: or data:), or a pathlib path on the host of the workers"
#: what an error shows of a text
_SHOWN = 40


class MediaOptions(TypedDict, total=False):
    """The media of prompts, among the options of `Pool.generate`."""

    images: MediaArgument
    videos: MediaArgument
    audio: MediaArgument


def media_of(row: object) -> dict[str, Any]:
    """The media in the row of a data set, as options of one prompt."""
    if not isinstance(row, Mapping):
        return {}
    found = cast("Mapping[str, Any]", row)
    return {name: found[name] for name in _KINDS if found.get(name) is not None}


def encode_media(options: Mapping[str, Any], prompts: int, *, single: bool) -> tuple[list[Medium], Payload]:
    """The media in `options` of so many prompts, with their frames. `single`: the caller gave one prompt, without a list.

    Raises:
        BadRequest: `field` names the medium.
    """
    found = _found(options, prompts, single=single)
    media, data = list[Medium](), list[bytes]()
    for prompt, what, where, one in found:
        medium, encoded = _medium(prompt, what, where, one)
        try:
            check_medium(where, medium, encoded)
        except WireError as error:
            raise bad(where, error.message, error.limit) from None
        media.append(medium)
        data.append(encoded)
    if not media:
        return [], ([], ())
    lengths = np.array([len(one) for one in data], np.uint32)
    whole = data[0] if len(data) == 1 else b"".join(data)
    return media, (media_specs(len(whole), len(data)), (whole, lengths.tobytes()))


def media_names(options: Mapping[str, Any], prompts: int, *, single: bool) -> dict[str, str]:
    """What the caller calls each medium of the wire (`media[2]` is `images[1][0]`), for errors; as in `encode_media`."""
    return {f"media[{at}]": where for at, (_, _, where, _) in enumerate(_found(options, prompts, single=single))}


def _found(options: Mapping[str, Any], prompts: int, *, single: bool) -> list[tuple[int, MediumKind, str, Any]]:
    """The media in `options`, in the order of the wire: prompt, kind, its name in errors, and what was given."""
    found: list[tuple[int, MediumKind, str, Any]] = []
    for name, what in _KINDS.items():
        given: Any = options.get(name)
        if given is None:
            continue
        entries = [given] if single else _listed(name, given)
        if len(entries) != prompts:
            raise bad(name, f"{name}: expected {prompts} entries (one per prompt), got {len(entries)}", str(prompts))
        for prompt, entry in enumerate(entries):
            where = name if single else f"{name}[{prompt}]"
            several = isinstance(entry, list | tuple)
            for i, one in enumerate(cast("Sequence[Any]", entry) if several else [entry]):
                if one is not None or several:
                    found.append((prompt, what, f"{where}[{i}]" if several else where, one))
    if len(found) > MAX_MEDIA:
        raise bad("images", f"images, videos, audio: {len(found)} media; at most {MAX_MEDIA} in one request", str(MAX_MEDIA))
    found.sort(key=lambda one: one[0])
    return found


def _listed(name: str, given: Any) -> Sequence[Any]:
    if isinstance(given, list | tuple):
        return cast("Sequence[Any]", given)
    raise bad(name, f"{name}: {kind(given)}; a list with an entry for each prompt: a medium, a list of media, or None")


def _medium(prompt: int, what: MediumKind, where: str, given: Any) -> tuple[Medium, bytes]:
    """A medium, and its bytes or its name."""
    if isinstance(given, bytes | bytearray | memoryview):
        return Medium(prompt, what), bytes(cast("bytes", given))
    if isinstance(given, PurePath):
        return Medium(prompt, what, "path"), utf8(where, str(given))
    if not isinstance(given, str):
        raise bad(where, f"{where}: {kind(given)}; {_ALLOWED}")
    scheme = given[:8].lower()
    if scheme.startswith("data:"):
        return Medium(prompt, what), _decoded(where, given)
    if scheme.startswith(("http://", "https://")):
        return Medium(prompt, what, "url"), utf8(where, given)
    raise bad(where, f"{where}: {given[:_SHOWN]!r}; {_ALLOWED}")


def _decoded(where: str, url: str) -> bytes:
    """The bytes in a `data:` URL."""
    head, comma, encoded = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise bad(where, f"{where}: {url[:_SHOWN]!r}; a data: URL has base64, as data:image/png;base64,…")
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise bad(where, f"{where}: a data: URL that is no base64: {error}") from None
