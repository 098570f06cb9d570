"""The signals that end a coordinator: with its workers, or alone."""

import asyncio
import signal
import time
from collections.abc import Callable

from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.events import DrainAsked
from enginepool.coordinator.shell.log import log
from enginepool.host.child_process import keep_exit_codes


def ignore_stop_signals(loop: asyncio.AbstractEventLoop) -> None:
    """The coordinator has ended: from now on these signals do nothing. A loop that closes takes its handlers away, and the
    default action would replace the exit code of the process."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # for this thread alone
    for number in numbers:
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)


def on_stop_signals(
    loop: asyncio.AbstractEventLoop,
    core: Context,
    drain_s: float,
    drain: Callable[[DrainAsked], None],
    end_now: Callable[[int], None],
    end_alone: Callable[[], None],
) -> None:
    """SIGTERM and SIGINT drain the pool; a second one ends it at once. SIGHUP drains. SIGUSR1 ends the coordinator alone.

    Called before a process is started."""
    keep_exit_codes()

    def stop() -> None:
        if core.draining and not core.keep_workers:
            log("asked again to end: ending now")
            end_now(1)
            return
        log(f"draining for at most {drain_s:g} s")
        drain(DrainAsked(time.monotonic(), drain_s))

    def hung_up() -> None:
        # A closed terminal sends it twice, itself and through its shell. The second one does not mean `now`.
        if not core.draining:
            stop()

    def stop_alone() -> None:
        if core.draining and not core.keep_workers:
            log("SIGUSR1 changes nothing: the pool is already ending with its workers")
        elif core.draining:
            log("asked again to end: ending now; the workers stay")
            end_alone()
        else:
            log(f"ending without the workers, which the next coordinator adopts; batches in flight have {drain_s:g} s")
            drain(DrainAsked(time.monotonic(), drain_s, keep_workers=True))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    loop.add_signal_handler(signal.SIGUSR1, stop_alone)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
        loop.add_signal_handler(signal.SIGHUP, hung_up)
    # `enginepool serve` starts a coordinator with these blocked.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP))
