"""The folder of an adapter is read only under its roots, and what SGLang would serve wrongly, or die of, is refused by name."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save  # pyright: ignore[reportUnknownVariableType]

from enginepool.protocol.adapters import CONFIG_FILE, MAX_ADAPTER_CONFIG, TENSORS_FILE, adapter_digest
from enginepool.workers.adapter_files import check_limits, read_adapter
from enginepool.workers.weights.checkpoint import CheckpointError

SHAPES = {"lin.weight": (4, 6), "norm.weight": (4,)}
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["lin"], "bias": "none", "use_rslora": False}
#: with these PEFT takes from the weights of the model what it puts into the adapter
CHANGING = ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga")
A, B = "base_model.model.lin.lora_A.weight", "base_model.model.lin.lora_B.weight"


def tensors(dtype: Any = np.float32, **changed: Any) -> dict[str, Any]:
    return {A: np.ones((2, 6), dtype), B: np.ones((4, 2), dtype), **changed}


def folder(path: Path, config: object = CONFIG, data: bytes | None = None) -> Path:
    path.mkdir()
    (path / CONFIG_FILE).write_bytes(config if isinstance(config, bytes) else json.dumps(config).encode())
    (path / TENSORS_FILE).write_bytes(save(tensors()) if data is None else data)
    return path


def read(path: Path, root: Path, shapes: dict[str, tuple[int, ...]] = SHAPES) -> tuple[str, str]:
    return read_adapter(str(path), [str(root)], "adapter_roots", shapes)


def test_its_digest_is_that_of_its_two_files(tmp_path: Path) -> None:
    path = folder(tmp_path / "a")
    config, data = (path / CONFIG_FILE).read_bytes(), (path / TENSORS_FILE).read_bytes()
    assert read(path, tmp_path) == (str(path), adapter_digest(config, data))
    assert read(folder(tmp_path / "b", data=save(tensors(np.float16))), tmp_path, {})[1] != adapter_digest(config, data)
    assert adapter_digest(b"ab", b"c") != adapter_digest(b"a", b"bc")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (b"{", "not the configuration of an adapter"),
        (b"[]", "not the configuration of an adapter"),
        ({}, "KeyError: 'peft_type'"),
        ({**CONFIG, "peft_type": "IA3"}, "peft_type is 'IA3'; LORA"),
        ({**CONFIG, "r": 0}, "r is 0"),
        ({**CONFIG, "r": True}, "r is True"),
        (json.dumps(CONFIG).replace("4", "NaN").encode(), "lora_alpha is nan"),
        ({**CONFIG, "use_rslora": True}, "SGLang does not serve; lora_alpha = 5.65685 without it is the same"),
        ({**CONFIG, "use_dora": True}, "use_dora is True, which SGLang does not serve; train without it"),
        ({**CONFIG, "bias": "all"}, "bias is 'all'"),
        ({**CONFIG, "modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({**CONFIG, "rank_pattern": {"lin": 8}}, "rank_pattern"),
        ({**CONFIG, "alora_invocation_tokens": [5, 6]}, "alora_invocation_tokens"),
        ({**CONFIG, "use_qalora": True}, "use_qalora"),
        ({**CONFIG, "lora_bias": True}, "lora_bias"),
        ({**CONFIG, "trainable_token_indices": [5]}, "trainable_token_indices"),
        ({**CONFIG, "layer_replication": [[0, 4], [2, 5]]}, "layer_replication"),
        *(({**CONFIG, "init_lora_weights": how}, f"init_lora_weights is '{how}', which changes the model") for how in CHANGING),
        ({**CONFIG, "target_modules": r".*\.(q|v)_proj"}, "target_modules is .*; SGLang takes a list of names"),
        ({**CONFIG, "target_modules": None}, "target_modules is None"),
        (b" " * (MAX_ADAPTER_CONFIG + 1), "more than 65536 bytes"),
        ({**CONFIG, "r": 3}, "for r = 3"),
    ],
)
def test_a_configuration_that_would_be_served_as_another_one_is_refused(tmp_path: Path, config: Any, says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        read(folder(tmp_path / "a", config), tmp_path)


@pytest.mark.parametrize("how", [True, False, "gaussian", "orthogonal", "eva", "mica"])
def test_an_adapter_that_leaves_the_weights_of_the_model_alone_is_read(tmp_path: Path, how: object) -> None:
    others = {"alora_invocation_tokens": None, "layer_replication": None, "arrow_config": None, "use_qalora": False}
    others |= {"layers_to_transform": [0]}  # SGLang has zeros for the other layers
    path = folder(tmp_path / "a", {**CONFIG, **others, "init_lora_weights": how})
    assert read(path, tmp_path)[0] == str(path)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "not a safetensors file"),
        (save(tensors())[:-1], "truncated"),
        (save({}), "has no tensors"),
        (save(tensors(**{A: np.ones((2, 5), np.float32)})), "lora_A and lora_B are"),
        (save({A: np.ones((2, 6), np.float32)}), "lora_A and lora_B are"),
        (save(tensors(np.float64)), "F64"),
        (save(tensors(**{"base_model.model.lin.lora_embedding_A": np.ones(2, np.float32)})), "expected base_model"),
        (save(tensors(**{"base_model.model.head.lora_A.weight": np.ones((2, 6), np.float32)})), "the model has no such layer"),
        (save(tensors(**{"base_model.model.norm.lora_A.weight": np.ones((2, 6), np.float32)})), "a weight of two sides"),
        (save(tensors(**{B: np.full((4, 2), np.inf, np.float32)})), f"{B}: has NaN or infinity"),
        (save(tensors(np.float16, **{B: np.full((4, 2), np.nan, np.float16)})), "has NaN or infinity"),
    ],
)
def test_tensors_that_fit_no_layer_or_hold_no_number_are_refused(tmp_path: Path, data: bytes, says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        read(folder(tmp_path / "a", data=data), tmp_path)


@pytest.mark.parametrize(
    ("has", "layer", "needs"),
    [
        ("0.q 0.k 0.v 1.q 1.v 0.o 1.gate 0.gate 0.up", "", ""),
        ("0.v", "0.v", "q"),
        ("0.k", "0.k", "q"),
        ("0.q", "0.q", "v"),
        ("0.q 0.k", "0.q", "v"),
        ("0.k 0.v 1.q 1.k 1.v", "0.k", "q"),
        ("0.up", "0.up", "gate"),
        ("0.gate 1.up", "1.up", "gate"),
    ],
)
def test_a_module_that_sglang_stacks_without_the_one_that_it_needs_is_refused(
    tmp_path: Path, has: str, layer: str, needs: str
) -> None:
    """SGLang would load some of these, and end when a sequence first uses the adapter."""

    def named(short: str) -> str:
        return f"model.layers.{short}_proj"

    names = [named(f"{number}.{module}") for number in (0, 1) for module in ("q", "k", "v", "o", "gate", "up")]
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (4, 6) for name in names}
    data = {key.replace("lin", named(short)): one for short in has.split() for key, one in tensors().items()}
    path = folder(tmp_path / "a", data=save(data))
    for known in (shapes, {}):
        if not layer:
            assert read(path, tmp_path, known)[0] == str(path)
            continue
        with pytest.raises(CheckpointError, match=f"^{named(layer)}: SGLang serves it only together with {needs}_proj of that"):
            read(path, tmp_path, known)


def test_a_model_without_gates_has_nothing_to_stack(tmp_path: Path) -> None:
    data = {key.replace("lin", "layers.0.up_proj"): one for key, one in tensors().items()}
    path = folder(tmp_path / "a", data=save(data))
    assert read(path, tmp_path, {"layers.0.up_proj.weight": (4, 6)})[0] == str(path)


@pytest.mark.parametrize(
    ("rank", "modules", "targets", "says"),
    [
        (None, None, ["v_proj"], ""),
        (2, {"q_proj", "lin"}, ["lin", "model.layers.0.v_proj"], ""),
        (2, ["all"], ["v_proj"], ""),
        (8, {"lin", "gate_proj"}, "all-linear", ""),
        (1, {"lin"}, ["lin"], "adapter_config.json: r is 2, but max_lora_rank of the group is 1"),
        (2, {"lin", "o_proj"}, ["lin", "v_proj"], "v_proj: not among lora_target_modules of the group: lin, o_proj"),
        (2, {"q_proj"}, "all-linear", "base_model.model.lin: not among lora_target_modules of the group: q_proj"),
    ],
)
def test_an_adapter_that_an_engine_has_no_room_for_is_refused_with_the_limit(
    tmp_path: Path, rank: int | None, modules: Any, targets: Any, says: str
) -> None:
    path = folder(tmp_path / "a", {**CONFIG, "target_modules": targets})
    assert read(path, tmp_path)[0] == str(path), "the model has such layers"
    if says:
        with pytest.raises(CheckpointError, match=f"^{says}$"):
            check_limits(str(path), rank, modules)
    else:
        check_limits(str(path), rank, modules)


def test_the_numbers_of_bfloat16_are_looked_at_too(tmp_path: Path) -> None:
    data = save(tensors(np.float16))
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    for entry in header.values():
        entry["dtype"] = "BF16"
    text = json.dumps(header).encode()
    for bits, fits in ((0x3F80, True), (0x7F80, False), (0xFFC0, False)):
        whole = b"".join((len(text).to_bytes(8, "little"), text, np.full(20, bits, np.uint16).tobytes()))
        path = folder(tmp_path / f"{bits}", data=whole)
        if fits:
            assert read(path, tmp_path)[0] == str(path)
        else:
            with pytest.raises(CheckpointError, match="has NaN or infinity"):
                read(path, tmp_path)


def test_nothing_is_opened_outside_the_roots_and_no_file_that_could_hold_a_program(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    outside = folder(tmp_path / "outside")
    (root / "link").symlink_to(outside)
    inside = folder(root / "inside")
    (inside / TENSORS_FILE).unlink()
    (inside / TENSORS_FILE).symlink_to(outside / TENSORS_FILE)
    for path in (outside, root / "link", inside):
        with pytest.raises(CheckpointError, match="not under adapter_roots"):
            read(path, root)
    for name in ("adapter_model.bin", "more.safetensors", "x.pt"):
        path = folder(root / name)
        (path / name).touch()
        with pytest.raises(CheckpointError, match=r"expected adapter_model\.safetensors and no others"):
            read(path, root)
    with pytest.raises(CheckpointError, match="there is no such directory here"):
        read(root / "none", root)
    os.remove(folder(root / "bare") / CONFIG_FILE)
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        read(root / "bare", root)
