"""Adapters that a pool loads into a real engine while it generates, and again when its worker is killed."""

import asyncio
import importlib
import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from enginepool import Generation, Generations, Pool
from enginepool.config import GroupConfig, PoolConfig, Timing
from enginepool.errors import WeightsRefused
from tests.engine.adapters import TARGETS, make_adapter, with_adapter
from tests.engine.forked import ForkedDaemon
from tests.engine.reference import Models, Reference
from tests.process.processes import Processes
from tests.process.waiting import check_running

safetensors: Any = importlib.import_module("safetensors.torch")

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

START_S = 300.0
PROMPTS = [[11, 12], [21, 22, 23]]
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "logprobs": True}
#: a tensor of every adapter
NARROW = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def assert_greedy(reference: Reference, prompt: Sequence[int], found: Generation, version: int) -> None:
    below, logprobs = reference.following(prompt, found.token_ids.tolist())
    assert below.max() < 1e-4
    assert found.logprobs is not None
    np.testing.assert_allclose(found.logprobs, logprobs, rtol=1e-4, atol=1e-5)
    assert found.adapters == ((version, len(found.token_ids)),)


async def killed(pool: Pool) -> None:
    """Kill the worker, and wait until the next one is ready."""
    [before] = (await pool.status()).groups[0].workers
    psutil.Process(before.pid).send_signal(signal.SIGKILL)
    while (worker := (await pool.status()).groups[0].workers[0]).stage != "ready" or worker.pid == before.pid:
        await asyncio.sleep(0.1)


def test_adapters_are_loaded_replaced_while_they_generate_and_loaded_again_by_the_next_worker(
    models: Models, reference: Reference, tmp_path: Path
) -> None:
    """The engine is started without any: with room for those that come later."""
    first, second = (make_adapter(models.causal, tmp_path / str(seed), seed=seed, rank=4 * seed, alpha=6.0) for seed in (1, 2))
    wide = make_adapter(models.causal, tmp_path / "wide", seed=3, rank=16, alpha=6.0)
    tensors, config = safetensors.load_file(second / "adapter_model.safetensors"), (second / "adapter_config.json").read_text()
    options = {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": list(TARGETS), "max_loras_per_batch": 3}

    async def scenario(address: str) -> list[Generations]:
        async with Pool.connect(address) as pool, asyncio.timeout(2 * START_S):
            await pool.ready(START_S)
            await pool.load_adapter("f", first)
            old = asyncio.ensure_future(pool.generate(PROMPTS, adapter="f", max_new_tokens=200, **GREEDY))
            while not (await pool.status()).groups[0].running:
                check_running([old])
                await asyncio.sleep(0.01)
            await pool.load_adapter("f", tensors=tensors, config=json.loads(config))
            new = await pool.generate(PROMPTS, adapter="f", max_new_tokens=40, **GREEDY)
            with pytest.raises(WeightsRefused, match="lora_A and lora_B are"):
                await pool.load_adapter("g", tensors={**tensors, NARROW: tensors[NARROW][:, 1:]}, config=json.loads(config))
            without = {name: tensor for name, tensor in tensors.items() if "q_proj" not in name}
            with pytest.raises(WeightsRefused, match="k_proj: SGLang serves it only together with q_proj of that layer"):
                await pool.load_adapter("g", tensors=without, config=json.loads(config))
            with pytest.raises(WeightsRefused, match="r is 16, but max_lora_rank of the group is 8"):
                await pool.load_adapter("g", wide)
            outside = {**json.loads(config), "target_modules": [*TARGETS, "lm_head"]}
            with pytest.raises(WeightsRefused, match="lm_head: not among lora_target_modules of the group: down_proj, "):
                await pool.load_adapter("g", tensors=tensors, config=outside)
            found = [await old, new]
            await killed(pool)
            return [*found, await pool.generate(PROMPTS, adapter="f", max_new_tokens=40, **GREEDY)]

    with Processes() as processes, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        group = GroupConfig(
            model=str(models.causal), device="cpu", operations=["generate"], options=options, adapter_roots=[str(tmp_path)]
        )
        pool = PoolConfig(
            groups={"policy": group},
            listen=f"ipc://{tmp_path}/pool.sock",
            state_dir=str(tmp_path / "state"),
            timing=Timing(silence_s=60.0),
        )
        results = asyncio.run(scenario(ForkedDaemon(processes, pool).listening().address))

    own = safetensors.load_file(models.causal / "model.safetensors")
    for path, version, result in zip((first, second, second), (1, 2, 2), results, strict=True):
        with reference.holding(with_adapter(own, path)):
            for prompt, [sample] in zip(PROMPTS, result, strict=True):
                assert_greedy(reference, prompt, sample, version)
