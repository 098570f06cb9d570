"""The operation `decode`: a worker's tokenizer turns rows of token ids into texts. No engine computes anything.

Its requests wait for a tokenizer with the requests of text, and what the tokenizer says is their answer.
"""

from collections.abc import Sequence

from enginepool.coordinator.operations.base import Operation, Work, check_ragged, signature
from enginepool.coordinator.requests.memory import request_bytes
from enginepool.protocol.basis import ELEMENT_BYTES, RESULT_BYTES, ROW_BYTES
from enginepool.protocol.errors import WireError
from enginepool.protocol.frames import Buffer
from enginepool.protocol.messages import Capabilities, Decode, FrameSpec, Part, TaskId, Tokenize
from enginepool.protocol.ragged import ITEMS, bad, id_outside, read_rows

#: assumed bytes of the text of a token, until a worker says how many they are at most
UNKNOWN_TOKEN_BYTES = 256
#: and the most that a worker can say
MOST_TOKEN_BYTES = 1 << 16

_SIGNATURE = signature(4)


class DecodeWork(Work, frozen=True, gc=False):
    """Rows of token ids to decode."""

    skip_special_tokens: bool = True


class DecodeOperation(Operation[DecodeWork]):
    """Rows of token ids, as texts."""

    name = "decode"
    of_tokenizer = True

    def open(self, message: Decode, frames: Sequence[Buffer]) -> DecodeWork:
        specs, skip = message.frames, message.skip_special_tokens
        rows, tokens, longest, max_id, _, text = read_rows(specs, frames, (ITEMS,), "a request to decode")
        if text:
            raise bad("items", "items: text; expected token ids", "int32")
        return DecodeWork(
            self, _SIGNATURE, message.group, rows, tokens, longest, max_id, True, sum(map(len, frames)),
            hash((self.name, message.group, skip, *frames)), Part(specs, operation=self.name), tuple(frames),
            skip_special_tokens=skip,
        )  # fmt: skip

    def refuse(self, work: DecodeWork, can: Capabilities, *, alone: bool = True) -> WireError | None:
        if not can.token_bytes:
            return bad("type", "type: decode needs a tokenizer, and the workers of this group have none that decodes", "")
        return id_outside(work.frames, can.vocab) if work.max_id >= can.vocab else None

    def impossible(self, can: Capabilities) -> bool:
        return not 0 <= can.token_bytes <= MOST_TOKEN_BYTES

    def packs(self, work: DecodeWork, can: Capabilities) -> bool:
        return True

    def outputs(self, work: DecodeWork, can: Capabilities | None) -> Sequence[tuple[str, int]]:
        return ()

    def knows_outputs(self, work: DecodeWork, can: Capabilities | None) -> bool:
        return can is not None

    def charge(self, work: DecodeWork, can: Capabilities | None) -> tuple[int, int]:
        answer = RESULT_BYTES + work.rows * (ROW_BYTES + ELEMENT_BYTES) + work.tokens * _token_bytes(can)
        return answer, request_bytes(work) + answer

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
