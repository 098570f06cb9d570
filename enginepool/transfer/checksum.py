"""The digest of `protocol/layout.py`, computed by the processor: the reference. No torch here.

`digest_kernel.py` computes the same sums on a GPU, and is held against this file before it is used.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from enginepool.protocol.layout import joined_digest

_THREADS = 4
#: Words are summed as a matrix of this shape, which fits a processor's cache.
_ROWS, _COLUMNS = 64, 4096
_WORDS = _ROWS * _COLUMNS
_ROWS_BEFORE = _COLUMNS * np.arange(_ROWS)
_PLACES = np.arange(1, _COLUMNS + 1)


def word_sums(words: npt.NDArray[np.int32]) -> tuple[int, int]:
    """Σ x[i] and Σ x[i] × (i + 1).

    The second sum needs no product for each word: the place of a word is told by its row and its column.
    """
    wide = np.zeros((min(_ROWS, -(-len(words) // _COLUMNS)), _COLUMNS), np.int64)
    flat = wide.reshape(-1)
    plain = weighted = 0
    for at in range(0, len(words), _WORDS):
        part = words[at : at + _WORDS]
        flat[: len(part)] = part
        flat[len(part) :] = 0
        rows, columns = wide.sum(1), wide.sum(0)
        total = int(rows.sum())
        plain += total
        weighted += at * total + int(rows @ _ROWS_BEFORE[: len(rows)]) + int(columns @ _PLACES)
    return plain, weighted


def digest_of_bytes(space: npt.NDArray[np.uint8]) -> str:
    """The digest of a whole space, by several threads: callers wait for the engine that takes a snapshot."""
    words = space.view("<i4")
    share = -(-len(words) // (_THREADS * _WORDS)) * _WORDS or 1
    starts = range(0, len(words), share)

    def sums_from(start: int) -> tuple[int, int]:
        return word_sums(words[start : start + share])

    with ThreadPoolExecutor(_THREADS) as threads:
        sums = threads.map(sums_from, starts)
        return joined_digest((start, *own) for start, own in zip(starts, sums, strict=True))
