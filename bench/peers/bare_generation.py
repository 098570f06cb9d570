"""The engine in the process that asks it, with the settings of a pool's worker: `sglang.Engine.async_generate`.

python -m bench.peers.bare_generation '{"model": ..., "device": ..., "options": {...}}'
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import uvloop

from bench.generate.streams import serve
from bench.peers.bare_engine import start_engine
from bench.score.load import own_voice
from enginepool.workers.engine_settings import EngineSettings


async def main() -> None:
    """Start the engine, then run the phases on stdin."""
    voice = own_voice()
    engine, kwargs = start_engine(msgspec.convert(msgspec.json.decode(sys.argv[1]), EngineSettings))
    await engine.tokenizer_manager.freeze_gc()

    async def stream(prompt: list[int], tokens: int) -> AsyncIterator[int]:
        sampling: dict[str, Any] = {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
        got = 0
        async for answer in await engine.async_generate(input_ids=prompt, sampling_params=sampling, stream=True):
            now = answer["meta_info"]["completion_tokens"]
            if now > got:
                yield now - got
                got = now

    await serve(stream, voice, {name: repr(value) for name, value in kwargs.items()})
    await asyncio.sleep(0)
    engine.shutdown()


if __name__ == "__main__":
    uvloop.run(main())
