"""What SGLang's scheduler says of each row in the message that answers it: its forward, and what it found. No SGLang here."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple


class Entry(NamedTuple):
    """How a row entered its forward.

    time: when, on the scheduler's clock; 0.0: it was not said. cached: tokens of it that the engine had computed before.
    """

    time: float = 0.0
    cached: int = 0


class Entries:
    """Reads the times that `scheduler.report_every_forward` adds, before SGLang drops them.

    Args:
        tm: SGLang's tokenizer manager, whose reader of answers is wrapped.
        unpack: SGLang's own way to unpack what it packed for the way between its processes.
    """

    def __init__(self, tm: Any, unpack: Callable[[Any], Any]) -> None:
        self._unpack = unpack
        self._keep = bool(getattr(tm, "enable_metrics", False))
        #: of the rows that are awaited
        self._entered: dict[str, Entry] = {}
        read: Callable[[Any], Awaitable[None]] = tm._handle_batch_output

        async def handle(message: Any) -> None:
            self._note(message)
            await read(message)

        tm._handle_batch_output = handle

    def expect(self, rows: Sequence[str]) -> None:
        """These rows are about to be sent; each is read with `pop`."""
        self._entered.update(dict.fromkeys(rows, Entry()))

    def pop(self, rows: Sequence[str]) -> list[Entry]:
        """How each row entered its forward."""
        return [self._entered.pop(row, Entry()) for row in rows]

    def _note(self, message: Any) -> None:
        packed = message.time_stats
        if packed is None or self._entered.keys().isdisjoint(message.rids):
            return
        times = self._unpack(packed)
        if not self._keep:
            message.time_stats = None  # it is not read again, so it need not be unpacked again
        # SGLang hands this on of causal models alone; the scheduler says it of all.
        cached = getattr(message, "cached_tokens", None) or [0] * len(times)
        for row, time, tokens in zip(message.rids, times, cached, strict=True):
            if row in self._entered:
                self._entered[row] = Entry(time.__dict__.get("entered", 0.0), tokens)
