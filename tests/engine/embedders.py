"""A checkpoint of an embedding model, and the direct computation that its embeddings must equal."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from enginepool.cli.tiny_model_files import make_tiny_model
from tests.engine.families import torch, transformers


class Embedder:
    """`transformers` in float32 on a checkpoint: each row alone, pooled at one place."""

    def __init__(self, folder: Path, place: int) -> None:
        self.folder = folder
        torch.set_num_threads(1)
        self._model: Any = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
        self._place = place

    def pooled(self, rows: list[list[int]], dimensions: int = 0, normalize: bool = True) -> npt.NDArray[np.float64]:
        """What `embed` must answer."""
        with torch.no_grad():
            found = [self._model(torch.tensor([row])).last_hidden_state[0, self._place].double().numpy() for row in rows]
        vectors = np.stack(found)[:, : dimensions or None]
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True) if normalize else vectors


def last_token_model(folder: Path) -> Embedder:
    """A decoder that pools its last token, trained for every number of dimensions."""
    make_tiny_model(folder, seed=5)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"is_matryoshka": True}))
    return Embedder(folder, -1)
