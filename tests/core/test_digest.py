"""The digest in torch is that of the specification, however the bytes are cut; findings name what is wrong, and no more."""

import importlib
import random
from typing import Any

import numpy as np
import pytest

from enginepool.protocol.layout import buckets, digest_text, layout
from enginepool.protocol.manifest import Tensor
from enginepool.protocol.messages.weight_reports import Finding
from enginepool.transfer.digest import Digest, DigestBatch, Findings, digest_of, use_once, views

torch: Any = importlib.import_module("torch")
tree_leaves: Any = importlib.import_module("torch.utils._pytree").tree_leaves
TorchDispatchMode: Any = importlib.import_module("torch.utils._python_dispatch").TorchDispatchMode


def specified(data: bytes) -> str:
    words = np.frombuffer(data, "<i4").astype(object)
    return digest_text(sum(words), sum(word * (i + 1) for i, word in enumerate(words)))


def space_of(data: bytes) -> Any:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@pytest.mark.parametrize("nbytes", [256, 4096 * 4, 4096 * 4 + 256, 300_032])
def test_the_digest_is_the_specified_one(nbytes: int) -> None:
    data = random.Random(nbytes).randbytes(nbytes)
    assert digest_of(space_of(data)) == specified(data)


@pytest.mark.parametrize("bucket_bytes", [256, 16_384, 65_792, 1 << 20])
def test_the_digest_is_the_same_however_the_bytes_are_cut(bucket_bytes: int) -> None:
    data = random.Random(1).randbytes(300_032)
    space = space_of(data)
    digest = Digest()
    for at in reversed(range(0, len(data), bucket_bytes)):
        digest.add(space[at : at + bucket_bytes], at)
    assert digest.text() == specified(data)


def test_the_digest_of_large_words_does_not_saturate() -> None:
    data = b"\xff\xff\xff\x7f" * 100_032
    assert digest_of(space_of(data)) == specified(data)


def test_a_swap_of_two_words_changes_the_digest() -> None:
    data = bytearray(512)
    data[0:4], data[256:260] = b"\1\0\0\0", b"\2\0\0\0"
    swapped = bytearray(data)
    swapped[0:4], swapped[256:260] = data[256:260], data[0:4]
    assert digest_of(space_of(bytes(data))) != digest_of(space_of(bytes(swapped)))


MANIFEST = [
    Tensor("a", "bfloat16", (3, 5)),
    Tensor("b", "float32", (700,)),
    Tensor("c", "float8_e4m3fn", (9,)),
    Tensor("d", "int32", (2, 2)),
    Tensor("e", "float16", ()),
    Tensor("f", "float32", (0, 4)),
]


def filled() -> tuple[Any, dict[str, Any]]:
    space = torch.zeros(layout(MANIFEST).nbytes, dtype=torch.uint8)
    tensors = dict(zip((tensor.name for tensor in MANIFEST), views(space, MANIFEST), strict=True))
    for tensor in tensors.values():
        tensor.fill_(1)
    return space, tensors


def findings(tensors: dict[str, Any]) -> list[Finding]:
    look = Findings()
    look.add(DigestBatch(list(tensors), list(tensors.values())))
    return look.found()


def test_whole_tensors_without_fault_give_no_finding() -> None:
    _, tensors = filled()
    assert findings(tensors) == []
    assert Findings().found() == []


def test_nan_infinity_and_zeros_are_found_and_counted_by_name() -> None:
    _, tensors = filled()
    tensors["a"][0, 1] = float("nan")
    tensors["a"][1, :2] = float("-inf")
    tensors["b"].zero_()
    tensors["c"][4] = float("nan")
    tensors["d"].zero_()
    tensors["e"].fill_(float("inf"))
    assert findings(tensors) == [
        Finding("a", "nan", 1),
        Finding("a", "infinity", 2),
        Finding("b", "zero", 700),
        Finding("c", "nan", 1),
        Finding("d", "zero", 4),
        Finding("e", "infinity", 1),
    ]


class Used(TorchDispatchMode):
    """Notes torch's operations, with the dtypes that they are given."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.operations: set[tuple[Any, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors: list[Any] = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        self.operations.add((str(func), *sorted({str(tensor.dtype) for tensor in tensors})))
        return func(*args, **kwargs or {})


def test_what_an_update_is_looked_at_with_has_been_used_once() -> None:
    space, tensors = filled()
    before, then = Used(), Used()
    with before:
        use_once("cpu", {tensor.dtype for tensor in tensors.values()})
    with then:
        digest, look = Digest(), Findings()
        for at in range(0, space.numel(), 256):
            digest.add(space[at : at + 256], at)
        look.add(DigestBatch(list(tensors), list(tensors.values())))
        assert (digest.text(), look.found()) == (digest_of(space), [])
    views_ = {one for one in then.operations if one[0].split(".")[1] in ("view", "slice", "select", "detach", "alias")}
    assert len(then.operations - views_) > 5 and then.operations - views_ <= before.operations


def test_views_hold_the_bytes_that_the_buckets_brought() -> None:
    sent, tensors = filled()
    tensors["b"].copy_(torch.arange(700))
    received = torch.full_like(sent, 7)
    for bucket in buckets(MANIFEST, 512):
        received[bucket.at : bucket.at + bucket.nbytes] = sent[bucket.at : bucket.at + bucket.nbytes]
    for mine, theirs in zip(views(received, MANIFEST), tensors.values(), strict=True):
        assert torch.equal(mine.view(torch.uint8) if mine.dim() else mine, theirs.view(torch.uint8) if theirs.dim() else theirs)
