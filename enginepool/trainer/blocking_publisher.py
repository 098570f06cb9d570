"""`BlockingWeightPublisher`: a `WeightPublisher` for trainers that do not await, on the loop of their `BlockingPool`."""

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

from enginepool.client.arguments import kind
from enginepool.client.blocking import BlockingPool
from enginepool.client.facade import BlockingFacade, attribute, blocking
from enginepool.client.loop_thread import LoopThread
from enginepool.errors import BadRequest, PoolClosed
from enginepool.trainer.buffers import stand_behind
from enginepool.trainer.publisher import WeightPublisher, device_of
from enginepool.trainer.update_handle import UpdateHandle

T = TypeVar("T")


class BlockingUpdateHandle(BlockingFacade):
    """An `UpdateHandle` whose calls return when they are done."""

    def __init__(self, handle: UpdateHandle, call: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        """Not for callers: `BlockingWeightPublisher.start` makes it."""
        self._async = handle
        self._call = call

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the publisher's loop and wait for its result."""
        return self._call(work)

    version = attribute[int | None]()
    phase = attribute[str]()
    members = attribute[int]()
    done = attribute[int]()
    sent_bytes = attribute[int]()
    total_bytes = attribute[int]()
    sent = blocking(UpdateHandle.sent)
    finish = blocking(UpdateHandle.finish)
    abort = blocking(UpdateHandle.abort)


class BlockingWeightPublisher(BlockingFacade):
    """A `WeightPublisher` whose calls return when they are done. Ctrl-C in a call aborts the update.

    `on_wanted` is called in the pool's thread, which must not wait for the pool: it tells another thread to publish.

    Args:
        pool: the pool; None on trainer ranks above 0.
        options: all of `WeightPublisher`'s.
    """

    def __init__(self, pool: BlockingPool | None, **options: Any) -> None:
        if pool is not None and not isinstance(cast("object", pool), BlockingPool):
            raise BadRequest(f"pool: {kind(pool)}; a BlockingPool; WeightPublisher takes a Pool", field="pool")
        #: found here: the loop's thread has another current GPU
        self._device = device_of(options.pop("device", "auto"))
        #: a loop of its own, on ranks without a pool
        self._thread = LoopThread() if pool is None else None
        self._run = self._thread.call if self._thread is not None else cast("BlockingPool", pool).call

        async def make() -> WeightPublisher:
            return WeightPublisher(None if pool is None else pool.pool, device=self._device, **options)

        try:
            self._async = self._run(make())
        except BaseException:  # also Ctrl-C: the caller gets no object that could stop the thread; raised again
            self._stop()
            raise

    def __enter__(self) -> "BlockingWeightPublisher":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    publish = blocking(WeightPublisher.publish)
    start = blocking(WeightPublisher.start, BlockingUpdateHandle)
    wanted_version = attribute[int]()

    @property
    def wanted(self) -> bool:
        """Whether the pool has lost its weights and waits for them."""
        return self._async.wanted.is_set()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the publisher's loop and wait for its result.

        What the caller's stream still has to compute comes first: the current stream of the loop's thread is the default one.
        """
        stand_behind(self._device)
        return self._run(work)

    def close(self) -> None:
        """As `WeightPublisher.close`, also after the pool's own `close`."""
        try:
            self._run(self._async.close())
        except PoolClosed:
            # The loop is gone; the memory of this publisher can still be freed.
            thread = LoopThread()
            try:
                thread.call(self._async.close())
            finally:
                thread.stop()
        self._stop()

    def _stop(self) -> None:
        if self._thread is not None:
            self._thread.stop()
