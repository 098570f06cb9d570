"""The model below its LoRA layers: new weights go there, and adapters stay as they are.

SGLang puts a layer of its own in the place of each one that adapters change, and keeps that one below. Parameters have other
names then, under which a model's `load_weights` does not find all of them. So tickets see the model as it was loaded. Runs in
the engine's processes; no SGLang here.
"""

import contextlib
from collections.abc import Generator
from typing import Any


class AdapterLayers:
    """The LoRA layers of a model. SGLang makes all of them at its start, also for adapters that are loaded later."""

    def __init__(self, model: Any) -> None:
        #: (the modules of the module around it, its name there, the layer)
        self._layers: list[tuple[dict[str, Any], str, Any]] = [
            (module._modules, name, layer)
            for module in model.modules()
            for name, layer in module._modules.items()
            if hasattr(layer, "lora_backend") and hasattr(layer, "base_layer")
        ]

    @contextlib.contextmanager
    def away(self) -> Generator[None]:
        """Meanwhile the layers below are in their places."""
        for modules, name, layer in self._layers:
            modules[name] = layer.base_layer
        try:
            yield
        finally:
            for modules, name, layer in self._layers:
                modules[name] = layer
