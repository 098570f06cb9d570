"""The LoRA adapters of an engine: their names, and which of them may run at once. Pure but for asyncio: no SGLang here.

A batch of SGLang has room for some adapters, and the model alone counts as one. A sequence of a further one would wait in
SGLang's queue, and with it all prompts that `prefill_admission` keeps back until the prompts before them were computed. So it
waits here.
"""

import asyncio
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

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

    While a sequence of a further adapter waits, the adapter that has had its place for longest gets no new sequences of that
    priority or a lower one. Once its last one has ended, its place is free, for all sequences of the next adapter that wait
    then. So adapters take turns, however busy they are. An adapter that gets a sequence of a higher priority meanwhile counts
    as one that has just got its place.

    Args:
        most: of one batch, with the model alone.
        pinned: those that have a place of their own among them.
    """

    def __init__(self, most: int, pinned: Collection[str] = ()) -> None:
        self._most = most - len(pinned)
        self._pinned = pinned
        #: sequences of each that has some; of those that are not pinned, the one that has its place for longest is first
        self._running: dict[str, int] = {}
        self._waiting: list[_Waiting] = []
        #: of those that wait for a place of their adapter, the next one
        self._next: _Waiting | None = None
        self._arrived = 0

    async def enter(self, adapter: str, priority: int = 0) -> None:
        """Wait until a sequence of this adapter, or of the model alone (""), may run; `leave` must be called then."""
        if self._may_enter(adapter, priority):
            if self._next is not None and adapter == self._oldest:
                self._running[adapter] = self._running.pop(adapter)
            self._take(adapter)
            return
        self._arrived += 1
        one = _Waiting(-priority, self._arrived, adapter, asyncio.get_running_loop().create_future())
        self._waiting.append(one)
        if adapter not in self._running and (self._next is None or one < self._next):
            self._next = one
        try:
            await one.turn
        except asyncio.CancelledError:
            if not one.turn.cancelled():  # it had got its place
                self.leave(adapter)
            elif one is self._next:
                self._admit()
            raise

    def leave(self, adapter: str) -> None:
        """A sequence of it has ended."""
        self._running[adapter] -= 1
        if not self._running[adapter]:
            del self._running[adapter]
            self._admit()

    def _may_enter(self, adapter: str, priority: int) -> bool:
        """Whether a sequence may run now, if those before it that wait may not."""
        if adapter in self._pinned:
            return True
        if adapter in self._running:
            return self._next is None or adapter != self._oldest or -priority < self._next.minus_priority
        return self._next is None and sum(one not in self._pinned for one in self._running) < self._most

    @property
    def _oldest(self) -> str:
        """Of the adapters that have a place which is not their own, the one that has it for longest."""
        return next((one for one in self._running if one not in self._pinned), "")

    def _take(self, adapter: str) -> None:
        self._running[adapter] = self._running.get(adapter, 0) + 1

    def _admit(self) -> None:
        """Let in what may run now: the highest priority first, then in the order of arrival."""
        waiting, self._waiting, self._next = sorted(self._waiting), [], None
        #: adapters that get a place now, and the priority for which they get it
        placed: dict[str, int] = {}
        for one in waiting:
            if one.turn.done():  # it was cancelled
                continue
            if self._may_enter(one.adapter, -one.minus_priority) or placed.get(one.adapter) == one.minus_priority:
                if one.adapter not in self._running:
                    placed[one.adapter] = one.minus_priority
                self._take(one.adapter)
                one.turn.set_result(None)
                continue
            self._waiting.append(one)
            if one.adapter not in self._running:
                self._next = self._next or one


class _Waiting(NamedTuple):
    """A sequence that waits, in the order of its turn."""

    minus_priority: int
    arrived: int
    adapter: str
    turn: asyncio.Future[None]
