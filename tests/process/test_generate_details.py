"""Hidden states of generated tokens, and routed experts, through whole pools of sim workers."""

import asyncio
import base64
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginepool import Generation, Pool
from enginepool.errors import BadRequest
from enginepool.workers.sim.tokens import expected_experts, expected_states
from tests.process.commands import call, records
from tests.process.daemons import PATIENCE_S
from tests.process.processes import Processes
from tests.process.test_generate import SAMPLING, generating, prompt, streaming, workers_of

SIZE, SHAPE = 48, (4, 2)
DETAILS: dict[str, Any] = {"hidden": SIZE, "experts": SHAPE}


def assert_right(found: Generation, i: int, *, first: int = 0) -> None:
    """Its tokens from `first` on have the hidden states of an undisturbed run."""
    states = found.hidden_states
    assert states is not None and states.dtype == np.float32 and states.shape == (len(found.token_ids), SIZE)
    expected = expected_states(prompt(i), found.token_ids.tolist(), SIZE)
    np.testing.assert_array_equal(states[first:], expected[first:])
    assert np.isnan(states[:first]).all()


def assert_routed(found: Generation, i: int) -> None:
    experts = found.routed_experts
    assert experts is not None and experts.dtype == np.int16
    np.testing.assert_array_equal(experts, expected_experts(prompt(i), found.token_ids.tolist(), SHAPE))


def test_they_are_those_of_an_undisturbed_run_when_a_worker_and_then_the_coordinator_are_killed(
    processes: Processes, tmp_path: Path
) -> None:
    daemon = generating(processes, tmp_path, options=DETAILS)

    async def scene() -> None:
        async with streaming(daemon, 12, hidden_states=True, credit=16) as (pool, streams):
            asked: dict[str, Any] = {**SAMPLING, "hidden_states": True, "routed_experts": True}
            calls = [asyncio.ensure_future(pool.generate([prompt(i)], n=2, **asked)) for i in range(12)]
            plain = asyncio.ensure_future(pool.generate([prompt(1)], logprobs=True, **SAMPLING))
            os.kill(workers_of(daemon)[0], signal.SIGKILL)
            await streams.until(12 * SAMPLING["max_new_tokens"] // 2)
            daemon.process.send_signal(signal.SIGKILL)
            await asyncio.to_thread(daemon.process.wait, PATIENCE_S)
            await asyncio.to_thread(daemon.successor)
            for i, result in enumerate(await streams.check()):
                assert_right(result[0][0], i)
            for i, result in enumerate(await asyncio.gather(*calls)):
                for sample in result[0]:
                    assert_right(sample, i)
                    assert_routed(sample, i)
            [[one]] = await plain
            assert one.hidden_states is None and one.routed_experts is None

    asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))


def test_chunks_have_them_and_a_generation_that_is_continued_keeps_them(processes: Processes, tmp_path: Path) -> None:
    daemon = generating(processes, tmp_path, workers=1, options={**DETAILS, "forward_s": 0.0})

    async def scene() -> None:
        async with Pool.connect(daemon.address) as pool:
            stream = pool.stream(prompt(2), hidden_states=True, logprobs=True, top_logprobs=2, max_new_tokens=9)
            parts = [chunk.hidden_states async for chunk in stream]
            [[whole]] = await stream.result()
            assert_right(whole, 2)
            known = [part for part in parts if part is not None and len(part)]
            np.testing.assert_array_equal(np.concatenate(known), whole.hidden_states)
            begun = await pool.generate([prompt(3)], hidden_states=True, max_new_tokens=4)
            again = await pool.generate(
                [prompt(3)], hidden_states=True, routed_experts=True, max_new_tokens=7, continue_from=begun
            )
            assert_right(again[0][0], 3)
            assert_routed(again[0][0], 3)
            bare = await pool.generate([prompt(3)], max_new_tokens=4)
            again = await pool.generate([prompt(3)], hidden_states=True, max_new_tokens=7, continue_from=bare)
            assert_right(again[0][0], 3, first=4)

    asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))


def test_a_pool_without_them_refuses_before_the_queue(processes: Processes, tmp_path: Path) -> None:
    daemon = generating(processes, tmp_path, workers=1)

    async def scene() -> None:
        async with Pool.connect(daemon.address) as pool:
            await pool.ready(PATIENCE_S)
            with pytest.raises(BadRequest, match="enable_return_hidden_states") as refused:
                await pool.generate([prompt(1)], hidden_states=True)
            assert refused.value.field == "hidden_states"
            with pytest.raises(BadRequest, match="enable_return_routed_experts") as refused:
                await pool.generate([prompt(1)], routed_experts=True)
            assert refused.value.field == "routed_experts"

    asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))


def test_the_command_writes_them_as_arrays_in_base64(processes: Processes, tmp_path: Path) -> None:
    daemon = generating(processes, tmp_path, workers=1, options={**DETAILS, "forward_s": 0.0})
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt": prompt(1)}, {"prompt": prompt(2), "hidden_states": False}]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ["--max-new-tokens", "3", "--hidden-states", "--routed-experts"]
    assert call("generate", source, target, "--connect", daemon.address, *flags)[0] == 0
    for line in (1, 2):
        [sample] = records(target)[line]["samples"]
        found = {
            name: np.frombuffer(base64.b64decode(sample[name]["base64"]), sample[name]["dtype"]).reshape(sample[name]["shape"])
            for name in ("hidden_states", "routed_experts")
            if name in sample
        }
        ids = sample["token_ids"]
        np.testing.assert_array_equal(found["routed_experts"], expected_experts(prompt(line), ids, SHAPE))
        if line == 1:
            np.testing.assert_array_equal(found["hidden_states"], expected_states(prompt(1), ids, SIZE))
        else:
            assert "hidden_states" not in found
