"""The message that asks for the texts of token ids."""

from typing import Annotated

import msgspec

from enginepool.protocol.basis import MAX_FRAMES, FrameSpec, Message
from enginepool.protocol.messages.of_tokenizer import OfTokenizer


class Decode(OfTokenizer, Message, tag="decode"):
    """Decode rows of token ids with the model's tokenizer. Frames: `items`, int32, then `item_lengths` uint32.

    Frames of the answer: `texts` utf8, the texts of all rows joined, and `text_lengths` uint32 [rows], in bytes.
    """

    id: int
    frames: Annotated[list[FrameSpec], msgspec.Meta(max_length=MAX_FRAMES)]
    group: str = ""
    skip_special_tokens: bool = True
    priority: int = 0
    timeout_ms: int | None = None
