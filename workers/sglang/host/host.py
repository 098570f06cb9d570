"""Holds an SGLang engine on a thread of its own and knows which of its processes died. No SGLang here.

Why a thread: building an engine blocks for a minute or more, and so may stopping it, while the worker's loop must go on
answering. It must be one thread for the engine's whole life: the engine's processes are killed by the kernel when the thread
that started them ends.
"""

import asyncio
import atexit
import contextlib
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

from enginepool.host import LONGEST_PATH
from enginepool.host.child_process import signal_name
from enginepool.host.folders import PrivateFolder
from enginepool.workers.sglang.host.process import NOTES_VARIABLE

STOP_S = 15.0
KILL_S = 3.0
#: bytes of a temporary file's name with its slash
NAME = 12


class EngineHost:
    """The thread that builds an engine, waits for the end of any of its processes, and stops it.

    Args:
        build: makes the engine; runs on the thread. Its result must have `shutdown()`.
        lost: called on the thread with the reason, once, when a process of the engine ends by itself.
    """

    def __init__(self, build: Callable[[], Any], lost: Callable[[str], None]) -> None:
        self._build = build
        self._lost = lost
        self._thread = threading.Thread(target=self._run, name="engine-host", daemon=True)
        self._built: Future[Any] = Future()
        self._wake, self._woken = multiprocessing.Pipe()
        self._stopping = False
        self._folder = PrivateFolder(Path(tempfile.gettempdir()), "enginepool-notes-")
        #: of this engine alone, as long as it lives
        self.folder = self._notes = self._folder.path
        #: Processes of this process that are not the engine's.
        self._others = {child.pid for child in multiprocessing.active_children()}

    def start(self) -> Future[Any]:
        """Begin to build; the future's result is the engine."""
        os.environ[NOTES_VARIABLE] = str(self._notes)
        self._built.set_running_or_notify_cancel()  # a caller that stops waiting does not cancel the build: `stop` ends it
        self._thread.start()
        return self._built

    @property
    def stopping(self) -> bool:
        """Whether `stop` was called: a build that has not started processes yet had better not."""
        return self._stopping

    def _run(self) -> None:
        try:
            with _temporary_files_in(self._notes):
                engine = self._build()
        except BaseException as error:  # SGLang also exits: the caller that waits for the engine gets any error
            self._built.set_exception(error)
            return
        children = self._children()
        self._built.set_result(engine)
        with self._further(children) as further:
            ended = wait([self._woken, *(child.sentinel for child in children), *further])
            if self._woken not in ended and not self._stopping:
                gone = [self._story(child) for child in children if child.sentinel in ended]
                gone += [self._end_of(pid) for descriptor, pid in further.items() if descriptor in ended]
                self._lost(gone[0])
                wait([self._woken])
        atexit.unregister(engine.shutdown)  # it kills all children of this process, also later ones
        engine.shutdown()
        loop: Any = getattr(engine, "loop", None)
        if isinstance(loop, asyncio.AbstractEventLoop) and not loop.is_running():
            loop.close()  # the engine makes one for its blocking calls, which are not used here

    @contextlib.contextmanager
    def _further(self, children: list[BaseProcess]) -> Generator[dict[int, int]]:
        """Process ids of the engine's processes that one of `children` has started, by a descriptor that tells their end."""
        own = {child.pid for child in children}
        found: dict[int, int] = {}
        for path in self._notes.glob("[0-9]*"):
            if int(path.name) not in own:
                with contextlib.suppress(ProcessLookupError):  # it has ended: one of `children` knows
                    found[os.pidfd_open(int(path.name))] = int(path.name)
        try:
            yield found
        finally:
            for descriptor in found:
                os.close(descriptor)

    def _end_of(self, pid: int) -> str:
        role, error = self._note(pid)
        return f"the engine's {role} " + (f"failed: {error}" if error else f"(pid {pid}) ended")

    def _story(self, child: BaseProcess) -> str:
        child.join(1.0)
        role, error = self._note(child.pid)
        code = child.exitcode
        if code == -signal.SIGQUIT and (failed := self.last_error()):
            return failed  # a scheduler that fails tells its parent so
        if code is None or code >= 0:
            return f"the engine's {role} " + (f"failed: {error}" if error else f"(pid {child.pid}) ended with exit code {code}")
        how = f"was killed by {signal_name(-code)}"
        if code == -signal.SIGKILL:
            how += " (out of memory, or by another process)"
        return f"the engine's {role} (pid {child.pid}) {how}" + (f"; its last error: {error}" if error else "")

    def _note(self, pid: int | None) -> tuple[str, str]:
        """(role, last error) of a process of the engine."""
        try:
            lines = (self._notes / str(pid)).read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return "process", ""
        return lines[0] if lines else "process", lines[-1] if len(lines) > 1 else ""

    def last_error(self) -> str:
        """What one of the engine's processes logged as its last error; empty when none did."""
        for path in sorted(self._notes.glob("[0-9]*"), key=lambda path: path.stat().st_mtime, reverse=True):
            role, error = self._note(int(path.name))
            if error:
                return f"the engine's {role} failed: {error}"
        return ""

    def stop(self) -> None:
        """Stop the engine and kill its processes, also when it was never built. Blocks for up to STOP_S + KILL_S."""
        self._stopping = True
        end = time.monotonic() + STOP_S
        self._wake.send(None)
        while self._thread.is_alive() and time.monotonic() < end:
            if not self._built.done():
                self._kill()  # a build ends only when its processes do
            self._thread.join(0.2)
        self._kill()
        self._folder.remove()

    def _children(self) -> list[BaseProcess]:
        return [child for child in multiprocessing.active_children() if child.pid not in self._others]

    def _kill(self) -> None:
        family: list[psutil.Process] = []
        for child in self._children():
            with contextlib.suppress(psutil.NoSuchProcess):
                parent = psutil.Process(child.pid)
                family += [parent, *parent.children(recursive=True)]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=KILL_S)


@contextlib.contextmanager
def _temporary_files_in(folder: Path) -> Generator[None]:
    """This process makes them there meanwhile. SGLang names the sockets of its processes like such files, and leaves them."""
    before = tempfile.tempdir
    if len(os.fsencode(folder)) + NAME <= LONGEST_PATH:
        tempfile.tempdir = str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before
