"""The process of external workers ends at SIGTERM, also while the settings of its group change. Its launcher is a stand-in."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from enginepool.coordinator.core.events import WorkerExited
from enginepool.coordinator.core.group_weights import EarlierWorker
from enginepool.coordinator.launchers import unit as units
from enginepool.coordinator.launchers.base import LauncherContext
from enginepool.coordinator.launchers.unit import UnitConfig
from enginepool.protocol.messages import WorkerSettings
from tests.process.daemons import PATIENCE_S

FIRST = WorkerSettings("g", '{"model": "m", "engine": "sim"}')
NEXT = WorkerSettings("g", '{"model": "other", "engine": "sim"}')


class StandIn:
    """A launcher whose first worker ends at once; the others end when they are killed, or drained."""

    signals, drains = 1, True

    def __init__(self, context: LauncherContext) -> None:
        self._context = context
        self.started: list[str] = []

    def adopt(self) -> list[EarlierWorker]:
        return []

    def start(self, group: str, index: int, incarnation: str, weights: Any = None) -> bool:
        self.started.append(incarnation)
        if len(self.started) == 1:
            self.stop(incarnation, "it ends")
        return True

    def stop(self, incarnation: str, reason: str) -> None:
        asyncio.get_running_loop().call_soon(self._context.exited, WorkerExited(0, incarnation, reason))

    def drain(self) -> None:
        """Its workers have begun work. Meanwhile signals arrive."""
        for _ in range(self.signals):
            os.kill(os.getpid(), signal.SIGTERM)
        if self.drains:
            self.stop(self.started[1], "drained")

    def finish(self, finished: Callable[[], None]) -> None:
        finished()


def serve(monkeypatch: pytest.MonkeyPatch, directory: Path, answers: list[WorkerSettings]) -> int:
    """Serve until the signal that comes when there is no answer left."""

    async def settings_of(unit: UnitConfig, *, wait_refused: bool = False) -> WorkerSettings:
        if not answers:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()
        return answers.pop(0)

    monkeypatch.setattr(units, "settings_of", settings_of)
    monkeypatch.setattr(units, "LocalLauncher", StandIn)
    monkeypatch.setattr(units, "AGAIN_S", (0.0, 0.0))

    async def story() -> int:
        async with asyncio.timeout(PATIENCE_S):
            return await units.serve(UnitConfig(address="ipc:///nowhere", workers=2, directory=str(directory)))

    return asyncio.run(story())


def test_a_signal_while_workers_drain_for_other_settings_ends_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [FIRST, NEXT, NEXT]
    assert serve(monkeypatch, tmp_path, answers) == 0
    assert answers == [NEXT], "the settings were asked for again"


@pytest.mark.parametrize(("signals", "ends"), [(1, "drained"), (2, "stopped: the group has other settings now")])
def test_the_second_signal_while_workers_drain_for_other_settings_kills_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signals: int, ends: str
) -> None:
    reasons: list[str] = []
    stop, drain = StandIn.stop, StandIn.drain

    def stopped(self: StandIn, incarnation: str, reason: str) -> None:
        reasons.append(reason)
        stop(self, incarnation, reason)

    def later(self: StandIn) -> None:
        drain(self)
        if signals == 1:
            asyncio.get_running_loop().call_later(0.1, self.stop, self.started[1], "drained")

    monkeypatch.setattr(StandIn, "signals", signals)
    monkeypatch.setattr(StandIn, "drains", False)
    monkeypatch.setattr(StandIn, "stop", stopped)
    monkeypatch.setattr(StandIn, "drain", later)
    assert serve(monkeypatch, tmp_path, [FIRST, NEXT, NEXT]) == 0
    assert reasons == ["it ends", ends]


def test_a_signal_while_the_other_settings_are_asked_for_ends_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drain(self: StandIn) -> None:
        self.stop(self.started[1], "drained")

    monkeypatch.setattr(StandIn, "drain", drain)
    assert serve(monkeypatch, tmp_path, [FIRST, NEXT]) == 0
