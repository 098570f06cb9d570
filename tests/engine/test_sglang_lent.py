"""Weights in memory that a publisher lends to the real engine: looked at while it serves, copied out of at the hand-over."""

import importlib
import random
from collections.abc import Iterator
from typing import Any

import pytest

from enginepool.protocol.messages.weight_reports import Finding
from enginepool.protocol.messages.weights import MemoryRegion
from enginepool.trainer import ipc_export as lending
from enginepool.trainer.buffers import Buffers
from enginepool.trainer.ipc_export import IpcExport, IpcExporter
from enginepool.trainer.tensors import make_plan
from enginepool.trainer.trainer_ranks import TrainerRanks
from enginepool.workers.engine import EngineDied, EngineError
from enginepool.workers.engine_weights import NewWeights
from tests.engine.reference import Reference
from tests.engine.test_sglang_scores import assert_close, declared, random_batch
from tests.engine.test_sglang_weights import Subject, assert_computed_with, subject

torch: Any = importlib.import_module("torch")

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
__all__ = ["subject"]


class Lending:
    """What a publisher lends for one update."""

    def __init__(self, tensors: dict[str, Any], device: str = "cpu") -> None:
        self.tensors = tensors
        self._loan = IpcExport(IpcExporter(Buffers(torch.device(device)), keep=False))
        plan = make_plan(tensors)
        self.digest, _, regions = self._loan.fill(
            plan, bucket_bytes=1 << 16, ranks=TrainerRanks(), stopped=lambda: False, progress=lambda _: None
        )
        self.weights = NewWeights(tuple(plan.manifest), tuple(regions))

    def end(self) -> None:
        self._loan.end()


@pytest.fixture
def lent(subject: Subject) -> Iterator[Lending]:
    lending = Lending(subject.drawn(1).tensors)
    yield lending
    lending.end()


def test_lent_memory_is_verified_during_forwards_and_loaded(subject: Subject, reference: Reference, lent: Lending) -> None:
    chance = random.Random(3)
    batches = [random_batch(chance, declared(subject.engine)) for _ in range(3)]
    before = subject.scores(*batches)
    assert subject.engine.call("do", "verify", lent.weights) == (lent.digest, [])
    for after, first in zip(subject.scores(*batches), before, strict=True):
        assert_close(after, first)
    subject.load_weights(lent.weights, 1, lent.digest)
    subject.engine.call("do", "release_buffers")
    assert subject.holds() == (1, lent.digest)
    assert subject.engine.call("do", "inspect", "digest") == (lent.digest, [])
    assert_computed_with(subject, reference, lent.tensors, 4)


@pytest.mark.parametrize("ready", [False, True])
def test_what_was_looked_at_can_be_taken_when_its_owner_is_gone(
    subject: Subject, reference: Reference, lent: Lending, monkeypatch: pytest.MonkeyPatch, ready: bool
) -> None:
    subject.engine.call("do", "verify", lent.weights)
    if ready:
        assert subject.prepare_load(lent.weights) > 0
    # A process that is killed breaks no seal.
    monkeypatch.setattr(lending, "break_seal", torch.numel)
    lent.end()
    subject.load_weights(lent.weights, 1, lent.digest)
    assert_computed_with(subject, reference, lent.tensors, 5)


@pytest.mark.parametrize("ready", [False, True])
def test_an_engine_that_copied_out_of_memory_that_was_used_again_has_to_end(
    subject: Subject, lent: Lending, ready: bool
) -> None:
    subject.engine.call("do", "verify", lent.weights)
    if ready:
        assert subject.prepare_load(lent.weights) > 0
    lent.end()
    with pytest.raises(EngineDied, match="given to something else meanwhile"):
        subject.load_weights(lent.weights, 1, lent.digest)


def test_released_memory_is_not_open(subject: Subject, lent: Lending) -> None:
    subject.engine.call("do", "verify", lent.weights)
    assert subject.prepare_load(lent.weights) > 0
    subject.engine.call("do", "release_buffers")
    lent.end()
    with pytest.raises(EngineError, match="refused the new weights"):
        subject.load_weights(lent.weights, 1, lent.digest)


def test_what_is_wrong_with_it_is_said_and_the_engine_serves_on(subject: Subject, lent: Lending) -> None:
    tensors = {name: tensor.clone() for name, tensor in lent.tensors.items()}
    tensors["model.norm.weight"][3] = float("inf")
    wrong = Lending(tensors)
    assert subject.engine.call("do", "verify", wrong.weights)[1] == [Finding("model.norm.weight", "infinity", 1)]
    wrong.end()
    [space] = lent.weights.regions
    small = MemoryRegion("file", 256, path=space.path)
    for bad in (wrong.weights.regions[0], small, MemoryRegion("cuda", 256, handle=b"\x90", gpu="a-b")):
        with pytest.raises(EngineError):
            subject.engine.call("do", "verify", NewWeights(lent.weights.tensors, (bad,)))
    with pytest.raises(EngineError, match="regions: expected one or more, got none"):
        subject.engine.call("do", "verify", NewWeights(lent.weights.tensors))
    assert subject.engine.call("do", "verify", lent.weights) == (lent.digest, [])
    subject.scores(random_batch(random.Random(6), declared(subject.engine)))
    assert subject.holds() == (0, "")
