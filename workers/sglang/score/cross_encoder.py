"""Cross-encoders: rows and scores as `CrossEncoder` of sentence-transformers makes them. No SGLang here.

A cross-encoder is an encoder with a classification head. Its tokenizer puts a separator between the two texts of a pair.
Without the separator the model gives another ranking, and no error.
"""

import importlib
import sys
from collections.abc import Sequence
from typing import Any, Literal

from enginepool.protocol.messages import Tokenize
from enginepool.workers.engine import EngineError
from enginepool.workers.sglang.host.settings import SettingsError
from enginepool.workers.sglang.score.token_types import types_of
from enginepool.workers.sglang.text.encoded_rows import encoded_rows
from enginepool.workers.truncated_rows import refuse_nothing_left, too_long

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


def pair_rows(
    tokenizer: Any, config: Any, pairs: Sequence[tuple[str, str]], asked: Tokenize, longest: int
) -> tuple[list[list[int]], int]:
    """(token ids of each pair, how many of them were truncated). A pair whose first text is empty is one text.

    Unless `asked` names another truncation, rows are cut as the tokenizer cuts pairs, to what the model and it take.

    Raises:
        WireError: nothing would be left of an item.
        EngineError: the tokenizer does not separate texts, or the first text of a pair contains the separator.
    """
    texts = [(first, second) if first else (second,) for first, second in pairs]
    encoded = _encode(tokenizer, texts, asked.long)
    if asked.truncation:
        longer = too_long([row for row, _ in encoded], asked)
        cut = [_truncated(tokenizer, texts[i], asked, i) for i in longer]
    else:
        most = min(tokenizer.model_max_length, config.max_position_embeddings, longest)
        longer = [i for i, (row, _) in enumerate(encoded) if len(row) > most]
        cut = _encode(tokenizer, [texts[i] for i in longer], asked.long, truncation=True, max_length=most)
    for i, row in zip(longer, cut, strict=True):
        encoded[i] = row
    separator = tokenizer.sep_token_id
    typed = getattr(config, "type_vocab_size", 1) > 1
    for i, (row, types) in enumerate(encoded):
        if len(texts[i]) == 2 and separator not in row[1:-1]:
            raise EngineError("the model's tokenizer puts no separator between two texts: send token ids")
        if len(texts[i]) == 2 and typed and types != types_of(row, separator):
            raise EngineError(f"items[{i}]: the first text of the pair contains the separator {tokenizer.sep_token!r}")
    return [row for row, _ in encoded], len(longer)


#: token ids and token types
_Encoded = tuple[list[int], list[int]]


def _encode(tokenizer: Any, texts: Sequence[tuple[str, ...]], long: bool, **how: Any) -> list[_Encoded]:
    """Each text, or pair of texts, with the special tokens of the model."""
    found: list[_Encoded] = [([], [])] * len(texts)
    for size in (1, 2):
        places = [i for i, some in enumerate(texts) if len(some) == size]
        if places:
            sides = zip(*(texts[i] for i in places), strict=True)
            rows = encoded_rows(tokenizer, *sides, long=long, return_token_type_ids=True, **how)
            for i, ids, types in zip(places, rows["input_ids"], rows["token_type_ids"], strict=True):
                found[i] = list(ids), list(types)
    return found


def _truncated(tokenizer: Any, texts: tuple[str, ...], asked: Tokenize, row: int) -> _Encoded:
    """A row whose item is cut on the side that was asked for."""
    item = -1 if len(texts) == 1 and asked.item_first else 0 if len(texts) == 1 or asked.item_first else 1
    whole = tokenizer(*texts, verbose=False)
    refuse_nothing_left(len(whole["input_ids"]) - whole.sequence_ids(0).count(item), asked, row)
    side, tokenizer.truncation_side = tokenizer.truncation_side, asked.truncation
    try:
        how = "only_second" if item else "only_first"
        return _encode(tokenizer, [texts], asked.long, truncation=how, max_length=asked.longest)[0]
    finally:
        tokenizer.truncation_side = side
