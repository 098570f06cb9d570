"""A checkpoint that takes media, as `transformers` loads it: what its own kinds of media need is in their files."""

import importlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from enginepool.workers import cpu_bridge


class MediaReference:
    """`transformers` in float32. `kind`: the name of its class of the model."""

    def __init__(self, kind: str, folder: Path) -> None:
        cpu_bridge.install()
        self._library: Any = importlib.import_module("transformers")
        self._torch: Any = importlib.import_module("torch")
        self._torch.set_num_threads(1)
        self._kind = getattr(self._library, kind)
        self._model = self._ready(self._kind.from_pretrained(folder))

    def _ready(self, model: Any) -> Any:
        return model.float().eval()

    @contextmanager
    def holding(self, weights: Mapping[str, Any]) -> Generator[None]:
        """Compute with other weights, by the names of the checkpoint, for as long as the block runs."""
        own = self._model
        if weights:
            self._model = self._ready(self._kind.from_pretrained(None, config=own.config, state_dict=dict(weights)))
        try:
            yield
        finally:
            self._model = own
