"""The operation `tokenize`: a worker's tokenizer turns texts into token ids, which are the answer. No engine runs anything."""

from collections.abc import Sequence

from enginepool.coordinator.operations.base import Operation, Work, check_ragged, signature
from enginepool.coordinator.requests.memory import request_bytes
from enginepool.protocol.basis import ELEMENT_BYTES, RESULT_BYTES, ROW_BYTES
from enginepool.protocol.errors import WireError
from enginepool.protocol.frames import Buffer
from enginepool.protocol.messages import Capabilities, FrameSpec, Part, TaskId, Tokenize, TokenizeTexts
from enginepool.protocol.ragged import ITEMS, bad, read_rows

#: ids that a tokenizer adds to a text, at most
SPECIAL_TOKENS = 8

_SIGNATURE = signature(5)


class TokenizeWork(Work, frozen=True, gc=False):
    """Texts to tokenize."""

    add_special_tokens: bool = True


class TokenizeOperation(Operation[TokenizeWork]):
    """Texts, as rows of token ids."""

    name = "tokenize"
    of_tokenizer = True

    def open(self, message: TokenizeTexts, frames: Sequence[Buffer]) -> TokenizeWork:
        specs, special = message.frames, message.add_special_tokens
        rows, tokens, longest, max_id, _, text = read_rows(specs, frames, (ITEMS,), "a request to tokenize")
        if not text:
            raise bad("items", "items: token ids; expected text", "utf8")
        return TokenizeWork(
            self, _SIGNATURE, message.group, rows, tokens, longest, max_id, True, sum(map(len, frames)),
            hash((self.name, message.group, special, *frames)), Part(specs, operation=self.name), tuple(frames),
            add_special_tokens=special,
        )  # fmt: skip

    def refuse(self, work: TokenizeWork, can: Capabilities, *, alone: bool = True) -> WireError | None:
        if can.text:
            return None
        return bad("type", "type: tokenize needs a tokenizer, and the workers of this group have none", "")

    def packs(self, work: TokenizeWork, can: Capabilities) -> bool:
        return True

    def outputs(self, work: TokenizeWork, can: Capabilities | None) -> Sequence[tuple[str, int]]:
        return ()

    def knows_outputs(self, work: TokenizeWork, can: Capabilities | None) -> bool:
        return True

    def charge(self, work: TokenizeWork, can: Capabilities | None) -> tuple[int, int]:
        ids = work.tokens + SPECIAL_TOKENS * work.rows
        answer = RESULT_BYTES + work.rows * (ROW_BYTES + ELEMENT_BYTES) + ELEMENT_BYTES * ids
        return answer, request_bytes(work) + answer

    def describe(self, work: TokenizeWork, can: Capabilities | None) -> str:
        return f"up to {work.tokens + SPECIAL_TOKENS * work.rows} ids"

    def tokenize(self, work: TokenizeWork, task: TaskId) -> Tokenize:
        special = work.add_special_tokens
        return Tokenize(task, work.part.frames, raw=True, operation=self.name, add_special_tokens=special)

    def check_answer(self, work: TokenizeWork, most: int, specs: Sequence[FrameSpec], frames: Sequence[Buffer]) -> int:
        check_ragged(("items", "int32", ELEMENT_BYTES), work.rows, most, specs, frames)
        return len(frames[0]) // ELEMENT_BYTES


TOKENIZE = TokenizeOperation()
