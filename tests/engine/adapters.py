"""Small random LoRA adapters for the tiny model, as PEFT writes them, and the checkpoint that one merged by hand gives."""

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

safetensors: Any = importlib.import_module("safetensors.numpy")
torch: Any = importlib.import_module("torch")

#: layers of a model that adapters change
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

Tensors = dict[str, npt.NDArray[np.float32]]


def make_adapter(model: Path, folder: Path, *, seed: int, rank: int, alpha: float, targets: tuple[str, ...] = TARGETS) -> Path:
    """An adapter of all layers of the checkpoint `model` whose names end with `targets`, drawn from `seed`, in `folder`."""
    random = np.random.default_rng(seed)
    found: Tensors = {}
    for name, weight in safetensors.load_file(model / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if layer.endswith(targets):
            rows, columns = weight.shape
            for part, shape in (("A", (rank, columns)), ("B", (rows, rank))):
                drawn = random.standard_normal(shape, np.float32) * np.float32(shape[1] ** -0.5)
                found[f"base_model.model.{layer}.lora_{part}.weight"] = drawn
    folder.mkdir()
    safetensors.save_file(found, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config: dict[str, Any] = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha, "lora_dropout": 0.0, "bias": "none",
        "target_modules": list(targets), "base_model_name_or_path": str(model),
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def merged(weights: Tensors, adapter: Path) -> Tensors:
    """The tensors of a model with an adapter: W + alpha / rank · B · A."""
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    parts = safetensors.load_file(adapter / "adapter_model.safetensors")
    scale = np.float32(config["lora_alpha"] / config["r"])
    out = dict(weights)
    for name in weights:
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{layer}.lora_A.weight" in parts:
            out[name] = weights[name] + scale * (parts[f"{layer}.lora_B.weight"] @ parts[f"{layer}.lora_A.weight"])
    return out


def with_adapter(weights: dict[str, Any], adapter: Path | None) -> dict[str, Any]:
    """The tensors of torch that the model has with this adapter."""
    if adapter is None:
        return weights
    whole = merged({name: tensor.numpy() for name, tensor in weights.items()}, adapter)
    return {name: torch.from_numpy(array) for name, array in whole.items()}
