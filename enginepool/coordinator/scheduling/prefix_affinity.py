"""Prefix affinity: which worker has computed the beginning of a prompt before, and has it in its cache. Pure.

Engines keep what they have computed of a prompt (SGLang's radix cache). So the next turn of a conversation is cheaper at the
worker that had the turn before. The coordinator remembers which worker last had each block of `BLOCK` tokens with all that
comes before it: the blocks of a prompt once a worker is given it, and those of its output once that has ended. It does not know
what an engine has evicted since: this is an approximation.

Affinity never makes a request wait, and never makes the load uneven: see `bound`.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, TypeVar

#: tokens of a block, and blocks of a prompt that are looked at
BLOCK, MOST_BLOCKS = 64, 512
#: blocks that a group remembers
REMEMBERED = 1 << 16
#: A worker may have so many sequences more than the one with the least, or this share more.
SLACK_ROWS, SLACK = 4, 0.125

W = TypeVar("W")


def blocks_of(tokens: bytes | memoryview, known: Sequence[int] = ()) -> list[int]:
    """A number for each whole block of a prompt (bytes of int32), which tells it and all blocks before it from others. `known`:
    those of its beginning."""
    found = list(known)
    last, step = found[-1] if found else 0, 4 * BLOCK
    for end in range((len(found) + 1) * step, min(len(tokens), MOST_BLOCKS * step) + 1, step):
        last = hash((last, bytes(tokens[end - step : end])))
        found.append(last)
    return found


class PrefixIndex(Generic[W]):
    """The worker that last had each block."""

    __slots__ = ("_workers",)

    def __init__(self) -> None:
        self._workers: OrderedDict[int, W] = OrderedDict()

    def find(self, blocks: Sequence[int]) -> W | None:
        """The worker that had the longest beginning of these blocks."""
        workers = self._workers
        for block in reversed(blocks):
            if (worker := workers.get(block)) is not None:
                return worker
        return None

    def add(self, blocks: Sequence[int], worker: W) -> None:
        """`worker` has a prompt of these blocks, or is given it."""
        workers = self._workers
        for block in blocks:
            workers[block] = worker
            workers.move_to_end(block)
        while len(workers) > REMEMBERED:
            workers.popitem(last=False)

    def clear(self) -> None:
        """The engines have forgotten everything: they have other weights."""
        self._workers.clear()

    def __len__(self) -> int:
        return len(self._workers)


def bound(least_rows: int) -> int:
    """The most sequences that a worker may have to be preferred over one that has `least_rows`."""
    return max(least_rows + SLACK_ROWS, int(least_rows * (1 + SLACK)))
