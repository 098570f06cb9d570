"""New weights in the real engine: every number equals a direct computation on exactly these weights, and none on others."""

import importlib
import random
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginepool.cli.tiny_model_files import make_tiny_model
from enginepool.protocol.layout import ALIGNMENT, buckets, layout
from enginepool.protocol.manifest import Tensor
from enginepool.protocol.messages.weight_reports import Finding
from enginepool.protocol.messages.weights import Join
from enginepool.transfer.collective import Rendezvous
from enginepool.transfer.digest import digest_of, views
from enginepool.workers.engine import EngineError, RowBatch
from enginepool.workers.engine_weights import LoadTimes, MemoryRegion, ModelTensors, NewWeights
from enginepool.workers.weights.checkpoint import checkpoint_tensors
from tests.engine.conftest import BUDGETS
from tests.engine.hosted import HostedEngine
from tests.engine.reference import Models, Reference
from tests.engine.test_sglang_scores import assert_close, declared, random_batch, whole

torch: Any = importlib.import_module("torch")
safetensors: Any = importlib.import_module("safetensors.torch")

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
BUCKET = 1 << 14


class Given:
    """Weights in a file, as a stager would leave them."""

    def __init__(self, directory: Path, tensors: dict[str, Any]) -> None:
        self.tensors = tensors
        self.manifest = tuple(
            Tensor(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in tensors.items()
        )
        self.space = torch.zeros(layout(self.manifest).nbytes, dtype=torch.uint8)
        for view, tensor in zip(views(self.space, self.manifest), tensors.values(), strict=True):
            view.copy_(tensor)
        self.digest = digest_of(self.space)
        self.path = directory / f"space-{secrets.token_hex(4)}"
        self.path.write_bytes(self.space.numpy().tobytes())
        self.weights = NewWeights(self.manifest, (MemoryRegion("file", self.space.numel(), path=str(self.path)),))

    def in_shards(self, *sizes: int) -> NewWeights:
        """The same as the stager of an engine on several GPUs would leave them: so many bytes in each, and the rest in one."""
        rest = self.space.numel() - sum(sizes)
        regions: list[MemoryRegion] = []
        for number, part in enumerate(self.space.split([*sizes, rest])):
            path = self.path.with_name(f"{self.path.name}-{number}")
            path.write_bytes(part.numpy().tobytes())
            regions.append(MemoryRegion("file", part.numel(), path=str(path)))
        return NewWeights(self.manifest, tuple(regions), sharded=True)

    def arrives(self, there: bool) -> None:
        """The bytes are there, or are not yet, in a file that others may have open."""
        with open(self.path, "r+b") as file:
            file.write(self.space.numpy().tobytes() if there else bytes(self.space.numel()))


class Subject:
    """An engine and the checkpoint that it started with."""

    def __init__(self, engine: HostedEngine, model: Path, directory: Path) -> None:
        self.engine = engine
        self.model = model
        self.directory = directory
        self.own: dict[str, Any] = safetensors.load_file(str(model / "model.safetensors"))

    def drawn(self, seed: int, dtype: Any = None) -> Given:
        """Other weights of the same shapes, in an order of their own."""
        generator = torch.Generator().manual_seed(seed)
        tensors = {
            name: (torch.randn(tensor.shape, generator=generator) * tensor.shape[-1] ** -0.5).to(dtype or tensor.dtype)
            for name, tensor in reversed(self.own.items())
        }
        return Given(self.directory, tensors)

    def load_weights(self, weights: NewWeights, version: int, digest: str = "") -> LoadTimes:
        return self.engine.call("do", "load_weights", weights, version, digest)

    def prepare_load(self, weights: NewWeights) -> float:
        return self.engine.call("do", "prepare_load", weights)

    def holds(self) -> tuple[int, str]:
        return self.engine.call("do", "version"), self.engine.call("do", "digest")

    def scores(self, *batches: RowBatch) -> list[Any]:
        found: list[Any] = []
        for outcome in whole(self.engine.score(*batches)):
            for part in outcome.parts:
                assert isinstance(part, dict)
                found.append(part["scores"])
        return found


@pytest.fixture(params=["causal", "reward"])
def subject(request: pytest.FixtureRequest, models: Models, tmp_path: Path) -> Iterator[Subject]:
    engine: HostedEngine = request.getfixturevalue(request.param)
    subject = Subject(engine, getattr(models, request.param), tmp_path)
    yield subject
    if not engine.ended:
        subject.load_weights(NewWeights(checkpoint=str(subject.model)), 0)
        subject.load_weights(NewWeights(), 0, "")


def expected(reference: Reference, batch: RowBatch, causal: bool) -> list[Any]:
    return [
        [
            reference.label_scores(row, part.asked.labels, part.asked.softmax)
            if causal
            else reference.rewards(row, part.asked.softmax)
            for row in part.prompts()
        ]
        for part in batch.parts
    ]


def assert_computed_with(subject: Subject, reference: Reference, weights: dict[str, Any], seed: int) -> None:
    chance = random.Random(seed)
    capabilities = declared(subject.engine)
    batch = random_batch(chance, capabilities)
    with reference.holding(weights):
        parts = expected(reference, batch, capabilities.kind == "causal")
    for found, rows in zip(subject.scores(batch), parts, strict=True):
        assert_close(found, rows)


def test_an_update_consists_of_what_the_engines_own_load_took(subject: Subject) -> None:
    model: ModelTensors = subject.engine.call("do", "model_tensors")
    assert set(model.tensors) == set(checkpoint_tensors(str(subject.model)))
    assert subject.engine.call("do", "ranks") == 1
    assert subject.holds() == (0, "")


@pytest.mark.every_version
def test_after_each_of_several_updates_scores_are_those_of_exactly_these_weights(
    subject: Subject, reference: Reference
) -> None:
    for version in (1, 2, 3):
        given = subject.drawn(version)
        subject.load_weights(given.weights, version, given.digest)
        assert subject.holds() == (version, given.digest)
        assert subject.engine.call("do", "inspect", "digest") == (given.digest, [])
        assert_computed_with(subject, reference, given.tensors, version)
        [outcome] = subject.engine.score(random_batch(random.Random(1), declared(subject.engine)))
        assert not isinstance(outcome, Exception) and outcome.version == version


@pytest.mark.every_version
def test_an_engine_that_got_ready_serves_on_and_takes_what_came_meanwhile(subject: Subject, reference: Reference) -> None:
    batch = random_batch(random.Random(3), declared(subject.engine))
    for version in (1, 2):
        before = subject.scores(batch)
        given = subject.drawn(30 + version)
        given.arrives(False)
        assert subject.prepare_load(given.weights) > 0
        for still, first in zip(subject.scores(batch), before, strict=True):
            assert_close(still, first)
        given.arrives(True)
        times = subject.load_weights(given.weights, version, given.digest)
        assert times.load_s > 0 and times.flush_s > 0
        assert subject.holds() == (version, given.digest)
        assert subject.engine.call("do", "inspect", "digest") == (given.digest, [])
        assert_computed_with(subject, reference, given.tensors, version)
    # Ready for one, it takes another one, too.
    ready, other = subject.drawn(33), subject.drawn(34)
    subject.prepare_load(ready.weights)
    subject.load_weights(other.weights, 3, other.digest)
    assert_computed_with(subject, reference, other.tensors, 3)
    subject.prepare_load(ready.weights)
    subject.engine.call("do", "release_buffers")
    subject.load_weights(ready.weights, 4, ready.digest)
    assert_computed_with(subject, reference, ready.tensors, 4)


def test_the_first_weights_come_back_bit_by_bit(subject: Subject) -> None:
    batch = random_batch(random.Random(7), declared(subject.engine))
    before = subject.scores(batch)
    given = subject.drawn(4)
    subject.load_weights(given.weights, 1, given.digest)
    assert all(not np.array_equal(other, first) for other, first in zip(subject.scores(batch), before, strict=True))
    own = Given(subject.directory, subject.own)
    subject.load_weights(own.weights, 2, own.digest)
    for after, first in zip(subject.scores(batch), before, strict=True):
        np.testing.assert_array_equal(after, first)


def test_other_dtypes_are_converted_and_a_part_changes_that_part_alone(subject: Subject, reference: Reference) -> None:
    half = subject.drawn(5, torch.bfloat16)
    subject.load_weights(half.weights, 1, half.digest)
    mixed = {name: tensor.float() for name, tensor in half.tensors.items()}
    assert_computed_with(subject, reference, mixed, 5)
    part = Given(subject.directory, {name: tensor * 0.5 for name, tensor in subject.own.items() if "k_proj" in name})
    subject.load_weights(part.weights, 2, part.digest)
    assert_computed_with(subject, reference, mixed | part.tensors, 6)


@pytest.mark.every_version
def test_a_checkpoint_directory_is_taken_and_has_the_digest_of_its_files(
    subject: Subject, reference: Reference, tmp_path: Path
) -> None:
    head = "causal" if declared(subject.engine).kind == "causal" else "reward"
    other = make_tiny_model(tmp_path / "other", head=head, labels=3, seed=11)  # pyright: ignore[reportArgumentType]
    tensors = safetensors.load_file(str(other / "model.safetensors"))
    in_order = {tensor.name: tensors[tensor.name] for tensor in checkpoint_tensors(str(other))}
    subject.load_weights(NewWeights(tuple(checkpoint_tensors(str(other))), checkpoint=str(other)), 3)
    assert subject.holds() == (3, Given(tmp_path, in_order).digest)
    assert_computed_with(subject, reference, in_order, 8)


@pytest.mark.every_version
def test_weights_are_received_straight_into_the_engine(subject: Subject, reference: Reference) -> None:
    given = subject.drawn(9)
    rendezvous = Rendezvous()
    name = secrets.token_hex(8)
    joined: list[Any] = []

    def send() -> None:
        joined.append(rendezvous.join(name, 2, backend="gloo"))
        for bucket in buckets(given.manifest, BUCKET):
            joined[0].broadcast(given.space[bucket.at : bucket.at + bucket.nbytes])

    trainer = threading.Thread(target=send)
    trainer.start()
    subject.engine.call("do", "join", Join(name, 2, 1, rendezvous.address, "gloo"))
    subject.load_weights(NewWeights(given.manifest, group=name, bucket_bytes=BUCKET), 5)
    trainer.join()
    assert subject.holds() == (5, given.digest)
    assert_computed_with(subject, reference, given.tensors, 9)
    with pytest.raises(EngineError, match="not in group other"):
        subject.load_weights(NewWeights(given.manifest, group="other", bucket_bytes=BUCKET), 6)
    joined[0].abort()
    rendezvous.close()


def test_a_weight_is_read_by_its_checkpoint_name(subject: Subject) -> None:
    given = subject.drawn(10)
    subject.load_weights(given.weights, 1, given.digest)
    for name in ("model.embed_tokens.weight", "model.layers.1.self_attn.v_proj.weight", "model.layers.0.mlp.up_proj.weight"):
        chunk = subject.engine.call("do", "tensor", name, 0, 1 << 20)
        tensor, dtype = chunk.values.reshape(chunk.shape), chunk.dtype
        assert dtype == "float32"
        np.testing.assert_array_equal(tensor, given.tensors[name].numpy())
    with pytest.raises(EngineError, match=r"^no weight 'nowhere'$"):
        subject.engine.call("do", "tensor", "nowhere", 0, 1)


def test_nan_and_zeros_in_the_engine_are_found_by_name(subject: Subject) -> None:
    given = subject.drawn(12)
    tensors = {name: tensor.clone() for name, tensor in given.tensors.items()}
    tensors["model.layers.1.self_attn.k_proj.weight"][3, 5] = float("nan")
    tensors["model.norm.weight"].zero_()
    wrong = Given(subject.directory, tensors)
    assert subject.engine.call("do", "inspect", "validate") == ("", [])
    subject.load_weights(wrong.weights, 1, wrong.digest)
    _, findings = subject.engine.call("do", "inspect", "validate")
    assert sorted(findings, key=lambda finding: finding.kind) == [
        Finding("model.layers.1.self_attn.k_proj.weight", "nan", 1),
        Finding("model.norm.weight", "zero", 64),
    ]


def test_weights_that_cannot_be_read_leave_the_old_ones_whole(subject: Subject) -> None:
    batch = random_batch(random.Random(13), declared(subject.engine))
    before = subject.scores(batch)
    given = subject.drawn(13)
    for space in (
        MemoryRegion("file", given.space.numel(), path=str(subject.directory / "gone")),
        MemoryRegion("file", 256, path=given.weights.regions[0].path),
    ):
        with pytest.raises(EngineError, match="refused the new weights"):
            subject.load_weights(NewWeights(given.manifest, (space,)), 1, given.digest)
    with pytest.raises(EngineError, match="no such directory"):
        subject.load_weights(NewWeights(given.manifest, checkpoint=str(subject.directory / "gone")), 1)
    assert subject.holds() == (0, "")
    for after, first in zip(subject.scores(batch), before, strict=True):
        assert_close(after, first)


def test_a_set_version_changes_the_version_alone(subject: Subject) -> None:
    batch = random_batch(random.Random(14), declared(subject.engine))
    before = subject.scores(batch)
    subject.load_weights(NewWeights(), 9, "")
    assert subject.holds() == (9, "")
    [outcome] = subject.engine.score(batch)
    assert not isinstance(outcome, Exception) and outcome.version == 9
    for after, first in zip(subject.scores(batch), before, strict=True):
        assert_close(after, first)


def test_an_engine_of_two_ranks_takes_the_same_weights_and_is_asked_as_one(
    models: Models, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|0")  # as if the machine had a node for each rank
    engine = HostedEngine(str(models.causal), options={"tp_size": 2}, **BUDGETS)
    try:
        subject = Subject(engine.wait_until_started(), models.causal, tmp_path)
        assert engine.call("do", "ranks") == 2
        for version in (1, 2):
            given = subject.drawn(20 + version)
            if version == 2:
                assert subject.prepare_load(given.weights) > 0
            assert engine.call("do", "verify", given.weights) == (given.digest, [])
            left = engine.call("do", "_answers.folder").iterdir()
            assert [path.name for path in left] == [".held"], "answers are removed once they are read"
            subject.load_weights(given.weights, version, given.digest)
            assert engine.call("do", "inspect", "digest") == (given.digest, [])
            assert_computed_with(subject, reference, given.tensors, version)
        for version in (3, 4):
            # Half of the bytes in the memory of each rank; the cut goes through the middle of a tensor.
            given = subject.drawn(20 + version)
            half = given.space.numel() // 2 // ALIGNMENT * ALIGNMENT
            assert half not in layout(given.manifest).offsets
            weights = given.in_shards(half)
            if version == 4:
                assert subject.prepare_load(weights) > 0
            subject.load_weights(weights, version, given.digest)
            assert engine.call("do", "inspect", "digest") == (given.digest, [])
            assert_computed_with(subject, reference, given.tensors, version)
        for name in ("lm_head.weight", "model.layers.1.self_attn.o_proj.weight", "model.layers.0.mlp.gate_proj.weight"):
            chunk = engine.call("do", "tensor", name, 0, 1 << 20)
            np.testing.assert_array_equal(chunk.values.reshape(chunk.shape), given.tensors[name].numpy())
            part = engine.call("do", "tensor", name, 7, 50)
            np.testing.assert_array_equal(part.values, given.tensors[name].numpy().reshape(-1)[7:57])
        tensors = {name: tensor.clone() for name, tensor in subject.drawn(25).tensors.items()}
        half_zero, torn, norm = (
            f"model.layers.0.{name}.weight" for name in ("self_attn.o_proj", "mlp.down_proj", "input_layernorm")
        )
        tensors[half_zero][:, : tensors[half_zero].shape[1] // 2] = 0.0  # all that one rank holds of it
        tensors[torn][0, 0] = tensors[torn][0, -1] = tensors[norm][0] = float("nan")
        wrong = Given(tmp_path, tensors)
        subject.load_weights(wrong.weights, 5, wrong.digest)
        _, found = engine.call("do", "inspect", "validate")
        assert sorted(found, key=lambda one: one.count) == [Finding(norm, "nan", 1), Finding(torn, "nan", 2)]
    finally:
        engine.end()
