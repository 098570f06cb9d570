"""Models without tokenizer files, as transformers reads them."""

import asyncio
import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from enginepool.cli.tiny_model_files import make_tiny_model
from enginepool.protocol.messages import Tokenize
from enginepool.workers.sglang.host.tokenizer import tokenizer_of
from enginepool.workers.sglang.text.engine_tokenizer import EngineTokenizer
from enginepool.workers.texts import TextTask
from tests.core.machines import CAN

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


def test_a_copy_of_the_tokenizer_finds_the_tokens_and_the_texts_that_the_tokenizer_does(tmp_path: Path) -> None:
    async def act() -> None:
        transformers: Any = importlib.import_module("transformers")
        made = transformers.AutoTokenizer.from_pretrained(str(make_tiny_model(tmp_path / "model")))
        tm = SimpleNamespace(tokenizer=made, model_config=SimpleNamespace(is_embedding_gemma=False))
        tokenizer, can = EngineTokenizer(), CAN
        pairs = [("Is it polite? ", "Good day!"), ("äöü ", "\n\n  x" * 1000), ("", "Go away!")]
        found = [await tokenizer.ids(tm, TextTask(pairs, Tokenize((1, 1), [], long=long)), can) for long in (False, True)]
        assert found[0] == found[1] and len(found[0].rows) == 3
        texts = [await tokenizer.texts(tm, found[0].rows, skip_special_tokens=True, long=long) for long in (False, True)]
        assert texts[0] == texts[1] and texts[0][0].endswith("Good day!")
        tokenizer.close()

    asyncio.run(act())
