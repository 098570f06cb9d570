"""The small models that demos and tests make for themselves."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from enginepool.cli.tiny_model_files import make_tiny_model

pytestmark = pytest.mark.engine


def weights(directory: Path) -> dict[str, Any]:
    return importlib.import_module("safetensors.numpy").load_file(directory / "model.safetensors")


def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    first, again, other = (weights(make_tiny_model(tmp_path / str(i), seed=seed)) for i, seed in enumerate((1, 1, 2)))
    assert all((first[name] == again[name]).all() for name in first)
    assert any((first[name] != other[name]).any() for name in first)


def test_a_reward_model_has_a_head_of_the_wanted_width(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path, head="reward", labels=5)
    assert weights(directory)["score.weight"].shape == (5, 64)
    assert len(json.loads((directory / "config.json").read_text())["id2label"]) == 5


def test_the_tokenizer_gives_any_text_back(tmp_path: Path) -> None:
    tokenizers: Any = importlib.import_module("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(make_tiny_model(tmp_path) / "tokenizer.json"))
    for text in ("What is the capital of France?", "Ω≈ç√ 你好\n\t", ""):
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids) == text
        assert all(0 <= token < 512 for token in ids)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(RuntimeError, match="needs tokenizers, which is not installed here: pip install tokenizers"):
        make_tiny_model(tmp_path)
