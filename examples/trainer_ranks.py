"""A trainer of several ranks that publishes its weights to a pool after each step: python examples/trainer_ranks.py

Two ranks train one sharded model (FSDP2) on a CPU, and publish it to a pool of simulated engines; no GPU is needed.
`train` is the part to copy: the pool is on rank 0, every rank has a publisher, and all ranks make the same calls with the
same tensors. A trainer that gathers its state dict on rank 0 by itself publishes it from rank 0 alone, with no `trainer_group`
and no publisher on the other ranks.
"""

# pyright: reportPrivateImportUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false

import socket
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.fsdp import fully_shard

from enginepool import BlockingPool, BlockingWeightPublisher

RANKS, STEPS, EXPERTS = 2, 3, 4


class Layer(torch.nn.Module):
    """Experts in one tensor, as transformers has them; checkpoints, and so engines, have them one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.Parameter(torch.randn(EXPERTS, 8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All experts, in place of a router."""
        return (self.experts @ x.T).square().mean()


def unfused(name: str, tensor: torch.Tensor) -> str | list[tuple[str, torch.Tensor]]:
    """The `rename` hook: other names, or several tensors where the trainer has one."""
    if not name.endswith("experts"):
        return name
    return [(f"{name}.{i}.weight", expert) for i, expert in enumerate(tensor)]


def train(rank: int, port: int) -> None:
    """What each rank does."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    torch.manual_seed(0)  # all ranks begin with the same weights
    model: Any = fully_shard(torch.nn.Sequential(Layer()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # The publishers' own group; nothing else uses it. Use gloo here also if the model's process group uses NCCL.
    group: Any = dist.new_group(backend="gloo")
    pool = start_pool() if rank == 0 else None
    with BlockingWeightPublisher(pool, device="cpu", rename=unfused, trainer_group=group) as publisher:
        for step in range(1, STEPS + 1):
            model(torch.randn(16, 4)).backward()
            optimizer.step()
            optimizer.zero_grad()
            record = publisher.publish(model, version=step)  # on all ranks: each gives its shards
            if pool is not None:
                answer = pool.score([1, 2], [[3], [4]], label_token_ids=[5], min_version=step)
                print(f"version {answer.version} on {record.committed} workers, {record.sent_bytes} bytes")
    if pool is not None:
        pool.close()
    dist.destroy_process_group()


def start_pool() -> BlockingPool:
    """On rank 0 alone; a pool that runs elsewhere is `BlockingPool.connect(address)`."""
    tensors = [[f"0.experts.{i}.weight", "float32", [8, 4]] for i in range(EXPERTS)]
    pool = BlockingPool.start("any-name", engine="sim", workers=2, options={"tensors": tensors})
    pool.ready()
    return pool


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    torch.multiprocessing.spawn(train, args=(port,), nprocs=RANKS)
