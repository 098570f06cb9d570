"""A model that is quantized when it is loaded takes new weights as a checkpoint, by a restart of its workers."""

import asyncio
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginepool import Pool, WeightPublisher, errors
from enginepool.cli.tiny_model_files import make_tiny_model
from enginepool.config import GroupConfig, PoolConfig

torch: Any = importlib.import_module("torch")

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
ROWS = [[(7 * row + 3 * at) % 512 for at in range(3 + 5 * row)] for row in range(8)]
LABELS = [5, 6, 7]
START_S = 400.0


def test_a_checkpoint_restarts_a_quantized_engine_and_the_old_one_brings_the_old_scores_back(tmp_path: Path) -> None:
    old, new = make_tiny_model(tmp_path / "old", seed=1), make_tiny_model(tmp_path / "new", seed=2)
    options: dict[str, Any] = {
        "quantization": "fp8", "attention_backend": "triton", "sampling_backend": "pytorch", "mem_fraction_static": 0.2,
    }  # fmt: skip
    group = GroupConfig(
        model=str(old), device="cuda", dtype="bfloat16", max_batch_tokens=1024, max_batch_rows=32, options=options,
        checkpoint_roots=[str(tmp_path)],
    )  # fmt: skip

    async def scores(pool: Pool, version: int) -> Any:
        answer = await pool.score([], ROWS, label_token_ids=LABELS, logprobs=True, timeout=START_S)
        assert answer.version == version
        return answer.scores

    async def run() -> None:
        async with Pool.start(config=PoolConfig(groups={"g": group}), start_timeout=START_S) as pool:
            await pool.ready(timeout=START_S)
            before = await scores(pool, 0)
            async with WeightPublisher(pool, device="cpu") as publisher:
                with pytest.raises(errors.Unsupported, match="checkpoint"):
                    await publisher.publish({"lm_head.weight": torch.zeros(512, 64)}, version=1)
            assert (await pool.publish_checkpoint(new, 1, timeout=START_S)).outcome == "committed"
            changed = await scores(pool, 1)
            assert np.abs(changed - before).max() > 1.0
            assert (await pool.publish_checkpoint(old, 2, timeout=START_S)).outcome == "committed"
            np.testing.assert_array_equal(await scores(pool, 2), before)

    asyncio.run(run())
