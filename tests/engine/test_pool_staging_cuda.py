"""Memory for staged updates by need, on a GPU: the first update takes what is free; workers that start later reserve it."""

import asyncio
import importlib
from pathlib import Path
from typing import Any

import pytest

from enginepool import Pool, WeightPublisher
from enginepool.config import Device, GroupConfig, PoolConfig, Timing
from enginepool.protocol.messages import WorkerStatus
from tests.engine.reference import Models
from tests.engine.test_pool_weights import LABELS, START_S, drawn, kept_room
from tests.process.daemons import Daemon
from tests.process.processes import Processes

torch: Any = importlib.import_module("torch")
safetensors: Any = importlib.import_module("safetensors.torch")

#: in a half of the GPU, so that the update finds the rest free
OPTIONS = {"attention_backend": "triton", "sampling_backend": "pytorch", "mem_fraction_static": 0.4, "max_total_tokens": 32_768}


def reserves_by_need(models: Models, folder: Path, device: Device, dtype: Any, options: dict[str, Any]) -> None:
    """Update a pool of one worker, restart the worker, and update it again. On a CPU it tells the same."""
    own = safetensors.load_file(str(models.causal / "model.safetensors"))
    group = GroupConfig(model=str(models.causal), device=device, dtype=dtype, options=options)
    config = PoolConfig(
        groups={"g": group},
        listen=f"ipc://{folder}/pool.sock",
        state_dir=str(folder / "state"),
        timing=Timing(silence_s=60.0),
    )

    def weights(version: int) -> dict[str, Any]:
        return {name: one.to(getattr(torch, dtype)) for name, one in drawn(own, version).items()}

    async def scenario(daemon: Daemon) -> None:
        async with Pool.connect(daemon.address) as pool, WeightPublisher(pool, device="cpu") as publisher:

            async def published(version: int) -> WorkerStatus:
                record = await publisher.publish(weights(version), version)
                assert (record.outcome, record.committed, record.message) == ("committed", 1, "")
                answer = await pool.score([1, 2], [[3], [4]], label_token_ids=LABELS)
                assert answer.version == version
                [worker] = (await pool.status()).groups[0].workers
                return worker

            await pool.ready(START_S)
            assert not kept_room(daemon, await published(1)), "it started before the first update"
            await pool.restart()
            assert kept_room(daemon, await published(2))

    with Processes() as processes:
        asyncio.run(scenario(Daemon(processes, config).listening()))


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: torch finds none")
def test_memory_for_updates_is_reserved_from_the_first_one_on(models: Models, tmp_path: Path) -> None:
    reserves_by_need(models, tmp_path, "cuda", "bfloat16", OPTIONS)
