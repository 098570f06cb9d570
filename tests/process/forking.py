"""Processes of a pool that are forked from one that has imported what they need. A process that is started imports it again:
a stager torch for one second, an engine SGLang in each of its three processes for seven.

    server          has imported everything (`preloaded`), and runs nothing; multiprocessing's fork server
      coordinator   of `ForkedDaemon`
        template    forks for the coordinator, and does nothing else
        worker      child of the coordinator, which adopted it; SGLang forks its own processes from it
        stager      likewise

What is forked runs the same code as what is started, with the same environment, session, parent, files and end.
"""

import array
import ctypes
import importlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir
from functools import cache
from multiprocessing import forkserver
from multiprocessing.reduction import DupFd
from typing import IO, Any, NoReturn

from enginepool.host.child_process import ChildProcess
from tests.process.commands import ROOT
from tests.process.daemons import Daemon

#: as sys/prctl.h has it
_PR_SET_CHILD_SUBREAPER = 36
#: bytes of the longest request to a template
_LONGEST = 1 << 17


@cache
def server(preloaded: str = "tests.process.preloaded") -> Any:
    """What starts processes as `multiprocessing` does, forked from one that has imported the module `preloaded`.

    A program has one such server. The first call decides what is preloaded, and the others import what they miss.
    """
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([preloaded])
    with chdir(ROOT):  # where it finds the module
        forkserver.ensure_running()
    return context


def fork_what_sglang_spawns() -> None:
    """In this process, `multiprocessing` forks from now on. SGLang asks it to spawn."""
    library: Any = multiprocessing
    library.set_start_method("fork", force=True)
    library.set_start_method = _keep_start_method
    # The handlers are of this process's loop, and so is the descriptor at which Python tells it of a signal.
    os.register_at_fork(after_in_child=_forget_handlers)


def _keep_start_method(*_: object, **__: object) -> None:
    """SGLang asks for "spawn"."""


def _forget_handlers() -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


class ForkedDaemon(Daemon):
    """A coordinator process whose workers and stagers are forked, too."""

    preloaded = "tests.process.preloaded"

    def _launch(self, environment: Mapping[str, str], stderr: int, within: Sequence[str]) -> Any:
        assert not within, "a process that is forked runs within no other program"
        process = server(self.preloaded).Process(target=_coordinate, args=(dict(environment), os.getcwd(), _Descriptor(stderr)))
        process.start()
        return self._processes.keep(ForkedProcess(process))


class ForkedProcess:
    """A process of `multiprocessing` with the methods of `subprocess.Popen` that tests use."""

    stdin = stdout = stderr = None

    def __init__(self, process: Any) -> None:
        self._process = process
        self.pid: int = process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Descriptor:
    """A descriptor that another process gets a copy of."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __reduce__(self) -> Any:
        return _detached, (DupFd(self._descriptor),)


def _detached(copy: Any) -> int:
    return copy.detach()


def _coordinate(environment: dict[str, str], folder: str, stderr: int) -> NoReturn:
    """A coordinator's process, as `python -m enginepool.coordinator.shell.daemon` makes it."""
    become(environment, folder, log=stderr)
    os.close(stderr)
    template = Template()

    class Adopted:
        """In place of the Popen of a child."""

        def __init__(self, pid: int) -> None:
            self._pid = pid

        def wait(self) -> int:
            return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def start(
        command: Sequence[str], environment: Mapping[str, str], *, log: IO[bytes] | None = None, lifeline: int | None = None
    ) -> ChildProcess:
        assert command[:2] == (sys.executable, "-m")
        pid = template.fork(command[2], environment, log.fileno() if log else 2, lifeline)
        adopted: Any = Adopted(pid)
        return ChildProcess(pid, adopted)

    patched: Any = ChildProcess
    patched.start = start
    _run("enginepool.coordinator.shell.daemon")


class Template:
    """The process of a coordinator that forks workers and stagers for it. It is forked before the coordinator has threads."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._prctl: Callable[..., int] = ctypes.CDLL(None).prctl
        if os.fork() == 0:
            self._socket.close()
            _serve(theirs)
        theirs.close()

    def fork(self, module: str, environment: Mapping[str, str], log: int, lifeline: int | None) -> int:
        """Run `module` in a process that is a child of this one, and leads a session of its own; its pid."""
        request = json.dumps([module, dict(environment), os.getcwd(), lifeline]).encode()
        descriptors = array.array("i", [log] if lifeline is None else [log, lifeline])
        # The parent of a forked process ends at once, and so this process is its next one.
        self._prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._socket.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
        pid = int(self._socket.recv(32))
        self._prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        return pid


def _serve(requests: socket.socket) -> NoReturn:
    """Fork what the coordinator asks for, until it has ended."""
    with open(os.devnull, "r+b", buffering=0) as nothing:
        for number in (1, 2):  # the log of the coordinator ends with the coordinator
            os.dup2(nothing.fileno(), number)
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, _LONGEST, 2)
        if not request:
            os._exit(0)
        read, write = os.pipe()
        between = os.fork()
        if between == 0:
            pid = os.fork()
            if pid == 0:
                requests.close()
                os.close(read)
                os.close(write)
                _work(*json.loads(request), *descriptors)
            os.write(write, str(pid).encode())
            os._exit(0)
        os.close(write)
        os.waitpid(between, 0)
        requests.send(os.read(read, 32))
        for descriptor in (read, *descriptors):
            os.close(descriptor)


def _work(
    module: str, environment: dict[str, str], folder: str, number: int | None, log: int, lifeline: int | None = None
) -> NoReturn:
    """A worker or a stager, as `ChildProcess.start` makes it. `number`: what its configuration calls the lifeline."""
    os.setsid()
    if number is not None and lifeline is not None and lifeline != number:
        log = os.dup(log)
        os.dup2(lifeline, number)
    become(environment, folder, log)
    fork_what_sglang_spawns()
    _run(module)


def become(environment: Mapping[str, str], folder: str = "", log: int | None = None) -> None:
    """Take what a process has that is started."""
    os.environ.clear()
    os.environ.update(environment)
    if folder:
        os.chdir(folder)
    if log is not None:
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)


def _run(module: str) -> NoReturn:
    """Run a module's `main`, and end as its program does."""
    code: Any = 1
    try:
        code = importlib.import_module(module).main()
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        os._exit(code or 0)
