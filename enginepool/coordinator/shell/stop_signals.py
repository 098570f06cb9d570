"""The signals that end a coordinator: with its workers, or alone."""

import asyncio
import signal
import time
from collections.abc import Callable

from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.events import DrainAsked
from enginepool.coordinator.shell.log import log


class StopSignals:
    """SIGTERM and SIGINT drain the pool; a second one ends it at once. SIGHUP drains. SIGUSR1 ends the coordinator alone."""

    def __init__(
        self,
        core: Context,
        drain_s: float,
        drain: Callable[[DrainAsked], None],
        end_now: Callable[[int], None],
        end_alone: Callable[[], None],
    ) -> None:
        self._core = core
        self._drain_s = drain_s
        self._drain = drain
        self._end_now = end_now
        self._end_alone = end_alone

    def install(self, loop: asyncio.AbstractEventLoop) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        loop.add_signal_handler(signal.SIGUSR1, self._stop_alone)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
            loop.add_signal_handler(signal.SIGHUP, self._hung_up)

    def _stop(self) -> None:
        if self._core.draining and not self._core.keep_workers:
            log("asked again to end: ending now")
            self._end_now(1)
            return
        log(f"draining for at most {self._drain_s:g} s")
        self._drain(DrainAsked(time.monotonic(), self._drain_s))

    def _hung_up(self) -> None:
        # A closed terminal sends it twice, itself and through its shell. The second one does not mean `now`.
        if not self._core.draining:
            self._stop()

    def _stop_alone(self) -> None:
        if self._core.draining and not self._core.keep_workers:
            log("SIGUSR1 changes nothing: the pool is already ending with its workers")
        elif self._core.draining:
            log("asked again to end: ending now; the workers stay")
            self._end_alone()
        else:
            log(f"ending without the workers, which the next coordinator adopts; batches in flight have {self._drain_s:g} s")
            self._drain(DrainAsked(time.monotonic(), self._drain_s, keep_workers=True))
