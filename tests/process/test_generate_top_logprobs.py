"""Top-k log-probabilities and those of prompts, through whole pools of sim workers."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np

from enginepool import Generation, Generations, Pool
from enginepool.protocol.messages import Sampling
from enginepool.workers.sim.operation import Weights
from enginepool.workers.sim.tokens import END_EVERY, expected_output, prompt_logprobs
from tests.process.commands import call, records
from tests.process.daemons import PATIENCE_S
from tests.process.forking import ForkedDaemon
from tests.process.processes import Processes
from tests.process.test_generate import VOCAB, generating, prompt

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 100}
ASKED: dict[str, Any] = {**GREEDY, "top_logprobs": 3, "prompt_logprobs": True}


def changed(options: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**options, **changes}


def of_prompt(i: int) -> list[float]:
    return prompt_logprobs(np.array(prompt(i), "<i4").tobytes(), len(prompt(i)), Weights(0, 0, ""))


def assert_right(found: Generation, i: int, sample: int = 0, *, first: int = 0) -> None:
    """It is what the sim engine generates after this prompt; what is known besides its ids begins with token `first`."""
    wanted, logprobs, reason = expected_output(prompt(i), Sampling(**GREEDY), sample=sample, vocab=VOCAB)
    assert found.token_ids.tolist() == wanted and found.finish_reason == reason
    assert found.logprobs is not None and found.top_ids is not None and found.top_logprobs is not None
    assert (found.top_ids.dtype, found.top_logprobs.dtype) == (np.int32, np.float32)
    assert found.top_ids.shape == found.top_logprobs.shape == (len(wanted), 3)
    np.testing.assert_allclose(found.logprobs[first:], logprobs[first:], rtol=1e-5)
    after = np.arange(3)
    np.testing.assert_array_equal(found.top_ids[first:], (np.array(wanted)[first:, None] + after) % VOCAB)
    np.testing.assert_allclose(found.top_logprobs[first:], np.array(logprobs)[first:, None] - after, rtol=1e-5)
    assert (found.top_ids[:first] == -1).all() and np.isnan(found.top_logprobs[:first]).all()


def assert_prompts(found: Generations, *numbers: int) -> None:
    assert found.prompt_logprobs is not None and len(found.prompt_logprobs) == len(numbers)
    assert found.prompt_top_ids is not None and found.prompt_top_logprobs is not None
    columns = zip(found.prompt_logprobs, found.prompt_top_ids, found.prompt_top_logprobs, numbers, strict=True)
    for one, ids, chances, i in columns:
        assert one is not None and one.dtype == np.float32
        np.testing.assert_allclose(one, of_prompt(i), rtol=1e-5)
        assert ids is not None and chances is not None and ids.shape == (len(prompt(i)), 3)
        assert (ids[0] == -1).all() and np.isnan(chances[0]).all()
        np.testing.assert_array_equal(ids[1:], (np.array(prompt(i))[1:, None] + np.arange(3)) % VOCAB)
        np.testing.assert_allclose(chances[1:], np.array(of_prompt(i))[1:, None] - np.arange(3), rtol=1e-5)


def test_a_call_has_them_as_arrays_and_others_at_the_same_time_have_none(processes: Processes, tmp_path: Path) -> None:
    daemon = generating(processes, tmp_path, options={"end_every": END_EVERY})

    async def main() -> None:
        async with Pool.connect(daemon.address) as pool:
            asked = [pool.generate([prompt(1), prompt(2)], n=2, **changed(ASKED, top_logprobs=k)) for k in (3, 3, 1)]
            plain = [pool.generate([prompt(3)], logprobs=k > 0, **GREEDY) for k in (0, 1)]
            *both, narrow, none, chosen = await asyncio.gather(*asked, *plain)
            for found in both:
                assert_prompts(found, 1, 2)
                for i, group in zip((1, 2), found, strict=True):
                    for one in group:
                        assert_right(one, i)
            assert narrow[0][0].top_ids is not None and narrow[0][0].top_ids.shape[1:] == (1,)
            assert (none[0][0].logprobs, none[0][0].top_ids, none.prompt_logprobs) == (None, None, None)
            assert none.prompt_top_ids is None and none.prompt_top_logprobs is None
            assert chosen[0][0].logprobs is not None and chosen[0][0].top_ids is None

    asyncio.run(asyncio.wait_for(main(), 2 * PATIENCE_S))


def test_streams_have_them_also_when_the_coordinator_is_killed(processes: Processes, tmp_path: Path) -> None:
    daemon = generating(processes, tmp_path, options={"inflight_rows": 16, "end_every": END_EVERY})
    count, enough = 0, asyncio.Event()

    async def read(pool: Pool, i: int) -> None:
        nonlocal count
        stream = pool.stream(prompt(i), credit=8 if i % 2 else 1024, **ASKED)
        ids: list[list[int]] = []
        async for chunk in stream:
            assert chunk.top_ids is not None and chunk.top_logprobs is not None
            assert chunk.top_ids.shape == chunk.top_logprobs.shape == (len(chunk.token_ids), 3)
            ids += chunk.top_ids.tolist()
            count += len(chunk.token_ids)
            if count > 200:
                enough.set()
        whole = await stream.result()
        assert_prompts(whole, i)
        assert_right(whole[0][0], i)
        assert whole[0][0].top_ids is not None and whole[0][0].top_ids.tolist() == ids

    async def main() -> None:
        async with Pool.connect(daemon.address) as pool:
            readers = [asyncio.create_task(read(pool, i)) for i in range(20)]
            await enough.wait()
            daemon.kill()
            again = ForkedDaemon(processes, daemon.config)
            await asyncio.wait_for(asyncio.gather(*readers), PATIENCE_S)
        assert await asyncio.to_thread(again.end) == 0

    asyncio.run(asyncio.wait_for(main(), 2 * PATIENCE_S))


def test_a_generation_that_is_continued_keeps_what_it_has(processes: Processes, tmp_path: Path) -> None:
    daemon = generating(processes, tmp_path, options={"end_every": END_EVERY})

    async def main() -> None:
        async with Pool.connect(daemon.address) as pool:
            begun = await pool.generate([prompt(1)], **changed(ASKED, max_new_tokens=4))
            assert_right((await pool.generate([prompt(1)], continue_from=begun, **ASKED))[0][0], 1)
            bare = await pool.generate([prompt(1)], **changed(GREEDY, max_new_tokens=4))
            found = await pool.generate([prompt(1)], continue_from=bare, **ASKED)
            assert_right(found[0][0], 1, first=4)
            assert_prompts(found, 1)
            whole = await pool.generate([prompt(1)], continue_from=found, **ASKED)
            assert_prompts(whole, 1)

    asyncio.run(asyncio.wait_for(main(), 2 * PATIENCE_S))


def test_the_command_writes_them(processes: Processes, tmp_path: Path) -> None:
    daemon = generating(processes, tmp_path, options={"end_every": END_EVERY})
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt": prompt(1)}, {"prompt": prompt(2), "top_logprobs": 0, "prompt_logprobs": False}]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ["--max-new-tokens", "3", "--top-logprobs", "2", "--prompt-logprobs"]
    assert call("generate", source, target, "--connect", daemon.address, *flags)[0] == 0
    first, second = (records(target)[line] for line in (1, 2))
    [sample] = first["samples"]
    assert len(sample["top_ids"]) == len(sample["top_logprobs"]) == len(sample["token_ids"])
    assert first["prompt_logprobs"][0] is None
    np.testing.assert_allclose(first["prompt_logprobs"][1:], of_prompt(1)[1:], rtol=1e-5)
    assert first["prompt_top_ids"][0] == [-1, -1] and len(first["prompt_top_logprobs"]) == len(prompt(1))
    assert "prompt_logprobs" not in second and "top_ids" not in second["samples"][0]
