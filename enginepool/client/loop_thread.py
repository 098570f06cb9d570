"""An event loop in a thread of its own, on which blocking facades run their async objects."""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

import uvloop

from enginepool.errors import PoolClosed

T = TypeVar("T")

#: Seconds for the thread to end.
_STOP_S = 5.0


class LoopThread:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self._process = os.getpid()
        running: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        #: held while a call is given to the loop, and when the loop takes no more; a signal handler may call meanwhile
        self._lock = threading.RLock()
        self._ended = False
        self._thread = threading.Thread(target=self._run, args=(running,), name="enginepool", daemon=True)
        self._thread.start()
        self._loop, self._stop = running.result()

    def call(self, work: Coroutine[Any, Any, T], within: float | None = None) -> T:
        """Run `work` on the loop and wait at most `within` seconds for it. An exception in the waiting thread cancels the work.

        Raises:
            RuntimeError: the call could never return: it comes from the loop's own thread, or from a fork of the process.
            PoolClosed: the thread has ended.
        """
        if self.is_current or self.is_elsewhere:
            work.close()
            if self.is_current:
                raise RuntimeError("this is the pool's own thread, where a call would wait for itself: call from another one")
            raise RuntimeError("this pool belongs to the process that this one was forked from; open one here")
        with self._lock:
            if self._ended or not self._thread.is_alive():
                work.close()
                raise PoolClosed("it is closed")
            future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(within)
        except BaseException:  # Ctrl-C above all; raised again
            future.cancel()
            raise

    def post(self, call: Callable[[], None]) -> None:
        """Have the loop make a call soon; from any thread, also its own. A loop that has ended makes none."""
        if self.is_elsewhere:
            return
        with suppress(RuntimeError):  # it is closed
            self._loop.call_soon_threadsafe(call)

    def stop(self) -> None:
        """Cancel what runs and end the thread. Idempotent."""
        if self.is_elsewhere or not self._thread.is_alive():
            return
        self.post(self._stop.set)
        if not self.is_current:
            self._thread.join(_STOP_S)

    @property
    def is_current(self) -> bool:
        """The caller is in this thread."""
        return threading.current_thread() is self._thread

    @property
    def is_elsewhere(self) -> bool:
        """This process is a fork, and the thread is in its parent."""
        return os.getpid() != self._process

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Start `work` from the loop's own thread, which must not wait, and stop the loop after it."""
        task = self._loop.create_task(work)
        task.add_done_callback(lambda _: self._stop.set())

    def _run(self, running: "Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]") -> None:
        async def until_stopped() -> None:
            stop = asyncio.Event()
            running.set_result((asyncio.get_running_loop(), stop))
            await stop.wait()
            with self._lock:
                self._ended = True
            await asyncio.sleep(0)  # calls that were given to the loop before are tasks now, which its end cancels

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(until_stopped())
