"""Publish new weights to real engines after each step, on a CPU: python examples/new_weights.py

Makes a tiny random model, starts a pool of two SGLang engines with it, and trains it by random search to prefer one token: each
step publishes slightly changed weights, scores them, and keeps the better weights. This takes about a minute on two cores, most
of it for the start of the engines. On GPUs leave out `device` and `dtype`, and name a model of your own.
"""

import asyncio
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]

from enginepool import Pool, WeightPublisher
from enginepool.cli.tiny_model_files import make_tiny_model

PROMPT, GOOD, BAD = [11, 12, 13], 21, 22
STEPS = 20


async def main() -> None:
    """Change the weights, publish them, score, and keep the better ones."""
    with tempfile.TemporaryDirectory() as directory:
        make_tiny_model(directory)
        best = load_file(Path(directory) / "model.safetensors")
        async with Pool.start(directory, workers=2, device="cpu", dtype="float32") as pool:
            await pool.ready(report=print)
            first = share = await good_share(pool, version=0)
            async with WeightPublisher(pool, device="cpu") as publisher:
                for step in range(1, STEPS + 1):
                    tried = {name: tensor + 0.02 * torch.randn_like(tensor) for name, tensor in best.items()}
                    record = await publisher.publish(tried, version=step)
                    now = await good_share(pool, version=step)
                    still = record.phases["hold"] / 1000  # µs; its parts are "drain", "load" and "journal"
                    print(f"version {step}: {now:.3f}{' better' if now > share else ''}, the hold took {still:.0f} ms")
                    if now > share:
                        best, share = tried, now
                await publisher.publish(best, version=STEPS + 1)
            print(f"the good token was at {first:.3f}, and is at {await good_share(pool, version=STEPS + 1):.3f}")


async def good_share(pool: Pool, version: int) -> float:
    """The share of the good token in the probability of both tokens, computed by weights of this version."""
    answer = await pool.score(PROMPT[:-1], [PROMPT[-1:]], label_token_ids=[GOOD, BAD], apply_softmax=True, min_version=version)
    assert answer.version == version
    return float(answer.scores[0, 0])


if __name__ == "__main__":
    asyncio.run(main())
