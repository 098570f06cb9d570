"""The weights of this process of an engine, written into files as SGLang's load_format `sharded_state` reads them.

SGLang's own command holds the engine meanwhile, for longer than a batch may take. Here a thread writes them while the engine
serves, and the worker says whether others were loaded meanwhile. Runs in the engine's processes; no SGLang here.
"""

import sys
from types import SimpleNamespace
from typing import Any

from enginepool.workers.sglang.patches import modules
from enginepool.workers.sglang.weights.completeness import quantization
from enginepool.workers.sglang.weights.ticket_answers import answer_later

#: bytes of one file, of which the host has a copy while it is written
PART_BYTES = 2 << 30


def rearranged(model: Any) -> str:
    """Why the model holds other tensors than it was loaded with, or ""."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if name := quantization(module):
            return f"its weights are quantized ({name})"
        if getattr(method, "use_flashinfer_trtllm_moe", False) or getattr(method, "w13_swiglu_interleaved", False):
            return "its experts were rearranged for a kernel when they had been loaded"
        if getattr(module, "use_intel_amx_backend", False):
            return "its weights are packed for AMX"
    return ""


def save_later(model: Any, ticket: dict[str, Any]) -> None:
    """Begin to write them into the folder `path`. Raises ValueError: they are not those that a start would read."""
    if why := rearranged(model):
        raise ValueError(f"not saved: {why}")
    # The tensors themselves, by the names that they have below LoRA layers, which are away for now only.
    state = dict(model.state_dict())
    loader: Any = getattr(sys.modules[modules.LOADER], "ShardedStateLoader")  # noqa: B009 (found in the table by its name)

    def save(asked: dict[str, Any]) -> dict[str, Any]:
        loader.save_model(SimpleNamespace(state_dict=lambda: state), asked["path"], None, PART_BYTES)
        return {}

    answer_later(ticket, save)
