"""A space in shards, one on each GPU: how large they are, that nothing is lost at a cut, and that all is received and seen."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from enginepool.protocol.layout import ALIGNMENT, layout
from enginepool.protocol.manifest import Tensor
from enginepool.protocol.messages.weight_reports import Finding
from enginepool.transfer.digest import digest_of, views
from enginepool.transfer.shared_memory import verified
from enginepool.workers.stager import memory as stager_memory
from enginepool.workers.stager import receiving
from enginepool.workers.stager.shards import cut_space, shard_sizes, whole_digest, whole_findings
from enginepool.workers.stager.snapshot import Footer, read_footer
from tests.core.test_reception import Sent

GIB = 1 << 30
BUCKET = ALIGNMENT
DTYPES = ("float32", "bfloat16", "float16", "uint8", "float64")
Sizes = some.lists(some.integers(0, 12).map(lambda size: size * ALIGNMENT), min_size=1, max_size=5)


def tensors_of(shapes: Sequence[tuple[str, int]]) -> list[Tensor]:
    return [Tensor(f"t{place}", dtype, (elements,)) for place, (dtype, elements) in enumerate(shapes)]


Manifests = some.lists(some.tuples(some.sampled_from(DTYPES), some.integers(0, 700)), min_size=1, max_size=8).map(tensors_of)


def test_each_gpu_holds_its_share_and_never_more_than_the_whole() -> None:
    assert shard_sizes(140 * GIB, 4, 2 * GIB) == {1: 35 * GIB, 2: 35 * GIB, 3: 35 * GIB, 0: 35 * GIB}
    assert shard_sizes(16 * GIB, 2, 2 * GIB) == {1: 8 * GIB, 0: 8 * GIB}
    assert shard_sizes(3 * GIB, 2, 2 * GIB) == {1: GIB, 0: 2 * GIB}
    assert shard_sizes(GIB + 3, 4, 2 * GIB) == {0: GIB + ALIGNMENT}
    assert shard_sizes(GIB, 1, 2 * GIB) == shard_sizes(GIB, 1, 0) == {0: GIB}


@given(some.integers(1, 1 << 40), some.integers(1, 16), some.integers(0, 1 << 32))
def test_shards_hold_the_whole_space_on_any_number_of_gpus(nbytes: int, gpus: int, least: int) -> None:
    sizes = shard_sizes(nbytes, gpus, least)
    assert list(sizes)[-1] == 0, "where bytes come to"
    assert all(size > 0 and size % ALIGNMENT == 0 for size in sizes.values())
    assert nbytes <= sum(sizes.values()) < nbytes + ALIGNMENT


@given(Manifests, Sizes)
def test_what_is_found_in_shards_is_what_is_found_in_the_whole_space(manifest: list[Tensor], sizes: list[int]) -> None:
    nbytes = layout(manifest).nbytes
    space = torch.zeros(nbytes, dtype=torch.uint8)
    for place, view in enumerate(views(space, manifest)):
        view.fill_(0 if place % 3 == 0 else 1)
        if view.numel() and view.dtype.is_floating_point:
            view[-1] = (1.0, float("inf"), float("nan"), 3.0)[place % 4]
    if not nbytes:
        return
    sizes = [*sizes, nbytes]
    digests: list[tuple[int, str]] = []
    findings: list[list[Finding]] = []
    ends = [0]
    for shard in cut_space(manifest, sizes):
        assert shard.begin == ends[-1] and layout(shard.manifest).nbytes == shard.end - shard.begin
        ends.append(shard.end)
        if shard.end > shard.begin:
            digest, found = verified(space[shard.begin : shard.end], shard.manifest)
            digests.append((shard.begin, digest))
            findings.append(found)
    assert ends[-1] == nbytes
    assert (whole_digest(digests), whole_findings(manifest, findings)) == verified(space, manifest)


def test_shards_that_are_too_small_are_refused() -> None:
    with pytest.raises(ValueError, match="shards of 512 bytes for 768"):
        cut_space([Tensor("a", "uint8", (700,))], [256, 256])


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize(
    "sizes", [[256 * 7, 256 * 9], [256 * 5, 256 * 5, 256 * 40], [256 * 40, 256, 256 * 2], [256 * 6, 256 * 12]]
)
def test_what_comes_by_a_group_lies_in_shards_whole_and_was_looked_at(backend: str, sizes: list[int]) -> None:
    """`Sent` writes a bucket when its broadcast is begun: one that were begun too early would write over bytes of others."""
    manifest = [Tensor("a", "float32", (300,)), Tensor("b", "bfloat16", (900,)), Tensor("c", "uint8", (1000,))]
    space = torch.randint(1, 127, (layout(manifest).nbytes,), dtype=torch.uint8)
    a, b, _ = views(space, manifest)
    a.fill_(1.0)
    b.fill_(65536.0)
    a[7] = float("nan")

    if sum(sizes) < space.numel():
        sizes = [*sizes[:-1], space.numel()]
    memory = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    reception = receiving.ShardedReception(memory, manifest, BUCKET, "cpu", ["", "float16", ""])
    for _ in range(2):
        digest, findings = reception.receive(Sent(space, backend))  # type: ignore[arg-type]
        assert (digest, findings) == verified(space, manifest, ["", "float16", ""])
        assert digest == digest_of(space)
        shards = cut_space(manifest, sizes)
        found = torch.cat([part[: shard.end - shard.begin] for part, shard in zip(memory, shards, strict=True)])
        assert torch.equal(found, space)


def test_buckets_pass_through_the_memory_of_the_last_shard_where_it_has_four_of_them() -> None:
    manifest = [Tensor("a", "uint8", (256 * 10,))]
    memory = [torch.zeros(256 * 5, dtype=torch.uint8), torch.zeros(256 * 5, dtype=torch.uint8)]
    own = memory[-1].untyped_storage().data_ptr()

    def used(bucket_bytes: int) -> set[bool]:
        reception = receiving.ShardedReception(memory, manifest, bucket_bytes, "cpu")
        return {into.untyped_storage().data_ptr() == own for into, _ in reception._parts}  # pyright: ignore[reportPrivateUsage]

    assert used(256) == {True}
    assert used(512) == {True, False}


def test_what_lies_in_shards_is_kept_as_a_whole_snapshot(tmp_path: Any) -> None:
    manifest = [Tensor("a", "uint8", (1000,)), Tensor("b", "float32", (7,))]
    nbytes = layout(manifest).nbytes
    space = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    memory = stager_memory.DeviceMemory.__new__(stager_memory.DeviceMemory)
    memory.nbytes, memory.shards = 1536, 2
    memory.tensors = [space[:512].clone(), torch.cat([space[512:], torch.zeros(256, dtype=torch.uint8)])]
    path = tmp_path / f"g-{'0' * 32}"
    memory.save(str(path), Footer(3, "d", manifest), lambda: None)
    assert read_footer(str(path)) == Footer(3, "d", manifest)
    assert path.read_bytes()[:nbytes] == space.numpy().tobytes()
