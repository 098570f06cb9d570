"""Cross-encoders: rows and scores as `CrossEncoder` of sentence-transformers makes them. No SGLang here.

A cross-encoder is an encoder with a classification head. Its tokenizer puts a separator between the two texts of a pair.
Without the separator the model gives another ranking, and no error.
"""

import importlib
import sys
from collections.abc import Sequence
from typing import Any, Literal

from enginepool.workers.engine import EngineError
from enginepool.workers.sglang.host.settings import SettingsError
from enginepool.workers.sglang.score.token_types import types_of

#: encoders whose head SGLang runs (`_cross_encoding_pooler_archs` there)
_ARCHITECTURES = ("BertForSequenceClassification", "XLMRobertaForSequenceClassification")
#: of these the first position is behind the padding token's
_OFFSET = ("XLMRobertaForSequenceClassification",)
#: SGLang keeps so many positions of its context for tokens that a scoring engine never generates.
_KEPT = 7


def is_cross_encoder(config: Any) -> bool:
    """Whether the model of this configuration is one."""
    return any(name in _ARCHITECTURES for name in config.architectures or ())


def positions(config: Any) -> int:
    """The longest row for which a cross-encoder has positions, in tokens."""
    offset = config.pad_token_id + 1 if any(name in _OFFSET for name in config.architectures) else 0
    return config.max_position_embeddings - offset


def use_all_positions(model_config: Any) -> None:
    """Let rows of a cross-encoder be as long as its positions: rows are cut there, and 505 of 512 would be another cut than
    CrossEncoder's. `model_config` is SGLang's class; `capabilities` holds rows to `positions`."""
    derive = model_config._derive_context_length

    def derive_context_length(self: Any, context_length: int | None) -> None:
        derive(self, context_length)
        if context_length is None and is_cross_encoder(self.hf_config):
            self.context_len += _KEPT
            self.hf_config.context_len = self.context_len

    model_config._derive_context_length = derive_context_length


def answer_logits(pooler: Any) -> None:
    """Have SGLang answer the head's logits. It knows one of the two keys that name an activation function, and not the default;
    a logarithm of sigmoid is computed from the logit. `pooler` is SGLang's class of a cross-encoder's head."""

    def identity(config: Any) -> Any:
        return importlib.import_module("torch").nn.Identity()

    module: Any = sys.modules[pooler.__module__]
    module.get_cross_encoder_activation_function = identity


def activation_of(config: Any) -> Literal["", "sigmoid"]:
    """What CrossEncoder applies to the head's outputs: the function that the configuration names, else sigmoid for one output,
    and nothing for several. Raises SettingsError for another function."""
    keys: dict[str, Any] = getattr(config, "sentence_transformers", None) or {}
    named: str | None = keys.get("activation_fn") or getattr(config, "sbert_ce_default_activation_function", None)
    if named is None:
        return "sigmoid" if config.num_labels == 1 else ""
    name = named.rpartition(".")[2]
    if named.startswith("torch.nn.") and name in ("Identity", "Sigmoid"):
        return "sigmoid" if name == "Sigmoid" else ""
    raise SettingsError(
        f"the configuration's activation function {named!r} is not supported; Identity and Sigmoid of torch.nn are"
    )


def pair_rows(tokenizer: Any, config: Any, pairs: Sequence[tuple[str, str]], longest: int) -> list[list[int]]:
    """Token ids of each pair, cut to what the model takes. A pair whose first text is empty is one text.

    Raises:
        EngineError: the tokenizer does not separate texts, or the first text of a pair contains the separator.
    """
    most = min(tokenizer.model_max_length, config.max_position_embeddings, longest)
    separator = tokenizer.sep_token_id
    typed = getattr(config, "type_vocab_size", 1) > 1

    def encode(*texts: list[str]) -> list[tuple[list[int], list[int]]]:
        if not texts[0]:
            return []
        encoded = tokenizer(*texts, truncation=True, max_length=most, return_token_type_ids=True, verbose=False)
        return [(list(ids), list(types)) for ids, types in zip(encoded["input_ids"], encoded["token_type_ids"], strict=True)]

    joined = iter(encode([first for first, _ in pairs if first], [second for first, second in pairs if first]))
    single = iter(encode([second for first, second in pairs if not first]))
    rows: list[list[int]] = []
    for i, (first, _) in enumerate(pairs):
        row, types = next(joined if first else single)
        if first and separator not in row[1:-1]:
            raise EngineError("the model's tokenizer puts no separator between two texts: send token ids")
        if first and typed and types != types_of(row, separator):
            raise EngineError(f"items[{i}]: the first text of the pair contains the separator {tokenizer.sep_token!r}")
        rows.append(row)
    return rows
