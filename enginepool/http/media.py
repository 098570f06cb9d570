"""Images, video and audio of chat messages, on their way to the pool: nothing of them is opened here. Pure: no SGLang here."""

from collections.abc import Sequence
from typing import Any, cast

from enginepool.http.refusals import refused

#: attribute of SGLang's `GenerateReqInput` -> the argument of `Pool.generate`
_NAMES = {"image_data": "images", "video_data": "videos", "audio_data": "audio"}
_SCHEMES = ("data:", "https://", "http://")


def take_media(request: Any) -> dict[str, list[str]]:
    """The media of the one prompt of SGLang's `GenerateReqInput`, by the argument of `Pool.generate`. The request has none
    afterwards: SGLang would fetch and decode them in this process, and an engine does so in its own.

    Raises:
        BadRequest: a medium is no URL.
    """
    found: dict[str, list[str]] = {}
    for attribute, name in _NAMES.items():
        value: Any = getattr(request, attribute, None)
        if not value:
            continue
        media = cast("Sequence[Any]", value if isinstance(value, list) else [value])
        found[name] = [getattr(one, "url", one) for one in media]
        for url in found[name]:
            if not isinstance(cast("object", url), str) or not url[:8].lower().startswith(_SCHEMES):
                raise refused("messages", f"a medium of a message is a URL that begins with {', '.join(_SCHEMES)}")
        setattr(request, attribute, None)
    return found
