"""`BlockingPool`: the same calls for code that does not await (notebooks, scripts), over a loop in a thread of its own."""

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import uvloop

from enginepool.client.absent import no_attribute, not_made_so
from enginepool.client.arguments import Ids, ScoreOptions
from enginepool.client.pool import Opening, Pool
from enginepool.client.results import Floats, ScoreResult
from enginepool.errors import PoolClosed
from enginepool.protocol.messages import StatusReport
from enginepool.protocol.updates import InFlight, UpdateRecord, WeightsReport

if TYPE_CHECKING:
    from enginepool.config import PoolConfig

T = TypeVar("T")

#: Seconds for closing; a pool that was started here drains its workers first.
_CLOSE_S = 30.0
#: Seconds for the thread to end after that.
_STOP_S = 5.0


class BlockingPool:
    """A `Pool` whose calls return when they are done. Any thread may call, also several at once, but for the pool's own, which
    calls `report` and `on_wanted`. It does not survive a fork: a child opens one of its own.

    Ctrl-C in a call takes its request back. The pool closes with `close`, at the end of a `with` block, when the object is
    forgotten, and at the end of the program.
    """

    def __init__(self, opening: Callable[[], Opening] | None = None) -> None:
        """Not for callers: use `connect` or `start`."""
        if not callable(opening):
            raise not_made_so("BlockingPool", opening)
        self._thread = LoopThread()
        try:
            self._pool = self._thread.call(_opened(opening))
        except BaseException:  # also Ctrl-C: nobody has the object that would stop the thread; raised again
            self._thread.stop()
            raise
        self._end = weakref.finalize(self, _close, self._thread, self._pool)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise no_attribute("BlockingPool", name)

    @classmethod
    def connect(
        cls,
        address: str | None = None,
        *,
        keys: str | PathLike[str] | None = None,
        connect_timeout: float | None = 10.0,
    ) -> "BlockingPool":
        """As `Pool.connect`."""
        return cls(lambda: Pool.connect(address, keys=keys, connect_timeout=connect_timeout))

    @classmethod
    def start(
        cls,
        model: str | None = None,
        *,
        workers: int = 1,
        engine: str = "sglang",
        device: str = "auto",
        config: "PoolConfig | None" = None,
        start_timeout: float = 60.0,
        **settings: Any,
    ) -> "BlockingPool":
        """As `Pool.start`."""
        return cls(
            lambda: Pool.start(
                model, workers=workers, engine=engine, device=device, config=config, start_timeout=start_timeout, **settings
            )
        )

    def score(self, query: str | Ids, items: Sequence[str] | Sequence[Ids], **options: Unpack[ScoreOptions]) -> ScoreResult:
        """As `Pool.score`."""
        return self.call(self._pool.score(query, items, **options))

    def score_pairs(
        self,
        prompts: Sequence[str] | Sequence[Ids],
        responses: Sequence[str] | Sequence[Ids],
        **options: Unpack[ScoreOptions],
    ) -> ScoreResult:
        """As `Pool.score_pairs`."""
        return self.call(self._pool.score_pairs(prompts, responses, **options))

    def ready(
        self, timeout: float | None = None, *, group: str = "", report: Callable[[str], None] | None = None
    ) -> StatusReport:
        """As `Pool.ready`; `report` is called in the pool's thread."""
        return self.call(self._pool.ready(timeout, group=group, report=report))

    def status(self, timeout: float | None = 10.0) -> StatusReport:
        """As `Pool.status`."""
        return self.call(self._pool.status(timeout))

    def restart(self, group: str = "", worker: str = "", *, report: Callable[[str], None] | None = None) -> list[str]:
        """As `Pool.restart`; `report` is called in the pool's thread."""
        return self.call(self._pool.restart(group, worker, report=report))

    def weights(self, group: str = "", *, timeout: float | None = 10.0) -> WeightsReport:
        """As `Pool.weights`."""
        return self.call(self._pool.weights(group, timeout=timeout))

    def weights_digest(self, group: str = "", *, timeout: float | None = 120.0) -> WeightsReport:
        """As `Pool.weights_digest`."""
        return self.call(self._pool.weights_digest(group, timeout=timeout))

    def validate_weights(self, group: str = "", *, timeout: float | None = 120.0) -> WeightsReport:
        """As `Pool.validate_weights`."""
        return self.call(self._pool.validate_weights(group, timeout=timeout))

    def weight(self, name: str, group: str = "", *, timeout: float | None = 60.0) -> Floats:
        """As `Pool.weight`."""
        return self.call(self._pool.weight(name, group, timeout=timeout))

    def set_version(
        self, version: int, group: str = "", *, new_run: bool = False, timeout: float | None = 60.0
    ) -> UpdateRecord:
        """As `Pool.set_version`."""
        return self.call(self._pool.set_version(version, group, new_run=new_run, timeout=timeout))

    def publish_checkpoint(
        self,
        path: str | PathLike[str],
        version: int,
        group: str = "",
        *,
        in_flight: InFlight = "drain",
        drain: float = 10.0,
        new_run: bool = False,
        timeout: float | None = 600.0,
    ) -> UpdateRecord:
        """As `Pool.publish_checkpoint`."""
        work = self._pool.publish_checkpoint(
            path, version, group, in_flight=in_flight, drain=drain, new_run=new_run, timeout=timeout
        )
        return self.call(work)

    def close(self) -> None:
        """As `Pool.close`. Calls that are under way in other threads end with PoolClosed."""
        self._end()

    @property
    def address(self) -> str:
        """Where the coordinator listens."""
        return self._pool.address

    def __enter__(self) -> "BlockingPool":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return repr(self._pool).replace("<Pool", "<BlockingPool", 1)

    @property
    def pool(self) -> Pool:
        """The pool behind it, for what runs on its loop by `call`."""
        return self._pool

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the pool's loop and wait for it. Raises PoolClosed."""
        if not self._end.alive:
            work.close()
            raise PoolClosed("the pool is closed")
        try:
            return self._thread.call(work)
        except CancelledError:
            if self._end.alive:
                raise
            # Closing ends the loop, and with it what still runs there.
            raise PoolClosed("the pool is closed") from None


class LoopThread:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self._process = os.getpid()
        running: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._thread = threading.Thread(target=_run, args=(running,), name="enginepool", daemon=True)
        self._thread.start()
        self._loop, self._stop = running.result()

    def call(self, work: Coroutine[Any, Any, T], within: float | None = None) -> T:
        """Run `work` on the loop and wait for it. Whatever interrupts the waiting cancels the work.

        Raises:
            RuntimeError: it would wait for ever: this is the loop's own thread, or a fork, where that thread is not.
            PoolClosed: the thread has ended.
        """
        if self.is_current or self.is_elsewhere:
            work.close()
            if self.is_current:
                raise RuntimeError("this is the pool's own thread, where a call would wait for itself: call from another one")
            raise RuntimeError("this pool belongs to the process that this one was forked from; open one here")
        if not self._thread.is_alive():
            work.close()
            raise PoolClosed("it is closed")
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(within)
        except BaseException:  # Ctrl-C above all; raised again
            future.cancel()
            raise

    def stop(self) -> None:
        """Cancel what runs and end the thread. Twice is once."""
        if self.is_elsewhere or not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._stop.set)
        if not self.is_current:
            self._thread.join(_STOP_S)

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    @property
    def is_elsewhere(self) -> bool:
        """This process is a fork, and the thread is in the other one."""
        return os.getpid() != self._process

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin `work` from the loop's own thread, where nobody may wait, and stop after it."""
        task = self._loop.create_task(work)
        task.add_done_callback(lambda _: self._stop.set())


def _run(running: "Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]") -> None:
    async def until_stopped() -> None:
        stop = asyncio.Event()
        running.set_result((asyncio.get_running_loop(), stop))
        await stop.wait()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(until_stopped())


async def _opened(opening: Callable[[], Opening]) -> Pool:
    return await opening()


def _close(thread: LoopThread, pool: Pool) -> None:
    if thread.is_elsewhere:
        return
    if thread.is_current:
        # The garbage collector found the forgotten pool while it ran in the pool's own thread.
        thread.spawn(pool.close())
        return
    try:
        thread.call(pool.close(), _CLOSE_S)
    finally:
        thread.stop()
