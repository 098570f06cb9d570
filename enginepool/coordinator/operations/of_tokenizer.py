"""What the operations have in common that a worker's tokenizer answers alone. No engine computes anything.

Their requests wait for a tokenizer with the requests of text, and what the tokenizer says is their answer.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, TypeVar

from enginepool.coordinator.operations.base import Operation, Work
from enginepool.coordinator.requests.memory import request_bytes
from enginepool.protocol.basis import ELEMENT_BYTES, RESULT_BYTES, ROW_BYTES
from enginepool.protocol.frames import Buffer
from enginepool.protocol.messages import Capabilities, Decode, Part, TokenizeTexts
from enginepool.protocol.ragged import ITEMS, bad, read_rows

W = TypeVar("W", bound=Work)


class TokenizerOperation(Operation[W]):
    """Rows in, rows out."""

    of_tokenizer = True
    signature: ClassVar[int]
    #: its rows are texts, and not token ids
    of_texts: ClassVar[bool]

    def read(self, work: Callable[..., W], message: Decode | TokenizeTexts, frames: Sequence[Buffer], **option: bool) -> W:
        """What `message` asks for. Raises WireError."""
        rows, tokens, longest, max_id, _, text = read_rows(message.frames, frames, (ITEMS,), f"a request to {self.name}")
        if text != self.of_texts:
            found, expected, dtype = ("text", "token ids", "int32") if text else ("token ids", "text", "utf8")
            raise bad("items", f"items: {found}; expected {expected}", dtype)
        return work(
            self, self.signature, message.group, rows, tokens, longest, max_id, True, sum(map(len, frames)),
            hash((self.name, message.group, *option.values(), *frames)), Part(message.frames, operation=self.name),
            tuple(frames), **option,
        )  # fmt: skip

    @abstractmethod
    def answer_bytes(self, work: W, can: Capabilities | None) -> int:
        """At most, of the rows of its answer."""

    def packs(self, work: W, can: Capabilities) -> bool:
        return True

    def outputs(self, work: W, can: Capabilities | None) -> Sequence[tuple[str, int]]:
        return ()

    def charge(self, work: W, can: Capabilities | None) -> tuple[int, int]:
        answer = RESULT_BYTES + work.rows * (ROW_BYTES + ELEMENT_BYTES) + self.answer_bytes(work, can)
        return answer, request_bytes(work) + answer
