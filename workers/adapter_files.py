"""The folder of a LoRA adapter, as PEFT writes it: checked before an engine sees it, without any library of tensors.

SGLang finds out that a tensor has another shape than its layer when a sequence first uses the adapter, and dies of it. What it
would take and compute wrongly is refused by name as well. No file is opened that could hold a program.
"""

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from enginepool.protocol.adapters import CONFIG_FILE, MAX_ADAPTER_CONFIG, TENSORS_FILE, adapter_digest
from enginepool.workers.weights.checkpoint import CheckpointError, checkpoint_under, safetensors_entries

_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
#: what of an adapter's configuration SGLang does not look at: the values that mean nothing
_UNREAD: dict[str, tuple[Any, ...]] = {
    "use_rslora": (None, False),
    "use_dora": (None, False),
    "fan_in_fan_out": (None, False),
    "bias": (None, "none"),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "modules_to_save": (None, []),
    "layer_replication": (None, []),
    "lora_bias": (None, False),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "use_bdlora": (None, False),
    "use_qalora": (None, False),
}
#: how an adapter may have begun: with others, such as PiSSA and LoftQ, PEFT changes the weights of the model below it
_INITIALIZED = (None, True, False, "gaussian", "orthogonal", "eva", "mica")
#: what a module needs of its layer: SGLang stacks q, k and v, and gate and up, and fills in zeros for k, up and w3 alone
_STACKED_WITH = {"q_proj": "v_proj", "k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj", "w3": "w1"}
#: modules that SGLang has under another name
_STACKED_IN = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), "gate_up_proj"),
    **dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa"), "fused_qkv_a_proj_with_mqa"),
    "w2": "down_proj",
}


def read_adapter(path: str, roots: Sequence[str], setting: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, str]:
    """(folder, digest) of the adapter in `path`, which lies under one of `roots`, the value of `setting`.

    Args:
        shapes: of the model's weights, by the names of its checkpoint; empty: they are not known.

    Raises:
        CheckpointError: it lies elsewhere, cannot be read, or does not fit the model.
    """
    folder = Path(checkpoint_under(path, roots, setting))
    try:
        names = sorted(file.name for file in folder.iterdir() if file.suffix in (".safetensors", ".bin", ".pt", ".pth"))
        if names != [TENSORS_FILE]:
            raise CheckpointError(f"{path}: has {', '.join(names) or 'no tensors'}; expected {TENSORS_FILE} and no others")
        with (folder / CONFIG_FILE).open("rb") as opened:
            config = opened.read(MAX_ADAPTER_CONFIG + 1)
        tensors = np.fromfile(folder / TENSORS_FILE, np.uint8)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{path}: cannot be read: {why}") from None
    entries, begin = safetensors_entries(folder / TENSORS_FILE)
    try:
        _check_shapes(dict(entries), _check_config(config), shapes)
        for name, entry in entries:
            first, end = entry["data_offsets"]
            _check_numbers(name, tensors[begin + first : begin + end].view(_DTYPES[entry["dtype"]]), entry["dtype"])
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: not an adapter ({type(error).__name__}: {error})") from None
    return str(folder), adapter_digest(config, tensors.data)


def check_limits(path: str, rank: int | None, modules: Collection[str] | None) -> None:
    """Raise CheckpointError for the adapter in `path`, which was read, if it needs more than an engine has room for.

    Args:
        rank, modules: the engine's max_lora_rank and lora_target_modules; None: not known.
    """
    config = json.loads((Path(path) / CONFIG_FILE).read_bytes())
    if rank is not None and config["r"] > rank:
        raise CheckpointError(f"{CONFIG_FILE}: r is {config['r']}, but max_lora_rank of the group is {rank}")
    if modules is None or "all" in modules:
        return
    rooms = {_STACKED_IN.get(module, module) for module in modules}
    targets = config["target_modules"]
    layers = dict.fromkeys(name[: name.rindex(".lora_")] for name, _ in safetensors_entries(Path(path) / TENSORS_FILE)[0])
    for layer in (*layers, *(() if isinstance(targets, str) else targets)):
        block, _, module = layer.rpartition(".")
        name = f"{block}.{_STACKED_IN.get(module, module)}"
        if not any(room in name for room in rooms):  # as SGLang looks for it
            raise CheckpointError(f"{layer:.200}: not among lora_target_modules of the group: {', '.join(sorted(modules))}")


def _check_config(text: bytes) -> int:
    """The rank. Raises CheckpointError for a configuration that SGLang would not serve as it is meant."""
    if len(text) > MAX_ADAPTER_CONFIG:
        raise CheckpointError(f"{CONFIG_FILE}: more than {MAX_ADAPTER_CONFIG} bytes")
    try:
        config = json.loads(text)
        kind, rank, alpha = str(config["peft_type"]), config["r"], config["lora_alpha"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{CONFIG_FILE}: not the configuration of an adapter ({type(error).__name__}: {error})") from None
    if kind.upper() != "LORA":
        raise CheckpointError(f"{CONFIG_FILE}: peft_type is {kind!r:.40}; LORA")
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float) or not math.isfinite(alpha):
        raise CheckpointError(f"{CONFIG_FILE}: r is {rank!r:.40} and lora_alpha is {alpha!r:.40}; two numbers, r at least 1")
    targets = config.get("target_modules")
    names = cast("list[Any]", targets) if isinstance(targets, list) else [None]
    if targets not in ("all", "all-linear") and not all(isinstance(name, str) for name in names):
        allowed = "a list of names, 'all' or 'all-linear'"
        raise CheckpointError(f"{CONFIG_FILE}: target_modules is {targets!r:.80}; SGLang takes {allowed}")
    refuse_unserved(config)
    return rank


def refuse_unserved(config: Mapping[str, Any]) -> None:
    """Raise CheckpointError for an adapter's configuration, with a rank, that SGLang would not serve as it is meant."""
    for key, values in _UNREAD.items():
        if (value := config.get(key)) not in values:
            same = (
                f"lora_alpha = {config['lora_alpha'] * config['r'] ** 0.5:.6g} without it is the same"
                if key == "use_rslora"
                else "train without it"
            )
            raise CheckpointError(f"{CONFIG_FILE}: {key} is {value!r:.80}, which SGLang does not serve; {same}")
    if (value := config.get("init_lora_weights")) not in _INITIALIZED:
        convert = (
            "save_pretrained with path_initial_model_for_weight_conversion makes an adapter of the model as it was; if the "
            "group has the changed weights, set it to true"
        )
        raise CheckpointError(
            f"{CONFIG_FILE}: init_lora_weights is {value!r:.40}, which changes the model's weights; {convert}"
        )


def _check_shapes(entries: Mapping[str, Any], rank: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Each tensor is one of a pair for a weight of the model. Raises CheckpointError."""
    layers: dict[str, dict[str, list[int]]] = {}
    for name, entry in entries.items():
        found = _TENSOR.fullmatch(name)
        if found is None or entry.get("dtype") not in _DTYPES:
            allowed = f"base_model.model.LAYER.lora_A.weight or lora_B, of {', '.join(_DTYPES)}"
            raise CheckpointError(f"{name:.200}: {entry.get('dtype')!r:.20}; expected {allowed}")
        layers.setdefault(found[1], {})[found[2]] = entry["shape"]
    if not layers:
        raise CheckpointError(f"{TENSORS_FILE}: has no tensors")
    for layer, parts in layers.items():
        weight = shapes.get(f"{layer}.weight")
        if shapes and (weight is None or len(weight) != 2):
            raise CheckpointError(f"{layer:.200}: the model has no such layer with a weight of two sides")
        rows, columns = weight or (parts.get("B", [0])[0], parts.get("A", [0])[-1])
        wanted = {"A": [rank, columns], "B": [rows, rank]}
        if parts != wanted:
            raise CheckpointError(f"{layer:.200}: lora_A and lora_B are {parts}; expected {wanted}, for r = {rank}")
    _check_stacked(layers, shapes)


def _check_stacked(layers: Collection[str], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError for a layer that SGLang cannot stack: it would end when a sequence first uses the adapter."""
    for layer in layers:
        block, _, module = layer.rpartition(".")
        needed = _STACKED_WITH.get(module)
        if needed is None or f"{block}.{needed}" in layers:
            continue
        if needed in ("gate_proj", "w1") and shapes and f"{block}.{needed}.weight" not in shapes:
            continue  # a model without gates: nothing is stacked
        text = f"SGLang serves it only together with {needed} of that layer, which the adapter does not have"
        raise CheckpointError(f"{layer:.200}: {text}; train both, or add tensors of zeros for {needed}")


def _check_numbers(name: str, values: Any, dtype: str) -> None:
    """Raise CheckpointError for NaN and infinity."""
    wrong = ((values & 0x7F80) == 0x7F80).any() if dtype == "BF16" else not np.isfinite(values).all()
    if wrong:
        raise CheckpointError(f"{name}: has NaN or infinity")
