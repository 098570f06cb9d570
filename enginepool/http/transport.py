"""How an HTTP client of this process reaches the endpoints: without a socket, and each piece of a stream as it comes."""

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Protocol, TypeVar

import httpx

from enginepool.http.endpoints import Endpoints, Reply

T = TypeVar("T")

#: The status whose answer is raised as a timeout, which callers of a client know.
_TIMED_OUT = 504


class Loop(Protocol):
    """The methods of a `BlockingPool` that run work on its loop."""

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for a result."""
        ...

    def post(self, call: Callable[[], None]) -> None:
        """Have the loop make a call soon."""
        ...


class _Pieces(httpx.AsyncByteStream):
    """The body of a stream."""

    def __init__(self, reply: Reply, pieces: AsyncIterator[bytes]) -> None:
        self._reply, self._pieces = reply, pieces

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._pieces

    async def aclose(self) -> None:
        self._reply.close()


class PoolTransport(httpx.AsyncBaseTransport):
    """For an `httpx.AsyncClient` on the pool's loop. The timeout of a request is that of its whole answer."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        reply = await _answer(self._endpoints, request, await request.aread())
        if isinstance(reply.body, bytes):
            return httpx.Response(reply.status, headers=reply.headers, content=reply.body)
        return httpx.Response(reply.status, headers=reply.headers, stream=_Pieces(reply, reply.body))


class _BlockingPieces(httpx.SyncByteStream):
    """The body of a stream, for code that does not await."""

    def __init__(self, loop: Loop, reply: Reply, pieces: AsyncIterator[bytes]) -> None:
        self._loop, self._reply, self._pieces = loop, reply, pieces

    def __iter__(self) -> Iterator[bytes]:
        while (piece := self._loop.call(_next(self._pieces))) is not None:
            yield piece

    def close(self) -> None:
        self._loop.post(self._reply.close)


class BlockingPoolTransport(httpx.BaseTransport):
    """For an `httpx.Client`, from any thread but the pool's own."""

    def __init__(self, endpoints: Endpoints, loop: Loop) -> None:
        self._endpoints, self._loop = endpoints, loop

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        reply = self._loop.call(_answer(self._endpoints, request, request.read()))
        if isinstance(reply.body, bytes):
            return httpx.Response(reply.status, headers=reply.headers, content=reply.body)
        return httpx.Response(reply.status, headers=reply.headers, stream=_BlockingPieces(self._loop, reply, reply.body))


async def _answer(endpoints: Endpoints, request: httpx.Request, body: bytes) -> Reply:
    timeout: float | None = request.extensions.get("timeout", {}).get("read")
    reply = await endpoints.answer(request.method, request.url.path, request.headers, body, timeout)
    if reply.status == _TIMED_OUT:
        raise httpx.ReadTimeout("the pool did not answer in time", request=request)
    return reply


async def _next(pieces: AsyncIterator[bytes]) -> bytes | None:
    return await anext(pieces, None)
