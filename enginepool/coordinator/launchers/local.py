"""Worker processes: starting them, seeing all of them end, finding those of an earlier coordinator.

`Supervisor` is what the daemon needs; `LocalSupervisor` does it with child processes on this host. Each worker leads a session
of its own, so that one SIGKILL to its process group reaches the engine's children too. Ends are awaited on pidfds, of the
worker and then of whatever its group still holds: a successor starts only when nothing of it is left to hold a GPU.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Protocol

import msgspec
import psutil

from enginepool.config import GroupConfig, PoolConfig, gpus_per_worker
from enginepool.coordinator.core.events import GroupWeights, LiveProcess, WorkerExited
from enginepool.coordinator.launchers.gpus import allocate_gpus, visible_gpus
from enginepool.coordinator.launchers.processes import (
    OUT_OF_MEMORY,
    PERMANENT,
    failed_by_itself,
    how_it_ended,
    is_the_one,
    kill_session,
    last_line,
    lives,
    made_at,
    session_member,
)
from enginepool.coordinator.launchers.stagers import Stagers
from enginepool.coordinator.shell.log import log
from enginepool.host import host_identity, os_error, write_file

#: logs of ended workers that are kept
KEPT_LOGS = 20
#: where no file descriptor is left to watch or look with, it is tried again after this
AGAIN_S = 0.5


class Supervisor(Protocol):
    """Starts and ends worker processes, wherever they run. Every started one is reported as exited exactly once."""

    def survivors(self) -> list[LiveProcess]:
        """Worker processes that an earlier coordinator started and that still run; from now on they are watched.

        Those of places that the pool does not have any more are ended."""
        ...

    def start(self, group: str, index: int, incarnation: str, weights: GroupWeights | None = None) -> bool:
        """Start a worker that will register as `incarnation`, on the checkpoint of `weights`; None: on the configured model.
        Whether there is a process; if not, it is reported as exited, and `unstarted`."""
        ...

    def restore_folders(self) -> None:
        """Write the records of running processes again, whose folder was removed: a successor finds workers by them."""
        ...

    def kill(self, incarnation: str, reason: str) -> None:
        """End a worker and everything that it started, now; `reason` is what is reported of its end."""
        ...

    def kill_all(self) -> None:
        """End all of them and everything that stands beside them, without waiting."""
        ...

    def finish(self, gone: Callable[[], None]) -> None:
        """The same, but what stands beside them may write first what it owes; `gone` is called when that has ended."""
        ...


class _ProcessRecord(msgspec.Struct, frozen=True):
    """A worker process as written to disk; `host` and `created` tell it from another process with the same pid."""

    group: str
    index: int
    incarnation: str
    pid: int
    created: float
    host: str = ""


class LocalSupervisor:
    """Workers as processes of this host."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        config: PoolConfig,
        directory: Path,
        endpoint: str,
        lifeline: int | None,
        exited: Callable[[WorkerExited], None],
        *,
        key: str = "",
        external: bool = False,
    ) -> None:
        """
        Args:
            key: the file with the key of the workers, if it is not the pool's own.
            external: the coordinator at `endpoint` is another process, perhaps on another host. The workers end with
                `lifeline`, and their stagers wait for successors.
        """
        self._key = key or (str(Path(config.keys).expanduser().absolute() / "worker.key") if config.keys else "")
        self._external = external
        self._loop = loop
        self._config = config
        self._records = directory / "workers"
        self._logs = directory / "logs"
        self._endpoint = endpoint
        self._lifeline = lifeline
        self._exited = exited
        self._gpus = allocate_gpus(config.groups, visible_gpus())
        self._processes: dict[str, _ProcessRecord] = {}
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        #: why those were killed that were
        self._killed: dict[str, str] = {}
        self._ports: dict[str, int] = {}
        self._make_folders()
        self._stagers = Stagers(loop, directory, None if external else lifeline, config.timing.orphan_s)
        for name, group in config.groups.items():
            if group.workers and _takes_updates(group):
                self._stagers.check(f"{name}.{group.workers - 1}")

    # --- starting ------------------------------------------------------------------------------------------------------

    def survivors(self) -> list[LiveProcess]:
        found: list[LiveProcess] = []
        for path in sorted(self._records.glob("*.json")):
            try:
                record = msgspec.json.decode(path.read_bytes(), type=_ProcessRecord)
            except msgspec.MsgspecError:
                # Torn by a crash. A worker that lives nevertheless dials in like one that somebody else started.
                path.unlink()
                continue
            config = self._config.groups.get(record.group)
            here = record.host == host_identity()
            lives_on = here and lives(record.pid, record.created)
            if lives_on and config is not None and record.index < config.workers:
                self._processes[record.incarnation] = record
                self._watch_leader(record)
                self._stager(record.group, record.index, self._environment(record.group, record.index))
                found.append(LiveProcess(record.group, record.index, record.incarnation))
                log(f"worker {record.incarnation} of an earlier coordinator still runs as process {record.pid}")
                continue
            # Its pid may be somebody else's by now; it cannot be while its session has members.
            if here and (not psutil.pid_exists(record.pid) or is_the_one(record.pid, record.created)):
                kill_session(record.pid)
            if lives_on:
                name = f"{record.group}-{record.index}"
                log(f"worker {record.incarnation} is ended: the configuration has no worker {name} any more")
            else:
                last = self.last_line(record.incarnation)
                log(f"worker {record.incarnation} ended while no coordinator ran{f': {last}' if last else ''}")
            path.unlink()
        return found

    def _make_folders(self) -> None:
        for folder in (self._records, self._logs):
            folder.mkdir(exist_ok=True)

    def restore_folders(self) -> None:
        with contextlib.suppress(OSError):  # the next start of a worker names the file
            self._make_folders()
            for incarnation, record in self._processes.items():
                write_file(self._path(incarnation), msgspec.json.encode(record))
        self._stagers.restore_folders()

    def start(self, group: str, index: int, incarnation: str, weights: GroupWeights | None = None) -> bool:
        child: subprocess.Popen[bytes] | None = None
        try:
            self._make_folders()
            with open(self._log(incarnation), "wb") as log:
                child = self._spawn(group, index, incarnation, weights, log)
            record = _ProcessRecord(group, index, incarnation, child.pid, made_at(child.pid), host_identity())
            write_file(self._path(incarnation), msgspec.json.encode(record))
        except OSError as error:
            # One that is not written down would be nobody's after the next start.
            if child is not None:
                child.kill()
                child.wait()
            self._ports.pop(incarnation, None)
            with contextlib.suppress(OSError):
                self._path(incarnation).unlink(missing_ok=True)
            reason = f"the worker process could not be started: {os_error(error)}"
            self._loop.call_soon(self._exited, WorkerExited(time.monotonic(), incarnation, reason, unstarted=True))
            return False
        self._processes[incarnation] = record
        self._children[incarnation] = child
        self._watch_leader(record)
        with contextlib.suppress(OSError):  # a log that stays harms no worker
            self._tidy_logs()
        return True

    def _spawn(
        self, group: str, index: int, incarnation: str, weights: GroupWeights | None, log: IO[bytes]
    ) -> "subprocess.Popen[bytes]":
        config, timing = self._config.groups[group], self._config.timing
        packed = index >= config.workers - config.packed_workers
        spec: dict[str, Any] = {
            "endpoint": self._endpoint,
            "group": group,
            "incarnation": incarnation,
            "engine": config.engine,
            "model": config.model,
            "device": config.device,
            "dtype": config.dtype,
            "packed": packed,
            "cached_query_tokens": None if packed else config.cached_query_tokens,
            "options": config.options,
            "max_batch_tokens": config.max_batch_tokens,
            "max_batch_rows": config.max_batch_rows,
            "forwards_in_flight": config.forwards_in_flight,
            "nccl_port": self._free_port(incarnation) if config.engine == "sglang" else None,
            "reserve_staging": config.reserve_staging,
            "checkpoint_roots": config.checkpoint_roots,
            "keys": self._key,
            "external": self._external,
            "lifeline_fd": self._lifeline,
            "orphan_s": timing.orphan_s,
            "drain_s": timing.drain_s,
        }
        if weights is not None:
            spec |= {"checkpoint": weights.path, "checkpoint_digest": weights.digest, "version": weights.version}
        environment = self._environment(group, index)
        spec["stager"] = self._stager(group, index, environment)
        environment["ENGINEPOOL_WORKER"] = msgspec.json.encode(spec).decode()
        return subprocess.Popen(
            [sys.executable, "-m", "enginepool.workers.main"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=() if self._lifeline is None else (self._lifeline,),
        )

    def _environment(self, group: str, index: int) -> dict[str, str]:
        """What a worker's process, and whatever stands beside it, finds around it."""
        config = self._config.groups[group]
        environment = dict(os.environ)
        gpus = self._gpus.get(group)
        if gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpus[index]
        elif config.engine == "sglang":
            # Engines on one CPU would each start a thread for every core, and spin on each other's.
            workers = sum(other.workers for other in self._config.groups.values())
            threads = max(1, len(os.sched_getaffinity(0)) // workers)
            environment.setdefault("OMP_NUM_THREADS", str(threads))
        return environment

    def _stager(self, group: str, index: int, environment: Mapping[str, str]) -> str:
        """The socket of the stager beside a worker with this environment; "" where updates are impossible."""
        config = self._config.groups[group]
        if not _takes_updates(config):
            return ""
        device = "cpu" if config.engine == "sim" else config.device
        gpus = 1 if config.engine == "sim" else gpus_per_worker(config)
        return self._stagers.beside(f"{group}.{index}", environment, device=device, gpus=gpus)

    def _free_port(self, incarnation: str) -> int:
        """A TCP port for the engine's process group. Engines that look for one at the same time may find the same."""
        while True:
            with socket.create_server(("127.0.0.1", 0)) as server:
                port = int(server.getsockname()[1])
            if port not in self._ports.values():
                self._ports[incarnation] = port
                return port

    # --- ending --------------------------------------------------------------------------------------------------------

    def kill(self, incarnation: str, reason: str) -> None:
        record = self._processes.get(incarnation)
        if record is not None:
            self._killed.setdefault(incarnation, reason)
            try:
                kill_session(record.pid)
            except OSError:  # the rest of the session is looked for when its leader has ended
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(record.pid, signal.SIGKILL)

    def drain(self) -> None:
        """Ask all workers to finish what they have begun and to end."""
        for record in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(record.pid, signal.SIGTERM)

    def kill_all(self) -> None:
        self._kill_workers()
        self._stagers.end()

    def finish(self, gone: Callable[[], None]) -> None:
        self._kill_workers()
        self._stagers.finish(gone)

    def _kill_workers(self) -> None:
        for incarnation in list(self._processes):
            self.kill(incarnation, "stopped by the pool, because the pool ends")

    def _watch_leader(self, record: _ProcessRecord) -> None:
        self._when_ended(record.pid, lambda: self._leader_ended(record))

    def _when_ended(self, pid: int, then: Callable[[], None]) -> None:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._loop.call_soon(then)
            return
        except OSError:
            self._loop.call_later(AGAIN_S, self._when_ended, pid, then)
            return

        def readable() -> None:
            self._loop.remove_reader(fd)
            os.close(fd)
            then()

        self._loop.add_reader(fd, readable)

    def _leader_ended(self, record: _ProcessRecord) -> None:
        child = self._children.pop(record.incarnation, None)
        code = child.wait() if child is not None else None
        self._await_group(record, code)

    def _await_group(self, record: _ProcessRecord, code: int | None) -> None:
        """Kill what is left of the worker's session, and wait for its members one after the other, until none is left."""
        try:
            kill_session(record.pid)
            member = session_member(record.pid)
        except OSError:
            self._loop.call_later(AGAIN_S, self._await_group, record, code)
            return
        if member is not None:
            self._when_ended(member, lambda: self._await_group(record, code))
            return
        self._processes.pop(record.incarnation, None)
        self._ports.pop(record.incarnation, None)
        with contextlib.suppress(OSError):  # on a disk that cannot be written: the record names a process that has ended
            self._path(record.incarnation).unlink(missing_ok=True)
        killed = self._killed.pop(record.incarnation, "")
        reason = killed or how_it_ended(code, self.last_line(record.incarnation))
        failed = not killed and failed_by_itself(code)
        permanent, out_of_memory = code == PERMANENT, code == OUT_OF_MEMORY
        self._exited(
            WorkerExited(
                time.monotonic(), record.incarnation, reason, permanent=permanent, failed=failed, out_of_memory=out_of_memory
            )
        )

    def last_line(self, incarnation: str) -> str:
        """The last line in a worker's log, or nothing."""
        try:
            with open(self._log(incarnation), "rb") as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - 4096))
                return last_line(log.read())
        except OSError:
            return ""

    def _tidy_logs(self) -> None:
        ended = [path for path in self._logs.glob("*.log") if path.stem not in self._processes]
        for path in sorted(ended, key=lambda path: path.stat().st_mtime)[:-KEPT_LOGS]:
            path.unlink()

    def _path(self, incarnation: str) -> Path:
        return self._records / f"{incarnation}.json"

    def _log(self, incarnation: str) -> Path:
        return self._logs / f"{incarnation}.log"


def _takes_updates(config: GroupConfig) -> bool:
    return config.engine != "sim" or bool(config.options.get("tensors"))
