"""Made ready before the hold: the same bits as `load_weights` gives, from bytes that come later, and nothing that lives on."""

import gc
import importlib
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from enginepool.protocol.layout import layout
from enginepool.protocol.manifest import Tensor, encode_manifest
from enginepool.protocol.messages.weights import MemoryRegion
from enginepool.transfer import shared_memory as regions
from enginepool.transfer.digest import views
from enginepool.workers.sglang.weights.load_plan import LoadPlan
from enginepool.workers.sglang.weights.load_watch import Copy
from enginepool.workers.sglang.weights.prepared_load import HostCopies, PreparedLoad, open_regions
from tests.core.test_sglang_plan import TENSORS, Model, drawn, same, state

torch: Any = importlib.import_module("torch")

NBYTES = layout(TENSORS).nbytes
TEXT = encode_manifest(TENSORS).decode()


@pytest.fixture
def space(tmp_path: Path) -> dict[str, Any]:
    """Where the bytes of an update will lie: nothing but zeros yet."""
    path = tmp_path / "space"
    path.write_bytes(bytes(NBYTES))
    return {"kind": "file", "nbytes": NBYTES, "path": str(path), "handle": "", "device": 0}


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Python looks for cycles when it likes."""
    gc.disable()
    yield
    gc.enable()


def write(space: dict[str, Any], seed: int) -> None:
    """As a stager does: into the file that others have open."""
    bytes_ = torch.from_file(space["path"], shared=True, size=space["nbytes"], dtype=torch.uint8)
    for view, (_, tensor) in zip(views(bytes_, TENSORS), drawn(seed), strict=True):
        view.copy_(tensor)


def copied(model: Any, seed: int) -> None:
    plan, copies = LoadPlan(model, TENSORS), HostCopies()
    for name, tensor in drawn(seed):
        for copy in plan.copies[name]:
            copies.add(copy, tensor)
    copies.replay()


def finish(ready: PreparedLoad) -> int:
    """How many moments it took."""
    moments = 0
    while not ready.done:
        ready.go_on(0)
        moments += 1
    return moments


def test_copies_in_few_calls_give_the_same_bits_as_load_weights() -> None:
    together, plain = Model(), Model()
    for seed in (1, 2):
        copied(together, seed)
        plain.load_weights(drawn(seed))
        assert same(state(together), state(plain))


def test_elements_are_copied_as_the_widest_words_that_both_ends_allow_and_keep_every_bit() -> None:
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)  # every bfloat16, NaNs of all kinds among them
    cases = [
        (torch.zeros(1 << 16, dtype=torch.bfloat16), bits.view(torch.bfloat16), torch.int64),
        (torch.zeros(1 << 16, dtype=torch.bfloat16)[2:], bits.view(torch.bfloat16)[2:], torch.int32),
        (torch.zeros(3, dtype=torch.bfloat16), bits.view(torch.bfloat16)[-3:], torch.int16),
        (torch.zeros(4, dtype=torch.bool), torch.tensor([True, False, True, True]), torch.int32),
        (torch.zeros(3, dtype=torch.bool), torch.tensor([True, False, True]), torch.uint8),
        (torch.zeros((), dtype=torch.float64), torch.tensor(2.5, dtype=torch.float64), torch.int64),
        (torch.zeros(8), bits[:8].view(torch.bfloat16).float().bfloat16(), torch.float32),
    ]
    copies = HostCopies()
    for target, source, _ in cases:
        copies.add(Copy(target, tuple(source.shape), source.stride()), source)
    [run] = copies._runs  # pyright: ignore[reportPrivateUsage]
    found = {target.data_ptr(): target.dtype for targets, _ in run.together.values() for target in targets}
    assert [found[target.data_ptr()] for target, _, _ in cases] == [word for _, _, word in cases]
    copies.replay()
    for target, source, _ in cases:
        if target.dtype == source.dtype:
            target, source = (tensor.reshape(-1).view(torch.uint8) for tensor in (target, source))
        assert torch.equal(target.nan_to_num(), source.to(target.dtype).nan_to_num())


def over(model: Any, name: str, tensor: Any) -> None:
    """Some memory is written twice, filled before, and filled after."""
    if name == "k":
        model.norm.data.fill_(2.0)
        model.qk.data[:3].copy_(tensor[:1].expand(3, 6))
    elif name == "norm":
        model.qk.data[5:].fill_(7.0)


def test_what_is_written_twice_holds_what_load_weights_leaves() -> None:
    together, plain = Model(over), Model(over)
    copied(together, 3)
    plain.load_weights(drawn(3))
    assert same(state(together), state(plain))
    assert bool((together.qk[5:] == 7).all())


def test_bytes_that_come_after_it_was_made_ready_are_those_that_are_taken(space: dict[str, Any]) -> None:
    model, plain = Model(), Model()
    before = state(model)
    ready = PreparedLoad(1, LoadPlan(model, TENSORS), [space], TEXT)
    assert not ready.done
    assert finish(ready) > len(TENSORS)
    assert same(state(model), before)
    for seed in (1, 2):
        write(space, seed)
        ready.copies.replay()
        plain.load_weights(drawn(seed))
        assert same(state(model), state(plain))


@pytest.mark.parametrize("sizes", [[256, 256], [512, 256, 256, 512]])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_in_shards_that_cut_tensors_are_taken_as_those_of_one_space(tmp_path: Path, sizes: list[int], dtype: str) -> None:
    """A tensor is copied whole, by rows, by columns, transposed, reshaped, expanded, and as a single element."""
    tensors = [
        Tensor("first", dtype, (7,)),
        Tensor("big", dtype, (96, 24)),
        Tensor("empty", dtype, (0, 3)),
        Tensor("last", dtype, (9,)),
    ]
    where = layout(tensors)
    whole = torch.randint(0, 256, (where.nbytes,), dtype=torch.uint8)
    described: list[dict[str, Any]] = []
    sizes = [*sizes, where.nbytes]
    for number, size in enumerate(sizes):
        begin = sum(sizes[:number])
        path = tmp_path / f"shard-{number}"
        path.write_bytes(whole[begin : begin + size].numpy().tobytes().ljust(size, b"?"))
        described.append({"kind": "file", "nbytes": size, "path": str(path)})
    opened = open_regions(described, where.nbytes)
    expected = dict(zip((one.name for one in tensors), views(whole, tensors), strict=True))
    for name, tensor in opened.tensors(tensors):
        assert tensor.shape == expected[name].shape and torch.equal(bits(tensor), bits(expected[name]))
    big, at = tensors[1], where.offsets[1]
    begins, parts = zip(*opened.elements(big, at), strict=True)
    assert len(parts) > 1, "it is cut"
    slices: list[Callable[[Any], Any]] = [
        lambda one: one, lambda one: one[13:77], lambda one: one[:, 5:17], lambda one: one[11:80:3, 2::7], lambda one: one.t(),
        lambda one: one.view(4, 24, 24)[:, 3:20].transpose(0, 2), lambda one: one.view(-1)[100:900], lambda one: one[40, 3],
        lambda one: one[:1].expand(3, 24), lambda one: one[5:5],
    ]  # fmt: skip
    for choose in slices:
        source = choose(torch.empty(96, 24, device="meta"))
        target = torch.zeros(source.shape, dtype=getattr(torch, dtype))
        copies = HostCopies()
        for part, own in Copy(target, tuple(source.shape), source.stride(), source.storage_offset()).cut(begins):
            assert own.target.numel() == 0 or own.target.untyped_storage().data_ptr() == target.untyped_storage().data_ptr()
            copies.add(own, parts[part])
        copies.replay()
        assert torch.equal(bits(target), bits(choose(expected["big"])))
    filled = Copy(torch.zeros(3), fill=2.0)
    assert list(filled.cut(begins)) == [(0, filled)]


def bits(tensor: Any) -> Any:
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("wrong", [{"nbytes": NBYTES - 1}, {"path": "/gone"}, {"nbytes": NBYTES + 1}])
def test_a_space_that_is_not_there_whole_is_refused(space: dict[str, Any], wrong: dict[str, Any]) -> None:
    with pytest.raises((ValueError, RuntimeError)):
        open_regions([space | wrong], NBYTES)


@pytest.mark.parametrize("on_gpu", [True, False])
def test_memory_of_the_host_is_pinned_for_an_engine_on_a_gpu(
    space: dict[str, Any], monkeypatch: pytest.MonkeyPatch, on_gpu: bool
) -> None:
    asked: list[bool] = []

    def opened(_space: MemoryRegion, *, by_current: bool, pinned: bool) -> Any:
        asked.append(pinned)
        assert by_current
        return torch.empty(0)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: on_gpu)
    monkeypatch.setattr(regions, "open_space", opened)
    open_regions([space], NBYTES)
    assert asked == [on_gpu]


def test_a_model_that_was_moved_is_not_made_ready(space: dict[str, Any]) -> None:
    model = Model()
    plan = LoadPlan(model, TENSORS)
    assert plan.stays()
    model.norm.data = model.norm.data.clone()
    assert not plan.stays()
    with pytest.raises(ValueError, match="memory"):
        finish(PreparedLoad(1, plan, [space], TEXT))


def test_a_parameter_in_the_place_of_another_is_seen() -> None:
    model = Model()
    plan = LoadPlan(model, TENSORS)
    model.norm = torch.nn.Parameter(model.norm.data, requires_grad=False)
    assert not plan.stays()


def test_only_the_one_memory_of_a_gpu_serves_another_update(space: dict[str, Any]) -> None:
    ready = PreparedLoad(1, LoadPlan(Model(), TENSORS), [space], TEXT)
    finish(ready)
    assert not ready.serves(2, [space], TEXT)
    handle = space | {"kind": "cuda", "handle": "00ff"}
    ready._source = [handle], TEXT  # pyright: ignore[reportPrivateUsage]  (no GPU here)
    assert not ready.serves(2, [handle | {"handle": "00fe"}], TEXT)
    assert not ready.serves(2, [handle], TEXT[:-1])
    assert ready.serves(2, [handle], TEXT) and (ready.name, ready.done) == (2, False)
    assert finish(ready) == 2


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("moments", [0, 2, 100])
def test_what_is_let_go_of_is_gone_at_once(space: dict[str, Any], moments: int) -> None:
    ready = PreparedLoad(1, LoadPlan(Model(), TENSORS), [space], TEXT)
    for _ in range(moments):
        ready.go_on(0)
    gone = weakref.ref(ready)
    ready.close()
    del ready
    assert gone() is None
