"""The weights of this process of an engine, written as SGLang reads them: into files for its load_format `sharded_state`, or
into Redis for `remote`.

SGLang's own command holds the engine meanwhile, for longer than a batch may take. Here a thread writes them while the engine
serves, and the worker says whether others were loaded meanwhile. Runs in the engine's processes; no SGLang here.
"""

import sys
from types import SimpleNamespace
from typing import Any

from enginepool.protocol.redis_url import parse_redis
from enginepool.workers.redis_model import redis_errors, refuse_large
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
    """Begin to write them to `path`, a folder or a URL. Raises ValueError: they are not those that a start would read."""
    if why := rearranged(model):
        raise ValueError(f"not saved: {why}")
    # The tensors themselves, by the names that they have below LoRA layers, which are away for now only.
    state = dict(model.state_dict())
    loader: Any = sys.modules[modules.LOADER]
    kept = SimpleNamespace(state_dict=lambda: state)

    def save(asked: dict[str, Any]) -> dict[str, Any]:
        path = asked["path"]
        if (at := parse_redis(path)) is None:
            loader.ShardedStateLoader.save_model(kept, path, None, PART_BYTES)
            return {}
        refuse_large(at, {name: tensor.numel() * tensor.element_size() for name, tensor in state.items()})
        with redis_errors(path):
            loader.RemoteModelLoader.save_model(kept, "", path)  # the worker adds the files: there are none in ""
        return {}

    answer_later(ticket, save)
