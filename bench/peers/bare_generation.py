"""The engine in the process that asks it, with the settings of a pool's worker: `sglang.Engine.async_generate`, and
`async_score` next to it.

    python -m bench.peers.bare_generation '{"model": ..., "device": ..., "options": {...}}' [repaired]

An engine of SGLang 0.5.17 ends when it is given both; a repaired one has the correction of 0.5.23.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import uvloop

from bench.generate.streams import LABELS, serve
from bench.peers.bare_engine import start_engine
from bench.peers.repaired_scores import run_repaired
from bench.score.load import own_voice
from enginepool.workers.engine_settings import EngineSettings


async def main() -> None:
    """Start the engine, then run the phases on stdin."""
    voice = own_voice()
    wanted = msgspec.convert(msgspec.json.decode(sys.argv[1]), EngineSettings)
    engine, kwargs = start_engine(wanted, run_repaired if "repaired" in sys.argv[2:] else None)
    await engine.tokenizer_manager.freeze_gc()

    async def stream(prompt: list[int], tokens: int) -> AsyncIterator[int]:
        sampling: dict[str, Any] = {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
        got = 0
        async for answer in await engine.async_generate(input_ids=prompt, sampling_params=sampling, stream=True):
            now = answer["meta_info"]["completion_tokens"]
            if now > got:
                yield now - got
                got = now

    async def score(query: list[int], items: list[list[int]]) -> object:
        return await engine.async_score(query, items, label_token_ids=LABELS)

    await serve(stream, score, voice, {name: repr(value) for name, value in kwargs.items()})
    await asyncio.sleep(0)
    engine.shutdown()


if __name__ == "__main__":
    uvloop.run(main())
