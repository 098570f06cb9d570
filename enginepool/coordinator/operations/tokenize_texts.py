"""The operation `tokenize`: a worker's tokenizer turns texts into token ids, which are the answer."""

from collections.abc import Sequence

from enginepool.coordinator.operations.base import Work, check_ragged, signature
from enginepool.coordinator.operations.of_tokenizer import TokenizerOperation
from enginepool.protocol.basis import ELEMENT_BYTES
from enginepool.protocol.errors import WireError
from enginepool.protocol.frames import Buffer
from enginepool.protocol.messages import Capabilities, FrameSpec, TaskId, Tokenize, TokenizeTexts
from enginepool.protocol.ragged import bad

#: ids that a tokenizer adds to a text, at most
SPECIAL_TOKENS = 8


class TokenizeWork(Work, frozen=True, gc=False):
    """Texts to tokenize."""

    add_special_tokens: bool = True


class TokenizeOperation(TokenizerOperation[TokenizeWork]):
    """Texts, as rows of token ids."""

    name, signature, of_texts = "tokenize", signature(5), True

    def open(self, message: TokenizeTexts, frames: Sequence[Buffer]) -> TokenizeWork:
        return self.read(TokenizeWork, message, frames, add_special_tokens=message.add_special_tokens)

    def refuse(self, work: TokenizeWork, can: Capabilities) -> WireError | None:
        if can.text:
            return None
        return bad("type", "type: tokenize needs a tokenizer, and the workers of this group have none", "")

    def knows_outputs(self, work: TokenizeWork, can: Capabilities | None) -> bool:
        return True

    def answer_bytes(self, work: TokenizeWork, can: Capabilities | None) -> int:
        return ELEMENT_BYTES * _ids(work)

    def describe(self, work: TokenizeWork, can: Capabilities | None) -> str:
        return f"up to {_ids(work)} ids"

    def tokenize(self, work: TokenizeWork, task: TaskId) -> Tokenize:
        special = work.add_special_tokens
        return Tokenize(task, work.part.frames, raw=True, operation=self.name, add_special_tokens=special)

    def check_answer(self, work: TokenizeWork, most: int, specs: Sequence[FrameSpec], frames: Sequence[Buffer]) -> int:
        check_ragged(("items", "int32", ELEMENT_BYTES), work.rows, most, specs, frames)
        return len(frames[0]) // ELEMENT_BYTES


def _ids(work: TokenizeWork) -> int:
    """At most."""
    return work.tokens + SPECIAL_TOKENS * work.rows


TOKENIZE = TokenizeOperation()
