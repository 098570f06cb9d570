"""The LoRA adapters of an engine: their names, and which of them may run at once. Pure but for asyncio: no SGLang here.

A batch of SGLang has room for some adapters, and the model alone counts as one. A sequence of a further one would wait in
SGLang's queue, and with it all prompts that `prefill_admission` keeps back until the prompts before them were computed. So it
waits here, and delays no other.
"""

import asyncio
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from enginepool.protocol.messages import MAX_ADAPTER_NAME, MAX_ADAPTERS
from enginepool.workers.sglang.host.settings import SettingsError


def adapter_names(loaded: Mapping[str, Any]) -> tuple[str, ...]:
    """The adapters that the engine was started with, in order. `loaded`: by name, as SGLang has them. Raises SettingsError."""
    if len(loaded) > MAX_ADAPTERS:
        raise SettingsError(f"lora_paths: {len(loaded)} adapters; at most {MAX_ADAPTERS}")
    for name in loaded:
        if not 0 < len(name) <= MAX_ADAPTER_NAME:
            raise SettingsError(f"lora_paths: {name:.40}…: a name of {len(name)} characters; 1 to {MAX_ADAPTER_NAME}")
    return tuple(sorted(loaded))


class AdapterSlots:
    """Which adapters have sequences in the running batch.

    Args:
        most: of one batch, with the model alone.
        pinned: those that have a place of their own among them.
    """

    def __init__(self, most: int, pinned: Collection[str] = ()) -> None:
        self._most = most - len(pinned)
        self._pinned = pinned
        #: sequences of each that has some
        self._running = Counter[str]()
        #: set when one has none any more
        self._left = asyncio.Event()

    async def enter(self, adapter: str) -> None:
        """Wait until a sequence of this adapter, or of the model alone (""), may run; `leave` must be called then."""
        while adapter not in self._running and adapter not in self._pinned and self._unpinned >= self._most:
            await self._left.wait()
        self._running[adapter] += 1

    def leave(self, adapter: str) -> None:
        """A sequence of it has ended."""
        self._running[adapter] -= 1
        if not self._running[adapter]:
            del self._running[adapter]
            self._left.set()
            self._left = asyncio.Event()

    @property
    def _unpinned(self) -> int:
        return sum(adapter not in self._pinned for adapter in self._running)
