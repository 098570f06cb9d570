"""The direct computation that the engine's answers must equal."""

import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from enginepool.workers import cpu_bridge

Floats2 = tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]


@dataclass(frozen=True)
class Models:
    """Folders of the checkpoints."""

    causal: Path
    reward: Path


class Reference:
    """`transformers` in float32: no padding, and one row at a time, but for `scores_of_labels`; nothing shared with the engine
    but the files."""

    def __init__(self, models: Models) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cpu_bridge.install()
            import torch
            import transformers

            self._torch: Any = torch
            self._torch.set_num_threads(1)
            library: Any = transformers
            self._causal = library.AutoModelForCausalLM.from_pretrained(models.causal, dtype=torch.float32).eval()
            self._reward = library.AutoModelForSequenceClassification.from_pretrained(models.reward, dtype=torch.float32).eval()
            # Rows are not padded: the last token is pooled, also where it happens to be the one that others pad with.
            self._reward.config.pad_token_id = None
            self.tokenizer = library.AutoTokenizer.from_pretrained(models.causal)

    @contextmanager
    def holding(self, weights: Mapping[str, Any]) -> Generator[None]:
        """Meanwhile the model that these tensors are for computes with them. Raises RuntimeError: they are for neither."""
        model = self._causal if "lm_head.weight" in weights else self._reward
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.load_state_dict(dict(weights))
        yield
        model.load_state_dict(before)

    def label_scores(self, row: list[int], labels: Sequence[int], softmax: bool) -> npt.NDArray[np.float64]:
        with self._torch.no_grad():
            logits = self._causal(self._torch.tensor([row])).logits[0, -1].double()
        if softmax:
            return self._torch.softmax(logits[list(labels)], dim=-1).numpy()
        return self._torch.softmax(logits, dim=-1)[list(labels)].numpy()

    def scores_of_labels(self, rows: Sequence[Sequence[int]], labels: Sequence[int]) -> npt.NDArray[np.float64]:
        """As `label_scores` without softmax, of many rows of one length at once."""
        with self._torch.no_grad():
            logits = self._causal(self._torch.tensor(rows)).logits[:, -1].double()
        return self._torch.softmax(logits, dim=-1)[:, list(labels)].numpy()

    def logits(self, row: list[int], labels: Sequence[int]) -> npt.NDArray[np.float64]:
        """Of these labels as the next token; of the head's outputs where there are none."""
        with self._torch.no_grad():
            if not labels:
                return self._reward(self._torch.tensor([row])).logits[0].double().numpy()
            return self._causal(self._torch.tensor([row])).logits[0, -1].double()[list(labels)].numpy()

    def following(self, row: Sequence[int], tokens: Sequence[int], allowed: Sequence[int] = ()) -> Floats2:
        """Of each token after `row`: how far its logit is below the largest one, and its log-probability. `allowed`: as if
        there were no other tokens."""
        with self._torch.no_grad():
            logits = self._causal(self._torch.tensor([[*row, *tokens]])).logits[0, len(row) - 1 : -1].double()
        if allowed:
            none = self._torch.full_like(logits, -self._torch.inf)
            logits = none.index_copy(1, self._torch.tensor(allowed), logits[:, allowed])
        chosen = self._torch.tensor(list(tokens))[:, None]
        logprobs = self._torch.log_softmax(logits, dim=-1).gather(1, chosen)[:, 0]
        return (logits.max(dim=-1).values - logits.gather(1, chosen)[:, 0]).numpy(), logprobs.numpy()

    def across(self, row: Sequence[int], spans: Sequence[tuple[Mapping[str, Any], Sequence[int]]]) -> Floats2:
        """As `following`, where the weights changed after each span of tokens, and the keys and values so far were kept."""
        below: list[Any] = []
        logprobs: list[Any] = []
        kept: Any = None
        pending = list(row)
        for weights, tokens in spans:
            with self.holding(weights), self._torch.no_grad():
                ids = [*pending, *tokens[:-1]]
                found = self._causal(self._torch.tensor([ids]), past_key_values=kept, use_cache=True)
            kept, logits = found.past_key_values, found.logits[0, len(pending) - 1 :].double()
            chosen = self._torch.tensor(list(tokens))[:, None]
            logprobs.append(self._torch.log_softmax(logits, dim=-1).gather(1, chosen)[:, 0].numpy())
            below.append((logits.max(dim=-1).values - logits.gather(1, chosen)[:, 0]).numpy())
            pending = [tokens[-1]]
        return np.concatenate(below), np.concatenate(logprobs)

    def afresh(self, row: Sequence[int], spans: Sequence[tuple[Mapping[str, Any], Sequence[int]]]) -> Floats2:
        """As `across`, where all before each span was computed again by its weights."""
        found: list[Floats2] = []
        before = list(row)
        for weights, tokens in spans:
            with self.holding(weights):
                found.append(self.following(before, tokens))
            before += tokens
        below, logprobs = zip(*found, strict=True)
        return np.concatenate(below), np.concatenate(logprobs)

    def greedy(self, row: Sequence[int], count: int) -> list[int]:
        """The likeliest tokens after `row`, each after those before it."""
        ids = list(row)
        with self._torch.no_grad():
            for _ in range(count):
                ids.append(int(self._causal(self._torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(row) :]

    def rewards(self, row: list[int], softmax: bool) -> npt.NDArray[np.float64]:
        with self._torch.no_grad():
            logits = self._reward(self._torch.tensor([row])).logits[0].double()
        return (self._torch.softmax(logits, dim=-1) if softmax else logits).numpy()

    def seeing(
        self, ids: list[int], sees: npt.NDArray[np.bool_], positions: npt.NDArray[np.int64], at: list[int]
    ) -> tuple[Any, Any]:
        """(logits of the next token, outputs of the head) at some tokens of a sequence. Each token sees those that `sees` has
        in its row; one without any sees something wrong."""
        torch = self._torch
        mask = torch.zeros(sees.shape).masked_fill(~torch.tensor(sees), torch.finfo(torch.float32).min)[None, None]
        where = {"attention_mask": mask, "position_ids": torch.tensor(positions)[None]}
        with torch.no_grad():
            logits = self._causal(torch.tensor([ids]), **where).logits[0, at]
            hidden = self._reward.model(torch.tensor([ids]), **where).last_hidden_state[0, at]
            return logits.double().numpy(), self._reward.score(hidden).double().numpy()

    def hidden(self, row: list[int]) -> npt.NDArray[np.float32]:
        with self._torch.no_grad():
            return self._reward.model(self._torch.tensor([row])).last_hidden_state[0, -1].numpy()
