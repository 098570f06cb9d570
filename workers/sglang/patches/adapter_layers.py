"""A change to how SGLang loads LoRA adapters, in the scheduler's process. No SGLang here: its class is an argument."""

import sys
from typing import Any

from enginepool.workers.adapter_files import refuse_unserved
from enginepool.workers.weights.checkpoint import CheckpointError


def refuse_layers_without_room(manager: Any) -> None:
    """Have an adapter refused when it is loaded if SGLang has no place for one of its layers, or would serve another
    one. `manager` is SGLang's class `LoRAManager`.

    SGLang looks for the place when a sequence first uses the adapter. If there is none, its scheduler ends. And those that an
    engine is started with are read by SGLang alone.
    """
    module: Any = sys.modules[manager.__module__]
    initialize, load = manager.init_state, manager.load_lora_weights

    def check(self: Any, adapter: Any) -> None:
        try:
            refuse_unserved(adapter.config.hf_config)
        except CheckpointError as error:
            raise ValueError(str(error)) from None
        for layer in adapter.layers:
            for name in layer.weights:
                module.get_target_module_name(name, self.target_modules)  # raises ValueError

    def init_state(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        for adapter in self.loras.values():
            check(self, adapter)

    def load_lora_weights(self: Any, lora_ref: Any) -> None:
        load(self, lora_ref)
        try:
            if hasattr(self, "memory_pool"):  # else it starts, and `init_state` checks them all
                check(self, self.loras[lora_ref.lora_id])
        except ValueError:
            del self.loras[lora_ref.lora_id]
            raise

    manager.init_state, manager.load_lora_weights = init_state, load_lora_weights
