"""Log-probabilities of generated tokens, computed again by transformers on both sets of weights."""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

torch: Any = importlib.import_module("torch")

Logprobs = npt.NDArray[np.float32]
#: weights, by their name, and how many tokens of a sequence they computed
Spans = Sequence[tuple[str, int]]


class Recomputed:
    """A model with several sets of weights, which keep their memory.

    Args:
        model: its folder.
        weights: by name the tensors of a checkpoint.
    """

    def __init__(self, model: Path, weights: Mapping[str, Mapping[str, Any]]) -> None:
        transformers: Any = importlib.import_module("transformers")
        config = transformers.AutoConfig.from_pretrained(str(model))
        first = next(iter(next(iter(weights.values())).values()))
        with torch.device(first.device):
            made = transformers.AutoModelForCausalLM.from_config(config, dtype=first.dtype)
        made.load_state_dict(dict(next(iter(weights.values()))), strict=False, assign=True)
        made.tie_weights()
        self._model = made.eval()
        self._weights = {name: dict(tensors) for name, tensors in weights.items()}
        self._device = first.device

    def named_and_other(self, prompt: list[int], tokens: list[int], spans: Spans, kept: bool) -> tuple[Logprobs, Logprobs]:
        """Of each token the log-probability by the weights that its span names, and by the other ones.

        Args:
            kept: keys and values of a span are those of the weights that computed it; else each span begins with all keys
                and values by its own weights.
        """
        named: list[Logprobs] = []
        others: list[Logprobs] = []
        cache: Any = None
        done = read = 0
        row = [*prompt, *tokens]
        for name, count in spans:
            [other] = [one for one in self._weights if one != name]
            # The last token so far is read by the weights that compute the next one.
            end = len(prompt) + done + count - 1
            ids, chosen = row[read:end], tokens[done : done + count]
            others.append(self._forward(other, ids, chosen, cache)[0])
            if cache is not None:
                cache.crop(read)
            found, grown = self._forward(name, ids, chosen, cache)
            named.append(found)
            done += count
            if kept:
                cache, read = grown, end
        return np.concatenate(named), np.concatenate(others)

    def _forward(self, name: str, ids: list[int], chosen: list[int], cache: Any) -> tuple[Logprobs, Any]:
        """Log-probabilities of the tokens in the last places, and the keys and values so far."""
        with torch.no_grad():
            given = torch.tensor([ids], device=self._device)
            arguments = {"past_key_values": cache, "use_cache": True, "logits_to_keep": len(chosen)}
            found = torch.func.functional_call(self._model, self._weights[name], (given,), arguments)
            logits = found.logits[0].float()
            places = torch.tensor(chosen, device=self._device)[:, None]
            logprobs = torch.log_softmax(logits, dim=-1).gather(1, places)[:, 0]
        return logprobs.cpu().numpy(), found.past_key_values
