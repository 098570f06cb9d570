"""Processes of a test: all are started through one `Processes`, which ends them, by their ids, however the test ends."""

import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import psutil

#: Seconds for a process to end well, with all that it started, before it is killed.
_GENTLE_S = 20.0


class Processes:
    """What one test, or one fixture of many tests, has started. `with` it; the fixture `processes` is one for each test."""

    def __init__(self) -> None:
        self._ends = ExitStack()

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *exc: Any) -> None:
        self._ends.__exit__(*exc)

    def start(self, command: Sequence[str], *, first: signal.Signals = signal.SIGTERM, **options: Any) -> subprocess.Popen[Any]:
        """As `subprocess.Popen`. What is still there at the end is sent `first`, and killed if that is not enough."""
        return self.keep(subprocess.Popen(command, **options), first)

    def keep(self, process: Any, first: signal.Signals = signal.SIGTERM) -> Any:
        """Treat a process as `start` does. It was started in another way, and has the methods of a `Popen`."""
        self._ends.callback(_end, process, first)
        return process

    def adopt(self, process: psutil.Process) -> None:
        """Kill this one too, if it is still there at the end: another process of the test has started it."""
        self._ends.callback(_kill, process)

    def then(self, clean: Callable[[], None]) -> None:
        """Call `clean` at the end, after everything has ended that is started from now on."""
        self._ends.callback(clean)


def _end(process: Any, first: signal.Signals) -> None:
    family = _descendants(process)
    try:
        process.send_signal(first)
        process.wait(_GENTLE_S)
    except subprocess.TimeoutExpired:
        family = {*family, *_descendants(process)}
        process.kill()
        process.wait()
    finally:
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        for one in family:
            _kill(one)


def _kill(process: psutil.Process) -> None:
    # psutil knows when it was created, and takes a later process with the same id for none.
    with suppress(psutil.NoSuchProcess):
        process.kill()


def _descendants(process: Any) -> set[psutil.Process]:
    """All children of a living process. Those of an ended process are not known any more."""
    if process.poll() is not None:
        return set()
    with suppress(psutil.NoSuchProcess):  # it has ended since
        return set(psutil.Process(process.pid).children(recursive=True))
    return set()
