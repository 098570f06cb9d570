"""Prefix affinity: which worker has computed the beginning of a prompt before, and has it in its cache. Pure.

Engines keep what they have computed of a prompt (SGLang's radix cache). So the next turn of a conversation is cheaper at the
worker that had the turn before. The coordinator remembers which worker last had each block of `BLOCK` tokens with all that
comes before it: the blocks of a prompt once a worker is given it, and those of its output once that has ended. It does not know
what an engine has evicted since: this is an approximation.

Affinity never makes a request wait, and never makes the load uneven: see `bound`. Conversations that share a system prompt are
spread, though each of them stays where it is: see `may_have`.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from itertools import zip_longest
from typing import Generic, TypeVar

#: tokens of a block, and blocks of a prompt that are looked at
BLOCK, MOST_BLOCKS = 64, 512
#: blocks that a group remembers
REMEMBERED = 1 << 16
#: A worker may have so many sequences more than the one with the least, or this share more.
SLACK_ROWS, SLACK = 4, 0.125
#: A shared beginning is computed by another worker where the one that has it has so many times its length more in its cache.
MOVES = 4
#: For so many shared blocks a worker may have one sequence more.
BLOCKS_A_ROW = 16

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
    """The worker that last had each block, and the block that last followed it there."""

    __slots__ = ("_blocks", "_counts")

    def __init__(self) -> None:
        #: block -> [worker, next block, or 0]; what was used longest ago comes first
        self._blocks: OrderedDict[int, tuple[W, int]] = OrderedDict()
        #: blocks of each worker
        self._counts: Counter[W] = Counter()

    def find(self, blocks: Sequence[int]) -> tuple[W, int] | None:
        """The worker that had the longest beginning of these blocks; and of how many blocks it is, if other prompts began with
        it too and went on differently. 0: nothing followed it, as it is with the history of a conversation."""
        for at in range(len(blocks) - 1, -1, -1):
            if (found := self._blocks.get(blocks[at])) is not None:
                return found[0], at + 1 if found[1] else 0
        return None

    def add(self, blocks: Sequence[int], worker: W) -> None:
        """`worker` has a prompt of these blocks, or is given it."""
        known, counts = self._blocks, self._counts
        for block, following in zip_longest(blocks, blocks[1:], fillvalue=0):
            before = known.pop(block, None)
            if before is not None:
                self._leave(before[0])
                following = following or before[1]
            known[block] = worker, following
            counts[worker] += 1
        while len(known) > REMEMBERED:
            self._leave(known.popitem(last=False)[1][0])

    def _leave(self, worker: W) -> None:
        self._counts[worker] -= 1
        if not self._counts[worker]:
            del self._counts[worker]

    def may_have(self, worker: W, other: W, shared: int) -> bool:
        """Whether `worker` rather than `other` may have another prompt after a beginning of `shared` blocks that it shares with
        others. Else one worker would have the histories of all, because they begin alike."""
        return self._counts[worker] <= self._counts[other] * (1 + SLACK) + MOVES * shared

    def clear(self) -> None:
        """The engines have forgotten everything: they have other weights."""
        self._blocks.clear()
        self._counts.clear()

    def __len__(self) -> int:
        return len(self._blocks)


def bound(least_rows: int, shared: int = 0) -> int:
    """The most sequences that a worker may have to be preferred over one that has `least_rows`. `shared`: as `find` says it."""
    if shared:
        return least_rows + min(SLACK_ROWS, shared // BLOCKS_A_ROW)
    return max(least_rows + SLACK_ROWS, int(least_rows * (1 + SLACK)))
