"""`BlockingSession`: `Session` for code that does not await, on the loop of its `BlockingPool`."""

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from enginepool.client.facade import BlockingIterator, StreamingFacade, blocking, on_loop
from enginepool.client.generation_session import Session
from enginepool.client.payload import Ids32

T = TypeVar("T")


def _branch(session: Session, of: "BlockingSession") -> "BlockingSession":
    return BlockingSession(session, of.pool)


class BlockingSession(StreamingFacade):
    """A `Session` whose calls return when they are done. Any thread may call it."""

    def __init__(self, session: Session, pool: StreamingFacade) -> None:
        """Not for callers: use `BlockingPool.session`."""
        self._async = session
        self.pool = pool

    generate = blocking(Session.generate)
    stream = on_loop(Session.stream, BlockingIterator)
    branch = on_loop(Session.branch, _branch)
    replace = on_loop(Session.replace)
    close = on_loop(Session.close)

    @property
    def history(self) -> Ids32:
        """As of `Session`."""
        return on_loop(lambda session: session.history)(self)

    @property
    def turns(self) -> tuple[int, ...]:
        """As of `Session`."""
        return on_loop(lambda session: session.turns)(self)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the pool's loop and wait for its result."""
        return self.pool.call(work)

    def post(self, call: Callable[[], None]) -> None:
        """Have the pool's loop make a call soon."""
        self.pool.post(call)

    def __enter__(self) -> "BlockingSession":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
