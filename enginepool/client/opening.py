"""What `Pool.connect` and `Pool.start` return: a pool that is not open yet."""

from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, SupportsIndex, TypeVar

from enginepool.client.absent import not_open


class Closable(Protocol):
    """What an `Opening` opens: a pool."""

    async def close(self) -> None:
        """Close it."""
        ...


T = TypeVar("T", bound=Closable)


class Opening(Awaitable[T], Generic[T]):
    """A pool that is about to open. `await` it, and close the pool yourself; or `async with` it, which closes it."""

    def __init__(self, call: str, open_: Callable[[], Coroutine[Any, Any, T]]) -> None:
        #: what returned this, as callers write it
        self._call = call
        self._open = open_
        self._pool: T | None = None

    if not TYPE_CHECKING:  # a type checker says it by itself

        def __getattr__(self, name: str) -> Any:
            raise not_open(self._call, name)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(f"{self._call}(...) cannot be copied or pickled: call it once for each pool")

    def __await__(self) -> Generator[Any, Any, T]:
        return self._open().__await__()

    async def __aenter__(self) -> T:
        self._pool = await self._open()
        return self._pool

    async def __aexit__(self, *exc: object) -> None:
        if self._pool is not None:
            await self._pool.close()
