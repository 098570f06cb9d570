"""A small random model with a tokenizer, made on this machine: what demos and tests run the real engine on.

The checkpoint is written file by file (config, weights, tokenizer), so this needs neither torch nor transformers and takes a
fraction of a second. Weights are drawn with a standard deviation of fan_in ** -0.5, about ten times wider than the usual
initialization, under which every token is equally likely and every score the same.
"""

import importlib
import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Head = Literal["causal", "reward"]

EOS = "<|endoftext|>"
SPECIAL_TOKENS = (EOS, "<|im_start|>", "<|im_end|>")
HEADS, KV_HEADS = 4, 2
HIDDEN_SIZE, LAYERS = 64, 2
#: the longest sequence in tokens, and the rows of the embedding; the tokenizer may use fewer
CONTEXT, VOCAB = 4096, 512
#: The smallest size of a head that GPU attention kernels take.
HEAD_SIZE = 64
#: How messages become a prompt of a causal model.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: What the tokenizer's merges are learned from: enough for some words to be one token and others several.
CORPUS = (
    "A pool of engines scores items for a query, by priority, each batch in one forward pass.",
    "The trainer sends prompts and responses; the reward model answers with one number for each pair.",
    "Is this passage relevant to the question? Answer yes or no.",
    "What is the capital of France? The capital of France is Paris.",
    "Weights have a version, and every answer carries the version of the weights that computed it.",
    "import asyncio\n\nasync def main() -> None:\n    print(1 + 1)\n",
)


def make_tiny_model(directory: str | Path, head: Head = "causal", labels: int = 1, seed: int = 0) -> Path:
    """Make a Qwen3-shaped float32 model in `directory`, as a Hugging Face checkpoint.

    Args:
        directory: made if it does not exist; files of an earlier model in it are overwritten.
        head: `causal` predicts the next token; `reward` has a classification head.
        labels: columns of the classification head (`reward` only).
        seed: the same seed gives the same weights.

    Returns:
        The directory.

    Raises:
        RuntimeError: a package that is needed is not installed.
    """
    tokenizers, safetensors = _library("tokenizers"), _library("safetensors.numpy")
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)

    tokenizer = _tokenizer(tokenizers)
    tokenizer.save(str(target / "tokenizer.json"))
    _write_json(
        target / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": EOS,
            "pad_token": EOS,
            "model_max_length": CONTEXT,
            "clean_up_tokenization_spaces": False,
        }
        | ({"chat_template": CHAT_TEMPLATE} if head == "causal" else {}),
    )
    _write_json(target / "config.json", _config(head, labels, tokenizer.token_to_id(EOS)))
    weights = _weights(np.random.default_rng(seed), head, labels)
    safetensors.save_file(weights, str(target / "model.safetensors"), metadata={"format": "pt"})
    return target


def _config(head: Head, labels: int, eos: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "dtype": "float32",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 2 * HIDDEN_SIZE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": eos,
    }
    if head == "reward":
        config["architectures"] = ["Qwen3ForSequenceClassification"]
        config["id2label"] = {str(i): f"LABEL_{i}" for i in range(labels)}
        config["label2id"] = {f"LABEL_{i}": i for i in range(labels)}
    return config


def _weights(random: np.random.Generator, head: Head, labels: int) -> dict[str, npt.NDArray[np.float32]]:
    weights: dict[str, npt.NDArray[np.float32]] = {}

    def matrix(name: str, rows: int, columns: int, spread: float | None = None) -> None:
        drawn = random.standard_normal((rows, columns), dtype=np.float32)
        weights[f"{name}.weight"] = drawn * np.float32(columns**-0.5 if spread is None else spread)

    def norm(name: str, size: int) -> None:
        weights[f"{name}.weight"] = np.ones(size, dtype=np.float32)

    matrix("model.embed_tokens", VOCAB, HIDDEN_SIZE, spread=0.5)
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        norm(f"{layer}.input_layernorm", HIDDEN_SIZE)
        matrix(f"{layer}.self_attn.q_proj", HEADS * HEAD_SIZE, HIDDEN_SIZE)
        matrix(f"{layer}.self_attn.k_proj", KV_HEADS * HEAD_SIZE, HIDDEN_SIZE)
        matrix(f"{layer}.self_attn.v_proj", KV_HEADS * HEAD_SIZE, HIDDEN_SIZE)
        matrix(f"{layer}.self_attn.o_proj", HIDDEN_SIZE, HEADS * HEAD_SIZE)
        norm(f"{layer}.self_attn.q_norm", HEAD_SIZE)
        norm(f"{layer}.self_attn.k_norm", HEAD_SIZE)
        norm(f"{layer}.post_attention_layernorm", HIDDEN_SIZE)
        matrix(f"{layer}.mlp.gate_proj", 2 * HIDDEN_SIZE, HIDDEN_SIZE)
        matrix(f"{layer}.mlp.up_proj", 2 * HIDDEN_SIZE, HIDDEN_SIZE)
        matrix(f"{layer}.mlp.down_proj", HIDDEN_SIZE, 2 * HIDDEN_SIZE)
    norm("model.norm", HIDDEN_SIZE)
    if head == "reward":
        matrix("score", labels, HIDDEN_SIZE)
    else:
        matrix("lm_head", VOCAB, HIDDEN_SIZE)
    return weights


def _tokenizer(tokenizers: Any) -> Any:
    """A byte-level BPE: any text becomes ids and comes back unchanged."""
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(CORPUS, trainer)
    return core


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise RuntimeError(f"making a model needs {package}, which is not installed here: pip install {package}") from error
