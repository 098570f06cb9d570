"""Blocking facades are generated: each method of an async class becomes one that returns when the call is done.

The generated method keeps the name, the signature, the types and the docstring of the async method.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, overload

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")
T_co = TypeVar("T_co", covariant=True)
R_co = TypeVar("R_co", covariant=True)


class AsyncItems(Protocol[T_co, R_co]):
    """What the async method of a stream returns."""

    async def next_chunk(self) -> T_co | None:
        """The next item, or None at the end."""
        ...

    async def result(self) -> R_co:
        """The whole, at the end."""
        ...

    def cancel(self) -> None:
        """Take it back."""
        ...


class BlockingFacade(ABC):
    """The methods of one async object, for code that does not await.

    Attributes:
        _async: the object behind this one, on an event loop in another thread.
    """

    _async: Any

    @abstractmethod
    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop of the async object and wait for its result."""

    def __repr__(self) -> str:
        return repr(self._async).replace("<", "<Blocking", 1)


class StreamingFacade(BlockingFacade):
    """A facade of an object that has streams."""

    @abstractmethod
    def post(self, call: Callable[[], None]) -> None:
        """Have the loop of the async object make a call soon. Any thread may ask, also its own."""


@overload
def blocking(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]: ...
@overload
def blocking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]], returns: Callable[[T, Any], R]
) -> Callable[Concatenate[Any, P], R]: ...
def blocking(method: Callable[..., Coroutine[Any, Any, Any]], returns: Callable[[Any, Any], Any] | None = None) -> Any:
    """The blocking form of an async method, as a method of a `BlockingFacade`.

    Args:
        method: of the class of the async object.
        returns: makes the facade of a result that has async methods itself, from that result and `BlockingFacade.call`.
    """
    name = method.__name__

    @functools.wraps(method)
    def call(facade: BlockingFacade, *args: Any, **options: Any) -> Any:
        result = facade.call(getattr(facade._async, name)(*args, **options))  # pyright: ignore[reportPrivateUsage]
        return result if returns is None else returns(result, facade.call)

    return call


@overload
def on_loop(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]: ...
@overload
def on_loop(method: Callable[Concatenate[Any, P], T], returns: Callable[[T, Any], R]) -> Callable[Concatenate[Any, P], R]: ...
def on_loop(method: Callable[..., Any], returns: Callable[[Any, Any], Any] | None = None) -> Any:
    """The blocking form of a method that does not await, called on the loop: threads do not meet in it.

    Args:
        method: of the class of the async object.
        returns: makes the facade of a result, from that result and the facade whose method was called.
    """

    @functools.wraps(method)
    def call(facade: BlockingFacade, *args: Any, **options: Any) -> Any:
        async def work() -> Any:
            return method(facade._async, *args, **options)  # pyright: ignore[reportPrivateUsage]

        result = facade.call(work())
        return result if returns is None else returns(result, facade)

    return call


class BlockingIterator(Generic[T, R]):
    """What an async class returns for `async for`, for code that does not await: for each item a call on the loop.

    Leaving the loop over it, by `break` or by an exception, is as leaving the async one; so is the end of a `with` block.
    """

    def __init__(self, stream: AsyncItems[T, R], facade: StreamingFacade) -> None:
        self._stream = stream
        self._facade = facade

    def __iter__(self) -> Iterator[T]:
        try:
            while (item := self._facade.call(self._stream.next_chunk())) is not None:
                yield item
        finally:
            self.cancel()

    def result(self) -> R:
        """As of the async object."""
        return self._facade.call(self._stream.result())

    def cancel(self) -> None:
        """As of the async object. Returns at once; any thread may call it."""
        self._facade.post(self._stream.cancel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.cancel()


def streaming(
    method: Callable[Concatenate[Any, P], AsyncItems[T, R]],
) -> Callable[Concatenate[Any, P], BlockingIterator[T, R]]:
    """The blocking form of a method that returns what `async for` takes."""
    name = method.__name__

    @functools.wraps(method)
    def call(facade: Any, *args: Any, **options: Any) -> BlockingIterator[T, R]:
        return BlockingIterator(getattr(facade._async, name)(*args, **options), facade)

    return call


class attribute(Generic[T]):
    """An attribute of the async object, which a facade has under the same name."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, facade: Any, owner: type) -> T:
        return getattr(facade._async, self._name)
