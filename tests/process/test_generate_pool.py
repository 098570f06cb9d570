"""`Pool.generate`, `Pool.stream` and `enginepool generate` with whole pools of sim workers."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np

from enginepool import Pool
from enginepool.protocol.messages import Sampling
from enginepool.workers.sim.tokens import END_EVERY, expected_output
from tests.process.commands import call, records
from tests.process.daemons import PATIENCE_S
from tests.process.forking import ForkedDaemon
from tests.process.processes import Processes
from tests.process.test_generate import VOCAB, generating, prompt
from tests.process.waiting import wait_until

STREAMS = 200
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 150}


def test_streams_of_a_pool_have_the_tokens_of_an_undisturbed_run_when_the_coordinator_is_killed(
    processes: Processes, tmp_path: Path
) -> None:
    daemon = generating(processes, tmp_path, options={"inflight_rows": STREAMS // 2, "forward_s": 0.03})
    begun, ended = set[int](), set[int]()
    all_begun = asyncio.Event()

    async def read(pool: Pool, i: int) -> None:
        stream = pool.stream(prompt(i), credit=8 if i % 2 else 1024, logprobs=True, **GREEDY)
        tokens: list[int] = []
        logprobs: list[float] = []
        async for chunk in stream:
            assert chunk.logprobs is not None
            tokens += chunk.token_ids.tolist()
            logprobs += chunk.logprobs.tolist()
            begun.add(i)
            if len(begun) == STREAMS:
                all_begun.set()
        [[whole]] = await stream.result()
        ended.add(i)
        wanted, chances, reason = expected_output(prompt(i), Sampling(**GREEDY), sample=0, vocab=VOCAB, end_every=0)
        assert tokens == wanted and whole.token_ids.tolist() == wanted and whole.finish_reason == reason
        np.testing.assert_allclose(logprobs, chances, rtol=1e-5)
        assert whole.logprobs is not None and whole.logprobs.tolist() == logprobs
        assert sum(tokens for _, tokens in whole.spans) == len(wanted)

    async def main() -> None:
        async with Pool.connect(daemon.address) as pool:
            readers = [asyncio.create_task(read(pool, i)) for i in range(STREAMS)]

            async def in_the_middle() -> bool:
                return all_begun.is_set()

            await wait_until(in_the_middle, *readers)
            assert not ended, "all of them are in the middle"
            daemon.kill()
            again = ForkedDaemon(processes, daemon.config)
            await asyncio.wait_for(asyncio.gather(*readers), PATIENCE_S)
        assert await asyncio.to_thread(again.end) == 0

    asyncio.run(asyncio.wait_for(main(), 2 * PATIENCE_S))


def test_a_partial_rollout_that_a_killed_coordinator_interrupts_is_handed_in_again(
    processes: Processes, tmp_path: Path
) -> None:
    daemon = generating(processes, tmp_path, options={"end_every": END_EVERY})
    wanted, chances, reason = expected_output(prompt(1), Sampling(**GREEDY), sample=0, vocab=VOCAB)

    async def main() -> None:
        async with Pool.connect(daemon.address) as pool:
            stream = pool.stream(prompt(1), partial=True, logprobs=True, **GREEDY)
            assert await stream.next_chunk() is not None
            daemon.kill()
            again = ForkedDaemon(processes, daemon.config)
            partial = await stream.result()
            [[one]] = partial
            assert one.finish_reason == "interrupted" and one.token_ids.tolist() == wanted[: len(one.token_ids)]
            [[whole]] = await pool.generate([prompt(1)], continue_from=partial, logprobs=True, **GREEDY)
            assert whole.token_ids.tolist() == wanted and whole.finish_reason == reason
            assert whole.logprobs is not None
            np.testing.assert_allclose(whole.logprobs, chances, rtol=1e-5)
        assert await asyncio.to_thread(again.end) == 0

    asyncio.run(asyncio.wait_for(main(), 2 * PATIENCE_S))


def test_the_command_generates_a_file_and_continues_it(processes: Processes, tmp_path: Path) -> None:
    daemon = generating(processes, tmp_path, options={"end_every": END_EVERY, "adapters": ["french"]})
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines: list[dict[str, Any]] = [{"prompt": prompt(i), "id": i} for i in range(5)]
    lines += [{"prompt": [VOCAB]}, {"text": "a"}, {"prompt": prompt(7), "n": 2, "logprobs": True, "max_new_tokens": 3}]
    lines += [{"prompt": prompt(8), "temperature": -1}, {"prompt": []}]
    lines += [{"prompt": prompt(9), "adapter": "french"}, {"prompt": prompt(9), "adapter": "dutch"}]
    lines += [{"prompt": prompt(1), "json_schema": {"type": "object"}}]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for _ in range(2):
        code, _, err = call("generate", source, target, "--connect", daemon.address, "--max-new-tokens", 9, "--temperature", 0)
        assert code == 1, err
    found = records(target)
    assert sorted(found) == list(range(1, 14))
    for i in range(5):
        wanted, _, reason = expected_output(prompt(i), Sampling(temperature=0.0, max_new_tokens=9), sample=0, vocab=VOCAB)
        [sample] = found[i + 1]["samples"]
        assert (sample["token_ids"], sample["finish_reason"], "logprobs" in sample) == (wanted, reason, False)
        assert (found[i + 1]["id"], found[i + 1]["version"], found[i + 1]["tokens"]) == (i, 0, len(wanted))
    assert found[6]["error"]["field"] == "prompt[0]" and found[6]["error"]["limit"] == str(VOCAB)
    assert found[6]["error"]["message"].startswith("line 6: prompt[0]: ")
    assert found[7]["error"]["code"] == "bad_line" and "unknown key text" in found[7]["error"]["message"]
    for number, sample in enumerate(found[8]["samples"]):
        sampling = Sampling(temperature=0.0, max_new_tokens=3)
        wanted, chances, _ = expected_output(prompt(7), sampling, sample=number, vocab=VOCAB)
        assert sample["token_ids"] == wanted
        np.testing.assert_allclose(sample["logprobs"], chances, rtol=1e-5)
    assert found[9]["error"]["field"] == "temperature" and found[10]["error"]["message"] == "line 10: prompt: empty"
    adapted, _, _ = expected_output(
        prompt(9), Sampling(temperature=0.0, max_new_tokens=9), sample=0, vocab=VOCAB, adapter="french"
    )
    assert found[11]["samples"][0]["token_ids"] == adapted
    assert found[12]["error"]["message"] == "line 12: adapter: 'dutch'; the workers of this group have french"
    said = "json_schema: an object; must be a string, or null (write the object as a string of JSON)"
    assert found[13]["error"]["message"] == f"line 13: {said}"
