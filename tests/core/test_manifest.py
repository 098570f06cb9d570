"""What does not fit a model is named in one line, with a way out where the publisher has one."""

import pytest

from enginepool.protocol.manifest import Tensor, difference

DENSE = ["model.embed_tokens.weight", "model.layers.0.mlp.gate_proj.weight", "model.norm.weight"]
EXPERTS = [f"model.layers.{layer}.mlp.experts.{i}.{name}.weight" for layer in (0, 1) for i in (0, 1) for name in ("up", "down")]
PREFIX = " (a wrapper's prefix: the publisher's `rename` takes it off)"
FUSED = " (fused experts: the publisher's `rename` takes them apart)"
PEFT = (
    " (a PEFT model: call merge_adapter() before, and let the publisher's `rename` give None for lora_ names and take "
    "base_model.model. and .base_layer off the others)"
)


def tensors(*names: str) -> list[Tensor]:
    return [Tensor(name, "float32", (2,)) for name in names]


MODEL = tensors(*DENSE, *EXPERTS, "0.experts.0.weight")
OPTIONAL = frozenset({"lm_head.weight"})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("module.model.norm.weight", PREFIX),
        ("module.module.model.norm.weight", PREFIX),
        ("_orig_mod.model.norm.weight", PREFIX),
        ("model._fsdp_wrapped_module.norm.weight", PREFIX),
        ("module._orig_mod.model.layers.0._checkpoint_wrapped_module.mlp.gate_proj.weight", PREFIX),
        ("_orig_mod.lm_head.weight", PREFIX),
        ("model.layers.0.mlp.experts.gate_up_proj", FUSED),
        ("module.model.layers.1.mlp.experts.down_proj", FUSED),
        ("0.experts", FUSED),
        ("base_model.model.model.layers.0.mlp.gate_proj.base_layer.weight", PEFT),
        ("model.layers.0.mlp.gate_proj.lora_A.default.weight", PEFT),
        ("base_model.model.model.norm.weight", PEFT),
        ("module.base_model.model.lm_head.weight", PEFT),
        # What `rename` would make of these is unknown.
        ("module.other.weight", ""),
        ("_orig_mod.other", ""),
        ("policy.model.norm.weight", ""),
        ("model.layers.2.mlp.experts.gate_up_proj", ""),
        ("model.layers.0.mlp.shared_experts.gate_up_proj", ""),
        ("model.layers.0.mlp.experts.2.up.weight", ""),
        ("model.experts_bias", ""),
    ],
)
def test_an_unknown_name_that_a_publisher_could_rename_is_told_so(name: str, hint: str) -> None:
    offered = [*MODEL[1:], *tensors(name)]
    assert difference(offered, MODEL, OPTIONAL) == (name, f"unknown names: {name}{hint}")
    assert difference(offered, MODEL, OPTIONAL, hints=False) == (name, f"unknown names: {name}")


def test_one_of_the_names_that_are_shown_is_enough() -> None:
    names = ["a", "b", "module.model.norm.weight", "c"]
    assert difference(tensors(*names), MODEL) == ("a", f"unknown names: a, b, module.model.norm.weight and 1 more{PREFIX}")
    names = ["a", "b", "c", "module.model.norm.weight"]
    assert difference(tensors(*names), MODEL) == ("a", "unknown names: a, b, c and 1 more")


def test_names_that_are_missing_may_be_so_where_a_publisher_says_it() -> None:
    told = f"missing names: {DENSE[0]}, {DENSE[1]}"
    assert difference(MODEL[2:], MODEL) == (DENSE[0], f"{told} (partial = true allows it)")
    assert difference(MODEL[2:], MODEL, hints=False) == (DENSE[0], told)
    assert difference(MODEL[2:], MODEL, partial=True) is None
    assert difference(MODEL, MODEL, OPTIONAL) is None
