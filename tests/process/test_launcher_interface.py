"""The daemon starts and stops workers through the interface of a launcher alone."""

import asyncio
import gc
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from enginepool.config import RestartConfig
from enginepool.coordinator.core.events import DrainAsked, WorkerExited
from enginepool.coordinator.core.group_weights import EarlierWorker, GroupWeights
from enginepool.coordinator.launchers.base import Launcher, LauncherContext
from enginepool.coordinator.shell.daemon import Daemon
from enginepool.coordinator.shell.router import Router
from enginepool.host.child_process import ChildProcess
from tests.process.daemons import PATIENCE_S, sim_pool


class FakeLauncher:
    """Starts nothing. A test reports what becomes of the workers."""

    def __init__(self, context: LauncherContext) -> None:
        self.context = context
        self.earlier: list[EarlierWorker] = []
        self.started: list[tuple[str, int, str]] = []
        self.stopped: list[str] = []
        self.finished = False
        self.changed = asyncio.Event()

    def adopt(self) -> list[EarlierWorker]:
        return self.earlier

    def start(self, group: str, index: int, incarnation: str, weights: GroupWeights | None = None) -> bool:
        assert weights is None
        self.started.append((group, index, incarnation))
        self.changed.set()
        return True

    def stop(self, incarnation: str, reason: str) -> None:
        self.stopped.append(incarnation)
        asyncio.get_running_loop().call_soon(self.exit, incarnation, reason)

    def exit(self, incarnation: str, reason: str) -> None:
        """Report the end of a worker."""
        self.context.exited(WorkerExited(time.monotonic(), incarnation, reason))

    def drain(self) -> None:
        raise AssertionError("the daemon drains its workers over their links")

    def stop_all(self) -> None:
        self.finished = True

    def finish(self, finished: Callable[[], None]) -> None:
        self.finished = True
        asyncio.get_running_loop().call_soon(finished)

    def restore_folders(self) -> None:
        raise AssertionError("no folder was removed")


def implements(launcher: FakeLauncher) -> Launcher:
    """For the type checker."""
    return launcher


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """A daemon sets the garbage collector of its process."""
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


def test_workers_are_started_started_again_and_stopped_through_the_launcher(tmp_path: Path) -> None:
    config = sim_pool(tmp_path, workers=2)
    config = msgspec.structs.replace(config, restart=RestartConfig(backoff_s=0.01))
    made: list[FakeLauncher] = []

    def make(context: LauncherContext) -> FakeLauncher:
        made.append(FakeLauncher(context))
        return made[0]

    async def story() -> None:
        daemon = Daemon(config, asyncio.get_running_loop(), None, make)
        [launcher] = made
        try:
            daemon.start()
            assert [(group, index) for group, index, _ in launcher.started] == [("g", 0), ("g", 1)]
            launcher.changed.clear()
            first = launcher.started[0][2]
            launcher.exit(first, "exit code 1")
            async with asyncio.timeout(PATIENCE_S):
                await launcher.changed.wait()
            group, index, again = launcher.started[2]
            assert (group, index) == ("g", 0) and again != first
            daemon.handle(DrainAsked(time.monotonic(), 0.0))
            async with asyncio.timeout(PATIENCE_S):
                assert await daemon.ended == 0
            assert sorted(launcher.stopped) == sorted([launcher.started[1][2], again])
            assert launcher.finished
        finally:
            daemon.close()

    asyncio.run(story())


def test_a_coordinator_that_waits_for_its_clients_before_it_ends_alone_may_be_told_to_end_the_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = sim_pool(tmp_path, workers=1)
    made: list[FakeLauncher] = []

    def make(context: LauncherContext) -> FakeLauncher:
        made.append(FakeLauncher(context))
        return made[0]

    def reads_later(self: Router) -> bool:
        return made[0].finished

    monkeypatch.setattr(Router, "all_read", reads_later)
    monkeypatch.setattr("enginepool.coordinator.shell.sockets.READ_S", PATIENCE_S)

    async def story() -> None:
        daemon = Daemon(config, asyncio.get_running_loop(), None, make)
        try:
            daemon.start()
            daemon.handle(DrainAsked(time.monotonic(), 0.0, keep_workers=True))
            daemon.handle(DrainAsked(time.monotonic(), 0.0))
            async with asyncio.timeout(PATIENCE_S):
                assert await daemon.ended == 0
            assert made[0].stopped == [made[0].started[0][2]]
        finally:
            daemon.close()

    asyncio.run(story())


def test_exit_codes_of_workers_are_known_although_the_program_that_started_it_ignores_them(tmp_path: Path) -> None:
    config = sim_pool(tmp_path, workers=0)
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    async def story() -> int | None:
        daemon = Daemon(config, asyncio.get_running_loop(), None, FakeLauncher)
        try:
            daemon.start()
            return ChildProcess.start([sys.executable, "-c", "raise SystemExit(71)"], {}).reap()
        finally:
            daemon.close()

    try:
        assert asyncio.run(story()) == 71
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_worker_may_read_nothing_for_as_long_as_it_may_be_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silences: list[float] = []

    class Noted(Router):
        def __init__(self, most: int, proof: int, unread: int, silence: float, *others: Any) -> None:
            silences.append(silence)
            super().__init__(most, proof, unread, silence, *others)

    async def story() -> None:
        Daemon(config, asyncio.get_running_loop(), None, FakeLauncher).close()

    monkeypatch.setattr("enginepool.coordinator.shell.daemon.Router", Noted)
    config = sim_pool(tmp_path, workers=0, silence_s=120.0, client_silence_s=30.0)
    asyncio.run(story())
    config = sim_pool(tmp_path, workers=0, silence_s=10.0, client_silence_s=30.0)
    asyncio.run(story())
    assert silences == [30.0, 120.0, 30.0, 30.0]


def test_a_worker_that_the_launcher_adopts_is_not_started_again(tmp_path: Path) -> None:
    config = sim_pool(tmp_path, workers=2)
    made: list[FakeLauncher] = []

    def make(context: LauncherContext) -> FakeLauncher:
        made.append(FakeLauncher(context))
        made[0].earlier.append(EarlierWorker("g", 1, "g-1.1.1"))
        return made[0]

    async def story() -> None:
        daemon = Daemon(config, asyncio.get_running_loop(), None, make)
        try:
            daemon.start()
            assert [(group, index) for group, index, _ in made[0].started] == [("g", 0)]
        finally:
            daemon.close()

    asyncio.run(story())
