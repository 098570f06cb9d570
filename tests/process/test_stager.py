"""A real stager process next to a sim engine: what arrives, what is kept, what a dead peer or a killed stager leads to."""

import asyncio
import contextlib
import importlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, TypeVar, cast

import msgspec
import psutil
import pytest

from enginepool.host import host_identity
from enginepool.protocol.layout import ALIGNMENT, buckets, layout
from enginepool.protocol.manifest import Tensor, encode_manifest
from enginepool.protocol.messages.weight_reports import Inspect, Inspected
from enginepool.protocol.messages.weights import (
    Committed,
    Join,
    Joined,
    LoadWeights,
    MemoryRegion,
    Prepare,
    Prepared,
    ReleaseWeights,
    Restore,
    Restored,
    Staged,
    VerifyWeights,
    WeightsLoaded,
)
from enginepool.transfer.collective import Rendezvous
from enginepool.transfer.digest import digest_of, views
from enginepool.transfer.shared_memory import HostSpace, open_space, set_seal
from enginepool.workers.engine import Engine, EngineDied, EngineError, PauseMode
from enginepool.workers.engine_weights import LoadTimes, NewWeights
from enginepool.workers.events import (
    EngineLost,
    RunWeights,
    SendToCoordinator,
    WeightsAnswered,
    WorkerEffect,
    WorkerEvent,
)
from enginepool.workers.sim.faults import suffer
from enginepool.workers.sim.options import read_options
from enginepool.workers.sim.weights import SimWeights
from enginepool.workers.stager import memory as stager_memory
from enginepool.workers.stager import messages as staging
from enginepool.workers.stager import receiving, stager
from enginepool.workers.stager.link import StagerLink
from enginepool.workers.stager.memory import HostMemory
from enginepool.workers.stager.shards import shard_sizes
from enginepool.workers.stager.snapshot import Footer, read_footer
from enginepool.workers.weights.executor import WeightExecutor
from enginepool.workers.weights.machine import WorkerUpdates
from tests.process.forking import ForkedProcess
from tests.process.processes import Processes

torch: Any = importlib.import_module("torch")

PATIENCE_S = 60.0
BUCKET = 1024
MODEL = [Tensor("a", "float32", (30, 17)), Tensor("b", "bfloat16", (5,)), Tensor("c", "float32", (3,))]

A = TypeVar("A")


class Trainer:
    """Rank 0, with the means of the publisher, and without its manners."""

    def __init__(self, manifest: list[Tensor] = MODEL) -> None:
        self.rendezvous = Rendezvous()
        self.manifest = manifest
        self.group: Any = None

    def fill(self, value: float) -> Any:
        """A space whose tensors are all `value`, or draws if that is 0."""
        space = torch.zeros(layout(self.manifest).nbytes, dtype=torch.uint8)
        for tensor in views(space, self.manifest):
            tensor.fill_(value)
        return space

    def join(self) -> Join:
        """Begin to form a group of two; what the worker is to be told."""
        name = secrets.token_hex(8)  # no name is used twice in a process
        self.joining = threading.Thread(target=self._join, args=(name,))
        self.joining.start()
        return Join(name, 2, 1, self.rendezvous.address, "gloo")

    def _join(self, name: str) -> None:
        self.group = self.rendezvous.join(name, 2, backend="gloo", timeout_s=PATIENCE_S)

    def send(self, space: Any, *, only: int | None = None) -> str:
        """Broadcast the space, or its first buckets; its digest."""
        self.joining.join(PATIENCE_S)
        for number, bucket in enumerate(buckets(self.manifest, BUCKET)):
            if only is None or number < only:
                self.group.broadcast(space[bucket.at : bucket.at + bucket.nbytes], PATIENCE_S)
        return digest_of(space)


class Worker:
    """The worker's side: a sim engine, its `WeightExecutor` and the machine's half of an update, on the loop of the test."""

    def __init__(self, socket: str, **options: Any) -> None:
        options = {"tensors": msgspec.to_builtins(MODEL), **options}
        self.engine = NotedWeights(options)
        self.events: asyncio.Queue[WorkerEvent] = asyncio.Queue()
        self.tasks: set[asyncio.Task[None]] = set()
        engine = cast(Engine, SimpleNamespace(weights=self.engine))
        self.weights = WeightExecutor(socket, engine, self._feed, self._spawn)
        self.updates = WorkerUpdates()
        self.update = (1, 0)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    @property
    def received(self) -> Staged | None:
        """What the stager has said of the update."""
        return None if self.updates.update is None else self.updates.update.received

    def _feed(self, event: WorkerEvent) -> None:
        said = [] if isinstance(event, EngineLost) else self.updates.reported(cast(Any, event))
        if has_taken(event) or isinstance(event, EngineLost):
            self.events.put_nowait(event)
        self._perform([*said, *self.updates.load()])

    def _perform(self, effects: Sequence[WorkerEffect]) -> None:
        for effect in effects:
            if isinstance(effect, RunWeights):
                self.weights.run(effect)
            elif isinstance(effect, SendToCoordinator):
                self.events.put_nowait(WeightsAnswered(0.0, cast(Any, effect.message), effect.frames))

    def tell(self, message: Any, *frames: bytes) -> None:
        """A message of the coordinator. Of other versions than the engine's, too, the stager hears that they are committed."""
        asked = self.updates.asked(message, frames, 1, ready=True)
        stray = [RunWeights(message)] if isinstance(message, Committed) and not asked else []
        self._perform([*asked, *stray, *self.updates.load()])

    async def event(self) -> WorkerEvent:
        async with asyncio.timeout(PATIENCE_S):
            return await self.events.get()

    async def answer(self, kind: type[A]) -> A:
        event = await self.event()
        assert isinstance(event, WeightsAnswered), event
        assert isinstance(event.answer, kind), event.answer
        return event.answer

    async def prepare(self, manifest: list[Tensor] = MODEL, **fields: Any) -> Prepared:
        self.update = (1, self.update[1] + 1)
        message = Prepare(self.update, 1, fields.pop("transfer", "staged"), bucket_bytes=BUCKET, **fields)
        self.tell(message, encode_manifest(manifest))
        return await self.answer(Prepared)

    async def join(self, join: Join) -> Joined:
        self.tell(msgspec.structs.replace(join, update=self.update))
        return await self.answer(Joined)

    async def staged(self, trainer: Trainer, space: Any, join: Join | None = None) -> Staged:
        """Prepare, join and receive `space`."""
        assert (await self.prepare()).code == ""
        assert (await self.join(join or trainer.join())).code == ""
        digest = await asyncio.to_thread(trainer.send, space)
        staged = await self.answer(Staged)
        assert staged.digest in (digest, "")
        return staged

    async def load(self, version: int) -> WeightsLoaded:
        self.tell(LoadWeights(self.update, version))
        return await self.answer(WeightsLoaded)

    async def restore(self, version: int, digest: str, snapshot: str = "", path: str = "") -> WorkerEvent:
        self.tell(Restore(version, digest, snapshot, path))
        return await self.event()


def has_taken(event: WorkerEvent) -> bool:
    """Whether a restore was done."""
    return isinstance(event, WeightsAnswered) and isinstance(event.answer, Restored) and not event.answer.code


class NotedWeights(SimWeights):
    """Notes what it is asked to have ready; an update waits for it until `may` is set."""

    def __init__(self, options: dict[str, Any]) -> None:
        SimWeights.__init__(self, read_options(options), lambda: None, suffer)
        self.asked: list[NewWeights | str] = []
        self.joining = asyncio.Event()
        self.may = asyncio.Event()
        self.may.set()
        self.fails: Exception | None = None

    async def join(self, request: Join) -> None:
        self.joining.set()
        await self.may.wait()
        await SimWeights.join(self, request)

    async def prepare_load(self, weights: NewWeights) -> float:
        self.asked.append(weights)
        await self.may.wait()
        if self.fails is not None:
            raise self.fails
        return 0.002

    async def release_buffers(self) -> None:
        self.asked.append("let go")

    async def load_weights(self, weights: NewWeights, version: int, digest: str, running: PauseMode | None = None) -> LoadTimes:
        self.asked.append(weights)
        return await SimWeights.load_weights(self, weights, version, digest, running)


#: a stager whose snapshots are written when the file of this name is there
SLOW = """
import os, sys, time
from enginepool.workers.stager import main, memory as stager_memory
save = stager_memory.HostMemory.save
def slowly(*args):
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.02)
    save(*args)
stager_memory.HostMemory.save = slowly
main.main()
"""


class Place:
    """A stager process and what it takes to have it again."""

    command = ("-m", "enginepool.workers.stager.main")
    log: int | IO[str] = subprocess.PIPE

    def __init__(
        self, processes: Processes, directory: Path, orphan_s: float = PATIENCE_S, lifeline: int | None = None
    ) -> None:
        self.processes = processes
        self.directory = directory
        self.socket = str(directory / "stager.sock")
        self.lifeline = lifeline
        self.spec = {"socket": self.socket, "name": "g.0", "device": "cpu", "orphan_s": orphan_s, "lifeline_fd": lifeline}
        self.start()

    def start(self) -> None:
        """Returns once it listens; or has, and has ended since."""
        Path(self.socket).unlink(missing_ok=True)
        environment = {**os.environ, "ENGINEPOOL_STAGER": msgspec.json.encode(self.spec).decode()}
        self.process = self.processes.keep(
            ForkedProcess(
                [sys.executable, *self.command],
                env=environment,
                pass_fds=() if self.lifeline is None else (self.lifeline,),
                stderr=self.log,
                text=True,
            )
        )
        end = time.monotonic() + PATIENCE_S
        while not os.path.exists(self.socket) and self.process.poll() is None:
            assert time.monotonic() < end
            time.sleep(0.02)

    @asynccontextmanager
    async def worker(self, **options: Any) -> AsyncGenerator[Worker]:
        worker = Worker(self.socket, **options)
        yield worker
        for task in worker.tasks:
            task.cancel()
        await asyncio.gather(*worker.tasks, return_exceptions=True)
        await worker.weights.close()


@pytest.fixture
def place(processes: Processes, tmp_path: Path) -> Place:
    return Place(processes, tmp_path)


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    trainer = Trainer()
    yield trainer
    if trainer.group is not None:
        trainer.group.abort()
    trainer.rendezvous.close()


def test_what_the_trainer_sends_is_what_the_engine_takes_several_times_over_one_group(place: Place, trainer: Trainer) -> None:
    async def story() -> None:
        async with place.worker() as worker:
            join = trainer.join()
            peers: set[str] = set()
            for version in (1, 2, 3):
                prepared = await worker.prepare()
                assert (prepared.code, prepared.staging, prepared.ranks) == ("", "host", 1)
                peers.add(prepared.peer)
                assert (await worker.join(join)).code == ""
                digest = await asyncio.to_thread(trainer.send, trainer.fill(version))
                staged = await worker.answer(Staged)
                assert (staged.code, staged.digest, staged.findings) == ("", digest, [])
                assert worker.engine.version == version - 1
                handed = await worker.load(version)
                assert (handed.code, handed.version, handed.digest) == ("", version, digest)
                assert (worker.engine.version, worker.engine.digest) == (version, digest)
                chunk = await worker.engine.tensor("a", 0, 30 * 17)
                assert chunk.shape == (30, 17) and (chunk.values == version).all()
                worker.tell(Committed(worker.update, version, digest))
            assert len(peers) == 1

    asyncio.run(asyncio.wait_for(story(), PATIENCE_S))


def test_the_engine_has_ready_what_it_takes_before_staged_is_said_and_lets_go_of_it_after_the_commit(
    place: Place, trainer: Trainer
) -> None:
    async def story() -> None:
        async with place.worker() as worker:
            engine, join = worker.engine, trainer.join()
            for version in (1, 2):
                engine.may.clear()
                assert (await worker.prepare()).code == ""
                assert engine.asked == []
                assert (await worker.join(join)).code == ""
                digest = await asyncio.to_thread(trainer.send, trainer.fill(version))
                while worker.received is None:
                    await asyncio.sleep(0.01)
                assert worker.events.empty()
                engine.may.set()
                assert (await worker.answer(Staged)).digest == digest
                handed = await worker.load(version)
                assert (handed.code, handed.prepare_us) == ("", 2000)
                worker.tell(Committed(worker.update, version, digest))
                while len(engine.asked) < 3:
                    await asyncio.sleep(0.01)
                ready, taken, last = engine.asked
                assert isinstance(ready, NewWeights) and ready.regions and ready == taken and last == "let go"
                engine.asked.clear()

    asyncio.run(asyncio.wait_for(story(), PATIENCE_S))


def test_an_engine_that_cannot_get_ready_takes_the_weights_all_the_same(place: Place, trainer: Trainer) -> None:
    async def story() -> None:
        async with place.worker() as worker:
            worker.engine.fails = EngineError("not today")
            digest = (await worker.staged(trainer, trainer.fill(1))).digest
            handed = await worker.load(1)
            assert (handed.code, handed.digest, handed.prepare_us) == ("", digest, 0)

    asyncio.run(asyncio.wait_for(story(), PATIENCE_S))


def test_an_engine_that_dies_while_it_gets_ready_is_lost(place: Place, trainer: Trainer) -> None:
    async def story(error: Exception) -> None:
        async with place.worker() as worker:
            worker.engine.fails = error
            assert (await worker.prepare()).code == ""
            worker.tell(msgspec.structs.replace(trainer.join(), update=worker.update))
            lost = await worker.event()
            assert isinstance(lost, EngineLost) and "unforeseen" in lost.reason
            assert (await worker.answer(Joined)).code == ""

    for error in (EngineDied("unforeseen"), LookupError("unforeseen")):
        asyncio.run(story(error))
        trainer.joining.join(PATIENCE_S)


@pytest.mark.parametrize("end", ["release", "stager", "restore"])
def test_what_was_made_ready_is_let_go_of_when_the_update_ends(place: Place, trainer: Trainer, end: str) -> None:
    async def story() -> None:
        async with place.worker() as worker:
            assert (await worker.staged(trainer, trainer.fill(1))).code == ""
            assert len(worker.engine.asked) == 1
            if end == "release":
                worker.tell(ReleaseWeights(worker.update, "the trainer is gone"))
            elif end == "stager":
                place.process.kill()
                assert (await worker.answer(Staged)).code == "update_aborted"
            else:
                assert (await worker.load(1)).code == ""
                worker.updates.new_epoch()
                await worker.restore(0, "0" * 32)
            while worker.engine.asked[-1] != "let go":
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(story(), PATIENCE_S))


@pytest.mark.parametrize("transfer", ["staged", "ipc"])
def test_a_restore_during_an_update_takes_no_memory_from_it(place: Place, trainer: Trainer, transfer: str) -> None:
    snapshot, space = place.directory / f"g-{2:032x}", trainer.fill(1)

    async def story() -> None:
        async with place.worker() as worker:
            if transfer == "staged":
                digest = (await worker.staged(trainer, space)).digest
                # The restore finds the bytes that were staged for the update: they are those of the committed weights.
                assert has_taken(await worker.restore(1, digest))
                worker.tell(Committed((0, 0), 1, digest, str(snapshot)))
                while not snapshot.exists():
                    await asyncio.sleep(0.02)
            else:
                lent = HostSpace(space.numel() + ALIGNMENT, lent=True)
                lent.tensors[0][: space.numel()].copy_(space)
                seal = set_seal(lent.tensors[0])
                assert (await worker.prepare(transfer="ipc", host=host_identity())).code == ""
                regions = [msgspec.structs.replace(region, seal=seal) for region in lent.regions()]
                worker.tell(VerifyWeights(worker.update, regions))
                digest = (await worker.answer(Staged)).digest
                failed = await worker.restore(1, digest)
                assert isinstance(failed, WeightsAnswered) and isinstance(failed.answer, Restored)
            handed = await worker.load(1)
            assert (handed.code, handed.digest) == ("", digest)
            worker.tell(Committed(worker.update, 1, digest))
            while worker.engine.asked[-1] != "let go":
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(story(), PATIENCE_S))


def test_a_stagers_one_device_space_stays_open_until_it_takes_a_larger_one_or_is_gone(
    place: Place, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = StagerLink.ask

    async def on_a_gpu(link: StagerLink, message: Any, kind: type[Any], timeout_s: float = PATIENCE_S) -> Any:
        answer = await ask(link, message, kind, timeout_s)
        return msgspec.structs.replace(answer, staging="device") if kind is staging.Reserved else answer

    monkeypatch.setattr(StagerLink, "ask", on_a_gpu)

    async def story() -> None:
        larger = [*MODEL, Tensor("more", "float32", (9, 9))]
        async with place.worker(tensors=msgspec.to_builtins(larger)) as worker:
            asked, join = worker.engine.asked, trainer.join()
            for version in (1, 2):
                assert (await worker.prepare(partial=True)).code == ""
                assert (await worker.join(join)).code == ""
                digest = await asyncio.to_thread(trainer.send, trainer.fill(version))
                await worker.answer(Staged)
                assert (await worker.load(version)).code == ""
                worker.tell(Committed(worker.update, version, digest))
            assert await worker.prepare(partial=True)
            assert len(asked) == 4 and "let go" not in asked
            assert (await worker.prepare(larger)).code == ""
            assert asked[4:] == ["let go"]
            place.process.kill()
            assert (await worker.join(join)).code == "update_aborted"
            while asked[6:] != ["let go"]:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(story(), PATIENCE_S))


def test_an_update_that_is_released_while_its_engine_joins_a_group_holds_up_no_other() -> None:
    async def story() -> None:
        worker = Worker("")
        worker.engine.may.clear()
        first = await worker.prepare(transfer="direct")
        worker.tell(Join("of nobody", 2, 1, "127.0.0.1:9", "gloo", update=worker.update))
        await worker.engine.joining.wait()
        worker.tell(ReleaseWeights(worker.update, "the publisher is gone"))
        second = await worker.prepare(transfer="direct")
        assert first.code == second.code == ""
        assert first.peer != second.peer, "it is not known which group the engine is in"
        for task in worker.tasks:
            task.cancel()
        await asyncio.gather(*worker.tasks, return_exceptions=True)

    asyncio.run(asyncio.wait_for(story(), PATIENCE_S))


def test_an_update_that_is_released_while_the_engine_gets_ready_is_let_go_of_too(place: Place, trainer: Trainer) -> None:
    async def story() -> None:
        async with place.worker() as worker:
            worker.engine.may.clear()
            assert (await worker.prepare()).code == ""
            assert (await worker.join(trainer.join())).code == ""
            worker.tell(ReleaseWeights(worker.update, "the trainer is gone"))
            worker.engine.may.set()
            while worker.engine.asked[-1] != "let go":
                await asyncio.sleep(0.01)
            trainer.joining.join(PATIENCE_S)

    asyncio.run(asyncio.wait_for(story(), PATIENCE_S))


def test_a_worker_that_comes_back_gets_the_committed_weights_while_the_next_are_received(
    place: Place, trainer: Trainer
) -> None:
    async def story() -> None:
        async with place.worker() as worker:
            join = trainer.join()
            digest = (await worker.staged(trainer, trainer.fill(1), join)).digest
            worker.tell(Committed(worker.update, 1, digest))
            assert (await worker.staged(trainer, trainer.fill(2), join)).code == ""
        async with place.worker() as successor:
            taken = await successor.restore(1, digest)
            assert has_taken(taken)
            assert (successor.updates.version, successor.updates.digest) == (1, digest)
            assert (successor.engine.version, successor.engine.digest) == (1, digest)
            other = await successor.restore(2, "0" * 32)
            assert isinstance(other, WeightsAnswered) and isinstance(other.answer, Restored)
            assert other.answer.code == "needs_weights" and "holds version 1" in other.answer.message
            assert successor.engine.digest == digest

    asyncio.run(asyncio.wait_for(story(), PATIENCE_S))


def test_an_update_that_was_received_is_there_for_the_successor_of_a_worker_that_died_with_the_word_of_its_commit(
    place: Place, trainer: Trainer
) -> None:
    snapshot = place.directory / f"g-{2:032x}"

    async def story() -> None:
        async with place.worker() as worker:
            join = trainer.join()
            worker.tell(Committed(worker.update, 1, (await worker.staged(trainer, trainer.fill(1), join)).digest))
            digest = (await worker.staged(trainer, trainer.fill(2), join)).digest
        async with place.worker() as successor:
            assert has_taken(await successor.restore(2, digest))
            assert (successor.engine.version, successor.engine.digest) == (2, digest)
            successor.tell(Committed((0, 0), 2, digest, str(snapshot)))
            while not snapshot.exists():
                await asyncio.sleep(0.02)
        assert read_footer(str(snapshot)).digest == digest
        async with place.worker() as third:
            other = await third.restore(3, "0" * 32)
            assert isinstance(other, WeightsAnswered) and isinstance(other.answer, Restored)
            assert "holds version 2" in other.answer.message

    asyncio.run(asyncio.wait_for(story(), PATIENCE_S))


def test_what_a_dead_worker_waited_for_is_no_answer_to_its_successor(place: Place, trainer: Trainer) -> None:
    async def story() -> None:
        async with place.worker() as worker:
            assert (await worker.prepare()).code == ""
            # No other rank comes to this group, so that the stager is joining when its worker dies.
            link = worker.weights._stager  # pyright: ignore[reportPrivateUsage]
            link.tell(Join("nobody", 2, 1, trainer.rendezvous.address, update=worker.update))
            await link.alive()
        async with place.worker() as successor:
            successor.update = worker.update
            prepared = await successor.prepare()
            assert (prepared.code, prepared.message) == ("", "")
            assert (await successor.staged(trainer, trainer.fill(1))).code == ""

    asyncio.run(asyncio.wait_for(story(), PATIENCE_S))


def test_the_room_that_a_dead_worker_waited_for_is_not_its_successors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    making, may = threading.Event(), threading.Event()
    path = str(tmp_path / "stager.sock")

    def make_memory(nbytes: int, *, gpus: int) -> HostMemory:
        making.set()
        may.wait(PATIENCE_S)
        return HostMemory(nbytes)

    def reserve(number: int) -> staging.Reserve:
        return staging.Reserve((number, 1), MODEL, BUCKET)

    def link() -> StagerLink:
        return StagerLink(path, lambda _: None, lambda _: None)

    async def story() -> None:
        one = stager.Stager(staging.StagerSpec(socket=path))
        server = await asyncio.start_unix_server(one.serve, path)
        worker, successor = link(), link()
        asking = asyncio.create_task(worker.ask(reserve(1), staging.Reserved))
        assert await asyncio.to_thread(making.wait, PATIENCE_S)
        asking.cancel()
        await worker.close()
        await successor.alive()
        asking = asyncio.create_task(successor.ask(reserve(2), staging.Reserved))
        await asyncio.sleep(0)
        may.set()
        reserved = await asking
        assert one.update is not None and one.update.id == (2, 1)
        assert reserved.regions == one.update.memory.regions()
        await successor.close()
        server.close()

    monkeypatch.setattr(stager_memory, "make_memory", make_memory)
    asyncio.run(asyncio.wait_for(story(), PATIENCE_S))


class Shards:
    """Memory in two shards, as that of two GPUs, on the host."""

    kind = "device"
    shards = 2

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._parts = [HostMemory(size) for size in shard_sizes(nbytes, 2, 0).values()]
        self.tensors = [part.tensors[0] for part in self._parts]

    def regions(self) -> list[MemoryRegion]:
        return [space for part in self._parts for space in part.regions()]

    def reception(self, *arguments: Any) -> receiving.ShardedReception:
        return receiving.ShardedReception(self.tensors, *arguments)

    def save(self, *arguments: Any) -> None:
        stager_memory.DeviceMemory.save(cast(Any, self), *arguments)


def test_an_update_in_shards_is_received_held_and_kept_as_one_in_a_space_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, snapshot = str(tmp_path / "stager.sock"), tmp_path / f"g-{1:032x}"
    whole = layout(MODEL).nbytes
    sent = torch.randint(1, 127, (whole,), dtype=torch.uint8)
    digest = digest_of(sent)
    stay: list[bool] = []

    class Group:
        name = "g"
        at = 0

        def begin(self, bucket: Any) -> Any:
            bucket.copy_(sent[self.at : self.at + bucket.numel()])
            self.at += bucket.numel()
            return SimpleNamespace(wait=float)

    def joined(*_: object, stays: bool, **__: object) -> Group:
        stay.append(stays)
        return Group()

    def make_memory(nbytes: int, *, gpus: int) -> Any:
        return Shards(nbytes)

    async def story() -> None:
        came: asyncio.Queue[Staged | staging.SnapshotMissing] = asyncio.Queue()
        one = stager.Stager(staging.StagerSpec(socket=path))
        server = await asyncio.start_unix_server(one.serve, path)
        link = StagerLink(path, came.put_nowait, lambda _: None)
        reserved = await link.ask(staging.Reserve((1, 1), MODEL, BUCKET), staging.Reserved)
        assert reserved.sharded and [space.nbytes for space in reserved.regions] == [whole // 2, whole // 2]
        ask = Join("g", 2, 1, "127.0.0.1:1", update=(1, 1))
        assert (await link.ask(ask, Joined)).message == ""
        assert stay == [False], "buckets pass through buffers: no other rank may copy them from there"
        async with asyncio.timeout(PATIENCE_S):
            received = await came.get()
        assert isinstance(received, Staged)
        assert (received.digest, received.code) == (digest, "")
        link.tell(Committed((1, 1), 1, digest, str(snapshot)))
        held = await link.ask(staging.AskHeld(digest), staging.StagerHolds)
        assert (held.version, held.digest, held.sharded) == (1, digest, True)
        found = torch.cat([open_space(space) for space in held.regions])
        assert torch.equal(found, sent)
        await asyncio.to_thread(one.finish)
        assert read_footer(str(snapshot)) == Footer(1, digest, MODEL)
        assert snapshot.read_bytes()[:whole] == sent.numpy().tobytes()
        await link.close()
        server.close()

    monkeypatch.setattr("enginepool.transfer.collective.join", joined)
    monkeypatch.setattr(stager_memory, "make_memory", make_memory)
    asyncio.run(asyncio.wait_for(story(), PATIENCE_S))


def test_the_snapshot_serves_where_the_stager_was_killed(place: Place, trainer: Trainer) -> None:
    snapshot = place.directory / "snapshots" / f"g-{1:032x}"
    older = snapshot.with_name(f"g-{0:032x}")

    async def story() -> None:
        async with place.worker() as worker:
            join = trainer.join()
            digest = (await worker.staged(trainer, trainer.fill(0), join)).digest
            worker.tell(Committed(worker.update, 0, digest, str(older)))
            while not older.exists():
                await asyncio.sleep(0.02)
            digest = (await worker.staged(trainer, trainer.fill(1), join)).digest
            worker.tell(Committed(worker.update, 1, digest, str(snapshot)))
            while not snapshot.exists() or older.exists():
                await asyncio.sleep(0.02)
        footer = read_footer(str(snapshot))
        assert (footer.version, footer.digest, footer.manifest) == (1, digest, MODEL)
        place.process.kill()
        place.process.wait()
        place.start()
        async with place.worker() as successor:
            assert has_taken(await successor.restore(1, digest, snapshot=str(snapshot)))
            assert successor.engine.digest == digest
        async with place.worker() as successor:
            data = bytearray(snapshot.read_bytes())
            data[5] ^= 1
            broken = place.directory / "broken"
            broken.write_bytes(data)
            refused = await successor.restore(1, digest, snapshot=str(broken))
            assert isinstance(refused, WeightsAnswered) and isinstance(refused.answer, Restored)
            assert "its digest is not" in refused.answer.message

    asyncio.run(asyncio.wait_for(story(), PATIENCE_S))


def test_a_stager_that_is_killed_in_a_transfer_is_an_aborted_update_and_the_next_one_works(
    place: Place, trainer: Trainer
) -> None:
    async def story() -> None:
        async with place.worker() as worker:
            assert (await worker.prepare()).code == ""
            assert (await worker.join(trainer.join())).code == ""
            await asyncio.to_thread(trainer.send, trainer.fill(1), only=1)
            place.process.kill()
            staged = await worker.answer(Staged)
            assert staged.code == "update_aborted" and "ended" in staged.message
            trainer.group.abort()
            place.start()
            assert (await worker.staged(trainer, trainer.fill(2))).code == ""
            assert (await worker.load(2)).code == ""

    asyncio.run(asyncio.wait_for(story(), PATIENCE_S))


def test_a_release_leaves_the_group_and_the_next_update_names_another_peer(place: Place, trainer: Trainer) -> None:
    async def story() -> None:
        async with place.worker() as worker:
            first = await worker.prepare()
            assert (await worker.join(trainer.join())).code == ""
            await asyncio.to_thread(trainer.send, trainer.fill(1), only=1)
            worker.tell(ReleaseWeights(worker.update, "the trainer is gone"))
            trainer.group.abort()
            second = await worker.prepare()
            assert second.code == "" and second.peer != first.peer
            assert (await worker.join(trainer.join())).code == ""
            await asyncio.to_thread(trainer.send, trainer.fill(2))
            assert (await worker.answer(Staged)).code == ""
            assert (await worker.load(2)).version == 2

    asyncio.run(asyncio.wait_for(story(), PATIENCE_S))


def test_findings_are_told_and_the_coordinator_judges_them(place: Place, trainer: Trainer) -> None:
    async def story() -> None:
        async with place.worker() as worker:
            space = trainer.fill(1)
            a, b, c = views(space, MODEL)
            a[0, :2], b[1] = float("nan"), float("inf")
            c.zero_()
            staged = await worker.staged(trainer, space)
            assert staged.code == ""
            found = [(one.name, one.kind, one.count) for one in staged.findings]
            assert found == [("a", "nan", 2), ("b", "infinity", 1), ("c", "zero", 3)]

    asyncio.run(asyncio.wait_for(story(), PATIENCE_S))


def test_names_and_shapes_that_do_not_fit_are_refused_before_anything_moves(place: Place) -> None:
    async def story() -> None:
        async with place.worker() as worker:
            for manifest, story_, name in (
                ([*MODEL, Tensor("d", "float32", (1,))], "unknown names: d", "d"),
                (MODEL[:2], "missing names: c", "c"),
                ([Tensor("a", "float32", (17, 30)), *MODEL[1:]], r"a: shape [17, 30]", "a"),
                ([*MODEL, MODEL[0]], "named twice", ""),
            ):
                prepared = await worker.prepare(manifest)
                assert prepared.code == "weights_refused" and story_ in prepared.message and prepared.field == name
            assert (await worker.prepare(MODEL[:2], partial=True)).code == ""
        async with place.worker(tensors=[]) as worker:
            assert "takes no updates" in (await worker.prepare()).message
        place.process.kill()
        place.process.wait()
        os.unlink(place.socket)

    asyncio.run(asyncio.wait_for(story(), PATIENCE_S))


def test_an_engine_that_refuses_keeps_its_weights_and_says_so(place: Place, trainer: Trainer) -> None:
    async def story() -> None:
        async with place.worker(faults=[{"kind": "fail_on_take", "at_take": 1}]) as worker:
            assert (await worker.staged(trainer, trainer.fill(1))).code == ""
            handed = await worker.load(1)
            assert handed.code == "engine_error" and "fail_on_take" in handed.message
            assert (worker.engine.version, worker.engine.digest) == (0, "")

    asyncio.run(asyncio.wait_for(story(), PATIENCE_S))


def test_a_set_version_changes_the_version_alone_and_questions_are_answered(place: Place) -> None:
    async def story() -> None:
        async with place.worker() as worker:
            assert (await worker.prepare(transfer="set_version")).code == ""
            assert (await worker.load(7)).version == 7
            assert (worker.engine.version, worker.engine.digest) == (7, "")
            worker.tell(Inspect((1, 9), "digest"))
            assert (await worker.answer(Inspected)).code == ""
            worker.tell(Inspect((1, 10), "tensor", "a"))
            assert (await worker.answer(Inspected)).code == "engine_error"

    asyncio.run(asyncio.wait_for(story(), PATIENCE_S))


def test_a_stager_ends_when_it_is_not_needed_and_at_once_with_its_owner(processes: Processes, tmp_path: Path) -> None:
    place = Place(processes, tmp_path, orphan_s=0.5)
    assert place.process.wait(PATIENCE_S) == 0
    assert place.process.stderr is not None and "neither an owner nor a worker" in place.process.stderr.read()
    read, write = os.pipe()
    place.spec |= {"lifeline_fd": read, "orphan_s": PATIENCE_S}
    environment = {**os.environ, "ENGINEPOOL_STAGER": msgspec.json.encode(place.spec).decode()}
    process = processes.start(
        [sys.executable, "-m", "enginepool.workers.stager.main"],
        env=environment,
        pass_fds=(read,),
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(read)
    os.close(write)
    assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("written", [True, False], ids=["written", "not written"])
def test_no_snapshot_in_memory_outlives_the_owner(processes: Processes, tmp_path: Path, written: bool) -> None:
    """Nor that of the version before, where the last one was not written yet."""
    kept = Path(f"/dev/shm/enginepool-test-{secrets.token_hex(6)}")
    processes.then(lambda: shutil.rmtree(kept, ignore_errors=True))
    read, write = os.pipe()
    place = Place(processes, tmp_path, lifeline=read)
    os.close(read)

    first = kept / f"g-{1:032x}"

    async def story(trainer: Trainer) -> None:
        async with place.worker() as worker:
            digest = (await worker.staged(trainer, trainer.fill(1))).digest
            worker.tell(Committed(worker.update, 1, digest, str(first)))
            while not first.exists():
                await asyncio.sleep(0.02)
            if not written:
                worker.tell(Committed((0, 0), 2, "another", str(kept / f"g-{2:032x}")))
                await worker.weights._stager.alive()  # pyright: ignore[reportPrivateUsage]

    trainer = Trainer()
    asyncio.run(story(trainer))
    trainer.group.abort()
    trainer.rendezvous.close()
    os.close(write)
    assert place.process.wait(PATIENCE_S) == 0
    assert not kept.exists()


@pytest.mark.parametrize("log", [subprocess.PIPE, "/dev/full"])
def test_a_stager_that_is_asked_to_end_writes_the_snapshot_that_it_owes_first(
    processes: Processes, tmp_path: Path, trainer: Trainer, monkeypatch: pytest.MonkeyPatch, log: int | str
) -> None:
    """The weights are committed, and its memory has them alone; also where the disk of its log is full."""
    with contextlib.ExitStack() as stack:
        if isinstance(log, str):
            monkeypatch.setattr(Place, "log", stack.enter_context(open(log, "w")))
        _owes_a_snapshot(processes, tmp_path, trainer, monkeypatch)


def _owes_a_snapshot(processes: Processes, tmp_path: Path, trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, snapshot = tmp_path / "gate", tmp_path / "snapshots" / f"g-{1:032x}"
    monkeypatch.setattr(Place, "command", ("-c", SLOW, str(gate)))
    place = Place(processes, tmp_path)

    async def story() -> str:
        async with place.worker() as worker:
            digest = (await worker.staged(trainer, trainer.fill(1))).digest
            worker.tell(Committed(worker.update, 1, digest, str(snapshot)))
            await worker.weights._stager.alive()  # pyright: ignore[reportPrivateUsage]
        return digest

    digest = asyncio.run(asyncio.wait_for(story(), PATIENCE_S))
    place.process.send_signal(signal.SIGTERM)
    end = time.monotonic() + PATIENCE_S
    while os.path.exists(place.socket):
        assert time.monotonic() < end
        time.sleep(0.02)
    assert not snapshot.exists()
    gate.touch()
    assert place.process.wait(PATIENCE_S) == 0
    assert read_footer(str(snapshot)).digest == digest


def test_sigterm_ends_a_stager_and_its_socket(place: Place) -> None:
    async def connected() -> None:
        async with place.worker() as worker:
            assert (await worker.prepare()).code == ""

    asyncio.run(connected())
    place.process.send_signal(signal.SIGTERM)
    assert place.process.wait(PATIENCE_S) == 0
    assert not os.path.exists(place.socket)
    assert not psutil.pid_exists(place.process.pid)


def test_a_receiver_that_fails_unexpectedly_says_so_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise TypeError("no such conversion\nand a long explanation")

    async def scene() -> list[Any]:
        said: list[Any] = []
        one = stager.Stager(staging.StagerSpec(socket="nowhere"))
        monkeypatch.setattr(one, "_say", lambda message, _to: said.append(message))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
        update = stager.StagedUpdate(staging.Reserve((1, 1), [], 256), HostMemory(256))
        message = Join("g", 2, 1, "127.0.0.1:1", update=(1, 1))
        await asyncio.to_thread(one._run, update, message)  # pyright: ignore[reportPrivateUsage]
        await asyncio.sleep(0)
        return said

    monkeypatch.setattr("enginepool.transfer.collective.join", broken)
    assert asyncio.run(scene()) == [Joined((1, 1), "update_aborted", "TypeError: no such conversion")]
    assert "and a long explanation" in capsys.readouterr().err


class Device:
    """A stager's memory on a device, as far as its group is concerned."""

    kind = "device"
    shards = 0

    def __init__(self, nbytes: int, into: Any = None) -> None:
        self.nbytes = nbytes
        self._into = into

    def regions(self) -> list[Any]:
        return []

    def reception(self, *_: object) -> Any:
        return self._into


def test_a_group_in_which_memory_was_to_stay_is_left_when_there_is_only_memory_that_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = threading.Event()

    class Group:
        abort = left.set

    def reserve(one: stager.Stager, update: int, nbytes: int) -> staging.Reserved:
        return one._reserve(staging.Reserve((1, update), [Tensor("a", "uint8", (nbytes,))], BUCKET))  # pyright: ignore[reportPrivateUsage]

    def gpus_of(_device: str, wanted: int) -> int:
        return wanted

    def make_memory(nbytes: int, *, gpus: int) -> Any:
        return Device(nbytes) if nbytes < 1024 else HostMemory(nbytes)

    async def scene() -> None:
        one = stager.Stager(staging.StagerSpec(socket="nowhere"))
        first = reserve(one, 1, 256)
        one.group = Group()  # type: ignore[assignment]
        assert reserve(one, 2, 256).peer == first.peer and not left.is_set()
        larger = reserve(one, 3, 1024)
        assert (first.staging, larger.staging) == ("device", "host")
        assert larger.peer not in ("", first.peer)
        assert one.group is None and left.wait(PATIENCE_S)

    monkeypatch.setattr(stager_memory, "gpus_of", gpus_of)
    monkeypatch.setattr(stager_memory, "make_memory", make_memory)
    asyncio.run(scene())


def test_nothing_is_received_into_memory_that_the_group_before_may_still_write_to(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    begun = threading.Event()

    class Before:
        name = "before"

        def abort(self) -> None:
            begun.wait(0.5)  # which must not happen
            events.append("left")

    class Into:
        def receive(self, _group: object) -> tuple[str, list[Any]]:
            events.append("received")
            begun.set()
            return "digest", []

    async def scene() -> None:
        one = stager.Stager(staging.StagerSpec(socket="nowhere"))
        one.group = Before()  # type: ignore[assignment]
        one._leave()  # pyright: ignore[reportPrivateUsage]
        update = stager.StagedUpdate(staging.Reserve((1, 1), [], 256), Device(256, Into()))  # type: ignore[arg-type]
        message = Join("next", 2, 1, "127.0.0.1:1", update=(1, 1))
        await asyncio.to_thread(one._run, update, message)  # pyright: ignore[reportPrivateUsage]

    def joined(*_: object, **__: object) -> Before:
        return Before()

    monkeypatch.setattr("enginepool.transfer.collective.join", joined)
    asyncio.run(scene())
    assert events == ["left", "received"]


def test_an_update_that_is_forgotten_while_it_leaves_a_group_does_not_lose_that_of_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Other:
        name = "other"

        def abort(self) -> None:
            pass

    def joined(*_: object, **__: object) -> Other:
        return Other()

    async def scene() -> None:
        one = stager.Stager(staging.StagerSpec(socket="nowhere"))
        update = stager.StagedUpdate(staging.Reserve((1, 1), [], 256), HostMemory(256))
        following: Any = Other()

        class Before:
            name = "before"

            def abort(self) -> None:
                # It takes seconds next to a stopped peer: meanwhile the update is forgotten, and the next one has its group.
                update.forgotten = True
                one.group = following

        one.group = Before()  # type: ignore[assignment]
        message = Join("g", 2, 1, "127.0.0.1:1", update=(1, 1))
        await asyncio.to_thread(one._run, update, message)  # pyright: ignore[reportPrivateUsage]
        assert one.group is following

    monkeypatch.setattr("enginepool.transfer.collective.join", joined)
    asyncio.run(scene())


def test_an_update_that_is_forgotten_before_its_first_byte_leaves_what_is_kept_in_its_memory() -> None:
    class Group:
        name = "g"

        def abort(self) -> None:
            pass

    class Into:
        def receive(self, _group: object) -> tuple[str, list[Any]]:
            raise AssertionError("an update that is forgotten is not received")

    async def scene() -> None:
        one = stager.Stager(staging.StagerSpec(socket="nowhere"))

        class Memory(Device):
            def reception(self, *_: object) -> Any:
                # It takes a moment to make one, and meanwhile the worker is told to release the update.
                one._forget()  # pyright: ignore[reportPrivateUsage]
                return Into()

        memory: Any = Memory(256)
        kept = one.kept = stager.KeptUpdate(1, "d", [], memory)
        update = one.update = stager.StagedUpdate(staging.Reserve((1, 2), [], 256), memory)
        one.group = Group()  # type: ignore[assignment]
        message = Join("g", 2, 1, "127.0.0.1:1", update=(1, 2))
        await asyncio.to_thread(one._run, update, message)  # pyright: ignore[reportPrivateUsage]
        assert one.kept is kept

    asyncio.run(scene())


def test_several_writers_leave_every_byte_of_a_space_in_its_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(stager_memory, "WRITTEN", 1000)
    space = torch.randint(0, 256, (10_240,), dtype=torch.uint8)
    with (tmp_path / "file").open("w+b") as file:
        stager_memory.write_out(space, file.fileno())
    assert (tmp_path / "file").read_bytes() == space.numpy().tobytes()


def test_what_lies_on_a_device_is_kept_as_a_whole_snapshot(tmp_path: Path) -> None:
    manifest = [Tensor("a", "uint8", (1000,)), Tensor("b", "float32", (7,))]
    memory = stager_memory.DeviceMemory.__new__(stager_memory.DeviceMemory)
    memory.nbytes = 4096
    memory.tensors = [torch.randint(0, 256, (4096,), dtype=torch.uint8)]
    path = str(tmp_path / f"g-{'0' * 32}")
    left: list[bool] = []
    memory.save(path, Footer(3, "d", manifest), lambda: left.append(Path(path).exists()))
    assert left == [False], "the memory is needed no more before the file has its name"
    assert read_footer(path) == Footer(3, "d", manifest)
    assert Path(path).read_bytes()[: layout(manifest).nbytes] == memory.tensors[0].numpy().tobytes()[: layout(manifest).nbytes]


def test_weights_for_which_gpus_have_no_room_lie_on_the_host_or_the_refusal_says_what_helps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    why = "GPU 0 has 3000 MiB left for 16000 MiB of weights"

    def full(nbytes: int, gpus: int, *, engine_runs: bool) -> Any:
        assert (gpus, engine_runs) == (1, True)
        raise OSError(why)

    def unpinned(nbytes: int, *, pinned: bool) -> HostMemory:
        assert pinned, "an engine copies from it while its group is held"
        return HostMemory(nbytes)

    monkeypatch.setattr(stager_memory, "DeviceMemory", full)
    monkeypatch.setattr(stager_memory, "HostMemory", unpinned)
    memory = stager_memory.make_memory(512, gpus=1)
    assert isinstance(memory, HostMemory) and (memory.nbytes, memory.why_host) == (512, why)
    monkeypatch.setattr(stager_memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=511))
    with pytest.raises(OSError, match=f"^{why}, and the host has 0 MiB; reserve_staging = true keeps memory of the GPU$"):
        stager_memory.make_memory(512, gpus=1)
