"""Embeddings are pooled as the model's folder says, each row alone; what SGLang does not compute is refused by name."""

import importlib
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from enginepool.workers.sglang.host import sentence_modules
from enginepool.workers.sglang.host.sentence_modules import pooling_of
from enginepool.workers.sglang.host.settings import SettingsError
from enginepool.workers.sglang.patches.pooling import means, pool_as_the_model_says

torch: Any = importlib.import_module("torch")
MODELS = "sentence_transformers.models"


def folder(path: Path, kinds: list[str], *configs: Any) -> str:
    """A model with these modules behind its transformer; of the first ones with these configurations."""
    paths = [f"{place}_{kind}" for place, kind in enumerate(kinds, 1)]
    modules = [{"path": "", "type": "custom_st.Transformer"}]
    modules += [{"path": path, "type": f"{MODELS}.{kind}"} for path, kind in zip(paths, kinds, strict=True)]
    (path / "modules.json").write_text(json.dumps(modules))
    for name, config in zip(paths, configs, strict=False):
        (path / name).mkdir()
        (path / name / "config.json").write_text(json.dumps(config))
    return str(path)


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False, "include_prompt": False}, "cls"),
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_lasttoken": True, "word_embedding_dimension": 8}, "last"),
        ({"pooling_mode": "mean", "embedding_dimension": 8}, "mean"),
        ({"pooling_mode": ["lasttoken"]}, "last"),
    ],
)
def test_a_folder_says_how_rows_are_pooled(config: dict[str, Any], pooling: str, tmp_path: Path) -> None:
    assert pooling_of(folder(tmp_path, ["Pooling", "Normalize"], config), None, "BertModel") == pooling


def test_a_hub_that_cannot_be_asked_is_no_model_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class LocalEntryNotFoundError(FileNotFoundError):
        """As of huggingface_hub, whose real one is also raised for 429 and 503."""

    def down(model: str, name: str, revision: str | None) -> Path:
        raise LocalEntryNotFoundError

    monkeypatch.setattr(sentence_modules, "model_file", down)
    known = set[str]()

    def absent(model: str, _: str | None) -> bool:
        return model in known

    monkeypatch.setattr(sentence_modules, "_known_absent", absent)
    for encoder in ("BertModel", "XLMRobertaModel", "Gemma3TextModel"):
        with pytest.raises(SettingsError, match=r"modules\.json: the hub cannot be asked"):
            pooling_of("who/what", None, encoder)
    assert pooling_of("who/what", None, "Qwen3ForCausalLM") == ""
    known.add("who/what")
    assert pooling_of("who/what", None, "BertModel") == ""


def test_a_folder_may_say_nothing(tmp_path: Path) -> None:
    assert pooling_of(str(tmp_path), None, "BertModel") == ""
    assert pooling_of(folder(tmp_path, []), None, "CLIPModel") == ""


REFUSED: list[tuple[list[str], list[Any], str]] = [
    (["Pooling"], [{"pooling_mode_max_tokens": True}], "1_Pooling/config.json: pooling is max_tokens; SGLang pools by cls"),
    (
        ["Pooling"],
        [{"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}],
        "pooling is cls_token and mean_tokens",
    ),
    (["Pooling"], [{"pooling_mode_cls_token": False}], "pooling is none"),
    (["Pooling"], [{"pooling_mode": "mean", "include_prompt": False}], "include_prompt is false"),
    (["Pooling"], [[]], "not a list of modules"),
    (["Pooling"], [], "1_Pooling/config.json: cannot be read .FileNotFoundError., and modules.json names it"),
    (["Pooling", "Dense"], [{"pooling_mode": "mean"}, {}], f"does not compute the module '{MODELS}.Dense'"),
    (["WordWeights"], [{}], f"does not compute the module '{MODELS}.WordWeights'"),
]


@pytest.mark.parametrize(("kinds", "configs", "says"), REFUSED)
def test_what_sglang_does_not_compute_is_refused(kinds: list[str], configs: list[Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=says):
        pooling_of(folder(tmp_path, kinds, *configs), None, "BertModel")


def test_a_list_of_modules_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text('[{}, {"type": "Pooling"}]')
    with pytest.raises(SettingsError, match="not a list of modules"):
        pooling_of(str(tmp_path), None, "BertModel")


def test_dense_layers_are_for_models_for_which_sglang_computes_them(tmp_path: Path) -> None:
    identity = {"activation_function": "torch.nn.modules.linear.Identity"}
    model = folder(tmp_path, ["Pooling", "Dense", "Normalize"], {"pooling_mode_mean_tokens": True}, identity)
    with pytest.raises(SettingsError, match=re.escape("2_Dense/model.safetensors: cannot be read")):
        pooling_of(model, None, "Gemma3TextModel")
    (tmp_path / "2_Dense" / "model.safetensors").touch()
    assert pooling_of(model, None, "Gemma3TextModel") == "mean"
    (tmp_path / "2_Dense" / "config.json").write_text(json.dumps({"activation_function": "torch.nn.modules.activation.Tanh"}))
    with pytest.raises(SettingsError, match="does not compute activation_function"):
        pooling_of(model, None, "Gemma3TextModel")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_mean_of_a_short_row_does_not_depend_on_the_rows_before_it(dtype: Any) -> None:
    """SGLang's own, of one sum over all rows, points elsewhere in bfloat16, and is NaN in float16."""
    torch.manual_seed(0)
    lengths = [4000, 3, 1, 8]
    states = (torch.randn(sum(lengths) + 4, 16) + torch.linspace(0, 40, 16)).to(dtype)
    found = means(states, torch.tensor(lengths, dtype=torch.int32))
    expected = torch.stack([row.double().mean(0) for row in states[: sum(lengths)].split(lengths)])
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected.to(dtype), rtol=1e-5 if dtype == torch.float32 else 0.01, atol=1e-5)


@pytest.mark.parametrize(("pooling", "chosen"), [("", 0), ("cls", 1), ("mean", 2), ("last", 0)])
def test_each_row_is_pooled_by_the_rule_that_was_chosen(pooling: str, chosen: int) -> None:
    class Pooler:
        def __init__(self, pooling_type: int, normalize: bool) -> None:
            self.asked = pooling_type, normalize

    def pool(pooling_type: int, hidden_states: Any, forward_batch: Any) -> str:
        return f"SGLang's {pooling_type}"

    types = SimpleNamespace(LAST=0, CLS=1, MEAN=2)
    module: Any = SimpleNamespace(Pooler=Pooler, pool_hidden_states=pool, PoolingType=types)
    pool_as_the_model_says(module, pooling)
    assert module.Pooler(0, True).asked == (chosen, False)
    batch = SimpleNamespace(extend_seq_lens=torch.tensor([2, 1]))
    assert module.pool_hidden_states(1, torch.ones(3, 4), batch) == "SGLang's 1"
    assert module.pool_hidden_states(2, torch.arange(3.0).reshape(3, 1), batch).tolist() == [[0.5], [2.0]]
