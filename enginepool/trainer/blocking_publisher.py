"""`BlockingWeightPublisher`: a `WeightPublisher` for trainers that do not await, on the loop of their `BlockingPool`."""

from collections.abc import Callable, Coroutine
from typing import Any, Unpack, cast

from enginepool.client.arguments import kind
from enginepool.client.blocking import BlockingPool, LoopThread
from enginepool.errors import BadRequest, PoolClosed
from enginepool.protocol.updates import UpdateRecord
from enginepool.trainer.buffers import stand_behind
from enginepool.trainer.publisher import UpdateOptions, WeightPublisher, device_of
from enginepool.trainer.tensors import Source
from enginepool.trainer.update_handle import UpdateHandle

_Run = Callable[[Coroutine[Any, Any, Any]], Any]


class BlockingUpdateHandle:
    """An `UpdateHandle` whose calls return when they are done."""

    def __init__(self, handle: UpdateHandle, call: _Run) -> None:
        """Not for callers: `BlockingWeightPublisher.start` makes it."""
        self._handle = handle
        self._call = call

    def __repr__(self) -> str:
        return repr(self._handle)

    @property
    def version(self) -> int | None:
        """As `UpdateHandle.version`."""
        return self._handle.version

    @property
    def phase(self) -> str:
        """As `UpdateHandle.phase`."""
        return self._handle.phase

    @property
    def sent_bytes(self) -> int:
        """Broadcast so far."""
        return self._handle.sent_bytes

    @property
    def total_bytes(self) -> int:
        """To be broadcast."""
        return self._handle.total_bytes

    def sent(self) -> None:
        """As `UpdateHandle.sent`."""
        self._call(self._handle.sent())

    def finish(self, timeout: float | None = None) -> UpdateRecord:
        """As `UpdateHandle.finish`."""
        return self._call(self._handle.finish(timeout))

    def abort(self, reason: str = "") -> None:
        """As `UpdateHandle.abort`."""
        self._call(self._handle.abort(reason))


class BlockingWeightPublisher:
    """A `WeightPublisher` whose calls return when they are done. Ctrl-C in a call gives the update up.

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
        self._thread: LoopThread | None = None
        self._run: _Run
        if pool is None:
            self._thread = LoopThread()
            self._run = self._thread.call
        else:
            self._run = pool.call

        async def make() -> WeightPublisher:
            return WeightPublisher(None if pool is None else pool.pool, device=self._device, **options)

        try:
            self._publisher: WeightPublisher = self._run(make())
        except BaseException:  # also Ctrl-C: nobody has the object that would stop the thread; raised again
            self._stop()
            raise

    def __enter__(self) -> "BlockingWeightPublisher":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return repr(self._publisher).replace("<Weight", "<BlockingWeight", 1)

    @property
    def wanted(self) -> bool:
        """Whether the pool has lost its weights and waits for them."""
        return self._publisher.wanted.is_set()

    @property
    def wanted_version(self) -> int:
        """As `WeightPublisher.wanted_version`."""
        return self._publisher.wanted_version

    def publish(self, source: Source, version: int | None = None, **options: Unpack[UpdateOptions]) -> UpdateRecord:
        """As `WeightPublisher.publish`."""
        self._stand_behind()
        return self._run(self._publisher.publish(source, version, **options))

    def start(self, source: Source, version: int | None = None, **options: Unpack[UpdateOptions]) -> BlockingUpdateHandle:
        """As `WeightPublisher.start`."""
        self._stand_behind()
        return BlockingUpdateHandle(self._run(self._publisher.start(source, version, **options)), self._run)

    def _stand_behind(self) -> None:
        """What the caller's stream still has to compute comes first: the current stream of the loop's thread is the default
        one."""
        stand_behind(self._device)

    def close(self) -> None:
        """As `WeightPublisher.close`, also after the pool's own `close`."""
        try:
            self._run(self._publisher.close())
        except PoolClosed:
            # The loop is gone; what is held on this side can still be given back.
            thread = LoopThread()
            try:
                thread.call(self._publisher.close())
            finally:
                thread.stop()
        self._stop()

    def _stop(self) -> None:
        if self._thread is not None:
            self._thread.stop()
