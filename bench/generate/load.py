"""One load: streams and scores from a pool, through its Python client, or streams from SGLang's HTTP server.

python -m bench.generate.load {pool,http} ADDRESS
"""

import sys
from collections.abc import AsyncIterator

import msgspec
import uvloop

from bench.generate.streams import LABELS, serve
from bench.score.callers import START_S, HttpCaller
from bench.score.load import own_voice
from enginepool import Pool


class _Meta(msgspec.Struct):
    completion_tokens: int


class _Event(msgspec.Struct):
    meta_info: _Meta


async def from_pool(address: str) -> None:
    """The pool's own client: tokens arrive as arrays."""
    pool = await Pool.connect(address, connect_timeout=60.0)
    await pool.ready(START_S)

    async def stream(prompt: list[int], tokens: int) -> AsyncIterator[int]:
        async for chunk in pool.stream(prompt, max_new_tokens=tokens, temperature=0.0, ignore_eos=True):
            yield len(chunk.token_ids)

    async def score(query: list[int], items: list[list[int]]) -> object:
        return await pool.score(query, items, label_token_ids=LABELS)

    await serve(stream, score, own_voice(), {"contestant": "pool"})
    await pool.close()


async def from_http(address: str) -> None:
    """SGLang's own route, `/generate`, with server-sent events."""
    voice = own_voice()
    session = (await HttpCaller.connect(address))._session  # pyright: ignore[reportPrivateUsage] (its connections)
    url = f"http://{address}/generate"
    decode = msgspec.json.Decoder(_Event).decode

    async def stream(prompt: list[int], tokens: int) -> AsyncIterator[int]:
        sampling = {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
        body = msgspec.json.encode({"input_ids": prompt, "sampling_params": sampling, "stream": True})
        got = 0
        async with session.post(url, data=body, headers={"content-type": "application/json"}) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    now = decode(line[6:]).meta_info.completion_tokens
                    if now > got:
                        yield now - got
                        got = now

    await serve(stream, None, voice, {"contestant": "http"})
    await session.close()


if __name__ == "__main__":
    uvloop.run({"pool": from_pool, "http": from_http}[sys.argv[1]](sys.argv[2]))
