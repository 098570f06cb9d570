"""The benchmark of scores next to streams measures both, with the simulated engine."""

import asyncio
from collections.abc import AsyncIterator

from bench.generate.streams import LABELS, Phase, Streamed, run_phase
from bench.mixed_gpu import BARE, BOTH, POOL, rows_of
from enginepool import Pool


def test_it_counts_tokens_and_times_scores_at_the_same_time() -> None:
    async def scenario() -> Streamed:
        options = {"forward_s": 0.001, "end_every": 0}
        async with Pool.start("any-name", engine="sim", operations=["generate", "score"], options=options) as pool:
            await pool.ready(60.0)

            async def stream(prompt: list[int], tokens: int) -> AsyncIterator[int]:
                async for chunk in pool.stream(prompt, max_new_tokens=tokens):
                    yield len(chunk.token_ids)

            async def score(query: list[int], items: list[list[int]]) -> object:
                return await pool.score(query, items, label_token_ids=LABELS)

            return await run_phase(stream, Phase(4, 1.0, 3, 300, 1000, 1, scores=20.0, query=4, items=3, item=5), score)

    found = asyncio.run(scenario())
    assert found.per_second > 0 and len(found.score_ms) >= 10 and (found.failed, found.failure) == (0, "")


def test_the_pool_is_compared_with_the_engine_alone_in_pairs_of_phases() -> None:
    found = {
        (POOL, BOTH): [Streamed(100.0, [], score_ms=[10.0]), Streamed(120.0, [], score_ms=[20.0])],
        (BARE, BOTH): [Streamed(200.0, [], score_ms=[40.0]), Streamed(0.0, [], 1, "it ended")],
    }
    rows = {(row.what, row.who): row for row in rows_of(found)}
    assert rows["scores: p99", BARE].ratio == 0.25 and rows[f"{BOTH}: tokens/s", BARE].ratio == 0.5
    assert rows[f"{BOTH}: failed", BARE].value == 1 and rows["scores: p50", POOL].ratio is None
