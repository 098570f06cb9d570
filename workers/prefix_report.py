"""Which blocks of prompts the engine has in its prefix cache, and what the coordinator was not told of that yet. Pure."""

from itertools import islice

import numpy as np

from enginepool.protocol.messages import MAX_REPORTED_BLOCKS, FrameSpec, PrefixBlocks
from enginepool.protocol.prefix_blocks import REMEMBERED


class PrefixReport:
    """What one engine has. An engine that tells nothing has no messages: the coordinator goes by what it gave the worker."""

    def __init__(self) -> None:
        #: block -> the block before it; what was stored longest ago comes first. At most REMEMBERED
        self._held: dict[int, int] = {}
        # What the coordinator was not told, in this order.
        self._cleared = False
        self._removed: dict[int, None] = {}
        self._stored: dict[int, None] = {}
        #: the engine has told something
        self._used = False

    def store(self, parent: int, block: int) -> None:
        """The engine has `block`, after the block `parent`."""
        self._used = True
        self._held.pop(block, None)
        self._held[block] = parent
        self._removed.pop(block, None)
        self._stored.pop(block, None)
        self._stored[block] = None
        if len(self._held) > REMEMBERED:
            self.remove(next(iter(self._held)))

    def remove(self, block: int) -> None:
        """The engine has evicted `block`."""
        if self._held.pop(block, None) is not None:
            self._stored.pop(block, None)
            self._removed[block] = None

    def clear(self) -> None:
        """The engine has no block, or nothing is known of those that it has."""
        self._used = True
        self._held.clear()
        self.again()

    def again(self) -> None:
        """The coordinator knows nothing: it is another one, or had no link."""
        self._cleared = self._used
        self._removed.clear()
        self._stored = dict.fromkeys(self._held)

    def take(self) -> tuple[PrefixBlocks, tuple[bytes, bytes]] | None:
        """The next message to the coordinator, with its frames; None: it knows all."""
        if not (self._cleared or self._removed or self._stored):
            return None
        removed = [*islice(self._removed, MAX_REPORTED_BLOCKS)]
        stored = [*islice(self._stored, MAX_REPORTED_BLOCKS - len(removed))]
        for block in removed:
            del self._removed[block]
        for block in stored:
            del self._stored[block]
        specs = [FrameSpec("stored", "uint64", (len(stored), 2)), FrameSpec("removed", "uint64", (len(removed),))]
        message, self._cleared = PrefixBlocks(specs, self._cleared), False
        pairs = np.array([(self._held[block], block) for block in stored], "<u8")
        return message, (pairs.tobytes(), np.array(removed, "<u8").tobytes())
