"""What the requests have in common that a worker's tokenizer answers alone."""

from collections.abc import Sequence
from typing import ClassVar


class OfTokenizer:
    """Texts, or rows of token ids."""

    __slots__ = ()
    #: any weights answer it: a tokenizer has none
    min_version: ClassVar[int] = 0
    version: ClassVar[int | None] = None

    @property
    def values(self) -> int:
        """Numbers in its header that can be many: none."""
        return 0

    def columns(self, frames: Sequence[bytes | memoryview]) -> int:
        """Columns of its answer, as far as the request tells: the length of each row or text."""
        return 1
