"""TRL's callback `PublishWeights` on a trainer of two ranks with a sharded model: each step is one update, of all shards."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

from enginepool import Pool
from tests.process.daemons import PATIENCE_S, sim_pool
from tests.process.forking import ForkedDaemon, ForkedProcess
from tests.process.processes import Processes

RANKS, STEPS = 2, 3
#: both ranks: one is forked from the other, once all is imported
TRAINER = """
import json, os, sys
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from enginepool import BlockingPool
from enginepool.integrations.trl import PublishWeights

address, meeting = sys.argv[1:]
rank = int(os.fork() == 0)
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
torch.manual_seed(0)
model = fully_shard(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
pool = BlockingPool.connect(address) if rank == 0 else None
callback = PublishWeights(pool, device="cpu", trainer_group=dist.new_group(backend="gloo"))
callback.on_train_begin(None, None, None, model=model)
for _ in range(3):
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    callback.on_step_end(None, None, None, model=model)
callback.on_train_end(None, None, None)
weight = model.weight.full_tensor().tolist()
print(json.dumps([callback.version, weight]) + "\\n", end="", flush=True)
if pool is not None:
    pool.close()
dist.destroy_process_group()
"""


def test_each_step_of_two_ranks_is_one_update_with_the_shards_of_both(processes: Processes, tmp_path: Path) -> None:
    tensors = [["weight", "float32", [2, 4]], ["bias", "float32", [2]]]
    daemon = ForkedDaemon(processes, sim_pool(tmp_path, options={"tensors": tensors})).listening()
    command = [sys.executable, "-c", TRAINER, daemon.address, str(tmp_path / "meeting")]
    trainer = processes.keep(ForkedProcess(command, stdout=subprocess.PIPE, text=True))
    said = [json.loads(trainer.stdout.readline()) for _ in range(RANKS)]
    assert said[0] == said[1] and said[0][0] == 1 + STEPS

    async def look() -> None:
        async with Pool.connect(daemon.address) as pool, asyncio.timeout(PATIENCE_S):
            history = (await pool.weights()).history
            assert [(one.version, one.outcome) for one in history] == [(i, "committed") for i in range(1, 2 + STEPS)]
            assert (await pool.weight("weight")).tolist() == said[0][1]

    asyncio.run(look())
