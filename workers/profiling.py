"""Profiles of a worker's engine: one at a time, each in a folder of its own. The worker ends one that nothing else ends."""

import asyncio
import itertools
import os
import re
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

from enginepool.protocol.messages import TaskId
from enginepool.protocol.messages.control import Command
from enginepool.workers.engine import Engine, EngineDied, EngineError
from enginepool.workers.log import say


class Profiling:
    """Starts and stops profiles.

    Args:
        root: the folder under which they are written; "": none is.
        worker: names of the group and of this process: the folders below `root`.
        spawn: runs what ends a profile.
    """

    def __init__(
        self, engine: Engine, root: str, worker: tuple[str, str], spawn: Callable[[Coroutine[Any, Any, None]], object]
    ) -> None:
        self._engine, self._root, self._worker, self._spawn = engine, root, worker, spawn
        #: of the `start_profile` that began it; None: no profile runs
        self._running: TaskId | None = None
        #: the folder of the last profile, and the `stop_profile` that was told of it; None: none was, and the next one is
        self._folder, self._told = "", (0, 0)
        #: why that one has no traces, or ""
        self._failed = ""
        self._turn = asyncio.Lock()

    async def start(self, command: Command) -> str:
        """The folder that the profile will be in. A command that is delivered twice begins one. Raises EngineError,
        EngineDied."""
        async with self._turn:
            if self._running is not None and self._running != command.task:
                raise EngineError("a profile runs already: stop_profile ends it, or its time does")
            if self._running is None:
                self._folder = await asyncio.to_thread(_make, self._root, *self._worker)
                await self._engine.profiler.start(self._folder, command.steps)
                self._running, self._told, self._failed = command.task, None, ""
                self._spawn(self._end(command))
            return self._folder

    async def stop(self, command: Command) -> str:
        """The folder of the profile that ran last, if no earlier command was told. Raises EngineError, EngineDied."""
        async with self._turn:
            if self._told not in (None, command.task):
                raise EngineError("no profile runs, and none has ended since the last stop_profile")
            self._told = command.task
            await self._stop()
            if self._failed:
                raise EngineError(self._failed)
            return self._folder

    async def _end(self, command: Command) -> None:
        await asyncio.sleep(command.seconds)
        async with self._turn:
            if self._running != command.task:
                return
            try:
                await self._stop()
            except EngineDied:
                return  # the worker ends, and says why
            if self._failed:
                say(self._failed)

    async def _stop(self) -> None:
        """Raises EngineDied."""
        if self._running is not None:
            self._running = None
            try:
                await self._engine.profiler.stop()
            except EngineError as error:
                self._failed = f"the profile in {self._folder} failed: {error}"


def _make(root: str, *names: str) -> str:
    """A new folder under `root`. Raises EngineError."""
    if not root:
        raise EngineError("profile_root of the group is empty: set it to a folder, and profiles are written under it")
    top = os.path.realpath(os.path.expanduser(root))
    folder = Path(top, *(re.sub(r"[^\w.-]|^\.", "_", name) for name in names), time.strftime("%Y%m%dT%H%M%S"))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder = next(new for new in _numbered(folder) if _is_made(new))
        # A link on the way could lead out of it.
        inside = os.path.realpath(folder) == str(folder)
        writable = inside and os.access(folder, os.W_OK)
    except OSError as error:
        raise EngineError(f"{folder}: {error.strerror}") from None
    if not inside:
        raise EngineError(f"{folder}: not under profile_root ({root}) once links are resolved")
    if not writable:
        raise EngineError(f"{folder}: cannot be written")
    return str(folder)


def _numbered(folder: Path) -> Iterator[Path]:
    """The folder, and names for others that begin within the same second."""
    yield folder
    for number in itertools.count(2):
        yield folder.with_name(f"{folder.name}-{number}")


def _is_made(folder: Path) -> bool:
    """Make it; False: it exists. Raises OSError."""
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True
