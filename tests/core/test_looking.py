"""One look gives the specified digest and findings, however its parts come: in torch, by the interpreted kernels, on a GPU."""

import importlib
import random
import sys
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from enginepool.protocol.layout import ALIGNMENT, digest_text, layout
from enginepool.protocol.manifest import SIZES, Tensor
from enginepool.protocol.messages.weight_reports import Finding
from enginepool.transfer import digest as digests
from enginepool.transfer.digest import Digest, DigestBatch, Findings, make_ready, views
from enginepool.transfer.weight_scan import WeightScan
from tests.core.interpreted import allow_runtime_bounds, run_interpreted

torch: Any = importlib.import_module("torch")
#: what a tensor that is drawn is filled with, and what is planted in it
OTHERS = ("drawn", 0.0, -0.0, 1.0)
PLANTED = (float("nan"), float("inf"), float("-inf"), -0.0, 1.0)
#: the least numbers that float16, bfloat16 and float32 do not hold, and others below and above, as far as a dtype has them
LARGE = tuple(
    sign * number
    for limit in (65520.0, (2 - 2**-8) * 2.0**127, (2 - 2**-24) * 2.0**127)
    for number in (limit, limit * (1 - 2.0**-20), limit * 1.5)
    for sign in (1, -1)
)
SEEDS = 12


def drawn_manifest(chance: random.Random) -> list[Tensor]:
    """Tensors of all dtypes and sizes: with nothing in them, of one number, of more words than one program reads."""

    def shape() -> tuple[int, ...]:
        return chance.choice([(), (0, 3), (1,), (128,), (chance.randint(1, 500), 7), (chance.randint(30_000, 90_000),)])

    return [Tensor(f"t{i}", chance.choice(list(SIZES)), shape()) for i in range(chance.randint(1, 14))]


def drawn_targets(chance: random.Random, manifest: list[Tensor]) -> list[str]:
    """The dtypes in which an engine holds them."""
    return [chance.choice(["", "", "float16", "bfloat16", "float32", "int8"]) for _ in manifest]


def drawn_space(chance: random.Random, manifest: list[Tensor]) -> Any:
    """Its bytes, in memory of the host."""
    draw = torch.Generator().manual_seed(chance.getrandbits(32))
    space = torch.zeros(layout(manifest).nbytes, dtype=torch.uint8)
    for tensor in views(space, manifest):
        others = chance.choice(OTHERS)
        if others == "drawn":
            tensor.copy_(torch.randn(tensor.shape, generator=draw) * 3)
        else:
            tensor.fill_(others)
        flat = tensor.view(-1)
        for _ in range(chance.choice([0, 0, 1, 3]) if len(flat) else 0):
            at = chance.randrange(len(flat))
            if chance.random() < 0.3:
                # The least magnitude that there is: 1 in the bits, of either sign.
                bits = flat[at : at + 1].view(torch.uint8)
                bits.copy_(torch.tensor([1] + [0] * (len(bits) - 1)))
            elif tensor.dtype.is_floating_point:
                number = chance.choice(PLANTED) if chance.random() < 0.5 else chance.choice(LARGE)
                flat[at : at + 1].copy_(torch.tensor([number], dtype=torch.float64))
            else:
                flat[at] = chance.choice([0, 1])
    return space


def drawn_bounds(chance: random.Random, nbytes: int) -> list[int]:
    """Some parts are empty, most tensors are cut."""
    groups = nbytes // ALIGNMENT
    inner = [chance.randint(0, groups) for _ in range(chance.choice([0, 1, 5, 20]))]
    return [ALIGNMENT * at for at in sorted(inner)] + [nbytes]


def specified(space: Any, manifest: list[Tensor], targets: list[str] | None = None) -> tuple[str, list[Finding]]:
    """By the sums of the specification, and number for number."""
    words = space.view(torch.int32).numpy().astype(np.uint64)
    found: list[Finding] = []
    for one, tensor, target in zip(manifest, views(space, manifest), targets or [""] * len(manifest), strict=True):
        wide = tensor.to(torch.float64)
        if one.nbytes and not wide.any():
            found.append(Finding(one.name, "zero", wide.numel()))
        if nan := int(wide.isnan().sum()):
            found.append(Finding(one.name, "nan", nan))
        if infinity := int(wide.isinf().sum()):
            found.append(Finding(one.name, "infinity", infinity))
        floats = tensor.dtype.is_floating_point and target.startswith(("float", "bfloat"))
        if floats and (large := int((tensor.to(getattr(torch, target)).isinf() & wide.isfinite()).sum())):
            found.append(Finding(one.name, "overflow", large))
    places = np.arange(1, len(words) + 1, dtype=np.uint64)
    return digest_text(int(words.sum()), int((words * places).sum())), found


def by_torch(space: Any, manifest: list[Tensor], targets: list[str]) -> tuple[str, list[Finding]]:
    """One after the other, each at once."""
    digest, findings = Digest(), Findings()
    digest.add(space, 0)
    findings.add(DigestBatch([tensor.name for tensor in manifest], views(space, manifest), targets))
    return digest.text(), findings.found()


def received(chance: random.Random, look: WeightScan, space: Any, bounds: list[int], sent: Any) -> tuple[str, list[Finding]]:
    """What a look finds whose parts come in any order, some of them together, each just before it is looked at."""
    space.fill_(255)
    edges = [0, *bounds]
    cuts = sorted({0, len(bounds), *(chance.randrange(len(bounds)) for _ in range(chance.choice([0, 3, 30])))})
    turns = list(pairwise(cuts))
    chance.shuffle(turns)
    looking = look.begin()
    for first, until in turns:
        here = slice(edges[first], edges[until])
        space[here].copy_(sent[here])
        if until == first + 1:
            looking.add(first)
        else:
            looking.add(first, until)
    return looking.result()


def check(seed: int, device: str) -> list[Finding]:
    """That a look there gives what is specified, in two updates of the same memory, which is larger; what was found."""
    chance = random.Random(seed)
    manifest = drawn_manifest(chance)
    nbytes = layout(manifest).nbytes
    bounds = drawn_bounds(chance, nbytes)
    memory = torch.full((nbytes + 512,), 255, dtype=torch.uint8, device=device)
    targets = drawn_targets(chance, manifest)
    look = WeightScan(memory, manifest, bounds, targets)
    every: list[Finding] = []
    for _ in range(2):
        sent = drawn_space(chance, manifest)
        expected = specified(sent, manifest, targets)
        assert received(chance, look, memory[:nbytes], bounds, sent) == expected, (seed, manifest, targets, bounds)
        every += expected[1]
        if device == "cpu":
            assert by_torch(sent, manifest, targets) == expected
    return every


def kinds(found: list[Finding]) -> set[str]:
    return {finding.kind for finding in found}


def test_torch_finds_what_is_specified_however_its_parts_come() -> None:
    found = [one for seed in range(5 * SEEDS) for one in check(seed, "cpu")]
    assert kinds(found) == {"nan", "infinity", "overflow", "zero"}


@pytest.mark.parametrize("bounds", [[], [512], [256, 700, 768], [512, 256, 768], [768, 1024]])
def test_bounds_that_are_not_those_of_parts_are_refused(bounds: list[int]) -> None:
    with pytest.raises(ValueError, match="ascending multiples of 256, the last one 768"):
        WeightScan(torch.zeros(1024, dtype=torch.uint8), [Tensor("a", "float32", (130,))], bounds)


def test_tensors_of_nothing_have_nothing_wrong_with_them() -> None:
    looking = WeightScan(torch.zeros(0, dtype=torch.uint8), [Tensor("a", "float32", (0, 4))], [0]).begin()
    looking.add(0)
    assert looking.result() == (digest_text(0, 0), [])


def interpret() -> None:
    """In a process of its own, see `run_interpreted`."""
    allow_runtime_bounds()
    kernels: Any = digests._tried(torch.device("cpu"))  # type: ignore[reportPrivateUsage]
    assert kernels, "the interpreted kernels are not what torch is"
    digests._ready["cpu"] = kernels  # type: ignore[reportPrivateUsage]
    test_tensors_of_nothing_have_nothing_wrong_with_them()
    found = [one for seed in range(SEEDS) for one in check(seed, "cpu")]
    sys.stdout.write(f"{SEEDS} are equal, with {', '.join(sorted(kinds(found)))}")


def test_the_interpreted_kernel_finds_what_is_specified_however_its_parts_come() -> None:
    done = run_interpreted("tests.core.test_looking", 280)
    assert (done.returncode, done.stdout) == (0, f"{SEEDS} are equal, with infinity, nan, overflow, zero"), done.stderr


@pytest.mark.gpu
def test_on_a_gpu_one_look_finds_what_is_specified_however_its_parts_come(caplog: pytest.LogCaptureFixture) -> None:
    make_ready("cuda:0")
    assert not caplog.messages, "torch looks at the bytes"
    found = [one for seed in range(3 * SEEDS) for one in check(seed, "cuda:0")]
    assert kinds(found) == {"nan", "infinity", "overflow", "zero"}


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_on_a_gpu_nothing_waits_for_the_device_before_the_result() -> None:
    make_ready("cuda:0")
    manifest = [Tensor("a", "bfloat16", (100_000,)), Tensor("b", "float64", (1000,))]
    space = drawn_space(random.Random(1), manifest)
    half = space.numel() // 2 // ALIGNMENT * ALIGNMENT
    look = WeightScan(space.to("cuda:0"), manifest, [half, space.numel()])
    torch.cuda.set_sync_debug_mode("error")
    try:
        looking = look.begin()
        looking.add(1)
        looking.add(0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert looking.result() == specified(space, manifest)


@pytest.mark.gpu
def test_on_a_gpu_places_of_words_beyond_31_bits_count() -> None:
    """The first word of the last tensor is number 2^31 of the space."""
    make_ready("cuda:0")
    manifest = [Tensor("a", "bfloat16", (1 << 32,)), Tensor("b", "float32", (100,))]
    nbytes = layout(manifest).nbytes
    if torch.cuda.mem_get_info("cuda:0")[0] < nbytes + (1 << 30):
        pytest.skip(f"needs {nbytes >> 30} GiB of free GPU memory, and one more")
    space = torch.zeros(nbytes, dtype=torch.uint8, device="cuda:0")
    words = space.view(torch.int32)
    planted = {0: 0x3F80, 5_000_000: -(1 << 31), (1 << 31) - 1: 0x7F80, (1 << 31) + 3: 0x7FC0_0000}
    for at, word in planted.items():
        words[at] = word
    for bounds in ([nbytes], [1 << 30, 3 << 30, nbytes]):
        looking = WeightScan(space, manifest, bounds).begin()
        looking.add(0, len(bounds))
        digest = digest_text(sum(planted.values()), sum(word * (at + 1) for at, word in planted.items()))
        assert looking.result() == (digest, [Finding("a", "infinity", 1), Finding("b", "nan", 1)])


if __name__ == "__main__":
    interpret()
