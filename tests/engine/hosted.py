"""A real engine in a process of its own, as a worker hosts it, driven over a pipe: one process can have one engine only."""

import asyncio
import inspect
import multiprocessing
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
import psutil

from bench.processes import free_port
from enginepool.protocol.errors import WireError
from enginepool.protocol.messages import Capabilities, Tokenize
from enginepool.workers.engine import BatchOutcome, EngineDied, EngineError, GenerationTask, NewTokens, PauseMode, RowBatch
from enginepool.workers.engine_settings import EngineSettings
from enginepool.workers.prefix_report import PrefixReport
from enginepool.workers.sglang.host.engine import SglangEngine
from enginepool.workers.texts import TextIds, TextTask
from tests.engine import forked as forks
from tests.process import forking
from tests.process.waiting import check_running

#: An engine starts in 20 s where nothing else runs; tests share their machine.
START_S = 500
#: The engine itself kills a process that hangs before that.
CLOSE_S = 120


class HostedEngine:
    """The tests' end of the pipe. Calls block.

    Args:
        refused: options with which another engine is tried before.

    Its processes are forked from one that has imported SGLang (`forked`), which saves twenty seconds. On a GPU they are
    spawned, as a worker has them.
    """

    def __init__(self, model: str, refused: dict[str, Any] | None = None, **settings: Any) -> None:
        # SGLang's own choice is one of 900, which engines that start at the same time may share.
        settings = {"device": "cpu", "nccl_port": free_port()} | settings
        forked = settings["device"] == "cpu"
        context: Any = forks.server() if forked else multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, model, settings, refused)
        self._process = context.Process(
            target=_host_forked if forked else _host, args=(dict(os.environ), *arguments) if forked else arguments
        )
        self._process.start()
        theirs.close()
        self.capabilities: Capabilities | None = None
        self.stages: list[str] = []
        self.details: list[str] = []
        self.refusal = ""

    def wait_until_started(self) -> "HostedEngine":
        """Raises EngineDied when the engine did not start."""
        if self.capabilities is None:
            assert self._pipe.poll(START_S), "the engine did not start in time"
            started = self._answer()
            self.capabilities, self.refusal = started.capabilities, started.refusal
            self.stages, self.details = started.stages, started.details
        return self

    def call(self, name: str, *args: Any) -> Any:
        """What the method of `_Host` of this name returns or raises."""
        self._pipe.send((name, args))
        return self._answer()

    def _answer(self) -> Any:
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def score(self, *batches: RowBatch, at_once: int = 1) -> list[BatchOutcome | Exception]:
        """Run batches, `at_once` of them in flight; their outcomes in order."""
        return self.call("score", batches, at_once)

    @property
    def ended(self) -> bool:
        """Whether the process is gone."""
        return not self._process.is_alive()

    def close(self) -> "Closed":
        """Close the engine and end its process."""
        closed = self.call("close")
        self._process.join(CLOSE_S)
        assert self._process.exitcode == 0
        return closed

    def end(self) -> None:
        """End the process in any state; nothing if it has ended."""
        self._pipe.close()  # the host closes its engine at the end of the pipe
        self._process.join(30)
        if self._process.is_alive():
            self._process.kill()


@dataclass(frozen=True)
class Started:
    """What starting gave."""

    capabilities: Capabilities
    stages: list[str]
    details: list[str]
    refusal: str


@dataclass(frozen=True)
class Closed:
    """What closing left, and what a call on the closed engine says."""

    seconds: float
    children: list[str]
    refusal: str


class _Host:
    """The engine's end of the pipe. Each method is a call."""

    def __init__(self, engine: SglangEngine) -> None:
        self._engine = engine
        #: the blocks that the engine reported and not yet evicted
        self._blocks = set[int]()
        self._report = PrefixReport()
        engine.report_prefixes(self._report)
        self._termed = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._termed.set)

    async def score(self, batches: tuple[RowBatch, ...], at_once: int) -> list[BatchOutcome | Exception]:
        slots = asyncio.Semaphore(at_once)

        async def one(batch: RowBatch) -> BatchOutcome | Exception:
            async with slots:
                try:
                    return await self._engine.score(batch)
                except (EngineError, EngineDied) as error:
                    return error

        return await asyncio.gather(*(one(batch) for batch in batches))

    async def generate(self, tasks: tuple[GenerationTask, ...]) -> list[list[NewTokens] | Exception]:
        """What each task emits, all of them at once, or how it failed."""

        async def one(task: GenerationTask) -> list[NewTokens] | Exception:
            emitted: list[NewTokens] = []
            try:
                await self._engine.generate(task, emitted.append)
            except (EngineError, EngineDied) as error:
                return error
            return emitted

        return await asyncio.gather(*(one(task) for task in tasks))

    async def mixed(
        self, tasks: tuple[GenerationTask, ...], batches: tuple[RowBatch, ...], at_once: int
    ) -> tuple[list[list[NewTokens] | Exception], list[BatchOutcome | Exception], list[int]]:
        """What each task emits, and the outcomes of the batches, which run once a task has a token; and how many tokens there
        were in all at the end of each batch."""
        begun, count, counts = asyncio.Event(), 0, list[int]()

        async def sequences(task: GenerationTask) -> list[NewTokens] | Exception:
            emitted: list[NewTokens] = []

            def emit(new: NewTokens) -> None:
                nonlocal count
                emitted.append(new)
                count += len(new.tokens)
                begun.set()

            try:
                await self._engine.generate(task, emit)
            except (EngineError, EngineDied) as error:
                return error
            return emitted

        slots = asyncio.Semaphore(at_once)

        async def rows(batch: RowBatch) -> BatchOutcome | Exception:
            async with slots:
                [outcome] = await self.score((batch,), 1)
                counts.append(count)
                return outcome

        running = [asyncio.create_task(sequences(task)) for task in tasks]
        await begun.wait()
        outcomes = await asyncio.gather(*(rows(batch) for batch in batches))
        return await asyncio.gather(*running), outcomes, counts

    async def swap(self, tasks: tuple[GenerationTask, ...], name: str, path: str) -> list[list[NewTokens] | Exception]:
        """As `generate`, while the engine loads an adapter: after the first token, and before the last one."""
        begun = asyncio.Event()
        real, ended = self._engine.generate, False

        async def load() -> None:
            await begun.wait()
            await self._engine.load_adapter(name, path)
            assert not ended, "nothing ran any more"

        async def one(task: GenerationTask) -> list[NewTokens] | Exception:
            nonlocal ended
            emitted: list[NewTokens] = []

            def emit(new: NewTokens) -> None:
                emitted.append(new)
                begun.set()

            await real(task, emit)
            ended = True
            return emitted

        loading = asyncio.create_task(load())
        found = await asyncio.gather(*(one(task) for task in tasks))
        await loading
        return found

    async def reported(self, there: list[int], gone: list[int], within: float) -> bool:
        """Wait until the engine has reported these blocks, and evicted those. False: it has not within so many seconds."""
        end = time.monotonic() + within
        while not self._blocks.issuperset(there) or self._blocks.intersection(gone):
            if time.monotonic() > end:
                return False
            await asyncio.sleep(0.01)
            while (told := self._report.take()) is not None:
                if told[0].cleared:
                    self._blocks.clear()
                self._blocks.difference_update(np.frombuffer(told[1][1], "<u8").tolist())
                self._blocks.update(np.frombuffer(told[1][0], "<u8").tolist()[1::2])
        return True

    async def order(self, tasks: list[GenerationTask]) -> list[int]:
        """The numbers of the tasks in the order in which they emit, all of them at once."""
        order: list[int] = []
        await asyncio.gather(*(self._engine.generate(task, lambda _, i=i: order.append(i)) for i, task in enumerate(tasks)))
        return order

    async def ends(self, tasks: list[GenerationTask], late: GenerationTask) -> list[int]:
        """The numbers of the tasks in the order in which they end. The last one, `late`, is given once all sequences of the
        others have a token."""
        order: list[int] = []
        begun: set[tuple[int, int]] = set()
        all_begun = asyncio.Event()

        async def one(i: int, task: GenerationTask) -> None:
            def emit(new: NewTokens) -> None:
                begun.add((i, new.sequence))
                if len(begun) >= sum(task.n for task in tasks):
                    all_begun.set()

            await self._engine.generate(task, emit)
            order.append(i)

        running = [asyncio.create_task(one(i, task)) for i, task in enumerate(tasks)]
        await _wait_for(all_begun, running)
        await asyncio.gather(*running, one(len(tasks), late))
        return order

    async def stop(self, task: GenerationTask, after: int) -> tuple[int, int]:
        """Cancel a task once it has emitted `after` tokens; (all that it emitted, requests that SGLang has not answered once
        the call has ended). With 0 it is cancelled before it begins, with -1 one turn of the loop later, and so on."""
        count = 0
        enough = asyncio.Event()

        def emit(new: NewTokens) -> None:
            nonlocal count
            count += len(new.tokens)
            if count >= after:
                enough.set()

        work = asyncio.create_task(self._engine.generate(task, emit))
        if after > 0:
            await _wait_for(enough, [work])
        for _ in range(-after):
            await asyncio.sleep(0)
        work.cancel()
        await asyncio.wait({work})
        assert work.cancelled()
        engine: Any = self._engine
        return count, len(engine._tm.rid_to_state)

    async def pause(
        self, tasks: tuple[GenerationTask, ...], after: int, mode: PauseMode, loads: tuple[tuple[Any, ...], ...] = ()
    ) -> tuple[list[list[NewTokens]], list[list[int]]]:
        """What tasks emit, all of them at once, and how many tokens each had emitted in each pause.

        A pause begins once each has emitted `after` more, and so does the cancel that ends them: they ask for more tokens than
        they emit while this process gets no turn. `loads`: arguments of `load_weights`, one in each pause; without them there
        is one pause.
        """
        emitted: list[list[NewTokens]] = [[] for _ in tasks]
        moved = asyncio.Event()

        def emit(number: int, new: NewTokens) -> None:
            emitted[number].append(new)
            moved.set()

        def counts() -> list[int]:
            return [sum(len(new.tokens) for new in one) for one in emitted]

        async def emitted_more() -> None:
            least = [count + after for count in (pauses[-1] if pauses else [0] * len(tasks))]
            while not all(count >= one for count, one in zip(counts(), least, strict=True)):
                moved.clear()
                await _wait_for(moved, work)

        work = [asyncio.create_task(self._engine.generate(task, partial(emit, i))) for i, task in enumerate(tasks)]
        pauses: list[list[int]] = []
        for load in loads or (None,):
            await emitted_more()
            await self._engine.pause(mode, confirmed=load is None)
            if load is not None:
                await self._engine.weights.load_weights(*load)
            pauses.append(counts())
            for _ in range(3):
                await self._engine.weights.confirm()
            assert counts() == pauses[-1], "tokens in a pause"
            engine: Any = self._engine
            while load is not None and not engine._generation.messages._held:
                assert not all(one.done() for one in work), "they have ended before the load"
                await asyncio.sleep(0.001)  # it has gone on with the load, and its tokens are held back
            assert counts() == pauses[-1], "tokens of weights that are not committed"
            await self._engine.resume()
        await emitted_more()
        for one in work:
            one.cancel()
        await asyncio.wait(work)
        assert all(one.cancelled() for one in work), "they have ended before the cancel"
        return emitted, pauses

    async def cancel_in_pause(self, tasks: tuple[GenerationTask, ...], mode: PauseMode) -> tuple[bool, list[list[NewTokens]]]:
        """Whether the first task left when it was cancelled in a pause, and what each task emitted until all others had ended.
        The pause begins once each has emitted something. `in_place`: in the pause those that are inside are also retracted."""
        emitted: list[list[NewTokens]] = [[] for _ in tasks]
        moved = asyncio.Event()

        def emit(number: int, new: NewTokens) -> None:
            emitted[number].append(new)
            moved.set()

        work = [asyncio.create_task(self._engine.generate(task, partial(emit, i))) for i, task in enumerate(tasks)]
        while not all(emitted):
            moved.clear()
            await _wait_for(moved, work)
        await self._engine.pause(mode)
        before = len(emitted[0])
        work[0].cancel()
        for _ in range(3):
            await self._engine.weights.confirm()
        left = work[0].done()
        if not left:
            await self._engine.pause("retract")
            assert not work[0].done(), "a retract lets it go: commands need not hold its cancel back"
        await self._engine.resume()
        await asyncio.wait(work)
        assert work[0].cancelled() and len(emitted[0]) == before
        for one in work[1:]:
            one.result()
        return left, emitted

    async def cancel_prepared(self, running: GenerationTask, prepared: GenerationTask, mode: PauseMode) -> list[NewTokens]:
        """What `running` emits. The engine is paused while the grammar of `prepared` is compiled. That is cancelled, and leaves
        before the engine goes on."""
        engine: Any = self._engine
        emitted: list[NewTokens] = []
        begun = asyncio.Event()

        def emit(new: NewTokens) -> None:
            emitted.append(new)
            begun.set()

        work = asyncio.create_task(self._engine.generate(running, emit))
        await _wait_for(begun, [work])
        # It finds both, the sequence and the pause, when it looks.
        scheduler = _scheduler()
        scheduler.suspend()
        try:
            dropped = asyncio.create_task(self._engine.generate(prepared, emit))
            while sum(state.dispatched for state in engine._tm.rid_to_state.values()) < 2:
                check_running([work, dropped])
                await asyncio.sleep(0.001)
            paused = asyncio.create_task(self._engine.pause(mode))
            while not engine._tm.is_pause:
                await asyncio.sleep(0.001)
        finally:
            scheduler.resume()
        await paused
        dropped.cancel()
        try:
            done, _ = await asyncio.wait({dropped}, timeout=30)
        finally:
            await self._engine.resume()
        assert done, "it waits for the end of the pause"
        await work
        return emitted

    async def drop_after_load(self, task: GenerationTask, load: tuple[Any, ...]) -> None:
        """A task runs, new weights are loaded, and before they are committed it is cancelled. The engine has gone on then."""
        emitted: list[NewTokens] = []
        begun = asyncio.Event()

        def emit(new: NewTokens) -> None:
            emitted.append(new)
            begun.set()

        engine: Any = self._engine
        work = asyncio.create_task(self._engine.generate(task, emit))
        await _wait_for(begun, [work])
        await self._engine.pause("in_place", confirmed=False)
        await self._engine.weights.load_weights(*load)
        loaded = len(emitted)
        while not engine._generation.messages._held:
            assert not work.done(), "it has ended before the load"
            await asyncio.sleep(0.001)
        assert len(emitted) == loaded, "tokens of weights that are not committed"
        work.cancel()
        await self._engine.resume()
        await asyncio.wait({work})
        assert work.cancelled() and not engine._tm.rid_to_state

    async def finish_order(self, batches: tuple[RowBatch, ...]) -> list[int]:
        """In which order batches finish that are sent all at once, in the given order."""
        order: list[int] = []
        engine: Any = self._engine
        dispatch, sent = engine._tm._dispatch_to_scheduler, 0

        def counted(message: object) -> None:
            nonlocal sent
            dispatch(message)
            sent += 1

        async def one(place: int) -> None:
            await self._engine.score(batches[place])
            order.append(place)

        # It finds all of them when it looks, however long it takes to send them.
        scheduler = _scheduler()
        scheduler.suspend()
        engine._tm._dispatch_to_scheduler = counted
        try:
            pending = [asyncio.create_task(one(place)) for place in range(len(batches))]
            while sent < len(batches):
                check_running(pending)
                await asyncio.sleep(0.01)
        finally:
            del engine._tm._dispatch_to_scheduler
            scheduler.resume()
        await asyncio.gather(*pending)
        return order

    async def flush(self) -> None:
        """Drop what the engine has computed without a word to the adapter."""
        engine: Any = self._engine
        await engine._tm.flush_cache(timeout_s=30)

    async def queries(self) -> tuple[int, int]:
        """How many queries were sent ahead of their rows so far, and how many parts did not find their query."""
        engine: Any = self._engine
        return engine._scoring.cached.computed, engine._scoring.cached.missed

    async def pretend(self, times: int) -> None:
        """Have the adapter believe in budgets `times` as large as those of the engine; 1 undoes it."""
        engine: Any = self._engine
        real = engine._real = getattr(engine, "_real", engine._scoring.capabilities)
        engine._scoring.capabilities = msgspec.structs.replace(
            real, inflight_tokens=real.inflight_tokens * times, inflight_rows=real.inflight_rows * times
        )

    async def do(self, name: str, *args: Any) -> Any:
        """What the method or property of this name gives, of the engine or of its weights; "A.B" is B of A."""
        whole = self._engine if hasattr(self._engine, name.partition(".")[0]) else self._engine.weights
        found = attrgetter(name)(whole)
        if not callable(found):
            return found
        outcome = found(*args)
        return await outcome if inspect.isawaitable(outcome) else outcome

    async def tokenize(self, pairs: list[tuple[str, str]], raw: bool = False) -> list[list[int]]:
        return (await self._engine.tokenize(TextTask(pairs, Tokenize((0, 0), [], raw=raw)))).rows

    async def text_ids(self, task: TextTask) -> TextIds:
        try:
            return await self._engine.tokenize(task)
        except WireError as error:  # it cannot be pickled
            raise EngineError(f"{error.code} {error.field}: {error.message}") from None

    async def terminate(self) -> bool:
        """Send this process SIGTERM and wait for the handler from before the engine's start."""
        os.kill(os.getpid(), signal.SIGTERM)
        return await self._termed.wait()

    async def kill_scheduler(self, batch: RowBatch) -> tuple[str, Exception]:
        """SIGKILL the scheduler with a batch in flight; (why the engine died, how the batch ended)."""
        scheduler = _scheduler()
        scheduler.suspend()  # so that the batch is in flight when it dies
        pending = asyncio.create_task(self._engine.score(batch))
        await asyncio.sleep(0)
        scheduler.kill()
        reason = await self._engine.died()
        try:
            await pending
        except EngineDied as error:
            return reason, error
        raise AssertionError("the batch was answered by an engine that is dead")

    async def die_generating(self, task: GenerationTask) -> None:
        """SIGKILL the scheduler while it generates; raises what the task ends with."""
        begun = asyncio.Event()
        work = asyncio.create_task(self._engine.generate(task, lambda _: begun.set()))
        await _wait_for(begun, [work])
        _scheduler().kill()
        await work

    async def close(self) -> Closed:
        began = time.monotonic()
        await asyncio.gather(self._engine.close(), self._engine.close())
        seconds = time.monotonic() - began
        children = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
        try:
            await self._engine.tokenize(TextTask([("", "x")], Tokenize((0, 0), [])))
        except EngineDied as error:
            return Closed(seconds, children, str(error))
        raise AssertionError("a closed engine answered")


async def _wait_for(event: asyncio.Event, tasks: Iterable[asyncio.Task[Any]]) -> None:
    """What tasks cause. Raises what one of them has raised, and AssertionError if all have ended before."""
    running = set(tasks)
    waiting = asyncio.create_task(event.wait())
    try:
        while not event.is_set():
            assert running, "all have ended before"
            done, _ = await asyncio.wait({waiting, *running}, return_when=asyncio.FIRST_COMPLETED)
            running -= done
            for task in done:
                task.result()
    finally:
        waiting.cancel()


def _scheduler() -> psutil.Process:
    """SGLang's own process; of several, the last one."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "scheduler" in " ".join(child.cmdline())][-1]


def _host_forked(environment: dict[str, str], *arguments: Any) -> None:
    forking.become(environment)
    forking.fork_what_sglang_spawns()
    _host(*arguments)


def _host(pipe: Connection, model: str, settings: dict[str, Any], refused: dict[str, Any] | None) -> None:
    asyncio.run(_serve(pipe, model, settings, refused))


async def _serve(pipe: Connection, model: str, settings: dict[str, Any], refused: dict[str, Any] | None) -> None:
    refusal = ""
    reports: list[tuple[str, str]] = []

    def report(stage: str, detail: str) -> None:
        reports.append((stage, detail))

    if refused is not None:
        try:
            await SglangEngine(EngineSettings(model=model, device=settings["device"], options=refused)).start(
                lambda _stage, _detail: None
            )
        except EngineDied as error:
            refusal = str(error)
    engine = SglangEngine(EngineSettings(model=model, **settings))
    host = _Host(engine)
    try:
        capabilities = await engine.start(report)
    except EngineDied as error:
        pipe.send(error)
        return
    pipe.send(Started(capabilities, [stage for stage, _ in reports], [detail for _, detail in reports], refusal))
    name = ""
    while name != "close":
        try:
            name, args = await asyncio.to_thread(pipe.recv)
        except EOFError:
            await engine.close()
            return
        try:
            answer = await getattr(host, name)(*args)
        except Exception as error:
            answer = error
        pipe.send(answer)
