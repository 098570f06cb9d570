"""The engine in the process that asks it, given streams and scores at once, with the settings of a worker that generates.

python -m bench.peers.bare_mixed '{"model": ..., "device": ..., "options": {...}}'
"""

import sys
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import uvloop

from bench.generate.mixed import LABELS, serve_mixed
from bench.peers.bare_engine import start_engine
from bench.score.load import own_voice
from enginepool.workers.engine_settings import EngineSettings


async def main() -> None:
    """Start the engine, then run the phases on stdin."""
    voice = own_voice()
    engine, _ = start_engine(msgspec.convert(msgspec.json.decode(sys.argv[1]), EngineSettings))
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

    await serve_mixed(stream, score, voice)
    engine.shutdown()


if __name__ == "__main__":
    uvloop.run(main())
