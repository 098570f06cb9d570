"""TRL: `GRPOTrainer` generates with a pool, and the pool gets the weights of each step. Needs `pip install "enginepool[trl]"`.

    trainer = GRPOTrainer(..., rollout_func=PoolRollouts(pool), callbacks=[PublishWeights(pool)])

A `BlockingPool` serves both. On trainer ranks above 0 `PublishWeights` gets None, and `PoolRollouts` a connection of its own.
"""

import re
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

from transformers import TrainerCallback

from enginepool.integrations.repeated_prompts import generate_runs
from enginepool.trainer.blocking_publisher import BlockingWeightPublisher

if TYPE_CHECKING:
    from enginepool.client.blocking import BlockingPool

#: what PEFT has put into the names of a model
_ADAPTED = re.compile(r"^base_model\.model\.|\.base_layer(?=\.)|\.modules_to_save\.[^.]+(?=\.)")
#: tensors that the checkpoint does not have: of adapters, and those that a trained copy stands in for
_OF_ADAPTERS = re.compile(r"\.lora_|\.original_module\.")


def checkpoint_name(name: str) -> str | None:
    """What the checkpoint calls a tensor of a PEFT model whose adapters are merged; None: it has no such tensor."""
    return None if _OF_ADAPTERS.search(name) else _ADAPTED.sub("", name)


class PublishWeights(TrainerCallback):
    """Publishes the weights of the model to a pool when training begins, and after each optimizer step.

    An update that is aborted, because a worker, a link or the coordinator was lost, is tried again for `retry_timeout` seconds
    (300), while the trainer waits. Adapters of PEFT are merged while the weights are sent, and travel under the names of the
    checkpoint.

    Args:
        pool: None on trainer ranks above 0, which need the option `trainer_group`.
        transfer: as of `WeightPublisher.start`.
        options: of `WeightPublisher`: group, device, dtype, trainer_group, rename, retry_timeout and others.

    Attributes:
        version: of the weights that were published last.
    """

    def __init__(
        self, pool: "BlockingPool | None", *, transfer: Literal["staged", "direct", "ipc"] = "staged", **options: Any
    ) -> None:
        self.version = 0
        self._pool = pool
        self._transfer: Literal["staged", "direct", "ipc"] = transfer
        self._rename = options.pop("rename", None)
        self._options = options
        self._publisher: BlockingWeightPublisher | None = None
        #: the model that is sent has adapters of PEFT
        self._adapted = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The engines may have other weights: those of another run, or of a checkpoint before the one that is resumed."""
        self.publish(kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The optimizer has changed the weights."""
        self.publish(kwargs["model"])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Nothing more is published."""
        self.close()

    def publish(self, model: Any) -> None:
        """Publish the weights of a model, as the version after the committed one.

        Raises:
            EnginepoolError: as `WeightPublisher.publish`.
        """
        if self._publisher is None:
            self._publisher = BlockingWeightPublisher(self._pool, rename=self._renamed, **self._options)
        self._adapted = hasattr(model, "merge_adapter")
        if self._adapted:
            model.merge_adapter()
        try:
            self.version = self._publisher.publish(model, transfer=self._transfer, in_flight="abort").version
        finally:
            if self._adapted:
                model.unmerge_adapter()

    def close(self) -> None:
        """End the publisher. Idempotent; `publish` makes another one."""
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.close()

    def _renamed(self, name: str, tensor: Any) -> Any:
        own = checkpoint_name(name) if self._adapted else name
        return own if own is None or self._rename is None else self._rename(own, tensor)


class PoolRollouts:
    """A `rollout_func`: a pool completes the prompts of a step, with the sampling parameters of the trainer.

    TRL repeats each prompt for each of its completions. Equal prompts in a row become one request for several samples.

    Args:
        options: of `Pool.generate`, such as group, priority or timeout; they go before those of the trainer.
    """

    def __init__(self, pool: "BlockingPool", **options: Any) -> None:
        self._pool, self._options = pool, options

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """prompt_ids, completion_ids and logprobs: of each prompt a list. The first error ends the other requests."""
        options: Any = {**_sampling(trainer.args), **self._options, "logprobs": True}
        runs = [(_prompt_ids(prompt, trainer), len([*equal])) for prompt, equal in groupby(prompts)]
        answers = self._pool.call(generate_runs(self._pool.pool, runs, options))
        samples = [sample for answer in answers for sample in answer[0]]
        return {
            "prompt_ids": [ids for ids, count in runs for _ in range(count)],
            "completion_ids": [sample.token_ids.tolist() for sample in samples],
            "logprobs": [[] if sample.logprobs is None else sample.logprobs.tolist() for sample in samples],
        }


def _prompt_ids(prompt: Any, trainer: Any) -> list[int]:
    """The token ids of a text, or of the messages of a chat, as the trainer would make them."""
    tokenizer = trainer.processing_class
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    named = {"tools": trainer.tools or None, "chat_template": trainer.chat_template, **trainer.chat_template_kwargs}
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=True, **named)[
        "input_ids"
    ]


def _sampling(args: Any) -> dict[str, Any]:
    """The sampling parameters of a `GRPOConfig`, by the pool's names, without those that change nothing."""
    given: dict[str, Any] = {
        "max_new_tokens": args.max_completion_length,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k or None,
        "min_p": args.min_p,
        "repetition_penalty": None if args.repetition_penalty == 1.0 else args.repetition_penalty,
        **(args.generation_kwargs or {}),
    }
    return {name: value for name, value in given.items() if value is not None}
