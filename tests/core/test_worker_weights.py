"""Updates in the worker's process: what happens where an engine hangs in something that no call waits for."""

import asyncio
from collections.abc import Coroutine
from typing import Any, cast

import pytest

from enginepool.protocol.messages import FrameSpec, Sampling, StartGeneration
from enginepool.protocol.messages.weight_reports import Finding
from enginepool.protocol.messages.weights import (
    Committed,
    LoadWeights,
    MemoryRegion,
    Prepare,
    Prepared,
    ReleaseWeights,
    Restore,
    Restored,
    VerifyWeights,
)
from enginepool.workers.between_batches import BetweenBatches
from enginepool.workers.engine import Emit, Engine, GenerationTask, NewTokens, PauseMode
from enginepool.workers.engine_weights import LoadTimes, NewWeights
from enginepool.workers.events import (
    EngineLost,
    LoadPrepared,
    RunGeneration,
    RunWeights,
    StepsDone,
    WeightsAnswered,
    WorkerEvent,
)
from enginepool.workers.generation import GenerationRunner
from enginepool.workers.weights import executor as weights
from enginepool.workers.weights.executor import WeightExecutor
from enginepool.workers.weights.worker_update import WorkerUpdate

UPDATE, NEXT = (7, 1), (7, 2)
SPACE = MemoryRegion("cuda", 8)


class HangingEngine:
    """Holds version 1; hangs in what it is told."""

    version, digest = 1, "d" * 32

    def __init__(self, hangs_in: str) -> None:
        self._hangs_in = hangs_in
        self.weights = self

    async def _maybe(self, call: str) -> None:
        if call == self._hangs_in:
            await asyncio.Event().wait()

    async def load_weights(self, _weights: NewWeights, version: int, digest: str) -> None:
        await self._maybe("load_weights")
        self.version, self.digest = version, digest

    async def verify(self, _weights: NewWeights) -> tuple[str, list[Finding]]:
        return "d" * 32, []

    async def prepare_load(self, _weights: NewWeights) -> float:
        return 0.0

    async def release_buffers(self) -> None:
        await self._maybe("release_buffers")


def heard(engine: HangingEngine, *, opens: bool = False) -> list[WorkerEvent]:
    """What comes of an update that is over, named or with memory open, and of a next one, up to the first event."""
    events: list[WorkerEvent] = []

    async def run() -> None:
        tasks: set[asyncio.Task[None]] = set()
        came = asyncio.Event()

        def feed(event: WorkerEvent) -> None:
            events.append(event)
            came.set()

        def spawn(work: Coroutine[Any, Any, None]) -> None:
            tasks.add(asyncio.create_task(work))

        def begin(prepare: Prepare) -> WorkerUpdate:
            update = WorkerUpdate(prepare, "")
            worker.run(RunWeights(prepare, (), update))
            return update

        worker = WeightExecutor("", cast(Engine, engine), feed, spawn)
        update = begin(Prepare(UPDATE, 2, "set_version"))
        await came.wait()
        assert [type(event) for event in events] == [WeightsAnswered]
        update.answers[Prepared] = Prepared(UPDATE)
        if opens:
            came.clear()
            worker.run(RunWeights(VerifyWeights(UPDATE, [SPACE]), (), update))
            await came.wait()
            assert [type(event) for event in events] == [WeightsAnswered, LoadPrepared, WeightsAnswered]
            worker.run(RunWeights(ReleaseWeights(UPDATE), (), update))
        else:
            worker.run(RunWeights(Committed(UPDATE, 1, "e" * 32), (), update))
        events.clear()
        came.clear()
        await asyncio.sleep(0)  # its turn has come
        begin(Prepare(NEXT, 2, "set_version"))
        async with asyncio.timeout(60):
            await came.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())
    return events


@pytest.mark.parametrize(("opens", "said"), [(False, "set the digest of its weights"), (True, "release an update's memory")])
def test_an_engine_that_hangs_where_no_coordinator_waits_is_lost(
    monkeypatch: pytest.MonkeyPatch, opens: bool, said: str
) -> None:
    monkeypatch.setattr(weights, "ASIDE_S", 0.05)
    lost = heard(HangingEngine("release_buffers" if opens else "load_weights"), opens=opens)[0]
    assert isinstance(lost, EngineLost)
    assert lost.reason == f"the engine does not {said} within 0.05 s"


@pytest.mark.parametrize("opens", [False, True])
def test_the_next_update_waits_for_what_is_done_aside_and_no_longer(opens: bool) -> None:
    engine = HangingEngine("")
    [answered] = heard(engine, opens=opens)
    assert isinstance(answered, WeightsAnswered) and isinstance(answered.answer, Prepared)
    assert answered.answer.update == NEXT
    assert engine.digest == ("d" if opens else "e") * 32


class SteppingEngine:
    """Its last step is over when it is paused, and neither a pause nor a load waits for anything."""

    version, digest = 1, "d" * 32
    emit: Emit

    def __init__(self) -> None:
        self.weights = self

    async def generate(self, _task: GenerationTask, emit: Emit) -> None:
        self.emit = emit
        await asyncio.Event().wait()

    def check_pause(self, _mode: PauseMode) -> None: ...

    async def pause(self, _mode: PauseMode, *, confirmed: bool = True) -> None:
        self.emit(NewTokens(0, [11]))

    async def load_weights(self, _weights: NewWeights, version: int, digest: str, _running: Any = None) -> LoadTimes:
        self.version, self.digest = version, digest
        return LoadTimes(0.0, 0.0)


def test_tokens_of_the_old_weights_are_said_before_the_new_ones_are() -> None:
    events: list[WorkerEvent] = []

    async def run() -> None:
        loaded = asyncio.Event()

        def feed(event: WorkerEvent) -> None:
            events.append(event)
            if isinstance(event, WeightsAnswered):
                loaded.set()

        engine = cast(Engine, SteppingEngine())
        generations = GenerationRunner(engine, feed, asyncio.create_task, BetweenBatches())
        start = StartGeneration((7, 1), [FrameSpec("prompt", "int32", (1,))], Sampling())
        generations.run(RunGeneration(start, (bytes(4),)))
        await asyncio.sleep(0)  # it is inside
        worker = WeightExecutor("", engine, feed, asyncio.create_task)
        update = WorkerUpdate(Prepare(UPDATE, 2, "set_version", generations="retract"), "")
        worker.run(RunWeights(LoadWeights(UPDATE, 2), (), update, "retract"))
        async with asyncio.timeout(60):
            await loaded.wait()

    asyncio.run(run())
    assert [type(event) for event in events] == [StepsDone, WeightsAnswered]


@pytest.mark.parametrize(
    ("code", "digest", "found"), [("", "x", None), ("needs_weights", "d" * 32, None), ("needs_weights", "x", "x")]
)
def test_a_restore_that_failed_says_what_the_engine_has_loaded_instead(
    code: str, digest: str, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, events = SteppingEngine(), list[WorkerEvent]()

    async def restore(*_: object) -> Restored:
        engine.digest = digest
        return Restored(3, code, "")

    async def run() -> None:
        WeightExecutor("", cast(Engine, engine), events.append, asyncio.create_task).run(RunWeights(Restore(3, "e")))
        while not events:
            await asyncio.sleep(0)

    monkeypatch.setattr(weights, "restore", restore)
    asyncio.run(asyncio.wait_for(run(), 60))
    [event] = events
    assert isinstance(event, WeightsAnswered) and event.found == found
