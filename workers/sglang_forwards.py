"""When each row entered a forward, as SGLang's scheduler says in the message that answers it. No SGLang here."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any


class Entries:
    """Reads the times that `sglang_scheduler.report_every_forward` adds, before SGLang drops them.

    Args:
        tm: SGLang's tokenizer manager, whose reader of answers is wrapped.
        unpack: SGLang's own way to unpack what it packed for the way between its processes.
    """

    def __init__(self, tm: Any, unpack: Callable[[Any], Any]) -> None:
        self._unpack = unpack
        self._keep = bool(getattr(tm, "enable_metrics", False))
        #: of the rows that are awaited; 0.0 until they are answered
        self._entered: dict[str, float] = {}
        read: Callable[[Any], Awaitable[None]] = tm._handle_batch_output

        async def handle(message: Any) -> None:
            self._note(message)
            await read(message)

        tm._handle_batch_output = handle

    def expect(self, rows: Sequence[str]) -> None:
        """These rows are about to be sent; each is taken with `take`."""
        self._entered.update(dict.fromkeys(rows, 0.0))

    def take(self, rows: Sequence[str]) -> list[float]:
        """When each row entered its forward, on the scheduler's clock; 0.0 where it was not said."""
        return [self._entered.pop(row, 0.0) for row in rows]

    def _note(self, message: Any) -> None:
        packed = message.time_stats
        if packed is None:
            return
        times = self._unpack(packed)
        if not self._keep:
            message.time_stats = None  # nobody else reads it, so it need not be unpacked again
        for row, time in zip(message.rids, times, strict=True):
            if row in self._entered:
                self._entered[row] = time.__dict__.get("entered", 0.0)
