"""A model that was not loaded completely is found, with every way to load it, and a complete one is not suspected."""

import importlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from enginepool.workers.sglang.host import process as sglang_process
from enginepool.workers.sglang.weights import completeness
from enginepool.workers.sglang.weights.completeness import Filled, Load, incomplete, incomplete_load

torch: Any = importlib.import_module("torch")
nn: Any = torch.nn
Pairs = Iterable[tuple[str, Any]]


def default(parameter: Any, tensor: Any) -> None:
    """As SGLang's default loader does it."""
    if parameter.numel() == 1 and tensor.numel() == 1:
        parameter.data.fill_(tensor.item())
    else:
        parameter.data.copy_(tensor)


class LlamaForCausalLM(nn.Module):
    """Loads as SGLang's models do: parts are fused, names that it does not know are left out without a word."""

    def __init__(self, tied: bool = False) -> None:
        nn.Module.__init__(self)
        self.embed_tokens = nn.Embedding(16, 8)
        self.norm = nn.Parameter(torch.zeros(8))
        self.scale = nn.Parameter(torch.zeros(1))
        self.qkv_proj = nn.Linear(8, 24, bias=False)
        self.lm_head = self.embed_tokens if tied else nn.Linear(8, 16, bias=False)

    def load_weights(self, weights: Pairs) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            parts = {"q_proj": 0, "k_proj": 8, "v_proj": 16}
            part = next((part for part in parts if part in name), "")
            if part:
                parameters["qkv_proj.weight"].data.narrow(0, parts[part], 8).copy_(tensor)
            elif name in parameters:
                default(parameters[name], tensor)


class Threaded(LlamaForCausalLM):
    """In threads, as DeepSeek's does."""

    def load_weights(self, weights: Pairs) -> None:
        parent = super().load_weights
        with ThreadPoolExecutor(2) as executor:
            for future in [executor.submit(parent, [pair]) for pair in weights]:
                future.result()


class Collecting(LlamaForCausalLM):
    """When all tensors are there."""

    def load_weights(self, weights: Pairs) -> None:
        super().load_weights(list(weights))


class Computing(LlamaForCausalLM):
    """What it computes of them, in a memory of its own."""

    def load_weights(self, weights: Pairs) -> None:
        def computed() -> Iterator[tuple[str, Any]]:
            for name, tensor in weights:
                buffer = torch.empty_like(tensor)
                buffer.copy_(tensor + 1)
                yield name, torch.cat([buffer, buffer]).chunk(2)[0]

        super().load_weights(computed())


class Rebinding(LlamaForCausalLM):
    """By giving parameters the memory of the checkpoint's tensors."""

    def load_weights(self, weights: Pairs) -> None:
        parameters = dict(self.named_parameters())
        rest: list[tuple[str, Any]] = []
        for name, tensor in weights:
            if name in parameters:
                parameters[name].data = tensor.clone()
            else:
                rest.append((name, tensor))
        super().load_weights(rest)


WAYS = [LlamaForCausalLM, Threaded, Collecting, Computing, Rebinding]


def tensors(*without: str, **more: tuple[int, ...]) -> list[tuple[str, Any]]:
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (16, 8), "norm": (8,), "scale": (1,), "lm_head.weight": (16, 8),
        "q_proj.weight": (8, 8), "k_proj.weight": (8, 8), "v_proj.weight": (8, 8),
    }  # fmt: skip
    shapes |= {name.replace("__", "."): shape for name, shape in more.items()}
    return [(name, torch.ones(shape)) for name, shape in shapes.items() if name not in without]


def judged(model: Any, given: list[tuple[str, Any]], *, asked: str = "LlamaForCausalLM", tied: bool = False) -> str:
    """What is said of the load by SGLang's loader, as its processes have it."""

    class Loader:
        def _get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Any]]:
            yield from given

        def load_model(self, model_config: Any, model: Any) -> None:
            weights = self._get_all_weights(model_config, model)
            model.load_weights(weights)

    sglang_process.note_own_load(Loader)
    text = SimpleNamespace(tie_word_embeddings=tied)
    config = SimpleNamespace(architectures=[asked], tie_word_embeddings=False, text_config=text)
    type(model).__name__ = asked
    Loader().load_model(SimpleNamespace(hf_config=config, is_draft_model=False), model)
    assert [name for name, _, _ in sglang_process.own_load()] == [name for name, _ in given]
    assert "load_weights" not in vars(model), "later loads are not watched"
    return incomplete_load()


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completeness, "_first", [])
    monkeypatch.setattr(sglang_process, "_own_load", [])


@pytest.fixture(params=WAYS, ids=lambda way: way.__name__)
def way(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    name = request.param.__name__
    yield request.param
    request.param.__name__ = name


def test_a_complete_load_is_served(way: Callable[..., Any]) -> None:
    assert judged(way(), tensors()) == ""
    assert judged(way(tied=True), tensors("lm_head.weight"), tied=True) == ""
    assert judged(way(tied=True), tensors(), tied=True) == "", "a tied head that the checkpoint has as well"


class PPMissingLayer(nn.Module):
    """In the place of a layer that another stage has."""


def test_a_head_that_another_stage_of_the_pipeline_has_is_not_missed() -> None:
    model = LlamaForCausalLM()
    model.lm_head = PPMissingLayer()
    assert judged(model, tensors()) == ""


def test_the_load_of_a_draft_model_is_its_own_affair() -> None:
    class Loader:
        def _get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Any]]:
            yield from tensors("lm_head.weight")

        def load_model(self, model: Any) -> None:
            model.load_weights(self._get_all_weights(SimpleNamespace(is_draft_model=True), model))

    sglang_process.note_own_load(Loader)
    Loader().load_model(LlamaForCausalLM())
    assert (incomplete_load(), sglang_process.own_load()) == ("", [])


def test_a_parameter_that_no_tensor_fills_is_named(way: Callable[..., Any]) -> None:
    said = "the model is incomplete: no tensor of the checkpoint fills "
    assert judged(way(), tensors("lm_head.weight")) == said + "lm_head.weight"
    assert judged(way(), tensors("scale")) == said + "scale"
    assert judged(way(), tensors("norm", "lm_head.weight")) == said + "norm (and 1 more parameters)"


def test_a_part_of_a_fused_parameter_that_is_missing_is_found(way: Callable[..., Any]) -> None:
    said = judged(way(), tensors("k_proj.weight"))
    assert said == "the model is incomplete: the checkpoint fills 128 of 192 elements of qkv_proj.weight"


def test_a_part_that_comes_twice_does_not_make_up_for_one_that_is_missing(way: Callable[..., Any]) -> None:
    said = judged(way(), tensors("k_proj.weight", also__q_proj=(8, 8)))
    assert said == "the model is incomplete: the checkpoint fills 128 of 192 elements of qkv_proj.weight"


@pytest.mark.parametrize("head", ["score__weight", "v_head__summary__weight", "model__classifier__bias"])
def test_a_head_tensor_that_goes_nowhere_is_named(way: Callable[..., Any], head: str) -> None:
    said = judged(way(), tensors(**{head: (1, 8)}))
    assert said == f"head tensor {head.replace('__', '.')} of the checkpoint goes nowhere: LlamaForCausalLM does not load it"


def test_other_tensors_may_go_nowhere(way: Callable[..., Any]) -> None:
    assert judged(way(), tensors(rotary_emb__inv_freq=(4,))) == ""


def test_a_load_that_was_not_watched_is_not_judged() -> None:
    """Dummy weights have no checkpoint."""
    assert incomplete_load() == ""
    judged(LlamaForCausalLM(), tensors("norm"))
    assert incomplete_load()


def load(asked: str, loaded: str, *unread: str, tied: bool = False, parameters: tuple[Filled, ...] = ()) -> Load:
    return Load((asked,), loaded, tied, parameters, unread)


def test_a_task_that_is_not_that_of_the_loaded_class_is_refused() -> None:
    said = incomplete(load("MistralForSequenceClassification", "TransformersForCausalLM"))
    assert said.startswith("SGLang has no MistralForSequenceClassification of its own, and its Transformers backend")
    said = incomplete(load("Qwen3MoeForSequenceClassification", "TransformersMoEForSequenceClassification"))
    assert "loads it without its head" in said, "the name promises a head that the class does not have"
    assert "for another task" in incomplete(load("LlamaForSequenceClassification", "LlamaForCausalLM"))
    assert "for another task" in incomplete(load("LlamaForCausalLM", "LlamaForSequenceClassification"))
    assert incomplete(load("SmolLM3ForCausalLM", "TransformersForCausalLM")) == ""
    assert incomplete(load("InternLM2ForRewardModel", "InternLM2ForRewardModel")) == ""
    assert incomplete(Load((), "LlamaForCausalLM", False, (), ())) == ""


def test_a_language_head_is_needed_by_what_predicts_tokens_alone() -> None:
    assert incomplete(load("Qwen3ForSequenceClassification", "Qwen3ForSequenceClassification", "lm_head.weight")) == ""
    assert incomplete(load("Qwen3ForCausalLM", "Qwen3ForCausalLM", "lm_head.weight", tied=True)) == ""
    assert "lm_head.weight" in incomplete(load("Qwen3ForCausalLM", "Qwen3ForCausalLM", "lm_head.weight"))


def test_what_checkpoints_lack_is_known_by_name() -> None:
    head = "Qwen3ForSequenceClassification"
    assert incomplete(load(head, head, parameters=(Filled("score.bias", 0, 3),))) == ""
    assert "score.weight" in incomplete(load(head, head, parameters=(Filled("score.weight", 0, 3),)))


def test_of_a_quantized_layer_the_weights_must_be_filled() -> None:
    def said(name: str, written: int) -> str:
        return incomplete(load("Qwen3ForCausalLM", "Qwen3ForCausalLM", parameters=(Filled(name, written, 8, True),)))

    assert said("qkv_proj.input_scale", 0) == "" and said("w2_weight", 6) == ""
    assert "qkv_proj.weight" in said("qkv_proj.weight", 0)
