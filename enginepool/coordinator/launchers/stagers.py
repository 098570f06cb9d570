"""Stager processes: one for each worker of this host, started with its first worker and kept for the workers that follow.

A stager outlives its worker. It also outlives a coordinator that dies, and the successor adopts it. It ends by itself when
neither a worker nor a coordinator is connected for `orphan_s`. So this side keeps an idle connection open.
"""

import contextlib
import os
import signal
import socket
import sys
from asyncio import TimerHandle, get_running_loop
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import msgspec

from enginepool.coordinator.launchers.exit_reasons import how_it_ended
from enginepool.coordinator.shell.log import log
from enginepool.errors import ConfigError
from enginepool.host import LONGEST_PATH, os_error
from enginepool.host.child_process import ChildProcess, ProcessRecord, read_record

COMMAND = (sys.executable, "-m", "enginepool.workers.stager.main")
#: seconds after which a stager that ended by itself is started again; twice as many each further time, up to the second
AGAIN_S = (0.5, 30.0)
#: seconds that stagers have for their snapshots at the end of a pool
FINISH_S = 600.0
#: seconds between two tries to connect to a stager that starts
CONNECT_S = 0.1


class StagerRecord(ProcessRecord, frozen=True, kw_only=True):
    """A stager process as written to disk. `gpus`: that it sees, as CUDA_VISIBLE_DEVICES has them; "": it uses none, or all."""

    gpus: str = ""


class _Stager:
    """How to start the stager of one worker, and what runs now."""

    def __init__(self, spec: bytes, environment: Mapping[str, str], worker: str, gpus: str) -> None:
        self.spec = spec
        self.environment = environment
        self.gpus = gpus
        #: the name of its worker
        self.worker = worker
        self.process: ChildProcess | None = None
        self.connection: socket.socket | None = None
        self.again_s = AGAIN_S[0]
        #: the next start, if one is due
        self.again: TimerHandle | None = None
        #: why it could not be started, which is logged once
        self.unstarted = ""


class Stagers:
    """The stagers of one coordinator, by worker slot (`group.index`)."""

    def __init__(self, directory: Path, lifeline: int | None, orphan_s: float) -> None:
        self._directory = directory / "stagers"
        self._logs = directory / "logs"
        self._lifeline = lifeline
        self._orphan_s = orphan_s
        self._stagers: dict[str, _Stager] = {}
        self._ended = False
        #: called when all of them have ended
        self._finished: Callable[[], None] | None = None
        #: ends those that take too long for that
        self._too_late: TimerHandle | None = None
        self._directory.mkdir(exist_ok=True)

    @property
    def logs(self) -> set[str]:
        """The names of the files that stagers write to."""
        return set(map(_log_of, self._stagers))

    def ensure(self, slot: str, environment: Mapping[str, str], *, device: str, gpus: int) -> str:
        """Let the stager of `slot` run: adopt that of an earlier coordinator, or start one. Returns its socket."""
        path = self._socket(slot)
        if slot not in self._stagers:
            worker = "-".join(slot.rsplit(".", 1))
            spec = {
                "socket": path,
                "name": worker,
                "device": device,
                "gpus": gpus,
                "lifeline_fd": self._lifeline,
                "orphan_s": self._orphan_s,
            }
            visible = "" if device == "cpu" else environment.get("CUDA_VISIBLE_DEVICES", "")
            self._stagers[slot] = _Stager(msgspec.json.encode(spec), environment, worker, visible)
            record = read_record(self._record(slot), StagerRecord)
            if record is not None and record.lives:
                process = ChildProcess(record.pid)
                self._runs(slot, process)
                if record.gpus != visible:  # those are another worker's now; it is started again with its own
                    _ask_to_end(process)  # after the snapshots that it owes, which no other process may have
        self._start(slot)
        return path

    def restore_folders(self) -> None:
        """Write the records again, because their folder was removed. Stagers listen again by themselves."""
        with contextlib.suppress(OSError):  # a missing record is written when its stager is started
            self._directory.mkdir(exist_ok=True)
            for slot, stager in self._stagers.items():
                if stager.process is not None:
                    StagerRecord.of(stager.process.pid, gpus=stager.gpus).write(self._record(slot))

    def check(self, slot: str) -> None:
        """Raises ConfigError: the names of the state directory and of the group are too long for the socket of a stager."""
        path = self._socket(slot)
        if len(os.fsencode(path)) > LONGEST_PATH:
            raise ConfigError(
                f"state_dir = {str(self._directory.parent)!r}: too long for the group's name: {path} is a socket, "
                f"whose path has at most {LONGEST_PATH} bytes"
            )

    def dismiss(self, slots: Collection[str]) -> None:
        """Ask stagers of an earlier coordinator to end whose workers are in none of these slots: they hold memory of GPUs. They
        write the snapshots that they owe before."""
        for path in self._directory.glob("*.json"):
            record = read_record(path, StagerRecord) if path.stem not in slots else None
            if record is not None and record.lives:
                _ask_to_end(ChildProcess(record.pid))

    def end(self) -> None:
        """End all stagers of this state directory, without waiting."""
        self._ended = True
        for path in self._directory.glob("*.json"):
            record = read_record(path, ProcessRecord)
            if record is not None and record.lives:
                ChildProcess(record.pid).send(signal.SIGKILL)
            with contextlib.suppress(OSError):  # of a read-only disk: the others are ended as well
                path.unlink(missing_ok=True)

    def finish(self, finished: Callable[[], None]) -> None:
        """Ask all of them to end, which they do when they have written the snapshots that they owe."""
        self._ended, self._finished = True, finished
        for stager in self._stagers.values():
            if stager.process is not None:
                _ask_to_end(stager.process)
        self._too_late = get_running_loop().call_later(FINISH_S, self.end)
        get_running_loop().call_soon(self._check_finished)

    def _check_finished(self) -> None:
        if self._finished is not None and not any(stager.process for stager in self._stagers.values()):
            finished, self._finished = self._finished, None
            if self._too_late is not None:
                self._too_late.cancel()  # other stagers may run in this directory by then
            finished()

    # --- one of them ----------------------------------------------------------------------------------------------------

    def _start(self, slot: str) -> None:
        stager = self._stagers[slot]
        if self._ended or stager.process is not None:
            return
        if stager.again is not None:
            stager.again.cancel()  # one that failed is due once, however often its worker asks
        process: ChildProcess | None = None
        try:
            for folder in (self._directory, self._logs):
                folder.mkdir(exist_ok=True)
            with open(self._logs / _log_of(slot), "ab") as output:
                environment = {**stager.environment, "ENGINEPOOL_STAGER": stager.spec.decode()}
                process = ChildProcess.start(COMMAND, environment, log=output, lifeline=self._lifeline)
            StagerRecord.of(process.pid, gpus=stager.gpus).write(self._record(slot))
        except OSError as error:
            if process is not None:
                process.kill()  # the next coordinator would not find it
                process.reap()
            if (why := os_error(error)) != stager.unstarted:
                log(f"the stager of worker {stager.worker} could not be started: {why}; tried again until it can be")
                stager.unstarted = why
            self._later(slot)  # meanwhile the answers of the worker say so
            return
        stager.unstarted = ""
        self._runs(slot, process)

    def _runs(self, slot: str, process: ChildProcess) -> None:
        self._stagers[slot].process = process
        process.watch(lambda code: self._process_ended(slot, code))
        self._connect(slot)

    def _process_ended(self, slot: str, code: int | None) -> None:
        stager = self._stagers[slot]
        stager.process = None
        if stager.connection is not None:
            stager.connection.close()
            stager.connection = None
        with contextlib.suppress(OSError):  # on a disk that cannot be written; the record names a process that has ended
            self._record(slot).unlink(missing_ok=True)
        if self._ended:
            self._check_finished()
        else:
            how = how_it_ended(code, "")
            log(f"the stager of worker {stager.worker} ended: {how}; it is started again after {stager.again_s:g} s")
            self._later(slot)

    def _later(self, slot: str) -> None:
        stager = self._stagers[slot]
        stager.again = get_running_loop().call_later(stager.again_s, self._start, slot)
        stager.again_s = min(2 * stager.again_s, AGAIN_S[1])

    def _connect(self, slot: str) -> None:
        stager = self._stagers[slot]
        if self._ended or stager.process is None or stager.connection is not None:
            return
        connection: socket.socket | None = None
        try:
            connection = socket.socket(socket.AF_UNIX)
            connection.setblocking(False)
            connection.connect(self._socket(slot))
        except OSError:
            if connection is not None:
                connection.close()
            get_running_loop().call_later(CONNECT_S, self._connect, slot)
        else:
            stager.connection = connection
            stager.again_s = AGAIN_S[0]

    def _socket(self, slot: str) -> str:
        return str(self._directory / f"{slot}.sock")

    def _record(self, slot: str) -> Path:
        return self._directory / f"{slot}.json"


def _log_of(slot: str) -> str:
    return f"stager-{slot}.log"


def _ask_to_end(process: ChildProcess) -> None:
    process.send(signal.SIGTERM)
    process.send(signal.SIGCONT)  # a stopped process does not get SIGTERM
