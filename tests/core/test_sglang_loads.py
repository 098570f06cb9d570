"""Loads of models as SGLang has them that do not copy each tensor as it comes: what they leave must be right all the same."""

import asyncio
import importlib
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from enginepool.protocol.layout import layout
from enginepool.protocol.manifest import encode_manifest
from enginepool.transfer.digest import digest_of, views
from enginepool.workers.engine import EngineError
from enginepool.workers.engine_weights import MemoryRegion, NewWeights
from enginepool.workers.sglang.host import process as sglang_process
from enginepool.workers.sglang.patches import scheduler as sglang_scheduler
from enginepool.workers.sglang.weights import loader as sglang_weights
from enginepool.workers.sglang.weights.load_plan import LoadPlan
from enginepool.workers.sglang.weights.load_watch import Unplannable
from enginepool.workers.sglang.weights.loader import ModelWeights
from tests.core.test_sglang_plan import TENSORS, Model, drawn, same, state
from tests.core.test_sglang_updates import Engine

torch: Any = importlib.import_module("torch")
WITHOUT_GRAPHS = SimpleNamespace(model_runner=SimpleNamespace())


class Derives(Model):
    """Makes weights for its attention from others at the end of each load, as Kimi-Linear does."""

    def __init__(self) -> None:
        super().__init__()
        self.derive()

    def derive(self) -> None:
        self.w_kc = self.qk.view(2, 3, 6).transpose(1, 2).contiguous().transpose(1, 2)

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        super().load_weights(weights)
        self.derive()


class DerivesElsewhere(Derives):
    """Keeps what it makes where no module has it."""

    def derive(self) -> None:
        self.kept = [self.qk.view(2, 3, 6).transpose(1, 2).contiguous()]

    @property
    def w_kc(self) -> Any:
        return self.kept[0]


class KeepsWhatCame(Derives):
    """Has one of the checkpoint's tensors itself, and not a copy of it."""

    def derive(self) -> None:
        self.w_kc = torch.ones(6)

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        tensors = dict(weights)
        Model.load_weights(self, tensors.items())
        self.w_kc = tensors["norm"]


class Reshapes(Derives):
    """Has its weights in another shape while they are loaded, as SGLang does for an expert kernel."""

    def derive(self) -> None:
        self.w_kc = self.qk

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        super().load_weights(weights)
        self.qk.data = self.qk.data.reshape(36)


@pytest.mark.parametrize("kind", [Derives, DerivesElsewhere, KeepsWhatCame, Reshapes])
def test_a_load_that_replaces_tensors_of_the_model_is_not_understood(kind: type[Derives]) -> None:
    model = kind()
    before, made, kept = state(model), model.w_kc.clone(), model.w_kc
    with pytest.raises(Unplannable):
        LoadPlan(model, TENSORS)
    assert same(before, state(model))
    assert model.w_kc is kept and torch.equal(kept, made)


class Waits(Model):
    """Copies nothing before it has all, and computes, as GptOss sorts and fuses."""

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        super().load_weights([(name, tensor * 2) for name, tensor in sorted(weights)])


class Group:
    """Rank 0 has sent all; buckets come in their order."""

    name, device = "g", "cpu"

    def __init__(self, seed: int) -> None:
        self.space = torch.zeros(layout(TENSORS).nbytes, dtype=torch.uint8)
        self.came = 0
        for view, (_, tensor) in zip(views(self.space, TENSORS), drawn(seed), strict=True):
            view.copy_(tensor)

    def begin(self, bucket: Any) -> Any:
        bucket.copy_(self.space[self.came : self.came + bucket.numel()])
        self.came += bucket.numel()
        return SimpleNamespace(order=lambda limit: None, wait=lambda limit: None)  # type: ignore[reportUnknownLambdaType]


def test_a_load_that_keeps_what_comes_for_later_finds_it_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_process, "_own_load", [(one.name, one.dtype, one.shape) for one in TENSORS])
    monkeypatch.setattr(sglang_scheduler, "_schedulers", [SimpleNamespace(flush_cache=lambda: True, tp_worker=WITHOUT_GRAPHS)])
    model, expected = Waits(), Waits()
    weights = ModelWeights(model)
    assert "computes" in weights.do_describe({})["plain"]
    weights._member.group = Group(1)  # pyright: ignore[reportPrivateUsage]
    weights.do_receive({"group": "g", "manifest": encode_manifest(TENSORS).decode(), "bucket_bytes": 256})
    expected.load_weights(drawn(1))
    assert same(state(model), state(expected))


class Expert(Model):
    """One rank of several that share out a model's experts: it loads `mine` of them and leaves the others."""

    def __init__(self, mine: str) -> None:
        super().__init__()
        self.mine = mine

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        super().load_weights((name, tensor) for name, tensor in weights if name not in ("q", "k") or name == self.mine)


def test_what_one_rank_leaves_to_another_is_no_weight_that_an_update_may_lack(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = [tensor for tensor in TENSORS if tensor.name != "row"]  # of which Model has a part
    monkeypatch.setattr(sglang_process, "_own_load", [(one.name, one.dtype, one.shape) for one in whole])
    monkeypatch.setattr(sglang_weights, "_weights", {})
    monkeypatch.setattr(sglang_scheduler, "_schedulers", [SimpleNamespace(tp_worker=WITHOUT_GRAPHS)])
    engine, given = Engine(2), {name: tensor for name, tensor in drawn(1) if name != "row"}
    engine.models[:] = Expert("q"), Expert("k")
    space = torch.zeros(layout(whole).nbytes, dtype=torch.uint8)
    for view, tensor in zip(views(space, whole), given.values(), strict=True):
        view.copy_(tensor)
    path = tmp_path / "space"
    path.write_bytes(space.numpy().tobytes())

    async def story() -> None:
        await engine.weights.describe()
        assert engine.weights.model_tensors().optional == {"skipped"}
        weights = NewWeights(tuple(whole), (MemoryRegion("file", space.numel(), path=str(path)),))
        await engine.weights.load_weights(weights, 1, digest_of(space))
        for name in ("q", "k", "norm"):
            chunk = await engine.weights.tensor(name, 0, given[name].numel())
            assert np.array_equal(chunk.values, given[name].numpy().reshape(-1))
        with pytest.raises(EngineError, match="skipped"):
            await engine.weights.tensor("skipped", 0, 1)

    asyncio.run(story())
    engine.weights.close()


@pytest.mark.parametrize("version", ["0.5.17", "0.5.20"])
def test_experts_that_were_rearranged_after_their_load_take_no_updates(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """SGLang does so for a kernel, and of an update it would copy what is not rearranged to where that is."""
    monkeypatch.setattr(sglang_process, "_own_load", [(one.name, one.dtype, one.shape) for one in TENSORS])
    kind = type("UnquantizedFusedMoEMethod", (), {"use_flashinfer_trtllm_moe": version == "0.5.17"})
    model = Model()
    model.quant_method = kind()
    if version == "0.5.20":
        assert "refused" not in ModelWeights(model).do_describe({})
        model.quant_method.w13_swiglu_interleaved = True  # SGLang says it of the method, not of the module
    assert "rearranged" in ModelWeights(model).do_describe({})["refused"]


class Strict(Model):
    """Knows the tensors of its checkpoint and no others, as many loads do; of `once` not a second time, as MiniCPM3's."""

    def __init__(self, once: str = "") -> None:
        super().__init__()
        self.config = SimpleNamespace(tie_word_embeddings=True)
        self.unknown = {once, "lm_head.weight"}

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        for name, tensor in weights:
            if name in self.unknown:
                raise KeyError(name)
            super().load_weights([(name.removesuffix("_tokens.weight"), tensor)])


class Experts(torch.nn.Module):
    """A model of one layer, whose load passes over names that it does not find."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.experts = torch.nn.ParameterDict({"w": torch.zeros(4, 6)})

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        known = dict(self.named_parameters())
        for name, tensor in weights:
            if name in known:
                known[name].data.copy_(tensor)


class Adapted(torch.nn.Module):
    """A layer as SGLang puts it in the place of one that adapters change."""

    def __init__(self, base_layer: Any) -> None:
        torch.nn.Module.__init__(self)
        self.base_layer, self.lora_backend = base_layer, "any"


def test_new_weights_find_the_layers_below_adapters_which_stay_where_they_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = Experts()
    model.experts = Adapted(model.experts)
    assert "experts.w" not in dict(model.named_parameters())
    monkeypatch.setattr(sglang_process, "_own_load", [("experts.w", "float32", (4, 6))])
    ticket = msgspec.json.encode({"do": "describe", "answer": str(tmp_path / "answer")}).decode()
    sglang_weights.load(model, [(ticket, None)])
    found = msgspec.msgpack.decode((tmp_path / "answer").read_bytes())
    assert (found["optional"], found["plain"]) == ([], "")
    assert isinstance(model.experts, Adapted)


def test_a_load_is_not_given_what_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    own = [("embed_tokens.weight", "float32", (8, 6))] + [(one.name, one.dtype, one.shape) for one in TENSORS[1:]]
    monkeypatch.setattr(sglang_process, "_own_load", own)
    described = ModelWeights(Strict()).do_describe({})
    assert (described["optional"], described["plain"]) == (["skipped"], "")
    # An update would fail half-way.
    assert "'norm'" in ModelWeights(Strict("norm")).do_describe({})["refused"]
