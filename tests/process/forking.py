"""Processes of a pool that are forked from one that has imported what they need. A process that is started imports it again:
a stager torch for one second, an engine SGLang in each of its three processes for seven.

    server          has imported everything (`preloaded`), and runs nothing; multiprocessing's fork server
      coordinator   of `ForkedDaemon`; or a program that embeds a pool, whose coordinator its template forks
        template    forks for the coordinator, and does nothing else
        worker      child of the coordinator, which adopted it; SGLang forks its own processes from it
        stager      likewise

What is forked runs the same code as what is started, with the same environment, session, parent, files and end.
"""

import array
import asyncio
import ctypes
import importlib
import inspect
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, chdir, suppress
from dataclasses import dataclass
from fcntl import F_DUPFD_CLOEXEC, fcntl
from functools import cache
from multiprocessing import forkserver
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import IO, Any, NoReturn

from bench.processes import ROOT
from enginepool.host.child_process import ChildProcess, ForkedChild
from tests.process.daemons import Daemon

#: the module that a coordinator's process runs
COORDINATOR = "enginepool.coordinator.shell.daemon"
#: the module that a fork server runs, which forks what SGLang spawns by itself
FORK_SERVER = "enginepool.workers.fork_server"
#: the code of a process that runs a file
RUN_FILE = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
#: as `subprocess.Popen` takes a standard stream
Stream = int | IO[Any] | None
#: descriptors of a process that was just forked are lower
_HIGH = 200
#: as sys/prctl.h and malloc.h have them
_PR_SET_CHILD_SUBREAPER, _M_MMAP_THRESHOLD = 36, -3
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


def file_command(file: Path) -> list[str]:
    """What `ForkedProcess` takes for `python FILE`."""
    return [sys.executable, "-c", RUN_FILE, str(file)]


class ForkedDaemon(Daemon):
    """A coordinator process whose workers and stagers are forked, too."""

    preloaded = "tests.process.preloaded"

    def _launch(self, environment: Mapping[str, str], stderr: int, within: Sequence[str]) -> Any:
        assert not within, "a process that is forked runs within no other program"
        nothing = subprocess.DEVNULL
        command = [sys.executable, "-m", COORDINATOR]
        return self._processes.keep(
            ForkedProcess(command, self.preloaded, env=environment, stdin=nothing, stdout=nothing, stderr=stderr)
        )


class ForkedProcess:
    """A forked process in place of a `subprocess.Popen` of Python. Those options and methods are there that tests use.

    What a coordinator, `enginepool serve`, `worker` and `demo`, or a program of `file_command` starts is forked, too.
    """

    def __init__(
        self,
        command: Sequence[str],
        preloaded: str = "tests.process.preloaded",
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        stdin: Stream = None,
        stdout: Stream = None,
        stderr: Stream = None,
        text: bool = False,
        pass_fds: Sequence[int] = (),
        start_new_session: bool = False,
        preexec_fn: Callable[[], None] | None = None,
    ) -> None:
        assert command[0] == sys.executable and command[1] in ("-m", "-c")
        with ExitStack() as stack:
            streams = [_stream(given, number, text, stack) for number, given in enumerate((stdin, stdout, stderr))]
            program = _Program(
                list(command[1:]),
                dict(os.environ if env is None else env),
                os.fspath(cwd or os.getcwd()),
                {number: _Descriptor(other) for number, (_, other) in enumerate(streams)}
                | {number: _Descriptor(number) for number in pass_fds},
                start_new_session,
                preexec_fn,
                signal.getsignal(signal.SIGHUP) is signal.SIG_IGN,
            )
            self._process = server(preloaded).Process(target=program.run)
            self._process.start()
        self.stdin, self.stdout, self.stderr = (ours for ours, _ in streams)
        self._readers: list[_Reader] = []
        self.pid: int = self._process.pid

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

    def communicate(self, timeout: float | None = None) -> tuple[Any, Any]:
        """Close its input; what it writes to its pipes until it has ended."""
        if self.stdin is not None:
            self.stdin.close()
        self._readers = self._readers or [_Reader(stream) for stream in (self.stdout, self.stderr)]
        self.wait(timeout)
        for reader in self._readers:
            reader.join()
        return self._readers[0].found, self._readers[1].found

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Reader(threading.Thread):
    """Reads all of a pipe; None without one."""

    def __init__(self, stream: Any) -> None:
        super().__init__(daemon=True)
        self._stream, self.found = stream, None
        self.start()

    def run(self) -> None:
        self.found = self._stream and self._stream.read()


def _stream(given: Stream, number: int, text: bool, stack: ExitStack) -> tuple[Any, int]:
    """Of a standard stream: our end of a pipe, or None, and the descriptor that the process gets a copy of."""
    if given == subprocess.PIPE:
        read, write = os.pipe()
        ours, other, mode = (write, read, "w") if number == 0 else (read, write, "r")
        stack.callback(os.close, other)
        return (open(ours, mode) if text else open(ours, f"{mode}b")), other
    if given == subprocess.DEVNULL:
        return None, stack.enter_context(open(os.devnull, "r+b", buffering=0)).fileno()
    if given is None:
        return None, number
    return None, given if isinstance(given, int) else given.fileno()


class _Descriptor:
    """A descriptor that another process gets a copy of."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __reduce__(self) -> Any:
        return _detached, (DupFd(self._descriptor),)


def _detached(copy: Any) -> int:
    return copy.detach()


@dataclass(frozen=True)
class _Program:
    """What a process that was forked becomes: Python with these arguments."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    #: by the numbers that they have in the process
    descriptors: dict[int, Any]
    leads_session: bool
    prepare: Callable[[], None] | None
    ignores_hangups: bool

    def run(self) -> NoReturn:
        if self.leads_session:
            os.setsid()
        # The server may have been started by a test that ignored them.
        signal.signal(signal.SIGHUP, signal.SIG_IGN if self.ignores_hangups else signal.SIG_DFL)
        # None has a number that another one is to have.
        copies = {number: fcntl(copy, F_DUPFD_CLOEXEC, _HIGH) for number, copy in self.descriptors.items()}
        for copy in self.descriptors.values():
            os.close(copy)
        for number, copy in copies.items():
            os.dup2(copy, number)
            os.close(copy)
        become(self.environment, self.folder)
        sys.stdin = os.fdopen(0, closefd=False)
        if self.prepare is not None:
            self.prepare()
        option, what, *arguments = self.arguments
        if arguments[:1] == ["serve"]:
            _fork_coordinators()
        elif what in (COORDINATOR, RUN_FILE) or arguments[:1] in (["worker"], ["demo"]):
            fork_what_is_started()
        sys.argv = [option, *arguments]
        _run(option, what)


def fork_what_is_started() -> None:
    """By this process, which has no threads yet: its coordinator, workers and stagers."""
    template, spawn = Template(), ChildProcess.start

    def start(command: Sequence[str], environment: Mapping[str, str], **options: Any) -> ChildProcess:
        assert command[:2] == (sys.executable, "-m")
        if options.get("prepare"):  # another process cannot call it
            return spawn(command, environment, **options)
        log = options.get("log")
        lifeline = options.get("lifeline")
        inherited = [*([] if lifeline is None else [lifeline]), *options.get("inherited", ())]
        pid = template.fork(command[2], environment, log.fileno() if log else 2, inherited)
        return ChildProcess(pid, ForkedChild(pid))

    patched: Any = ChildProcess
    patched.start = start


def _fork_coordinators() -> None:
    """By this process, which has no threads."""

    def start(command: Sequence[str], environment: Mapping[str, str], *, prepare: Callable[[], None]) -> ChildProcess:
        assert command[:2] == (sys.executable, "-m")
        pid = os.fork()
        if pid == 0:
            _forget_handlers()
            prepare()
            _work(command[2], dict(environment), "", (), 2)
        return ChildProcess(pid, ForkedChild(pid))

    patched: Any = ChildProcess
    patched.start = start


class Template:
    """The process that forks children for another one, which has no threads when it makes it."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._prctl: Callable[..., int] = ctypes.CDLL(None).prctl
        if os.fork() == 0:
            self._socket.close()
            _serve(theirs)
        theirs.close()

    def fork(self, module: str, environment: Mapping[str, str], log: int, inherited: Sequence[int]) -> int:
        """Run `module` in a process that is a child of this one, and leads a session of its own; its pid."""
        request = json.dumps([module, dict(environment), os.getcwd(), inherited]).encode()
        descriptors = array.array("i", [log, *inherited])
        # The parent of a forked process ends at once, and so this process is its next one.
        self._prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._socket.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
        pid = int(self._socket.recv(32))
        self._prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        return pid


def _serve(requests: socket.socket) -> NoReturn:
    """Fork what the other process asks for, until it has ended."""
    with open(os.devnull, "r+b", buffering=0) as nothing:
        for number in (1, 2):  # the log of the coordinator ends with the coordinator
            os.dup2(nothing.fileno(), number)
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, _LONGEST, 3)
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


def _work(module: str, environment: dict[str, str], folder: str, numbers: Sequence[int], log: int, *inherited: int) -> NoReturn:
    """A process as `ChildProcess.start` makes it. `numbers`: those that the inherited descriptors have in the other process."""
    os.setsid()
    # None has a number that another one is to have.
    log, *copies = (fcntl(descriptor, F_DUPFD_CLOEXEC, _HIGH) for descriptor in (log, *inherited))
    for descriptor in inherited:
        os.close(descriptor)
    for number, copy in zip(numbers, copies, strict=True):
        os.dup2(copy, number)
        os.close(copy)
    become(environment, folder, log)
    os.close(log)  # else what is forked from here on has it, and a pipe has no end before them
    sys.argv = [module]
    if "coordinator" in module:
        fork_what_is_started()
    elif module != FORK_SERVER:
        fork_what_sglang_spawns()
    _run("-m", module)


def become(environment: Mapping[str, str], folder: str = "", log: int | None = None) -> None:
    """Take what a process has that is started."""
    os.environ.clear()
    os.environ.update(environment)
    if read := sys.modules.get("huggingface_hub.constants"):  # which reads the environment when it is imported
        importlib.reload(read)
    if threshold := environment.get("MALLOC_MMAP_THRESHOLD_"):  # which the C library reads when a process is started
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, int(threshold))
    if folder:
        os.chdir(folder)
    if log is not None:
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)


def _run(option: str, what: str) -> NoReturn:
    """Run a module's `main` or a piece of code, and end as its program does."""
    code: Any = 1
    try:
        if option == "-c":
            exec(what, {"__name__": "__main__"})
            code = 0
        else:
            ended: Any = importlib.import_module(what).main()
            code = asyncio.run(ended) if inspect.iscoroutine(ended) else ended
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            sys.stderr.write(f"{code}\n")
            code = 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(code or 0)
