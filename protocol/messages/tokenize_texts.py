"""The message that asks for the token ids of texts."""

from collections.abc import Sequence
from typing import Annotated, ClassVar

import msgspec

from enginepool.protocol.basis import MAX_FRAMES, FrameSpec, Message


class TokenizeTexts(Message, tag="tokenize_texts"):
    """Turn texts into token ids with the model's tokenizer. Frames: `items`, utf8, then `item_lengths` uint32, in bytes.

    Frames of the answer: `items` int32, the ids of all rows joined, and `item_lengths` uint32 [rows].
    """

    #: any weights answer it: a tokenizer has none
    min_version: ClassVar[int] = 0
    version: ClassVar[int | None] = None

    id: int
    frames: Annotated[list[FrameSpec], msgspec.Meta(max_length=MAX_FRAMES)]
    group: str = ""
    add_special_tokens: bool = True
    priority: int = 0
    timeout_ms: int | None = None

    @property
    def values(self) -> int:
        """Numbers in its header that can be many: none."""
        return 0

    def columns(self, frames: Sequence[bytes | memoryview]) -> int:
        """Columns of its answer, as far as the request tells: the length of each row."""
        return 1
