"""A plan of copies: what it understands gives the same bits as `load_weights`, what it does not is refused, a proof leaves no
trace."""

import importlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from enginepool.protocol.manifest import Tensor
from enginepool.protocol.messages.weight_reports import Finding
from enginepool.workers.sglang.weights.load_plan import LoadPlan, digest_of_tensor
from enginepool.workers.sglang.weights.load_watch import Unplannable
from enginepool.workers.sglang.weights.model_inspection import part_findings
from enginepool.workers.sglang.weights.rank_answers import whole_findings

torch: Any = importlib.import_module("torch")

TENSORS = [
    Tensor("embed", "float32", (8, 6)),
    Tensor("q", "float32", (4, 6)),
    Tensor("k", "float32", (2, 6)),
    Tensor("row", "bfloat16", (6, 10)),
    Tensor("norm", "float32", (6,)),
    Tensor("skipped", "float32", (3,)),
]

Load = Callable[[Any, str, Any], Any]


class Model(torch.nn.Module):
    """Loads as SGLang's models do: fused, sharded, tied, skipped; `extra` sees each tensor too."""

    def __init__(self, extra: Load = lambda model, name, tensor: None) -> None:
        torch.nn.Module.__init__(self)
        self.extra = extra
        generator = torch.Generator().manual_seed(0)
        for name, shape in {"embed": (8, 6), "head": (8, 6), "qk": (6, 6), "row": (6, 5), "norm": (6,)}.items():
            parameter = torch.nn.Parameter(torch.randn(shape, generator=generator), requires_grad=False)
            self.register_parameter(name, parameter)

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        for name, tensor in weights:
            changed = self.extra(self, name, tensor)
            tensor = tensor if changed is None else changed
            if name == "embed":
                self.embed.data.copy_(tensor)
                self.head.data.copy_(tensor)
            elif name == "q":
                self.qk.data.narrow(0, 0, 4).copy_(tensor)
            elif name == "k":
                self.qk.data[4:].copy_(tensor)
            elif name == "row":
                self.row.data.copy_(tensor.narrow(1, 5, 5))
            elif name == "norm":
                self.norm.data.copy_(tensor.view(6))


def drawn(seed: int) -> list[tuple[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    return [(one.name, torch.randn(one.shape, generator=generator).to(getattr(torch, one.dtype))) for one in TENSORS]


def state(model: Any) -> list[Any]:
    return [parameter.clone() for parameter in model.parameters()]


def same(one: list[Any], other: list[Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_replay_gives_the_same_bits_as_load_weights() -> None:
    replayed, plain = Model(), Model()
    before = state(replayed)
    plan = LoadPlan(replayed, TENSORS)
    assert same(before, state(replayed))
    for seed in (1, 2):
        plan.replay(drawn(seed))
        plain.load_weights(drawn(seed))
        assert same(state(replayed), state(plain))
    plan.replay(drawn(3)[1:2])
    plain.load_weights(drawn(3)[1:2])
    assert same(state(replayed), state(plain))


def test_a_proof_changes_every_bit_and_puts_it_back() -> None:
    loads: list[str] = []
    model = Model(lambda _model, name, tensor: loads.append(name) if not tensor.is_meta else None)
    before = state(model)
    plan = LoadPlan(model, TENSORS)
    plan.prove(TENSORS)
    assert same(before, state(model))
    assert loads == [tensor.name for tensor in TENSORS if tensor.name != "skipped"]
    assert plan.copies["skipped"] == []


def test_a_tensor_is_read_back_as_far_as_the_model_holds_it() -> None:
    model = Model()
    plan = LoadPlan(model, TENSORS)
    tensors = dict(drawn(4))
    plan.replay(tensors.items())
    for name in ("embed", "q", "k", "norm"):
        tensor, here = plan.read(name, tensors[name].shape)
        assert torch.equal(tensor, tensors[name]) and bool(here.all())
    tensor, here = plan.read("row", (6, 10), torch.bfloat16)
    assert torch.equal(here, torch.arange(10).expand(6, 10) >= 5)
    assert torch.equal(tensor[:, 5:], tensors["row"][:, 5:]) and not tensor[:, :5].any()


@pytest.mark.parametrize("size", [1, 200, 999])
def test_a_digest_does_not_depend_on_where_a_tensor_lies(size: int) -> None:
    tensor = torch.arange(1000, dtype=torch.bfloat16)[1 : 1 + size]
    assert digest_of_tensor(tensor, 256).text() == digest_of_tensor(tensor.clone(), 256).text()


def adds(model: Any, name: str, tensor: Any) -> None:
    if name == "norm":
        model.norm.data.add_(1)


def converts(model: Any, name: str, tensor: Any) -> None:
    if name == "norm":
        model.norm.data.copy_(tensor + 1)


def asks(model: Any, name: str, tensor: Any) -> None:
    if name == "norm" and float(tensor[0]) > 0:
        model.norm.data.zero_()


@pytest.mark.parametrize(("extra", "why"), [(adds, "more than copy"), (converts, "computes"), (asks, "norm")])
def test_a_load_that_computes_is_not_understood(extra: Load, why: str) -> None:
    model = Model(extra)
    before = state(model)
    with pytest.raises(Unplannable, match=why):
        LoadPlan(model, TENSORS)
    assert same(before, state(model))


def findings(*models: Any) -> list[Finding]:
    """Of the ranks of an engine: (model, plan) of each."""
    return whole_findings([part_findings(model, plan) for model, plan in models])


def test_a_tensor_is_zero_only_where_the_parts_of_all_ranks_are() -> None:
    class Half(torch.nn.Module):
        """Half of each row, and all of the norm."""

        def __init__(self, rank: int) -> None:
            torch.nn.Module.__init__(self)
            self.rank = rank
            self.q = torch.nn.Parameter(torch.ones(3, 2), requires_grad=False)
            self.norm = torch.nn.Parameter(torch.ones(4), requires_grad=False)

        def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
            for name, tensor in weights:
                part = tensor if name == "norm" else tensor.narrow(1, 2 * self.rank, 2)
                getattr(self, name).data.copy_(part)

    tensors = [Tensor("q", "float32", (3, 4)), Tensor("norm", "float32", (4,))]
    first, second = (Half(rank) for rank in range(2))
    ranks = [(model, LoadPlan(model, tensors)) for model in (first, second)]
    first.q.zero_()
    assert findings(*ranks) == [], "the other half is not zero"
    second.q.zero_()
    assert findings(*ranks) == [Finding("q", "zero", 12)]
    for model in (first, second):
        model.q[0] = model.norm[0] = float("nan")
    assert findings(*ranks) == [Finding("q", "nan", 4), Finding("norm", "nan", 1)]
    for model in (first, second):
        model.q.fill_(1.0)
        model.norm.fill_(1.0)
    second.norm.zero_()
    assert findings(*ranks) == [Finding("norm", "zero", 4)], "both hold all of it, and one of them has lost it"


def test_all_parts_of_a_tensor_are_looked_at_and_one_that_is_held_twice_counts_once() -> None:
    class Fused(torch.nn.Module):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.experts = torch.nn.Parameter(torch.ones(4, 6, 2), requires_grad=False)
            self.embed = torch.nn.Parameter(torch.ones(3, 2), requires_grad=False)
            self.head = torch.nn.Parameter(torch.ones(3, 2), requires_grad=False)

        def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
            for name, tensor in weights:
                if name == "experts":
                    for number in range(4):
                        self.experts.data[number].copy_(tensor[number])
                else:
                    self.embed.data.copy_(tensor)
                    self.head.data.copy_(tensor)

    model, tensors = Fused(), [Tensor("experts", "float32", (4, 6, 2)), Tensor("embed", "float32", (3, 2))]
    plan = LoadPlan(model, tensors)
    model.experts[2, 0, 1] = float("nan")
    model.embed[0, 0] = model.head[0, 0] = float("inf")
    assert findings((model, plan)) == [Finding("experts", "nan", 1), Finding("embed", "infinity", 1)]
    model.embed[0, 0] = 1.0
    assert findings((model, plan))[1] == Finding("embed", "infinity", 1), "one of the places alone"
    model.experts.fill_(1.0)
    model.head.zero_()
    model.experts[0] = 0.0
    assert findings((model, plan)) == [Finding("embed", "zero", 6)], "one expert of four is zero"
    model.experts.zero_()
    assert findings((model, plan))[0] == Finding("experts", "zero", 48)


def test_constants_are_filled_in_again() -> None:
    def fills(model: Any, name: str, tensor: Any) -> None:
        if name == "k":
            model.norm.data.fill_(2.0)

    model = Model(fills)
    plan = LoadPlan(model, TENSORS)
    plan.replay(drawn(1)[1:3])
    assert bool((model.norm == 2).all())


def test_a_plan_that_would_give_other_weights_is_found_out_and_the_model_is_as_before() -> None:
    def swaps(model: Any, name: str, tensor: Any) -> Any:
        return tensor.flip(0) if name == "q" and not tensor.is_meta else None

    model = Model(swaps)
    before = state(model)
    plan = LoadPlan(model, TENSORS)
    with pytest.raises(Unplannable, match="q: a replay would give other weights"):
        plan.prove(TENSORS)
    assert same(before, state(model))


def test_a_load_that_writes_elsewhere_too_is_told_apart() -> None:
    def elsewhere(model: Any, name: str, tensor: Any) -> None:
        if name == "q" and not tensor.is_meta:
            model.norm.data[0] = 5.0

    model = Model(elsewhere)
    plan = LoadPlan(model, TENSORS[:2])
    with pytest.raises(RuntimeError, match="not as before"):
        plan.prove(TENSORS[:2])


def test_a_plan_holds_while_the_models_memory_stays() -> None:
    model = Model()
    plan = LoadPlan(model, TENSORS)
    for looked in (False, True):
        assert plan.holds(["q", "k"], looked=looked) and not plan.holds(["unknown"], looked=looked)
    model.norm.data = model.norm.data.clone()
    assert not plan.holds(["q", "k"]) and not plan.holds(["q", "k"], looked=True)


class Number(Model):
    """Has a parameter of one element, which it reads as a number."""

    def __init__(self, load: Callable[[Any, float], None]) -> None:
        Model.__init__(self)
        self.load = load
        self.bias = torch.nn.Parameter(torch.zeros(1), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        rest: list[tuple[str, Any]] = []
        for name, tensor in weights:
            if name == "bias":
                self.load(self.bias.data, tensor.item())
            else:
                rest.append((name, tensor))
        super().load_weights(rest)


BIAS = Tensor("bias", "float32", (1,))


def filled(bias: Any, number: float) -> None:
    bias.fill_(number)


def test_a_number_that_is_filled_in_is_a_copy() -> None:
    replayed = Number(filled)
    plan = LoadPlan(replayed, [BIAS, *TENSORS])
    plan.prove([BIAS, *TENSORS])
    assert replayed.bias.item() == 0
    plan.replay([("bias", torch.tensor([0.25]))])
    assert replayed.bias.item() == 0.25
    assert plan.read("bias", (1,))[0].item() == 0.25


def doubled(bias: Any, number: float) -> None:
    bias.fill_(number * 2)


def chosen(bias: Any, number: float) -> None:
    bias.fill_(0.5 if number > 0 else 0.25)


def added(bias: Any, number: float) -> None:
    bias.add_(number)


def dropped(bias: Any, number: float) -> None:
    pass


@pytest.mark.parametrize("load", [doubled, chosen, added, dropped])
def test_what_is_done_with_a_number_otherwise_is_refused(load: Callable[[Any, float], None]) -> None:
    model = Number(load)
    with pytest.raises(Unplannable, match="bias: its load "):
        LoadPlan(model, [BIAS, *TENSORS])
    assert model.bias.item() == 0
