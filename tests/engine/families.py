"""Tiny random checkpoints of many model families, made with `transformers`, and what `transformers` computes with them."""

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from enginepool.workers import cpu_bridge
from tests.lazy import LazyModule

cpu_bridge.install()
torch: Any = importlib.import_module("torch")
transformers: Any = LazyModule("transformers")
safetensors: Any = importlib.import_module("safetensors.torch")

#: No multiple of 64, to which SGLang pads it.
VOCAB = 120
CLS, SEP = 1, 2
_DECODER: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None, "tie_word_embeddings": False, "initializer_range": 0.1,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ENCODER: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 130, "num_labels": 1, "pad_token_id": 0, "initializer_range": 0.5,
    # Logits: a single output goes through sigmoid otherwise.
    "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity",
}  # fmt: skip


_DECODERS = (
    "LlamaConfig", "Qwen2Config", "Qwen3Config", "Qwen3MoeConfig", "Phi3Config", "Gemma2Config", "Gemma3TextConfig",
    "MistralConfig",
)  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A model family. `config` and `model` are classes of `transformers`, `settings` the arguments of `config`; `options` are
    engine options; `kind` as in `Capabilities`."""

    config: str
    model: str
    kind: str = "causal"
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


def _causal(config: str, model: str, **settings: Any) -> Family:
    return Family(config, model, settings=_DECODER | settings)


def _head(config: str, model: str, **settings: Any) -> Family:
    return Family(config, model, "classifier", settings=_DECODER | {"num_labels": 3} | settings)


#: InternLM2 is no family of `transformers`: it computes what Llama does, from other names.
_INTERNLM2 = Family(
    "LlamaConfig", "LlamaForSequenceClassification", "classifier",
    _DECODER | {"num_labels": 1}, {"trust_remote_code": True},
)  # fmt: skip
_GEMMA = {"query_pre_attn_scalar": 16, "sliding_window": 64}
FAMILIES: dict[str, Family] = {
    "Llama": _causal("LlamaConfig", "LlamaForCausalLM"),
    "Llama, tied": _causal("LlamaConfig", "LlamaForCausalLM", tie_word_embeddings=True),
    "Qwen2": _causal("Qwen2Config", "Qwen2ForCausalLM"),
    "Qwen3": _causal("Qwen3Config", "Qwen3ForCausalLM"),
    "Qwen3-MoE": _causal("Qwen3MoeConfig", "Qwen3MoeForCausalLM", **_EXPERTS),
    "Phi3": _causal("Phi3Config", "Phi3ForCausalLM"),
    "Gemma2": _causal("Gemma2Config", "Gemma2ForCausalLM", **_GEMMA, tie_word_embeddings=True),
    "Gemma3": _causal("Gemma3TextConfig", "Gemma3ForCausalLM", **_GEMMA, tie_word_embeddings=True),
    "Mistral": _causal("MistralConfig", "MistralForCausalLM", sliding_window=None),
    "Llama reward": _head("LlamaConfig", "LlamaForSequenceClassification"),
    "Qwen2 reward": _head("Qwen2Config", "Qwen2ForSequenceClassification"),
    "Qwen3 reward": _head("Qwen3Config", "Qwen3ForSequenceClassification"),
    "Gemma2 reward": _head("Gemma2Config", "Gemma2ForSequenceClassification", **_GEMMA),
    "InternLM2 reward": _INTERNLM2,
    "BERT": Family("BertConfig", "BertForSequenceClassification", "classifier", _ENCODER | {"type_vocab_size": 2}),
    "XLM-R": Family(
        "XLMRobertaConfig", "XLMRobertaForSequenceClassification", "classifier",
        _ENCODER | {"type_vocab_size": 1, "bos_token_id": CLS, "eos_token_id": SEP, "pad_token_id": 3},
    ),
    "Mistral reward": _head("MistralConfig", "MistralForSequenceClassification", sliding_window=None),
    "Qwen3-MoE reward": _head("Qwen3MoeConfig", "Qwen3MoeForSequenceClassification", **_EXPERTS),
}  # fmt: skip


def make(family: Family, folder: Path, seed: int = 0) -> Any:
    """Write a checkpoint of the family, with random weights and a tokenizer; the model of `transformers` that it holds."""
    torch.manual_seed(seed)
    config = getattr(transformers, family.config)(**family.settings)
    model = getattr(transformers, family.model)(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # norms and biases are ones and zeros, which would hide a load that leaves them out
            torch.nn.init.normal_(parameter, mean=float("norm" in name.lower()), std=0.2)
    model.save_pretrained(folder)
    if family is _INTERNLM2:
        _save_internlm2(folder)
    tokenizers: Any = importlib.import_module("tokenizers")
    words = {"<s>": 0, "[CLS]": CLS, "[SEP]": SEP, "[PAD]": 3, "[UNK]": 4, **{f"w{i}": i for i in range(5, VOCAB)}}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    names = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=core, **names).save_pretrained(folder)
    return model


def scores(family: Family, model: Any, row: list[int], labels: tuple[int, ...]) -> Any:
    """What `transformers` gives for a row: probabilities of labels, or the outputs of the head. float64 [columns]."""
    given: dict[str, Any] = {"input_ids": torch.tensor([row])}
    if family.config == "BertConfig":
        first = row.index(SEP) + 1
        given["token_type_ids"] = torch.tensor([[0] * first + [1] * (len(row) - first)])
    if family.config in _DECODERS and family.kind == "classifier":
        model.config.pad_token_id = None  # rows are not padded: the last token is pooled
    with torch.no_grad():
        logits = model(**given).logits[0].double()
    return logits.numpy() if family.kind == "classifier" else torch.softmax(logits[-1], dim=-1)[list(labels)].numpy()


def computed(name: str, folder: Path, seed: int, rows: list[list[int]], labels: tuple[int, ...]) -> list[Any]:
    """Write a checkpoint of the family `name`; what `transformers` gives for each row with it."""
    torch.set_num_threads(1)
    family = FAMILIES[name]
    model = make(family, folder, seed)
    return [scores(family, model, row, labels) for row in rows]


def checkpoint(folder: Path) -> dict[str, Any]:
    """The tensors of a checkpoint, by name, in memory of their own: its files may be written again."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor.clone() for file in files for name, tensor in safetensors.load_file(file).items()}


# --- InternLM2 ---------------------------------------------------------------------------------------------------------

_INTERNLM2_NAMES = {
    "embed_tokens": "tok_embeddings", "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2", "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm", "score": "v_head",
}  # fmt: skip
_INTERNLM2_CONFIG = """from transformers import PretrainedConfig


class InternLM2Config(PretrainedConfig):
    model_type = "internlm2"
"""


def _save_internlm2(folder: Path) -> None:
    """Make a Llama reward model one of InternLM2: by its names, with queries, keys and values of each group together."""
    tensors = checkpoint(folder)
    made: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if "q_proj" in name:
            q, k, v = (tensors[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj"))
            groups, hidden = _DECODER["num_key_value_heads"], q.shape[1]
            parts = [part.view(groups, -1, _DECODER["head_dim"], hidden) for part in (q, k, v)]
            name = name.replace("self_attn.q_proj", "attention.wqkv")
            made[name] = torch.cat(parts, 1).reshape(-1, hidden).contiguous()
        elif "k_proj" not in name and "v_proj" not in name:
            for theirs, ours in _INTERNLM2_NAMES.items():
                name = name.replace(theirs, ours)
            made[name] = tensor
    safetensors.save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "model_type": "internlm2", "architectures": ["InternLM2ForRewardModel"], "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "rope_scaling": None, "bias": False, "dtype": "float32",
        "auto_map": {"AutoConfig": "configuration_internlm2.InternLM2Config"},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(_DECODER | config))
    (folder / "configuration_internlm2.py").write_text(_INTERNLM2_CONFIG)
