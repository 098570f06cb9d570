"""The message that asks for the token ids of texts."""

from typing import Annotated

import msgspec

from enginepool.protocol.basis import MAX_FRAMES, FrameSpec, Message
from enginepool.protocol.messages.of_tokenizer import OfTokenizer


class TokenizeTexts(OfTokenizer, Message, tag="tokenize_texts"):
    """Turn texts into token ids with the model's tokenizer. Frames: `items`, utf8, then `item_lengths` uint32, in bytes.

    Frames of the answer: `items` int32, the ids of all rows joined, and `item_lengths` uint32 [rows].
    """

    id: int
    frames: Annotated[list[FrameSpec], msgspec.Meta(max_length=MAX_FRAMES)]
    group: str = ""
    add_special_tokens: bool = True
    priority: int = 0
    timeout_ms: int | None = None
