"""A model to score with, made on the spot: the shape of a Qwen3 with random weights, in bfloat16, and a small tokenizer.

    python -m bench.score.model DIR {causal,reward} [SIZE]

In a process of its own, because what draws the weights on a GPU holds some of it until it ends.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from enginepool.cli.tiny_model_files import make_tiny_model

KV_HEADS, HEAD_SIZE, VOCAB, CONTEXT = 8, 128, 151936, 40960


class Size(NamedTuple):
    """What the sizes of Qwen3 differ in. `tied`: the embeddings are the output matrix too."""

    hidden: int
    layers: int
    heads: int
    inner: int
    tied: bool


SIZES = {
    "0.6b": Size(1024, 28, 16, 3072, True),
    "4b": Size(2560, 36, 32, 9728, True),
    "8b": Size(4096, 36, 32, 12288, False),
}
#: Of embeddings, which are the output matrix too: logits then spread by one or two.
EMBEDDING_SPREAD = 0.05


def make_model(directory: Path, head: str, size: str = "0.6b") -> None:
    """Make the checkpoint. Needs torch and safetensors; draws on the GPU where there is one."""
    torch: Any = importlib.import_module("torch")
    save: Any = importlib.import_module("safetensors.torch")
    make_tiny_model(directory, "reward" if head == "reward" else "causal")  # for its tokenizer; the rest is replaced
    hidden, layers, heads, inner, tied = SIZES[size]
    tied = tied and head != "reward"
    path = directory / "config.json"
    config: dict[str, Any] = json.loads(path.read_text()) | {
        "dtype": "bfloat16",
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "max_position_embeddings": CONTEXT,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": tied,
    }
    path.write_text(json.dumps(config, indent=2))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    chance = torch.Generator(device).manual_seed(7)
    weights: dict[str, Any] = {}

    def matrix(name: str, rows: int, columns: int, spread: float = 0.0) -> None:
        drawn = torch.randn(rows, columns, generator=chance, device=device, dtype=torch.float32)
        weights[f"{name}.weight"] = (drawn * (spread or columns**-0.5)).to(torch.bfloat16).cpu()

    def norm(name: str, size: int) -> None:
        weights[f"{name}.weight"] = torch.ones(size, dtype=torch.bfloat16)

    matrix("model.embed_tokens", VOCAB, hidden, EMBEDDING_SPREAD)
    for i in range(layers):
        layer = f"model.layers.{i}"
        norm(f"{layer}.input_layernorm", hidden)
        norm(f"{layer}.post_attention_layernorm", hidden)
        norm(f"{layer}.self_attn.q_norm", HEAD_SIZE)
        norm(f"{layer}.self_attn.k_norm", HEAD_SIZE)
        matrix(f"{layer}.self_attn.q_proj", heads * HEAD_SIZE, hidden)
        matrix(f"{layer}.self_attn.k_proj", KV_HEADS * HEAD_SIZE, hidden)
        matrix(f"{layer}.self_attn.v_proj", KV_HEADS * HEAD_SIZE, hidden)
        matrix(f"{layer}.self_attn.o_proj", hidden, heads * HEAD_SIZE)
        matrix(f"{layer}.mlp.gate_proj", inner, hidden)
        matrix(f"{layer}.mlp.up_proj", inner, hidden)
        matrix(f"{layer}.mlp.down_proj", hidden, inner)
    norm("model.norm", hidden)
    if head != "reward" and not tied:
        matrix("lm_head", VOCAB, hidden)
    if head == "reward":
        matrix("score", 1, hidden)
        # SGLang gives the head a bias; one that is not in the checkpoint stays as it was drawn.
        weights["score.bias"] = torch.zeros(1, dtype=torch.bfloat16)
    save.save_file(weights, str(directory / "model.safetensors"), metadata={"format": "pt"})


def vocabulary(model: Path) -> int:
    """Ids below this are in the model's vocabulary."""
    return int(json.loads((model / "config.json").read_text())["vocab_size"])


if __name__ == "__main__":
    make_model(Path(sys.argv[1]), *sys.argv[2:])
    sys.stdout.write("{}\n")
