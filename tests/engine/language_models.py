"""A checkpoint of a causal model, and the direct computation that its log-probabilities must equal."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.engine.families import torch, transformers


class LanguageModel:
    """`transformers` in float32 on a checkpoint: each row alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        torch.set_num_threads(1)
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def logprobs(self, row: list[int]) -> npt.NDArray[np.float64]:
        """float64 [tokens, vocabulary]: what each token of the row says of the next one."""
        with torch.no_grad():
            return torch.log_softmax(self._model(torch.tensor([row])).logits[0].double(), dim=-1).numpy()
