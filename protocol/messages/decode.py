"""The message that asks for the texts of token ids."""

from collections.abc import Sequence
from typing import Annotated, ClassVar

import msgspec

from enginepool.protocol.basis import MAX_FRAMES, FrameSpec, Message


class Decode(Message, tag="decode"):
    """Decode rows of token ids with the model's tokenizer. Frames: `items`, int32, then `item_lengths` uint32.

    Frames of the answer: `texts` utf8, the texts of all rows joined, and `text_lengths` uint32 [rows], in bytes.
    """

    #: any weights answer it: a tokenizer has none
    min_version: ClassVar[int] = 0
    version: ClassVar[int | None] = None

    id: int
    frames: Annotated[list[FrameSpec], msgspec.Meta(max_length=MAX_FRAMES)]
    group: str = ""
    skip_special_tokens: bool = True
    priority: int = 0
    timeout_ms: int | None = None

    @property
    def values(self) -> int:
        """Numbers in its header that can be many: none."""
        return 0

    def columns(self, frames: Sequence[bytes | memoryview]) -> int:
        """Columns of its answer, as far as the request tells: the length of each text."""
        return 1
