"""`enginepool.integrations.trl`: what TRL's prompts become, and under which names the weights of adapted models travel.

`test_trainers.py` trains with it.
"""

import copy
import importlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from enginepool import BlockingPool, errors
from enginepool.protocol.messages import Cancel, ErrorReply, FromClient, Generate
from enginepool.trainer.tensors import make_plan
from tests.engine.families import torch, transformers
from tests.engine.reference import Models
from tests.lazy import LazyModule
from tests.process.daemons import PATIENCE_S, sim_pool
from tests.process.forking import ForkedDaemon
from tests.process.processes import Processes
from tests.process.scenes import OPTIONS
from tests.wire.generating_coordinator import GeneratingCoordinator

trl: Any = LazyModule("enginepool.integrations.trl")

pytestmark = pytest.mark.engine
ARGS: dict[str, Any] = {
    "max_completion_length": 3, "temperature": 0.9, "top_p": 0.8, "top_k": 0, "min_p": None, "repetition_penalty": 1.0,
    "generation_kwargs": {"min_new_tokens": 2},
}  # fmt: skip


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[GeneratingCoordinator]:
    with (fake := GeneratingCoordinator(f"ipc://{tmp_path}/c.sock")):
        yield fake


def test_equal_prompts_in_a_row_become_one_request_with_the_parameters_of_the_trainer(
    coordinator: GeneratingCoordinator, models: Models
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(models.causal)
    args = SimpleNamespace(**ARGS)
    trainer = SimpleNamespace(
        processing_class=tokenizer, args=args, tools=[], chat_template=None, chat_template_kwargs={"enable_thinking": False}
    )
    chat = [{"role": "user", "content": "Who?"}]
    with BlockingPool.connect(coordinator.address) as pool:
        made = trl.PoolRollouts(pool, group="policy", temperature=0.5)(["Paris", "Paris", chat, chat, chat, "Paris"], trainer)
    ids = tokenizer("Paris")["input_ids"]
    rendered = tokenizer(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))["input_ids"]
    assert made["prompt_ids"] == [ids, ids, rendered, rendered, rendered, ids]
    assert made["completion_ids"] == [[100 * s + at for at in range(3)] for s in (0, 1, 0, 1, 2, 0)]
    assert made["logprobs"] == [[-float(one) for one in row] for row in made["completion_ids"]]
    assert [(request.n, request.group, request.logprobs) for request in coordinator.asked] == [
        (n, "policy", True) for n in (2, 3, 1)
    ]
    sampling = coordinator.asked[0].sampling
    assert (sampling.max_new_tokens, sampling.temperature, sampling.top_p, sampling.min_new_tokens) == (3, 0.5, 0.8, 2)
    assert (sampling.top_k, sampling.repetition_penalty) == (-1, 1.0)


def test_a_prompt_that_is_refused_ends_the_requests_of_the_others(coordinator: GeneratingCoordinator) -> None:
    def refuse_the_last(link: bytes, message: FromClient, frames: list[bytes]) -> None:
        if isinstance(message, Generate) and frames[0] == b"\x09\0\0\0":
            coordinator.write(link, ErrorReply("bad_request", "items[0]: refused", message.id, field="items[0]"))

    def tokenize(text: str) -> dict[str, list[int]]:
        return {"input_ids": [int(text)]}

    coordinator.others = refuse_the_last
    trainer = SimpleNamespace(processing_class=tokenize, args=SimpleNamespace(**ARGS))
    with BlockingPool.connect(coordinator.address) as pool:
        with pytest.raises(errors.BadRequest):
            trl.PoolRollouts(pool)(["1", "2", "9"], trainer)
        pool.status()  # what was sent before was heard
    assert sum(isinstance(message, Cancel) for message in list(coordinator.heard.queue)) == 2


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight", None),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector.default.weight", None),
        ("base_model.model.model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("base_model.model.lm_head.modules_to_save.default.weight", "lm_head.weight"),
        ("base_model.model.lm_head.original_module.weight", None),
    ],
)
def test_a_tensor_of_an_adapted_model_has_its_name_in_the_checkpoint(name: str, expected: str | None) -> None:
    assert trl.checkpoint_name(name) == expected


class Sent:
    """In place of a publisher: what it would send."""

    def __init__(self, pool: Any, *, rename: Any, **options: Any) -> None:
        self.rename, self.options = rename, options
        self.tensors: dict[str, Any] = {}
        self.closed = False

    def publish(self, model: Any, **options: Any) -> Any:
        self.options.update(options)
        if self.options.get("fails"):
            raise RuntimeError("it fails")
        self.tensors = {name: tensor.clone() for name, tensor in make_plan(model, rename=self.rename).tensors()}
        return SimpleNamespace(version=7)

    def close(self) -> None:
        self.closed = True


Module: Any = torch.nn.Module


class Adapted(Module):
    """What PEFT makes of a model, as far as it is looked at."""

    def __init__(self) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        parts: Any = {"lora_A": torch.nn.Linear(2, 2), "base_layer": torch.nn.Linear(2, 2, bias=False)}
        inner: Any = torch.nn.ModuleDict({"proj": torch.nn.ModuleDict(parts), "norm": torch.nn.LayerNorm(2)})
        self.base_model: Any = torch.nn.ModuleDict({"model": inner})
        self.merged = False

    def merge_adapter(self) -> None:
        self.merged = True
        self.base_model["model"]["proj"]["base_layer"].weight.data += 1

    def unmerge_adapter(self) -> None:
        self.merged = False
        self.base_model["model"]["proj"]["base_layer"].weight.data -= 1


def test_adapters_are_merged_while_the_weights_are_sent_also_if_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("enginepool.integrations.trl.BlockingWeightPublisher", Sent)
    model = Adapted()
    before = model.base_model["model"]["proj"]["base_layer"].weight.detach().clone()

    def rename(name: str, tensor: Any) -> str | None:
        return None if name == "norm.bias" else name

    callback = trl.PublishWeights(None, group="policy", rename=rename, retry_timeout=5.0)
    callback.on_train_begin(None, None, None, model=model)
    sent: Any = callback._publisher  # pyright: ignore[reportPrivateUsage]
    assert sorted(sent.tensors) == ["norm.weight", "proj.weight"] and callback.version == 7
    torch.testing.assert_close(sent.tensors["proj.weight"], before + 1)
    assert sent.options == {"group": "policy", "retry_timeout": 5.0, "transfer": "staged", "in_flight": "abort"}
    assert not model.merged
    sent.options["fails"] = True
    with pytest.raises(RuntimeError, match="it fails"):
        callback.on_step_end(None, None, None, model=model)
    assert not model.merged
    callback.on_train_end(None, None, None)
    assert sent.closed


def test_an_update_that_is_aborted_by_the_death_of_a_worker_is_tried_again(processes: Processes, tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 2)
    options = {"tensors": [["weight", "float32", [2, 4]], ["bias", "float32", [2]]]}
    daemon = ForkedDaemon(processes, sim_pool(tmp_path, workers=1, options=options)).listening()
    victims: list[int] = []

    def rename(name: str, tensor: Any) -> str:
        while victims and not tensor.is_meta:  # the bytes are on their way
            os.kill(victims.pop(), signal.SIGKILL)
        return name

    with BlockingPool.connect(daemon.address) as pool:
        pool.ready(PATIENCE_S)
        publishing: Any = {**OPTIONS, "retry_timeout": PATIENCE_S, "rename": rename}
        callback = trl.PublishWeights(pool, **publishing)
        callback.on_train_begin(None, None, None, model=model)
        victims += [worker.pid for worker in pool.status().groups[0].workers]
        callback.on_step_end(None, None, None, model=model)
        outcomes = [record.outcome for record in pool.weights().history]
        assert (callback.version, pool.status().groups[0].version) == (2, 2) and "update_aborted" in outcomes
        callback.close()


def test_a_model_of_peft_is_published_as_its_merged_checkpoint(monkeypatch: pytest.MonkeyPatch, models: Models) -> None:
    peft: Any = importlib.import_module("peft")
    monkeypatch.setattr("enginepool.integrations.trl.BlockingWeightPublisher", Sent)
    plain = transformers.AutoModelForCausalLM.from_pretrained(models.causal, dtype=torch.float32)
    names = set(plain.state_dict())
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"], init_lora_weights=False)
    model = peft.get_peft_model(plain, config)
    torch.nn.init.normal_(model.base_model.model.lm_head.modules_to_save["default"].weight)
    callback = trl.PublishWeights(None)
    callback.publish(model)
    sent: Any = callback._publisher  # pyright: ignore[reportPrivateUsage]
    merged = copy.deepcopy(model).merge_and_unload().state_dict()
    assert set(sent.tensors) == names == set(merged)
    for name, tensor in sent.tensors.items():
        torch.testing.assert_close(tensor, merged[name])
