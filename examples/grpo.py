"""A GRPO loop by hand, on a CPU: python examples/grpo.py [ADDRESS MODEL]

The policy learns to choose tokens with even ids. `pool.rollout` generates while the trainer computes and publishes. So groups
are by the weights of this step or of the one before (one-step off-policy), and the ratio of probabilities corrects for that.

Without arguments a tiny random model is made, and a pool of two SGLang engines is started with it; all takes half a minute on
two cores. On GPUs leave out `device` and `dtype`, and name a model of your own.
"""

# pyright: reportUnknownMemberType=false

import asyncio
import itertools
import sys
import tempfile
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import torch
import transformers

from enginepool import Generation, Pool, RolloutGroup, WeightPublisher
from enginepool.cli.tiny_model_files import make_tiny_model
from enginepool.config import GroupConfig, PoolConfig

STEPS, GROUPS, SAMPLES, TOKENS = 20, 4, 8, 12
CLIP = 0.2


async def even(prompt: list[int], sample: Generation) -> float:
    """The reward: the share of even token ids."""
    return float((sample.token_ids % 2 == 0).mean())


def loss_of(model: Any, group: RolloutGroup) -> torch.Tensor:
    """The clipped objective of GRPO, over the tokens of a group."""
    rewards = torch.from_numpy(group.rewards)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    rows = [torch.tensor([*group.prompt, *sample.token_ids.tolist()]) for sample in group.samples]
    batch = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    first = len(group.prompt) - 1
    logprobs = torch.log_softmax(model(batch).logits[:, first:-1].float(), -1)
    logprobs = logprobs.gather(2, batch[:, first + 1 :, None])[:, :, 0]
    old = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(sample.logprobs) for sample in group.samples], batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(sample.token_ids)) for sample in group.samples], batch_first=True)
    ratio = torch.exp(logprobs - old)
    gains = torch.minimum(ratio * advantages[:, None], ratio.clamp(1 - CLIP, 1 + CLIP) * advantages[:, None])
    return -(gains * mask).sum() / mask.sum()


def update(model: Any, optimizer: torch.optim.Optimizer, groups: list[RolloutGroup]) -> None:
    """One training step."""
    for group in groups:
        (loss_of(model, group) / len(groups)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


async def train(pool: Pool, path: str) -> None:
    """Take groups, learn from them, publish."""
    library: Any = transformers
    model = library.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    prompts = ([11 + i % 7, 12, 13] for i in itertools.count())
    asked: dict[str, Any] = {"group": "policy", "max_new_tokens": TOKENS, "temperature": 1.0}
    async with WeightPublisher(pool, group="policy", device="cpu") as publisher:
        version = (await publisher.publish(model, in_flight="abort")).version
        rollout = pool.rollout(prompts, SAMPLES, reward=even, max_staleness=1, max_in_flight=GROUPS, **asked)
        async with rollout:
            for step in range(STEPS):
                groups = await rollout.take(GROUPS)
                # In a thread: this loop goes on receiving samples, and rewards them.
                await asyncio.to_thread(update, model, optimizer, groups)
                reward = float(np.mean([group.rewards.mean() for group in groups]))
                age = version - min(sample.spans[0][0] for group in groups for sample in group.samples)
                print(f"step {step}: reward {reward:.3f}, by weights up to {age} versions old", flush=True)
                version = (await publisher.publish(model, in_flight="abort")).version


async def main() -> None:
    """A pool that runs elsewhere, or one of its own."""
    async with AsyncExitStack() as stack:
        if sys.argv[1:]:
            address, path = sys.argv[1:]
            pool = await stack.enter_async_context(Pool.connect(address))
        else:
            path = stack.enter_context(tempfile.TemporaryDirectory())
            make_tiny_model(path)
            policy = GroupConfig(model=path, workers=2, device="cpu", dtype="float32", operations=["generate"])
            pool = await stack.enter_async_context(Pool.start(config=PoolConfig(groups={"policy": policy})))
        await pool.ready(report=print)
        await train(pool, path)


if __name__ == "__main__":
    asyncio.run(main())
