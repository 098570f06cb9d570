"""Stager processes: one beside each worker of this host, started with the first one there, and kept for those that come after.

A stager outlives its worker, and a coordinator that dies, whose successor adopts it. It ends by itself when neither of them is
connected for `orphan_s`; this side therefore keeps a connection open, over which nothing is said.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from enginepool.coordinator.launchers.processes import how_it_ended, lives, made_at
from enginepool.coordinator.shell.log import log
from enginepool.errors import ConfigError
from enginepool.host import LONGEST_PATH, host_identity, os_error, write_file

#: a stager that ended by itself is started again after this, and after twice as long each further time, up to the second
AGAIN_S = (0.5, 30.0)
#: a snapshot that takes longer is given up at the end of a pool
FINISH_S = 600.0
#: how often a stager that starts is tried
CONNECT_S = 0.1


class _StagerRecord(msgspec.Struct, frozen=True):
    """A stager as written to disk; `host` and `created` tell it from another process with the same pid."""

    place: str
    pid: int
    created: float
    host: str = ""

    @property
    def lives(self) -> bool:
        return self.host == host_identity() and lives(self.pid, self.created)


class _Stager:
    """What is needed to start one again, and what runs now."""

    def __init__(self, spec: bytes, environment: Mapping[str, str]) -> None:
        self.spec = spec
        self.environment = environment
        self.pid = 0
        self.child: subprocess.Popen[bytes] | None = None
        self.connection: socket.socket | None = None
        self.again_s = AGAIN_S[0]
        #: why it could not be started, which is said once
        self.unstarted = ""

    @property
    def name(self) -> str:
        """The name of its worker."""
        return str(msgspec.json.decode(self.spec)["name"])


class Stagers:
    """The stagers of one coordinator, by place (`group.index`)."""

    def __init__(self, loop: asyncio.AbstractEventLoop, directory: Path, lifeline: int | None, orphan_s: float) -> None:
        self._loop = loop
        self._directory = directory / "stagers"
        self._logs = directory / "logs"
        self._lifeline = lifeline
        self._orphan_s = orphan_s
        self._stagers: dict[str, _Stager] = {}
        self._ended = False
        #: called when all of them have ended, where somebody waits for that
        self._all_gone: Callable[[], None] | None = None
        self._directory.mkdir(exist_ok=True)

    def beside(self, place: str, environment: Mapping[str, str], *, device: str, gpus: int) -> str:
        """The socket of the stager of `place`, which runs from now on; one of an earlier coordinator is adopted."""
        path = self._socket(place)
        if place not in self._stagers:
            spec = {
                "socket": path,
                "name": "-".join(place.rsplit(".", 1)),  # of its worker
                "device": device,
                "gpus": gpus,
                "lifeline_fd": self._lifeline,
                "orphan_s": self._orphan_s,
            }
            self._stagers[place] = _Stager(msgspec.json.encode(spec), environment)
            if not self._adopt(place):
                self._start(place)
        elif not self._stagers[place].pid:
            self._start(place)
        return path

    def restore_folders(self) -> None:
        """Write the records again, whose folder was removed. Stagers listen again by themselves."""
        with contextlib.suppress(OSError):  # a record that is missing is written when its stager is started
            self._directory.mkdir(exist_ok=True)
            for place, stager in self._stagers.items():
                if stager.pid:
                    self._write_down(place, stager.pid)

    def _write_down(self, place: str, pid: int) -> None:
        record = _StagerRecord(place, pid, made_at(pid), host_identity())
        write_file(self._directory / f"{place}.json", msgspec.json.encode(record))

    def check(self, place: str) -> None:
        """Raises ConfigError: the state directory and the group have names too long for the socket of a stager there."""
        path = self._socket(place)
        if len(os.fsencode(path)) > LONGEST_PATH:
            raise ConfigError(
                f"state_dir = {str(self._directory.parent)!r}: too long for the group's name: {path} is a socket, "
                f"whose path has at most {LONGEST_PATH} bytes"
            )

    def _socket(self, place: str) -> str:
        return str(self._directory / f"{place}.sock")

    def end(self) -> None:
        """End all of them, without waiting, whoever started them."""
        self._ended = True
        for path in self._directory.glob("*.json"):
            record = _read(path)
            if record is not None and record.lives:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(record.pid, signal.SIGKILL)
            path.unlink(missing_ok=True)

    def finish(self, gone: Callable[[], None]) -> None:
        """Ask all of them to end, which they do when the snapshots are written that they owe; `gone` is called then."""
        self._ended, self._all_gone = True, gone
        for stager in self._stagers.values():
            if stager.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(stager.pid, signal.SIGTERM)
                    os.kill(stager.pid, signal.SIGCONT)  # one that is stopped would never hear of it
        self._loop.call_later(FINISH_S, self.end)
        self._loop.call_soon(self._maybe_gone)

    def _maybe_gone(self) -> None:
        if self._all_gone is not None and not any(stager.pid for stager in self._stagers.values()):
            gone, self._all_gone = self._all_gone, None
            gone()

    # --- one of them ----------------------------------------------------------------------------------------------------

    def _adopt(self, place: str) -> bool:
        record = _read(self._directory / f"{place}.json")
        if record is None or not record.lives:
            return False
        stager = self._stagers[place]
        stager.pid = record.pid
        self._watch(place, record.pid)
        self._connect(place)
        return True

    def _start(self, place: str) -> None:
        stager = self._stagers[place]
        if self._ended or stager.pid:
            return
        child: subprocess.Popen[bytes] | None = None
        try:
            for folder in (self._directory, self._logs):
                folder.mkdir(exist_ok=True)
            with open(self._logs / f"stager-{place}.log", "ab") as output:
                child = subprocess.Popen(
                    [sys.executable, "-m", "enginepool.workers.stager.main"],
                    env={**stager.environment, "ENGINEPOOL_STAGER": stager.spec.decode()},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    pass_fds=() if self._lifeline is None else (self._lifeline,),
                )
            self._write_down(place, child.pid)
        except OSError as error:
            if child is not None:
                child.kill()  # one that is not written down would be nobody's after the next start
                child.wait()
            if (why := os_error(error)) != stager.unstarted:
                log(f"the stager of worker {stager.name} could not be started: {why}; tried again until it can be")
                stager.unstarted = why
            self._later(place)  # the worker says so in its answers
            return
        stager.child, stager.pid, stager.unstarted = child, child.pid, ""
        self._watch(place, child.pid)
        self._connect(place)

    def _watch(self, place: str, pid: int) -> None:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._loop.call_soon(self._gone, place)
            return
        except OSError:  # no file descriptor is left
            self._loop.call_later(AGAIN_S[0], self._watch, place, pid)
            return

        def readable() -> None:
            self._loop.remove_reader(fd)
            os.close(fd)
            self._gone(place)

        self._loop.add_reader(fd, readable)

    def _gone(self, place: str) -> None:
        stager = self._stagers[place]
        code = stager.child.wait() if stager.child is not None else None
        stager.child, stager.pid = None, 0
        if stager.connection is not None:
            stager.connection.close()
            stager.connection = None
        with contextlib.suppress(OSError):  # on a disk that cannot be written: the record names a process that has ended
            (self._directory / f"{place}.json").unlink(missing_ok=True)
        if self._ended:
            self._maybe_gone()
        else:
            how = how_it_ended(code, "")
            log(f"the stager of worker {stager.name} ended: {how}; it is started again after {stager.again_s:g} s")
            self._later(place)

    def _later(self, place: str) -> None:
        stager = self._stagers[place]
        self._loop.call_later(stager.again_s, self._start, place)
        stager.again_s = min(2 * stager.again_s, AGAIN_S[1])

    def _connect(self, place: str) -> None:
        stager = self._stagers[place]
        if self._ended or not stager.pid or stager.connection is not None:
            return
        stager.connection = self._connection(place)
        if stager.connection is None:
            self._loop.call_later(CONNECT_S, self._connect, place)
        else:
            stager.again_s = AGAIN_S[0]

    def _connection(self, place: str) -> socket.socket | None:
        connection = socket.socket(socket.AF_UNIX)
        connection.setblocking(False)
        try:
            connection.connect(self._socket(place))
        except OSError:
            connection.close()
            return None
        return connection


def _read(path: Path) -> _StagerRecord | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_StagerRecord)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
