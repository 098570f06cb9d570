"""The operation `decode`: a worker's tokenizer turns rows of token ids into texts."""

from collections.abc import Sequence

from enginepool.coordinator.operations.base import Work, check_ragged, signature
from enginepool.coordinator.operations.of_tokenizer import TokenizerOperation
from enginepool.protocol.errors import WireError
from enginepool.protocol.frames import Buffer
from enginepool.protocol.messages import Capabilities, Decode, FrameSpec, TaskId, Tokenize
from enginepool.protocol.ragged import bad, id_outside

#: assumed bytes of the text of a token, until a worker says how many they are at most
UNKNOWN_TOKEN_BYTES = 256
#: and the most that a worker can say
MOST_TOKEN_BYTES = 1 << 16


class DecodeWork(Work, frozen=True, gc=False):
    """Rows of token ids to decode."""

    skip_special_tokens: bool = True


class DecodeOperation(TokenizerOperation[DecodeWork]):
    """Rows of token ids, as texts."""

    name, signature, of_texts = "decode", signature(4), False

    def open(self, message: Decode, frames: Sequence[Buffer]) -> DecodeWork:
        return self.read(DecodeWork, message, frames, skip_special_tokens=message.skip_special_tokens)

    def refuse(self, work: DecodeWork, can: Capabilities) -> WireError | None:
        if not can.token_bytes:
            return bad("type", "type: decode needs a tokenizer, and the workers of this group have none that decodes", "")
        return id_outside(work.frames, can.vocab) if work.max_id >= can.vocab else None

    def impossible(self, can: Capabilities) -> bool:
        return not 0 <= can.token_bytes <= MOST_TOKEN_BYTES

    def knows_outputs(self, work: DecodeWork, can: Capabilities | None) -> bool:
        return can is not None

    def answer_bytes(self, work: DecodeWork, can: Capabilities | None) -> int:
        return work.tokens * _token_bytes(can)

    def describe(self, work: DecodeWork, can: Capabilities | None) -> str:
        return f"{work.tokens} ids of up to {_token_bytes(can)} bytes of text each"

    def tokenize(self, work: DecodeWork, task: TaskId) -> Tokenize:
        return Tokenize(task, work.part.frames, operation=self.name, skip_special_tokens=work.skip_special_tokens)

    def check_answer(self, work: DecodeWork, most: int, specs: Sequence[FrameSpec], frames: Sequence[Buffer]) -> int:
        check_ragged(("texts", "utf8", 1), work.rows, most, specs, frames)
        return work.tokens


def _token_bytes(can: Capabilities | None) -> int:
    return UNKNOWN_TOKEN_BYTES if can is None else can.token_bytes


DECODE = DecodeOperation()
