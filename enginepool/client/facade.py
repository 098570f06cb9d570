"""Blocking facades are generated: each method of an async class becomes one that returns when the call is done.

The generated method keeps the name, the signature, the types and the docstring of the async method.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")


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


class attribute(Generic[T]):
    """An attribute of the async object, which a facade has under the same name."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, facade: Any, owner: type) -> T:
        return getattr(facade._async, self._name)
