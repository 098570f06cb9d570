"""Models without tokenizer files, as transformers reads them."""

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from enginepool.cli.tiny_model_files import make_tiny_model
from enginepool.workers.sglang.host.tokenizer import tokenizer_of

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("model_type", ["qwen2", "bert", "xlm-roberta", "gemma2"])
def test_a_model_folder_without_tokenizer_files_has_no_tokenizer(tmp_path: Path, model_type: str) -> None:
    """transformers makes one all the same, of special tokens."""
    transformers: Any = importlib.import_module("transformers")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    made = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    assert tokenizer_of(SimpleNamespace(tokenizer=made)) is None
    whole = transformers.AutoTokenizer.from_pretrained(str(make_tiny_model(tmp_path / "whole")))
    assert tokenizer_of(SimpleNamespace(tokenizer=whole)) is whole
