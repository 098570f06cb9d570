"""External workers: the process behind `enginepool worker`, which runs workers for a coordinator elsewhere.

It starts its workers, each with its stager, watches all of them, and starts again those that end. It asks the coordinator for
the settings of the group, again at each start of a worker: for a group whose engines take weights only at their start, the
settings name a checkpoint. The workers end with this process, which holds a pipe. Their stagers stay for a minute, so that the
next such process in the same directory finds the weights that they keep.
"""

import asyncio
import os
import platform
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import msgspec

from enginepool.config import GroupConfig, PoolConfig, Timing
from enginepool.config_loader import check_config, check_models
from enginepool.coordinator.core.events import WorkerExited
from enginepool.coordinator.core.group_weights import GroupWeights
from enginepool.coordinator.launchers.base import Launcher, LauncherContext, MakeLauncher
from enginepool.coordinator.launchers.gpus import check_gpus
from enginepool.coordinator.launchers.local import LocalLauncher
from enginepool.coordinator.shell.journal import JOURNAL, prepare_state_dir
from enginepool.coordinator.shell.log import log
from enginepool.errors import ConfigError
from enginepool.host.child_process import keep_exit_codes
from enginepool.host.folders import lock_file
from enginepool.net.address import STATE_DIR
from enginepool.net.dealer import ask
from enginepool.net.keys import Key, no_answer_hint
from enginepool.protocol.errors import WireError
from enginepool.protocol.frames import decode_header, encode_header
from enginepool.protocol.messages import ErrorReply, GetSettings, ToWorker, WorkerSettings

#: a coordinator that is there answers a question within this
ANSWER_S = 5.0
#: a worker that ended is started again after this, and after twice as long each further time, up to the second
AGAIN_S = (0.5, 30.0)
#: a worker that was up for so long starts again after the first pause
STEADY_S = 60.0
#: workers that were asked to end have so much longer than their begun work, and are then killed
END_S = 10.0


class UnitConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a unit is told. All other settings are those of the coordinator's group.

    address: where the coordinator listens for workers.
    group: the name of the group; "": the only one.
    workers: how many to start.
    gpus: for each worker the GPUs that it sees; empty: each worker gets its own ones.
    model: where the model is on this host; "": as the group names it.
    directory: for logs, records and sockets; one unit at a time; "": one for each group under `address.STATE_DIR`.
    key, key_file: of the worker, for TCP.
    """

    address: str
    group: str = ""
    workers: int = 1
    gpus: list[str] = []
    model: str = ""
    directory: str = ""
    key: Key | None = None
    key_file: str = ""


class SettingsRefused(Exception):
    """The coordinator does not give the settings. The message is one line."""


_to_worker = msgspec.msgpack.Decoder(ToWorker)


def get_settings(unit: UnitConfig) -> WorkerSettings | None:
    """The settings of the group; None: no coordinator answers within ANSWER_S.

    Raises:
        SettingsRefused: the coordinator has no such group, or refuses the key; or clients connect to this address.
    """
    try:
        header = ask(unit.address, unit.key, encode_header(GetSettings(unit.group)), ANSWER_S)
    except OSError as error:
        raise SettingsRefused(f"{unit.address}: {error.strerror}") from None
    if header is None:
        return None
    try:
        answer = decode_header(_to_worker, header)
    except WireError as error:
        raise SettingsRefused(f"{unit.address}: an answer that cannot be read: {error.message}") from None
    if isinstance(answer, WorkerSettings):
        return answer
    if isinstance(answer, ErrorReply):
        hint = "; is this the address for clients? Workers connect to listen_workers" if answer.code == "unsupported" else ""
        raise SettingsRefused(f"{unit.address}: {answer.code}: {answer.message}{hint}")
    raise SettingsRefused(f"{unit.address}: expected settings, got {type(answer).__name__}")


def pool_config(unit: UnitConfig, settings: WorkerSettings, directory: Path) -> PoolConfig:
    """The unit's workers as a pool of one group. Raises ConfigError: they cannot run on this host."""
    where = f"group {settings.group} of {unit.address}"
    try:
        group = msgspec.json.decode(settings.settings, type=GroupConfig)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{where}: {error}; is enginepool of the same version on both hosts?") from None
    group = msgspec.structs.replace(
        group,
        model=unit.model or group.model,
        workers=unit.workers,
        gpus=unit.gpus,
    )
    config = PoolConfig({settings.group: group}, state_dir=str(directory), timing=Timing(drain_s=settings.drain_s))
    return check_gpus(check_models(check_config(config, where=where), where), where)


def pause_s(ends: int) -> float:
    """Before the next start of a worker that ended so often in a row soon after its start."""
    first, longest = AGAIN_S
    return min(longest, first * 2.0 ** min(ends - 1, 16))


class Unit:
    """The workers of one unit, as long as the settings of their group stay the same."""

    def __init__(
        self, unit: UnitConfig, settings: WorkerSettings, directory: Path, lifeline: int, make_launcher: MakeLauncher
    ) -> None:
        self._unit = unit
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        config = pool_config(unit, settings, directory)
        context = LauncherContext(config, directory, unit.address, lifeline, self._exited, key=unit.key_file, external=True)
        self._launcher: Launcher = make_launcher(context)
        #: the end of each worker that runs
        self._exits: dict[str, asyncio.Future[WorkerExited]] = {}
        self._keepers: list[asyncio.Task[str]] = []
        self._stopping = ""
        self._result: int | None = 1

    async def run(self) -> int | None:
        """Run the workers until `stop`, or until none can be started. Returns the exit code; None: the group has other settings
        now."""
        for worker in self._launcher.adopt():
            if worker.lives:
                self._exits[worker.incarnation] = self._loop.create_future()
                self._launcher.stop(worker.incarnation, "left by an earlier unit")
        await self._all_ended()
        if not self._stopping:
            self._keepers = [self._loop.create_task(self._keep(index)) for index in range(self._unit.workers)]
            reasons = await asyncio.gather(*self._keepers, return_exceptions=True)
            if not self._stopping:
                log(f"no worker can be started: {reasons[-1]}")
        await self._all_ended()
        finished: asyncio.Future[None] = self._loop.create_future()
        self._launcher.finish(lambda: finished.set_result(None))
        await finished
        return self._result

    async def _keep(self, index: int) -> str:
        """Start one worker, and start it again when it ends. Returns why it can never be started."""
        settings, ends = self._settings, 0
        while settings.settings == self._settings.settings:
            began = self._loop.time()
            event = await self._run_worker(index, settings)
            if event.permanent:
                return event.reason
            ends = 1 if self._loop.time() - began > STEADY_S else ends + 1
            await asyncio.sleep(pause_s(ends))
            settings = await settings_of(self._unit, wait_refused=True)
        self.stop("the group has other settings now", None)
        return self._stopping

    async def _run_worker(self, index: int, settings: WorkerSettings) -> WorkerExited:
        incarnation = f"{platform.node() or 'host'}-{settings.group}-{index}.{time.time_ns() // 1000:x}"
        log(f"starting worker {incarnation}")
        ended = self._exits[incarnation] = self._loop.create_future()
        weights = GroupWeights(settings.version, settings.digest, path=settings.path) if settings.path else None
        self._launcher.start(settings.group, index, incarnation, weights)
        return await asyncio.shield(ended)

    def _exited(self, event: WorkerExited) -> None:
        log(f"worker {event.incarnation} ended: {event.reason}")
        self._exits.pop(event.incarnation).set_result(event)

    async def _all_ended(self) -> None:
        await asyncio.gather(*self._exits.values())

    def stop(self, reason: str, result: int | None = 0) -> None:
        """Let begun work finish and end all; asked a second time by a signal: end all now. `result`: as in `run`."""
        if self._stopping and self._result is None:
            log(f"{reason}: the command ends once the workers have")
            self._result = result
            return
        if self._stopping:
            log("asked again to end: ending now")
            self._result = result
            self._kill()
            return
        log(f"draining for at most {self._settings.drain_s:g} s: {reason}")
        self._stopping, self._result = reason, result
        for keeper in self._keepers:
            keeper.cancel()
        self._launcher.drain()
        self._loop.call_later(self._settings.drain_s + END_S, self._kill)

    def _kill(self) -> None:
        for incarnation in self._exits:
            self._launcher.stop(incarnation, f"stopped: {self._stopping}")


async def settings_of(unit: UnitConfig, *, wait_refused: bool = False) -> WorkerSettings:
    """Ask until a coordinator answers. `wait_refused`: also after a refusal, since a coordinator may be started with another
    configuration. Raises SettingsRefused."""
    said = ""
    while True:
        try:
            settings = await asyncio.to_thread(get_settings, unit)
            line = f"no coordinator answers at {unit.address}: waiting for one{no_answer_hint(unit.address, unit.key)}"
        except SettingsRefused as error:
            if not wait_refused:
                raise
            settings, line = None, str(error)
        if settings is not None:
            return settings
        if line != said:
            log(line)
            said = line
        if wait_refused:
            await asyncio.sleep(ANSWER_S)


def _directory(unit: UnitConfig, group: str) -> Path:
    return Path(unit.directory or f"{STATE_DIR}/external/{group}").expanduser()


def _lock(directory: Path) -> IO[str]:
    """Raises ConfigError: another unit uses this directory, or it is the state_dir of a pool, whose workers must live."""
    prepare_state_dir(directory)
    where = f"state_dir = {str(directory)!r}"
    if (directory / JOURNAL).exists():
        raise ConfigError(f"{where}: the state_dir of a pool; name another one")
    # The lock that a pool takes too: neither starts in a directory in which the other runs.
    try:
        return lock_file(directory / "lock")
    except BlockingIOError:
        raise ConfigError(f"{where}: in use by another `enginepool worker` or by a pool; name another one") from None


def run(unit: UnitConfig) -> int:
    """Run a unit in this process; see `serve`."""
    keep_exit_codes()
    return asyncio.run(serve(unit))


async def serve(unit: UnitConfig) -> int:
    """Run a unit until SIGTERM or SIGINT; returns the exit code.

    Raises:
        SettingsRefused: by the coordinator, at the start.
        ConfigError: the workers cannot run on this host, or the directory is in use.
    """
    settings = await _settings_or_end(unit)
    if settings is None:
        return 0
    directory = _directory(unit, settings.group)
    lifeline, held = os.pipe()
    with _lock(directory):
        try:
            while settings is not None:
                running = Unit(unit, settings, directory, lifeline, LocalLauncher)
                _on_end(running.stop)
                code = await running.run()
                if code is not None:
                    return code
                settings = await _settings_or_end(unit)
            return 0
        finally:
            os.close(held)
            os.close(lifeline)


async def _settings_or_end(unit: UnitConfig) -> WorkerSettings | None:
    """As `settings_of`; None: SIGTERM or SIGINT arrived first."""
    asking = asyncio.create_task(settings_of(unit))
    _on_end(lambda _: asking.cancel())
    try:
        return await asking
    except asyncio.CancelledError:
        return None


def _on_end(call: Callable[[str], object]) -> None:
    """Call this at SIGTERM or SIGINT, with the name of the signal, in place of what was called before."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, call, number.name)
