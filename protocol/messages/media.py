"""Images, videos and audio of a prompt, as messages name them; their bytes are in frames."""

from typing import Literal

import msgspec

#: Media of one request; bytes of one medium; and UTF-8 bytes of a URL or a path.
MAX_MEDIA, MAX_MEDIUM_BYTES, MAX_MEDIUM_NAME = 1024, 32 << 20, 2048

MediumKind = Literal["image", "video", "audio"]
MediumSource = Literal["bytes", "url", "path"]


class Medium(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """[prompt, kind, source]: a medium of the prompt with this number. The frame `media` has its bytes, or the UTF-8 text of
    its URL, or of its path on the host of a worker."""

    prompt: int
    kind: MediumKind
    source: MediumSource = "bytes"
