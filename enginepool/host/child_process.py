"""A child process: started in a session of its own, watched, killed and reaped; and found again by a later program.

All processes that a pool starts on a host are of this class: workers, their stagers, and a coordinator that a program embeds or
`enginepool serve` keeps running. The end of a process is awaited on a pidfd, which also works for a process that an earlier
program started. A pid alone does not name a process, because the kernel gives it again. So a record has the time as well at
which the process was created.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Self, TypeVar

import msgspec
import psutil

from enginepool.host import host_identity, write_file
from enginepool.host.fork_server import ForkServer

#: seconds until the next try, where no file descriptor is left to watch a process or to look for one
RETRY_S = 0.5
#: clock ticks in a second, as /proc counts them
_TICKS = os.sysconf("SC_CLK_TCK")
#: fields of /proc/PID/stat after the name in parentheses, which may hold anything
_STATE, _CREATED = 0, 19


def keep_exit_codes() -> None:
    """Let the kernel keep the exit codes of this process's children until they are asked for. It does not where SIGCHLD is
    ignored, and a program that ignores it hands that on to the programs that it starts."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def signal_name(number: int) -> str:
    """Such as SIGKILL. Real-time signals have no names of their own in Python, but for two: SIGRTMIN+1."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"


class ProcessRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A process as written to disk. `host` and `created` tell it from another process with the same pid."""

    pid: int
    created: float
    host: str = ""

    @classmethod
    def of(cls, pid: int, **fields: object) -> Self:
        """The record of a process that runs now. Raises OSError: there is none."""
        return cls(pid=pid, created=created_at(pid), host=host_identity(), **fields)

    @property
    def here(self) -> bool:
        """Whether the process was started on this host, since the host was booted."""
        return self.host == host_identity()

    @property
    def lives(self) -> bool:
        return self.here and lives(self.pid, self.created)

    def write(self, path: Path) -> None:
        """Raises OSError."""
        write_file(path, msgspec.json.encode(self))


Record = TypeVar("Record", bound=ProcessRecord)


def read_record(path: Path, form: type[Record]) -> Record | None:
    """The record at `path`; None: there is none, or a crash cut it off or damaged it."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=form)
    except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


class ForkedChild:
    """A child that was forked, in the place of a `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.returncode: int | None = None

    def wait(self) -> int:
        if self.returncode is None:
            try:
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
            except ChildProcessError:
                self.returncode = 0  # as `subprocess` has it
        return self.returncode


class ChildProcess:
    """One process. Made by `start` or `fork`, or from the pid of a process that an earlier program started."""

    def __init__(self, pid: int, child: "subprocess.Popen[bytes] | ForkedChild | None" = None) -> None:
        self.pid = pid
        self._child = child
        self._stop_watching: Callable[[], object] = lambda: None

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        log: IO[bytes] | None = None,
        lifeline: int | None = None,
        inherited: Sequence[int] = (),
        prepare: Callable[[], None] | None = None,
    ) -> "ChildProcess":
        """Start a process that leads a session of its own: Ctrl-C in a terminal does not reach it.

        Args:
            log: where it writes; None: where this process writes.
            lifeline: a descriptor that it inherits; its end of file says that this process has ended.
            inherited: further descriptors that it inherits.
            prepare: called in the child before it becomes another program.

        Raises:
            OSError: it could not be started.
        """
        popen = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=inherited if lifeline is None else (lifeline, *inherited),
            preexec_fn=prepare,
        )
        return cls(popen.pid, popen)

    @classmethod
    def fork(
        cls, server: ForkServer, command: Sequence[str], environment: Mapping[str, str], *, log: IO[bytes]
    ) -> "ChildProcess":
        """As `start`, from a fork server that has inherited the lifeline. Raises OSError."""
        numbers = {1: log.fileno(), 2: log.fileno()}
        pid = server.fork(command[1:], environment, numbers, leads_session=True)
        return cls(pid, ForkedChild(pid))

    def watch(self, ended: Callable[[int | None], None], *, session: bool = False) -> None:
        """Call `ended` once, on the running loop, with the exit code; None: unknown, an earlier program started it.

        `session`: kill what is left of its session, and call `ended` when nothing is left.
        """

        def leader_ended() -> None:
            code = self.reap()
            if session:
                self._await_session(lambda: ended(code))
            else:
                ended(code)

        self._when_ended(self.pid, leader_ended)

    def reap(self) -> int | None:
        """Wait for its end, then stop watching it. Returns the exit code, None if it is unknown."""
        self._stop_watching()
        if self._child is None:
            return None
        known = self._child.returncode is not None or _left_code(self.pid)
        code = self._child.wait()
        return code if known else None

    def reaped(self, code: int) -> None:
        """The caller has waited for it itself."""
        if self._child is not None:
            self._child.returncode = code

    def send(self, number: int) -> None:
        """Send a signal. A process that has ended is left alone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL the process and its session."""
        try:
            kill_session(self.pid)
        except OSError:  # no descriptor is left to look with: `watch` kills the rest of the session
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def _await_session(self, then: Callable[[], None]) -> None:
        """Kill the session, and wait for its members one after the other."""
        try:
            kill_session(self.pid)
            member = session_member(self.pid)
        except OSError:
            asyncio.get_running_loop().call_later(RETRY_S, self._await_session, then)
            return
        if member is None:
            then()
        else:
            self._when_ended(member, lambda: self._await_session(then))

    def _when_ended(self, pid: int, then: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._stop_watching = loop.call_soon(then).cancel
            return
        except OSError:
            self._stop_watching = loop.call_later(RETRY_S, self._when_ended, pid, then).cancel
            return

        def stop() -> None:
            self._stop_watching = lambda: None
            loop.remove_reader(fd)
            os.close(fd)

        def readable() -> None:
            stop()
            then()

        self._stop_watching = stop
        loop.add_reader(fd, readable)


def _left_code(pid: int) -> bool:
    """Wait for the end of a child. Whether its exit code can be asked for: not in a program that ignores SIGCHLD, or that waits
    for all of its children itself."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def created_at(pid: int) -> float:
    """When this process was created, in seconds since the host was booted. Setting the clock does not change it.

    Raises OSError: there is none.
    """
    return int(_stat(pid)[_CREATED]) / _TICKS


def exists(pid: int, created: float) -> bool:
    """Whether the process with this pid is the one that was created then. It may have ended without being waited for."""
    try:
        return created_at(pid) == created
    except OSError:
        return False


def lives(pid: int, created: float) -> bool:
    """Whether the process with this pid is the one that was created then, and has not ended."""
    try:
        stat = _stat(pid)
    except OSError:
        return False
    return int(stat[_CREATED]) / _TICKS == created and stat[_STATE] not in ("Z", "X")


def kill_session(leader: int) -> None:
    """SIGKILL every member of the session that `leader` leads or led. No other session has this id while a member lives."""
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader:
                os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def session_member(leader: int) -> int | None:
    """The pid of a member of that session that has not ended. Raises OSError: no descriptor is left to look with."""
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                return process.pid
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return None


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
