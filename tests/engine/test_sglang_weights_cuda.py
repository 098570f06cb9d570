"""New weights on a GPU: through a stager's device or host memory, or straight into the engine; always the same bits."""

import asyncio
import importlib
import os
import random
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from enginepool.protocol.layout import buckets
from enginepool.protocol.messages.weights import Committed, Join, Joined, Staged
from enginepool.transfer.collective import Rendezvous
from enginepool.transfer.peer_copy import CopySource
from enginepool.transfer.process_group import ProcessGroup
from enginepool.transfer.shared_memory import make_space, open_space
from enginepool.workers.engine import EngineDied, EngineError
from enginepool.workers.engine_weights import NewWeights
from enginepool.workers.stager import memory as stager_memory
from enginepool.workers.stager.link import StagerLink
from enginepool.workers.stager.memory import HostMemory
from enginepool.workers.stager.messages import AskHeld, Reserve, Reserved, Room, SnapshotMissing, StagerHolds
from tests.engine.hosted import HostedEngine
from tests.engine.reference import Models
from tests.engine.test_sglang_lent import Lending
from tests.engine.test_sglang_scores import declared, full_batch, whole
from tests.engine.test_sglang_weights import Subject
from tests.process.processes import Processes

torch: Any = importlib.import_module("torch")

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
BUCKET = 1 << 20
PATIENCE_S = 120.0


@pytest.fixture(scope="module", params=["causal", "reward"])
def engine(request: pytest.FixtureRequest, models: Models) -> Iterator[HostedEngine]:
    model: Path = getattr(models, request.param)
    options = {
        "attention_backend": "triton", "sampling_backend": "pytorch", "mem_fraction_static": 0.2, "max_total_tokens": 32_768,
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "0")
        hosted = HostedEngine(
            str(model), device="cuda", dtype="bfloat16", options=options, max_batch_tokens=2048, max_batch_rows=64
        )
    yield hosted.wait_until_started()
    hosted.end()


@pytest.fixture
def subject(request: pytest.FixtureRequest, engine: HostedEngine, models: Models, tmp_path: Path) -> Subject:
    kind = "causal" if declared(engine).kind == "causal" else "reward"
    return Subject(engine, getattr(models, kind), tmp_path)


@pytest.fixture(params=["gloo", "nccl", "copies"])
def way(request: pytest.FixtureRequest) -> str:
    """How bytes reach a stager. Beyond the CPU the trainer has the second GPU."""
    if request.param != "gloo" and torch.cuda.device_count() < 2:
        pytest.skip(f"needs two CUDA GPUs: torch finds {torch.cuda.device_count()}")
    return request.param


@pytest.fixture(params=["gloo", "nccl"])
def backend(request: pytest.FixtureRequest) -> str:
    """NCCL wants a GPU for each rank: the trainer has the second one."""
    if request.param == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip(f"needs two CUDA GPUs: torch finds {torch.cuda.device_count()}")
    return request.param


class Trainer:
    """Rank 0 on a thread. `copies`: it offers to have its buckets copied."""

    def __init__(self, backend: str, *, copies: bool = False) -> None:
        self.backend = backend
        self.copies = copies
        self.device = "cuda:1" if backend == "nccl" else "cpu"
        self.rendezvous = Rendezvous()
        self.name = secrets.token_hex(8)
        self.group: ProcessGroup | None = None

    def begin(self, given: Any) -> threading.Thread:
        """Join, unless it has, and send."""

        def send() -> None:
            if self.backend == "nccl":
                torch.cuda.set_device(1)
            if self.group is None:
                self.group = self.rendezvous.join(
                    self.name, 2, backend=self.backend, device=self.device, timeout_s=PATIENCE_S, copies=self.copies
                )
                assert isinstance(self.group, CopySource) == self.copies
            memory = make_space(given.space.numel(), self.device)
            space = memory.tensors[0].copy_(given.space)
            for bucket in buckets(given.manifest, BUCKET):
                self.group.broadcast(space[bucket.at : bucket.at + bucket.nbytes], PATIENCE_S)

        thread = threading.Thread(target=send)
        thread.start()
        return thread

    def close(self) -> None:
        if self.group is not None:
            self.group.abort()
        self.rendezvous.close()


def with_stager(
    processes: Processes, directory: Path, device: str, story: Callable[[StagerLink, "asyncio.Queue[Staged]"], Any]
) -> "subprocess.Popen[Any]":
    socket = str(directory / "stager.sock")
    spec = {"socket": socket, "device": device, "orphan_s": PATIENCE_S}
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "0", "ENGINEPOOL_STAGER": msgspec.json.encode(spec).decode()}
    stager = processes.start(
        [sys.executable, "-m", "enginepool.workers.stager.main"], env=environment, stdin=subprocess.DEVNULL
    )

    async def run() -> None:
        received: asyncio.Queue[Staged] = asyncio.Queue()

        def heard(message: Staged | SnapshotMissing) -> None:
            assert isinstance(message, Staged)
            received.put_nowait(message)

        link = StagerLink(socket, heard, lambda reason: None)
        try:
            await story(link, received)
        finally:
            await link.close()

    asyncio.run(run())
    return stager


@pytest.mark.parametrize("room", ["device", "host"])
def test_staged_weights_are_in_the_engine_bit_by_bit(
    processes: Processes, subject: Subject, way: str, room: str, tmp_path: Path
) -> None:
    trainer = Trainer("gloo" if way == "gloo" else "nccl", copies=way == "copies")
    batch = full_batch(declared(subject.engine), rows=4, seed=1)

    async def story(link: StagerLink, received: "asyncio.Queue[Staged]") -> None:
        assert (await link.ask(Room(64 << 20), Reserved)).staging == room
        before = None
        for version in (1, 2):
            given = subject.drawn(version, torch.bfloat16)
            reserved = await link.ask(Reserve((1, version), list(given.manifest), BUCKET), Reserved, PATIENCE_S)
            assert reserved.staging == room
            ready = NewWeights(given.manifest, tuple(reserved.regions))
            ready_s = subject.prepare_load(ready)
            thread = trainer.begin(given)
            ask = Join(trainer.name, 2, 1, trainer.rendezvous.address, trainer.backend, update=(1, version))
            joined = await link.ask(ask, Joined, PATIENCE_S)
            assert joined.message == ""
            whole(await asyncio.to_thread(subject.engine.score, batch))
            async with asyncio.timeout(PATIENCE_S):
                came = await received.get()
            thread.join()
            assert (came.message, came.digest, came.findings) == ("", given.digest, [])
            times = subject.load_weights(ready, version, given.digest)
            parts = {"ready": ready_s, "load": times.load_s, "flush": times.flush_s}
            print(f"{room} {way}:", ", ".join(f"{part} {s * 1e3:.2f} ms" for part, s in parts.items()))  # noqa: T201
            assert subject.engine.call("do", "inspect", "digest") == (given.digest, [])
            after = subject.scores(batch)
            assert before is None or any((a != b).any() for a, b in zip(after, before, strict=True))
            before = after
            snapshot = tmp_path / f"g-{given.digest}"
            link.tell(Committed((1, version), version, given.digest, str(snapshot)))
            held = await link.ask(AskHeld(), StagerHolds)
            assert (held.version, held.digest) == (version, given.digest)
            subject.load_weights(NewWeights(given.manifest, tuple(held.regions)), version, given.digest)
            if room == "host":
                subject.engine.call("do", "release_buffers")
            assert subject.engine.call("do", "inspect", "digest") == (given.digest, [])

    try:
        with_stager(processes, tmp_path, "cuda" if room == "device" else "cpu", story)
    finally:
        trainer.close()


class Filled:
    """A group whose buckets come as soon as their broadcast is begun."""

    def __init__(self, space: Any) -> None:
        self.on_device = True
        self._space, self._at = space, 0

    def begin(self, bucket: Any) -> Any:
        bucket.copy_(self._space[self._at : self._at + bucket.numel()])
        self._at += bucket.numel()
        return SimpleNamespace(wait=float, order=float)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f"needs two CUDA GPUs: torch finds {torch.cuda.device_count()}")
@pytest.mark.parametrize("least", [0, stager_memory.LEAST_ON_FIRST])
def test_an_engine_over_two_gpus_reads_an_update_out_of_shards(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least: int
) -> None:
    """With `least` 0 each GPU holds half of the bytes; else the first one holds all of so small a model."""
    monkeypatch.setattr(stager_memory, "LEAST_ON_FIRST", least)
    options = {
        "attention_backend": "triton", "sampling_backend": "pytorch", "mem_fraction_static": 0.2, "max_total_tokens": 32_768,
        "tp_size": 2, "disable_custom_all_reduce": True,
    }  # fmt: skip
    engine = HostedEngine(
        str(models.causal), device="cuda", dtype="bfloat16", options=options, max_batch_tokens=2048, max_batch_rows=64
    )
    try:
        subject = Subject(engine.wait_until_started(), models.causal, tmp_path)
        nbytes = subject.drawn(0, torch.bfloat16).space.numel()
        memory = stager_memory.DeviceMemory(nbytes, 2)
        sizes = [space.nbytes for space in memory.regions()]
        assert len(sizes) == memory.shards == (1 if least else 2) and sum(sizes) == nbytes
        for version in (1, 2, 3):
            given = subject.drawn(version, torch.bfloat16)
            weights = NewWeights(given.manifest, tuple(memory.regions()), sharded=True)
            ready_s = subject.prepare_load(weights) if version > 1 else 0.0
            reception = memory.reception(list(given.manifest), 1 << 14, "cuda:0")
            came: Any = Filled(given.space.to("cuda:0"))
            assert reception.receive(came) == (given.digest, [])
            times = subject.load_weights(weights, version, given.digest)
            print(f"shards of {sizes}: ready {ready_s * 1e3:.2f} ms, load {times.load_s * 1e3:.2f} ms")  # noqa: T201
            assert engine.call("do", "inspect", "digest") == (given.digest, [])
        engine.call("do", "release_buffers")
    finally:
        engine.end()


def test_memory_of_a_stager_that_died_is_free_once_the_engine_lets_go_of_it(
    processes: Processes, subject: Subject, tmp_path: Path
) -> None:
    nbytes = 512 << 20
    given = subject.drawn(5, torch.bfloat16)

    def free() -> int:
        return torch.cuda.mem_get_info(0)[0]

    async def story(link: StagerLink, received: "asyncio.Queue[Staged]") -> None:
        assert (await link.ask(Room(nbytes), Reserved, PATIENCE_S)).staging == "device"
        for update in (1, 2):
            reserved = await link.ask(Reserve((1, update), list(given.manifest), BUCKET), Reserved, PATIENCE_S)
            first_s = subject.prepare_load(NewWeights(given.manifest, tuple(reserved.regions)))
            print(f"ready {first_s * 1e3:.2f} ms")  # noqa: T201

    stager = with_stager(processes, tmp_path, "cuda", story)
    stager.kill()
    stager.wait()
    held = free()
    subject.engine.call("do", "release_buffers")
    assert free() >= held + nbytes


def test_host_memory_is_pinned_where_the_gpu_copies_from() -> None:
    memory = HostMemory(1 << 20, pinned=True)
    sent = torch.arange(1 << 20, device="cuda:0").to(torch.uint8)
    memory.tensors[0].copy_(sent, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(memory.tensors[0], sent.cpu())
    assert memory.tensors[0].is_pinned()
    for _ in range(2):  # the second time perhaps at the address of the first
        opened = open_space(memory.regions()[0], pinned=True)
        assert opened.is_pinned()
        assert torch.equal(opened.to("cuda:0"), sent)
        del opened


@pytest.mark.parametrize("lender", ["cuda:0", "cpu", "cuda:1"])
def test_lent_weights_are_in_the_engine_bit_by_bit_and_their_memory_comes_back(subject: Subject, lender: str) -> None:
    """This process is the trainer, and on `cuda:0` shares the engine's GPU. The engine does not see `cuda:1`."""
    if lender == "cuda:1" and torch.cuda.device_count() < 2:
        pytest.skip(f"needs two CUDA GPUs: torch finds {torch.cuda.device_count()}")
    batch = full_batch(declared(subject.engine), rows=4, seed=2)
    before = torch.cuda.memory_allocated(0)
    for version in (1, 2, 3):
        lent = Lending(subject.drawn(30 + version, torch.bfloat16).tensors, lender)
        [space] = lent.weights.regions
        gpus = subject.engine.call("do", "model_tensors").gpus
        assert len(gpus) == 1 and (space.gpu in gpus) == (lender == "cuda:0")
        if lender == "cuda:1":
            with pytest.raises(EngineError, match=f"GPU {space.gpu} is not visible here"):
                subject.engine.call("do", "verify", lent.weights)
            lent.end()
            return
        assert subject.engine.call("do", "verify", lent.weights) == (lent.digest, [])
        whole(subject.engine.score(batch))
        times = subject.load_weights(lent.weights, version, lent.digest)
        print(f"lent on {lender}: load {times.load_s * 1e3:.1f} ms, flush {times.flush_s * 1e3:.1f} ms")  # noqa: T201
        subject.engine.call("do", "release_buffers")
        lent.end()
        assert subject.engine.call("do", "inspect", "digest") == (lent.digest, [])
        del lent
        assert torch.cuda.memory_allocated(0) == before, "torch keeps memory that it takes for used"


def test_a_lender_on_a_gpu_that_uses_its_memory_again_is_noticed(subject: Subject) -> None:
    lent = Lending(subject.drawn(40, torch.bfloat16).tensors, "cuda:0")
    subject.engine.call("do", "verify", lent.weights)
    lent.end()
    with pytest.raises(EngineDied, match="given to something else meanwhile"):
        subject.load_weights(lent.weights, 4, lent.digest)
    subject.engine.call("do", "release_buffers")
    given = subject.drawn(41, torch.bfloat16)
    subject.load_weights(given.weights, 5, given.digest)
    assert subject.engine.call("do", "inspect", "digest") == (given.digest, [])


def test_direct_weights_are_in_the_engine_bit_by_bit(subject: Subject, backend: str) -> None:
    trainer = Trainer(backend)
    for version in (1, 2):
        given = subject.drawn(10 + version, torch.bfloat16)
        thread = trainer.begin(given)
        subject.engine.call("do", "join", Join(trainer.name, 2, 1, trainer.rendezvous.address, backend))
        times = subject.load_weights(NewWeights(given.manifest, group=trainer.name, bucket_bytes=BUCKET), version)
        thread.join()
        print(f"direct {backend}: load {times.load_s * 1e3:.1f} ms, flush {times.flush_s * 1e3:.1f} ms")  # noqa: T201
        assert subject.holds() == (version, given.digest)
        assert subject.engine.call("do", "inspect", "digest") == (given.digest, [])
    trainer.close()


def test_a_checkpoint_and_its_questions(subject: Subject) -> None:
    subject.load_weights(NewWeights(checkpoint=str(subject.model)), 3)
    name = random.Random(1).choice(sorted(subject.own))
    chunk = subject.engine.call("do", "tensor", name, 0, 1 << 20)
    tensor, dtype = chunk.values.reshape(chunk.shape), chunk.dtype
    assert dtype == "bfloat16"
    assert (tensor == subject.own[name].bfloat16().float().numpy()).all()
    assert subject.engine.call("do", "inspect", "validate") == ("", [])
