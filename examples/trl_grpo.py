"""TRL's GRPOTrainer with a pool, on a CPU: python examples/trl_grpo.py [ADDRESS MODEL]

The group `policy` generates the completions, the group `judge` rewards them, and the policy gets the weights of each step. The
log-probabilities of the engines are compared with those of the trainer's model, which has the same weights.

Without arguments tiny random models are made, and a pool of three SGLang engines is started. On GPUs leave out `device`,
`dtype` and `use_cpu`, and name models of your own. Needs `pip install "enginepool[sglang,trl]"`.
"""

# pyright: reportPrivateImportUsage=false, reportUnknownMemberType=false, reportMissingTypeStubs=false

import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from enginepool import BlockingPool
from enginepool.cli.tiny_model_files import make_tiny_model
from enginepool.config import GroupConfig, PoolConfig
from enginepool.integrations.trl import PoolRollouts, PublishWeights

STEPS, PROMPTS, GENERATIONS = 20, 2, 4
QUESTIONS = ["What is the capital of France?", "Is this passage relevant?", "Who sends prompts?", "What has a version?"]


class ComparedRollouts(PoolRollouts):
    """Says how far the log-probabilities of the engines are from those of the trainer's model."""

    def __call__(self, prompts: Any, trainer: Any) -> dict[str, Any]:
        made = super().__call__(prompts, trainer)
        farthest = 0.0
        for prompt, completion, logprobs in zip(made["prompt_ids"], made["completion_ids"], made["logprobs"], strict=True):
            with torch.no_grad():
                logits = trainer.model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
            own = torch.log_softmax(logits.float(), -1).gather(1, torch.tensor(completion)[:, None])[:, 0]
            farthest = max(farthest, float((own - torch.tensor(logprobs)).abs().max()))
        print(f"step {trainer.state.global_step}: the log-probabilities differ by at most {farthest:.1e}", flush=True)
        return made


def train(pool: BlockingPool, model: str) -> None:
    """20 steps of GRPO."""

    def judged(prompts: list[str], completions: list[str], **_: Any) -> list[float | None]:
        return pool.score_pairs(prompts, [text or " " for text in completions], group="judge").scores[:, 0].tolist()

    publish = PublishWeights(pool, group="policy", device="cpu")
    library: Any = transformers
    trainer = GRPOTrainer(
        model=library.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        processing_class=library.AutoTokenizer.from_pretrained(model),
        reward_funcs=judged,
        rollout_func=ComparedRollouts(pool, group="policy"),
        callbacks=[publish],
        train_dataset=Dataset.from_dict({"prompt": QUESTIONS}),
        args=GRPOConfig(
            output_dir=tempfile.gettempdir(), save_strategy="no", report_to=[], use_cpu=True, bf16=False, disable_tqdm=True,
            max_steps=STEPS, per_device_train_batch_size=PROMPTS * GENERATIONS, num_generations=GENERATIONS,
            max_completion_length=16, learning_rate=1e-3, lr_scheduler_type="constant", logging_steps=STEPS,
        ),
    )  # fmt: skip
    trainer.train()
    committed = next(group.version for group in pool.status().groups if group.name == "policy")
    print(f"{trainer.state.global_step} steps; the pool has version {committed}, and {publish.version} was published last")


def start(folder: Path) -> BlockingPool:
    """A pool of three engines, with tiny models in this folder."""
    policy, judge = make_tiny_model(folder / "policy"), make_tiny_model(folder / "judge", "reward")
    common: dict[str, Any] = {"device": "cpu", "dtype": "float32"}
    groups = {
        "policy": GroupConfig(model=str(policy), workers=2, operations=["generate"], **common),
        "judge": GroupConfig(model=str(judge), **common),
    }
    return BlockingPool.start(config=PoolConfig(groups=groups))


if __name__ == "__main__":
    with ExitStack() as stack:
        if sys.argv[1:]:
            address, model = sys.argv[1:]
            pool = stack.enter_context(BlockingPool.connect(address))
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            pool, model = stack.enter_context(start(folder)), str(folder / "policy")
        pool.ready(report=print)
        train(pool, model)
