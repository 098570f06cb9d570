"""The prefix cache of the sim engine: which beginnings of sequences it has computed before, in blocks. Pure."""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import pairwise

from enginepool.protocol.prefix_blocks import first_parent, next_block
from enginepool.workers.prefix_report import PrefixReport
from enginepool.workers.sim.operation import Weights

#: tokens of a block
BLOCK = 16


class SimPrefixCache:
    """Beginnings of sequences that were computed by the weights of now. What was used longest ago is dropped first; of a
    sequence, the last block.

    Args:
        tokens: how many it holds at most.
        block: tokens of a block.
    """

    def __init__(self, tokens: int, block: int = BLOCK) -> None:
        self._block = block
        self._most = tokens // block
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._weights: Weights | None = None
        #: is told what changes
        self.report: PrefixReport | None = None

    def found(self, tokens: bytes, weights: Weights, adapter: str = "") -> int:
        """How many of these tokens (int32) it has of this adapter. As in a real engine, at least one has to be computed."""
        if weights != self._weights:
            self._weights = weights
            self.clear()
        count = 0
        for block in _blocks(tokens, self._block, adapter):
            if block not in self._blocks:
                break
            count += self._block
        return max(0, min(count, len(tokens) // 4 - 1))

    def add(self, tokens: bytes, weights: Weights, adapter: str = "") -> None:
        """These tokens were computed by `weights` with this adapter."""
        if weights != self._weights:
            return  # the engine has others now
        blocks = [first_parent(adapter), *_blocks(tokens, self._block, adapter)]
        for parent, block in pairwise(blocks):
            if block not in self._blocks and self.report is not None:
                self.report.store(parent, block)
        for block in reversed(blocks[1:]):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._most:
            block, _ = self._blocks.popitem(last=False)
            if self.report is not None:
                self.report.remove(block)

    def clear(self) -> None:
        """Forget everything."""
        self._blocks.clear()
        if self.report is not None:
            self.report.clear()


def _blocks(tokens: bytes, size: int, adapter: str) -> Iterator[int]:
    """A number for each whole block, which tells it and all blocks before it from others."""
    last, step = first_parent(adapter), 4 * size
    for end in range(step, len(tokens) + 1, step):
        last = next_block(last, tokens[end - step : end])
        yield last
