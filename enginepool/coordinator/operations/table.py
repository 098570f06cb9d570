"""The operations by the message that asks for one. A new operation is one file and one entry here."""

from typing import Any

from enginepool.coordinator.operations.base import Operation
from enginepool.coordinator.operations.decode import DECODE
from enginepool.coordinator.operations.embed import EMBED
from enginepool.coordinator.operations.generate import GENERATE
from enginepool.coordinator.operations.logprobs import LOGPROBS
from enginepool.coordinator.operations.score import SCORE
from enginepool.coordinator.operations.tokenize_texts import TOKENIZE
from enginepool.protocol.messages import Decode, Embed, Generate, Logprobs, Score, TokenizeTexts

OPERATIONS: dict[type, Operation[Any]] = {
    Score: SCORE,
    Embed: EMBED,
    Logprobs: LOGPROBS,
    Decode: DECODE,
    TokenizeTexts: TOKENIZE,
    Generate: GENERATE,
}
