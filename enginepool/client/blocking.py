"""`BlockingPool`: `Pool` for code that does not await (notebooks, scripts), over a loop in a thread of its own."""

import functools
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from os import PathLike
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, SupportsIndex, TypeVar

from enginepool.client.absent import no_attribute, not_copied, not_made_so
from enginepool.client.blocking_rollout import BlockingRollout
from enginepool.client.blocking_session import BlockingSession
from enginepool.client.facade import StreamingFacade, attribute, blocking, on_loop, streaming
from enginepool.client.loop_thread import LoopThread
from enginepool.client.opening import Opening
from enginepool.client.pool import Pool, drain_s
from enginepool.errors import PoolClosed

if TYPE_CHECKING:
    from openai import OpenAI

P = ParamSpec("P")
T = TypeVar("T")

#: Seconds for closing, besides those in which a pool that was started here drains its workers.
_CLOSE_S = 30.0


def _opened(opening: Callable[P, Opening[Pool]]) -> "Callable[P, BlockingPool]":
    """The blocking form of a class method of `Pool` that opens one."""

    @functools.wraps(opening)
    def open_(*args: P.args, **options: P.kwargs) -> "BlockingPool":
        return BlockingPool(opening(*args, **options))

    return open_


class BlockingPool(StreamingFacade):
    """A `Pool` whose calls return when they are done. Any thread may call it, also several at once, except the pool's own
    thread, which calls `report` and `on_wanted`. It does not survive a fork: a child process opens a pool of its own.

    Ctrl-C in a call cancels its request. The pool closes with `close`, at the end of a `with` block, when the object is
    garbage-collected, and at the end of the program. Calls that run in other threads then end with PoolClosed.
    """

    def __init__(self, opening: Opening[Pool] | None = None) -> None:
        """Not for callers: use `connect` or `start`."""
        if not isinstance(opening, Opening):
            raise not_made_so("BlockingPool", opening)

        async def open_() -> Pool:
            return await opening

        self._thread = LoopThread()
        try:
            self._async = self._thread.call(open_())
        except BaseException:  # also Ctrl-C: the caller gets no object that could stop the thread; raised again
            self._thread.stop()
            raise
        self._end = weakref.finalize(self, _close, self._thread, self._async)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise no_attribute("BlockingPool", name)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise not_copied("BlockingPool", self.address)

    connect = staticmethod(_opened(Pool.connect))
    start = staticmethod(_opened(Pool.start))

    score = blocking(Pool.score)
    score_pairs = blocking(Pool.score_pairs)
    embed = blocking(Pool.embed)
    similarity = blocking(Pool.similarity)
    rerank = blocking(Pool.rerank)
    tokenize = blocking(Pool.tokenize)
    decode = blocking(Pool.decode)
    generate = blocking(Pool.generate)
    stream = streaming(Pool.stream)
    session = on_loop(Pool.session, BlockingSession)
    rollout = on_loop(Pool.rollout, BlockingRollout)
    logprobs = blocking(Pool.logprobs)
    flush = blocking(Pool.flush)
    sleep = blocking(Pool.sleep)
    wake = blocking(Pool.wake)
    pause = blocking(Pool.pause)
    resume = blocking(Pool.resume)
    abort = blocking(Pool.abort)
    start_profile = blocking(Pool.start_profile)
    stop_profile = blocking(Pool.stop_profile)
    load_adapter = blocking(Pool.load_adapter)
    unload_adapter = blocking(Pool.unload_adapter)
    ready = blocking(Pool.ready)
    status = blocking(Pool.status)
    restart = blocking(Pool.restart)
    weights = blocking(Pool.weights)
    weights_digest = blocking(Pool.weights_digest)
    validate_weights = blocking(Pool.validate_weights)
    weight = blocking(Pool.weight)
    set_version = blocking(Pool.set_version)
    save_weights = blocking(Pool.save_weights)
    publish_checkpoint = blocking(Pool.publish_checkpoint)
    address = attribute[str]()

    def openai(self, group: str = "", *, model: str | PathLike[str] | None = None, **settings: Any) -> "OpenAI":
        """As `Pool.openai`: an `openai.OpenAI` for code that does not await."""
        endpoints = self.pool.endpoints(group, model, settings)
        from enginepool.http.clients import blocking_client

        return blocking_client(endpoints, self)

    def close(self) -> None:
        """As `Pool.close`."""
        self._end()

    def __enter__(self) -> "BlockingPool":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def pool(self) -> Pool:
        """The async pool, for coroutines that `call` runs on its loop."""
        return self._async

    @property
    def client_id(self) -> str:
        """As `Pool.client_id`."""
        return self._async.client_id

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the pool's loop and wait for its result. Raises PoolClosed."""
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

    def post(self, call: Callable[[], None]) -> None:
        """Have the pool's loop make a call soon; nothing of a closed pool is left to call."""
        if self._end.alive:
            self._thread.post(call)


def _close(thread: LoopThread, pool: Pool) -> None:
    if thread.is_elsewhere:
        return
    if thread.is_current:
        # The garbage collector found the unreferenced pool while it ran in the pool's own thread.
        thread.spawn(pool.close())
        return
    try:
        thread.call(pool.close(), _CLOSE_S + drain_s(pool))
    finally:
        thread.stop()
