"""The message that asks for embeddings."""

from collections.abc import Sequence
from typing import Annotated

import msgspec

from enginepool.protocol.basis import MAX_FRAMES, FrameSpec, Message, Truncation

#: Values of an embedding that can be asked for.
MAX_DIMENSIONS = 1 << 20


class Embed(Message, tag="embed"):
    """Embed items. Frames: `items`, int32 token ids or utf8 text, then `item_lengths` uint32, which count ids or bytes.

    `dimensions`: the first so many of each embedding; 0: all. `normalize`: each row, as it is answered, has length 1.
    Frame of the answer: `embeddings` float32 [items, dimensions].
    """

    id: int
    frames: Annotated[list[FrameSpec], msgspec.Meta(max_length=MAX_FRAMES)]
    group: str = ""
    dimensions: int = 0
    normalize: bool = True
    priority: int = 0
    timeout_ms: int | None = None
    min_version: int = 0
    version: int | None = None
    truncation: Truncation = ""

    @property
    def values(self) -> int:
        """Numbers in its header that can be many: none."""
        return 0

    def columns(self, frames: Sequence[bytes | memoryview]) -> int:
        """Columns of its answer, as far as the request tells."""
        return self.dimensions
