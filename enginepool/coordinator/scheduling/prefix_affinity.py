"""Prefix affinity: which worker has computed the beginning of a prompt before, and has it in its cache. Pure.

Engines keep what they have computed of a prompt (SGLang's radix cache). So the next turn of a conversation is cheaper at the
worker that had the turn before. The coordinator remembers which worker last had each block of `BLOCK` tokens with all that
comes before it: the blocks of a prompt once a worker is given it, and those of its output once that has ended.

For most engines this is an approximation: the coordinator does not know what they have evicted since, and forgets all when it
ends. The worker of an engine that publishes KV events reports each block that the engine stores and evicts, and all that it has
to a new coordinator: see `report`.

Affinity never makes a request wait, and never makes the load uneven: see `bound`. Conversations that share a system prompt are
spread, though each of them stays where it is: see `may_have`.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Generic, TypeVar

from enginepool.protocol.prefix_blocks import REMEMBERED

#: A worker may have so many sequences more than the one with the least, or this share more.
SLACK_ROWS, SLACK = 4, 0.125
#: A shared beginning is computed by another worker where the one that has it has so many times its length more in its cache.
MOVES = 4
#: For so many shared blocks a worker may have one sequence more.
BLOCKS_A_ROW = 16

W = TypeVar("W")


class PrefixIndex(Generic[W]):
    """The worker that last had each block, and the block that last followed it there."""

    __slots__ = ("_blocks", "_of")

    def __init__(self) -> None:
        #: block -> [worker, next block, or 0]; what was used longest ago comes first
        self._blocks: OrderedDict[int, tuple[W, int]] = OrderedDict()
        #: the blocks of each worker; no worker has none
        self._of: dict[W, set[int]] = {}

    def find(self, blocks: Sequence[int]) -> tuple[W, int] | None:
        """The worker that had the longest beginning of these blocks; and of how many blocks it is, if other prompts began with
        it too and went on differently. 0: nothing follows it, as it is with the history of a conversation."""
        for at in range(len(blocks) - 1, -1, -1):
            if (found := self._blocks.get(blocks[at])) is not None:
                return found[0], at + 1 if found[1] in self._blocks else 0
        return None

    def add(self, blocks: Sequence[int], worker: W) -> None:
        """`worker` has a prompt of these blocks, or is given it."""
        for block, following in zip_longest(blocks, blocks[1:], fillvalue=0):
            self._put(block, worker, following)
        self._shrink()

    def report(self, worker: W, *, cleared: bool, removed: Iterable[int], stored: Iterable[tuple[int, int]]) -> None:
        """What the engine of `worker` says of its cache: it is empty, then without the blocks `removed`, then with `stored`:
        (the block before it, block) each."""
        known = self._blocks
        if cleared:
            self.clear(worker)
        for block in removed:
            if (found := known.get(block)) is not None and found[0] == worker:
                del known[block]
                self._leave(block, worker)
        for parent, block in stored:
            self._put(block, worker, 0)
            if (found := known.get(parent)) is not None:
                known[parent] = found[0], block
        self._shrink()

    def _put(self, block: int, worker: W, following: int) -> None:
        before = self._blocks.pop(block, None)
        if before is not None:
            self._leave(block, before[0])
            following = following or before[1]
        self._blocks[block] = worker, following
        self._of.setdefault(worker, set()).add(block)

    def _leave(self, block: int, worker: W) -> None:
        blocks = self._of[worker]
        blocks.remove(block)
        if not blocks:
            del self._of[worker]

    def _shrink(self) -> None:
        while len(self._blocks) > REMEMBERED:
            block, (worker, _) = self._blocks.popitem(last=False)
            self._leave(block, worker)

    def _count(self, worker: W) -> int:
        return len(self._of.get(worker, ()))

    def may_have(self, worker: W, other: W, shared: int) -> bool:
        """Whether `worker` rather than `other` may have another prompt after a beginning of `shared` blocks that it shares with
        others. Else one worker would have the histories of all, because they begin alike."""
        return self._count(worker) <= self._count(other) * (1 + SLACK) + MOVES * shared

    def clear(self, worker: W | None = None) -> None:
        """An engine has forgotten everything, or is lost; None: all of them have, they have other weights."""
        if worker is None:
            self._blocks.clear()
            self._of.clear()
        else:
            for block in self._of.pop(worker, ()):
                del self._blocks[block]

    def __len__(self) -> int:
        return len(self._blocks)


def bound(least_rows: int, shared: int = 0) -> int:
    """The most sequences that a worker may have to be preferred over one that has `least_rows`. `shared`: as `find` says it."""
    if shared:
        return least_rows + min(SLACK_ROWS, shared // BLOCKS_A_ROW)
    return max(least_rows + SLACK_ROWS, int(least_rows * (1 + SLACK)))
