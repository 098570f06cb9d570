"""A checkpoint of an embedding model, and the direct computation that its embeddings must equal."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from enginepool.cli.tiny_model_files import make_tiny_model
from tests.engine.families import VOCAB, torch, transformers


class Embedder:
    """`transformers` in float32 on a checkpoint: each row alone, pooled at one place; None: the mean of all places."""

    def __init__(self, folder: Path, place: int | None) -> None:
        self.folder = folder
        torch.set_num_threads(1)
        self._model: Any = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
        self._place = place

    def pooled(self, rows: list[list[int]], dimensions: int = 0, normalize: bool = True) -> npt.NDArray[np.float64]:
        """What `embed` must answer."""
        with torch.no_grad():
            states = [self._model(torch.tensor([row])).last_hidden_state[0].double().numpy() for row in rows]
        found = [state.mean(axis=0) if self._place is None else state[self._place] for state in states]
        vectors = np.stack(found)[:, : dimensions or None]
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True) if normalize else vectors


def last_token_model(folder: Path) -> Embedder:
    """A decoder that pools its last token, trained for every number of dimensions."""
    make_tiny_model(folder, seed=5)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"is_matryoshka": True}))
    return Embedder(folder, -1)


def encoder(folder: Path, pooling: str = "") -> Embedder:
    """A BERT. `pooling`: as sentence-transformers calls it, in whose form its folder says it; "": it says nothing."""
    torch.manual_seed(3)
    config = transformers.BertConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=64, initializer_range=0.5,
    )  # fmt: skip
    transformers.BertModel(config, add_pooling_layer=False).eval().save_pretrained(folder)
    if pooling:
        say_pooling(folder, {f"pooling_mode_{name}": name == pooling for name in ("cls_token", "mean_tokens", "lasttoken")})
    return Embedder(folder, {"": 0, "cls_token": 0, "mean_tokens": None, "lasttoken": -1}[pooling])


def say_pooling(folder: Path, pooling: dict[str, Any], *more: str) -> None:
    """Write the modules behind the transformer into the folder: a pooling, and others of these kinds."""
    kinds = ["sentence_transformers.models.Transformer", "sentence_transformers.models.Pooling", *more]
    modules = [
        {"idx": place, "name": str(place), "path": f"{place}_{kind.rpartition('.')[2]}" if place else "", "type": kind}
        for place, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
