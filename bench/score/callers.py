"""How a request reaches a contestant: through the pool's Python client, or SGLang's HTTP route."""

import asyncio
import time
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import msgspec

from bench.score.workloads import Shape
from enginepool import Pool

if TYPE_CHECKING:
    import aiohttp

#: Seconds for a pool's worker, or a server, to load its model and answer for the first time.
START_S = 600.0


class Answer(NamedTuple):
    """The answers. Only the pool says how many forwards its batches took and where the time went."""

    scores: list[list[float]]
    forwards: tuple[int, ...] = ()
    queued_s: float = 0.0
    run_s: float = 0.0


class Caller(Protocol):
    """One contestant, as the load sees it."""

    def prepare(self, shape: Shape, number: int) -> object:
        """Request `number` in the form that `call` takes."""
        ...

    async def call(self, request: Any, priority: int) -> Answer:
        """The answer; raises when it is no scores."""
        ...

    async def counters(self) -> dict[str, int]:
        """What the contestant counts by itself."""
        ...

    async def close(self) -> None:
        """Leave."""
        ...


class PoolCaller:
    """The pool through its Python client: arrays are encoded and scores decoded within the latency."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    @classmethod
    async def connect(cls, address: str) -> "PoolCaller":
        """Connect, and wait until a worker is ready."""
        pool = await Pool.connect(address, connect_timeout=60.0)
        await pool.ready(START_S)
        return cls(pool)

    def prepare(self, shape: Shape, number: int) -> object:
        return shape, shape.request(number)

    async def call(self, request: Any, priority: int) -> Answer:
        shape, (query, items) = request
        labels = list(shape.labels) or None
        result = await self._pool.score(
            query, items, label_token_ids=labels, return_pooled_hidden_states=shape.hidden, priority=priority
        )
        if (result.hidden is not None) != shape.hidden:
            raise ValueError("hidden states came, or did not come, against what was asked")
        timings = result.timings
        return Answer(result.scores.tolist(), result.forwards, timings.queued_s, timings.run_s)

    async def counters(self) -> dict[str, int]:
        status = await self._pool.status()
        [group] = status.groups
        pauses, pause_us = status.pauses
        return {
            "answered": group.answered,
            "batches": group.batches,
            "forwards": group.forwards,
            "split batches": group.split_batches,
            "packed batches": group.packed_batches,
            "lost batches": group.lost_batches,
            "pauses": pauses,
            "pause µs": pause_us,
        }

    async def close(self) -> None:
        await self._pool.close()


class _Scored(msgspec.Struct):
    scores: list[list[float]]
    pooled_hidden_states: list[list[float] | None] | None = None


class HttpCaller:
    """SGLang's `/v1/score`, over as many kept connections as there are requests at once. It knows no priority."""

    def __init__(self, address: str, session: "aiohttp.ClientSession") -> None:
        self._url = f"http://{address}/v1/score"
        self._session = session
        self._decode = msgspec.json.Decoder(_Scored).decode

    @classmethod
    async def connect(cls, address: str) -> "HttpCaller":
        """Wait until the server listens, which it does when its engine is loaded."""
        import aiohttp  # SGLang needs it; who measures the pool alone does not

        host, _, port = address.rpartition(":")
        end = time.monotonic() + START_S
        while True:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
            except OSError:
                if time.monotonic() > end:
                    raise
                await asyncio.sleep(0.3)
            else:
                writer.close()
                break
        # The server closes idle connections after five seconds; letting go of them first avoids the race.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0)
        return cls(address, aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)))

    def prepare(self, shape: Shape, number: int) -> object:
        query, items = shape.request(number).listed()
        body: dict[str, object] = {"query": query, "items": items, "model": "default"}
        if shape.labels:
            body["label_token_ids"] = shape.labels
        if shape.hidden:
            body["return_pooled_hidden_states"] = True
        return shape, len(items), msgspec.json.encode(body)

    async def call(self, request: Any, priority: int) -> Answer:
        shape, rows, body = cast("tuple[Shape, int, bytes]", request)
        async with self._session.post(self._url, data=body, headers={"content-type": "application/json"}) as response:
            text = await response.read()
            if response.status != 200:
                raise RuntimeError(f"status {response.status}: {text[:200]!r}")
        scored = self._decode(text)
        if len(scored.scores) != rows or (scored.pooled_hidden_states is not None) != shape.hidden:
            raise RuntimeError(f"not the answer to what was asked: {text[:200]!r}")
        return Answer(scored.scores)

    async def counters(self) -> dict[str, int]:
        return {}

    async def close(self) -> None:
        await self._session.close()
