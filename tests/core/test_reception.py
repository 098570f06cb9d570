"""A stager begins broadcasts as early as their memory allows, and looks at every byte that came."""

from typing import Any

import pytest
import torch

from enginepool.protocol.layout import layout
from enginepool.protocol.manifest import Tensor
from enginepool.protocol.messages.weight_reports import Finding
from enginepool.transfer import weight_scan as looking
from enginepool.transfer.digest import Digest, Findings, digest_of
from enginepool.transfer.process_group import QUEUED
from enginepool.workers.stager.receiving import AHEAD, Reception

BUCKET = 256


class Sent:
    """A group whose bytes are there as soon as their broadcast is begun, and which notes what is done with them."""

    def __init__(self, space: Any, backend: str) -> None:
        self.on_device = backend == "nccl"
        self.events: list[tuple[str, int]] = []
        self._space = space
        self._begun = 0

    def begin(self, bucket: Any) -> "Way":
        k = self._begun
        self._begun += 1
        self.events.append(("begin", k))
        bucket.copy_(self._space[k * BUCKET : k * BUCKET + bucket.numel()])
        return Way(self, k)

    def when(self, what: str, k: int) -> int:
        """The number of this event."""
        return self.events.index((what, k))


class Way:
    """One of its broadcasts."""

    def __init__(self, group: Sent, k: int) -> None:
        self._group = group
        self._k = k

    def order(self, timeout_s: float) -> None:
        self._group.events.append(("order", self._k))

    def wait(self, timeout_s: float) -> None:
        self._group.events.append(("wait", self._k))


def received(monkeypatch: pytest.MonkeyPatch, count: int, backend: str, *, bounced: bool = False) -> Sent:
    """What is noted of an update of so many buckets, whose digest and findings were right.

    `bounced`: into a device that keeps nothing, by way of two buffers in memory of the host; only the digest is looked at.
    """
    manifest = [Tensor(f"t{i}", "float32", (BUCKET // 4,)) for i in range(count)]
    space = torch.arange(1.0, count * BUCKET // 4 + 1).view(torch.uint8)
    assert layout(manifest).nbytes == space.numel()
    space[3 * BUCKET : 4 * BUCKET] = 0
    group = Sent(space, backend)

    class NotedDigest(Digest):
        def add(self, bucket: Any, at: int) -> None:
            group.events.append(("digest", at // BUCKET))
            super().add(bucket, at)

    class NotedFindings(Findings):
        def add(self, batch: Any) -> None:
            group.events.append(("findings", sum(event == "findings" for event, _ in group.events)))
            super().add(batch)

        def found(self) -> list[Finding]:
            return [] if bounced else super().found()

    monkeypatch.setattr(looking, "Digest", NotedDigest)
    monkeypatch.setattr(looking, "Findings", NotedFindings)
    memory = torch.empty(space.numel(), dtype=torch.uint8, device="meta" if bounced else "cpu")
    digest, findings = Reception([memory], manifest, BUCKET, "cpu").receive(group)  # type: ignore[arg-type]
    assert digest == digest_of(space)
    if not bounced:
        assert torch.equal(memory, space)
        assert [finding.name for finding in findings] == ["t3"]
    for what in ("begin", "digest", "findings"):
        assert [k for event, k in group.events if event == what] == list(range(count))
    return group


def test_where_each_bucket_has_memory_of_its_own_on_a_gpu_no_broadcast_waits_for_a_look_at_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = received(monkeypatch, QUEUED // 2, "nccl")
    last = few.when("begin", QUEUED // 2 - 1)
    assert all(few.when(what, 0) > last for what in ("order", "digest", "findings", "wait"))
    many = received(monkeypatch, 3 * QUEUED, "nccl")
    for k in range(3 * QUEUED):
        assert many.when("order", k) < many.when("digest", k) < many.when("findings", k)
        if k >= QUEUED // 2:
            # What it comes after on the stream belongs to buckets that came long ago.
            assert many.when("begin", k) < many.when("digest", k - QUEUED // 2 + 1)
        if k >= QUEUED:
            assert many.when("wait", k - QUEUED) < many.when("begin", k), "a GPU's queues are not endless"
    assert {k for event, k in many.events if event == "wait"} == set(range(3 * QUEUED))


def test_a_gpu_looks_twice_for_each_look_stops_its_engine_and_the_second_look_is_at_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for count, first in ((4, 3), (8, 7), (15, 13), (16, 14), (40, 35)):
        group = received(monkeypatch, count, "nccl")
        looks = [k for event, k in group.events if event in ("order", "digest")]
        assert looks == [*range(first), *range(first), *range(first, count), *range(first, count)], "by buckets that came"


@pytest.mark.parametrize(("backend", "bounced"), [("nccl", True), ("gloo", True), ("gloo", False)])
def test_where_buffers_take_turns_or_the_processor_works_two_broadcasts_are_on_their_way(
    monkeypatch: pytest.MonkeyPatch, backend: str, bounced: bool
) -> None:
    group = received(monkeypatch, 2 * QUEUED, backend, bounced=bounced)
    for k in range(2 * QUEUED):
        assert group.when("wait" if bounced else "order", k) < group.when("digest", k)
        if k >= AHEAD:
            assert group.when("findings", k - AHEAD) < group.when("begin", k) < group.when("digest", k - AHEAD + 1)
    assert {k for event, k in group.events if event == "wait"} == set(range(2 * QUEUED))


def test_what_becomes_infinity_in_the_engine_is_found_on_each_way_into_the_memory() -> None:
    manifest = [Tensor("a", "float32", (64,)), Tensor("b", "float32", (64,))]
    space = torch.full((128,), 65520.0).view(torch.uint8)
    came = [space[:256], space[256:]]
    bounced = looking.WeightScan(space, manifest, [256, 512], ["", "float16"], came).begin()
    bounced.add(0, 2)
    memory = torch.empty(512, dtype=torch.uint8)
    in_place = Reception([memory], manifest, BUCKET, "cpu", ["", "float16"]).receive(Sent(space, "gloo"))  # type: ignore[arg-type]
    assert in_place == bounced.result() == (digest_of(space), [Finding("b", "overflow", 64)])
