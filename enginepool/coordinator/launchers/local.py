"""Workers as child processes of this host.

Each worker leads a session of its own, so that one SIGKILL to the session reaches the engine's children too. A successor of a
worker starts only when no process of its session is left that could hold a GPU.
"""

import contextlib
import os
import signal
import socket
import sys
import time
from asyncio import get_running_loop
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import msgspec
import psutil

from enginepool.config import GroupConfig, gpus_per_worker
from enginepool.coordinator.core.events import WorkerExited
from enginepool.coordinator.core.group_weights import EarlierWorker, GroupWeights
from enginepool.coordinator.fleet.failures import lacks_disk_space
from enginepool.coordinator.launchers.base import LauncherContext
from enginepool.coordinator.launchers.exit_reasons import (
    OUT_OF_MEMORY,
    PERMANENT,
    cause,
    failed_by_itself,
    free_space,
    how_it_ended,
    last_line,
)
from enginepool.coordinator.launchers.fork_servers import LOG, ForkServers, Usable, is_wanted
from enginepool.coordinator.launchers.gpus import all_gpus, allocate_gpus, visible_gpus
from enginepool.coordinator.launchers.leftovers import Leftovers
from enginepool.coordinator.launchers.stagers import Stagers
from enginepool.coordinator.launchers.worker_record import WorkerRecord
from enginepool.coordinator.shell.adapter_store import STORE
from enginepool.coordinator.shell.log import log
from enginepool.host import os_error
from enginepool.host.child_process import ChildProcess, exists, read_record
from enginepool.host.fork_server import ForkServer
from enginepool.host.kernel_caches import cache_variables

COMMAND = (sys.executable, "-m", "enginepool.workers.main")
#: logs of ended workers that are kept
KEPT_LOGS = 20
#: fields of a group's configuration that its workers are started with as they are
_GROUP_FIELDS = (
    "packing", "cached_query_tokens",
    "engine", "model", "operations", "device", "dtype", "options", "max_batch_tokens", "max_batch_rows",
    "forwards_in_flight", "reserve_staging", "checkpoint_roots", "adapter_roots", "media_root", "media_urls",
    "profile_root", "save_roots", "kernel_cache",
)  # fmt: skip


class _Worker:
    """A worker process that runs."""

    def __init__(self, record: WorkerRecord, process: ChildProcess) -> None:
        self.record = record
        self.process = process
        #: why it was stopped; "": it was not
        self.stopped = ""


class LocalLauncher:
    """A `Launcher` of child processes."""

    def __init__(self, context: LauncherContext) -> None:
        config, directory = context.config, context.directory
        self._context = context
        self._config = config
        self._key = context.key or (str(Path(config.keys).expanduser().absolute() / "worker.key") if config.keys else "")
        self._records = directory / "workers"
        self._logs = directory / "logs"
        earlier = [read_record(path, WorkerRecord) for path in self._records.glob("*.json")]
        used = {(record.group, record.index): record.gpus for record in earlier if record is not None and record.lives}
        self._gpus = allocate_gpus(config.groups, visible_gpus(), used)
        self._leftovers = Leftovers()
        self._workers: dict[str, _Worker] = {}
        #: workers that are started when their fork server is ready
        self._waiting: set[str] = set()
        self._ports: dict[str, int] = {}
        self._make_folders()
        self._stagers = Stagers(directory, None if context.external else context.lifeline, config.timing.orphan_s)
        # A worker that waits has to register in time, too.
        ready_s = config.timing.starting_s / 2
        self._fork_servers = ForkServers(self._logs, context.lifeline, all_gpus(self._gpus), ready_s)
        for name, group in config.groups.items():
            if group.workers and _takes_updates(group):
                self._stagers.check(f"{name}.{group.workers - 1}")

    # --- starting ------------------------------------------------------------------------------------------------------

    def adopt(self) -> list[EarlierWorker]:
        found: list[EarlierWorker] = []
        for path in sorted(self._records.glob("*.json")):
            record = read_record(path, WorkerRecord)
            if record is None:
                # If its worker still runs, the worker connects like an external one.
                path.unlink()
                continue
            lives, config = record.lives, self._config.groups.get(record.group)
            wrong = record.why_ended(config, self._gpus_of(record.group, record.index))
            if lives and not wrong:
                self._watch(record, ChildProcess(record.pid))
                self._stager(record.group, record.index, self._environment(record.group, record.index))
                self._when_usable(record.group, record.index)  # for its successor
                found.append(EarlierWorker(record.group, record.index, record.incarnation))
                log(f"worker {record.incarnation} of an earlier coordinator still runs as process {record.pid}")
                continue
            # Another process may have the pid by now, but not while the session of the worker has members.
            if record.here and (not psutil.pid_exists(record.pid) or exists(record.pid, record.created)):
                self._leftovers.end(record, path)
            else:
                path.unlink()
            if lives:
                log(f"worker {record.incarnation} is ended: {wrong}")
            else:
                last = cause(None, self.last_line(record.incarnation))
                log(f"worker {record.incarnation} ended while no coordinator ran{f': {last}' if last else ''}")
            found.append(EarlierWorker(record.group, record.index, record.incarnation, lives=False))
        groups = self._config.groups.items()
        self._stagers.dismiss({f"{name}.{i}" for name, group in groups if _takes_updates(group) for i in range(group.workers)})
        return found

    def start(self, group: str, index: int, incarnation: str, weights: GroupWeights | None = None) -> bool:
        self._waiting.add(incarnation)

        def launch(server: ForkServer | None) -> None:
            if incarnation in self._waiting:  # it was not stopped meanwhile
                self._waiting.remove(incarnation)
                self._launch(group, index, incarnation, weights, server)

        def prepare() -> None:
            if incarnation in self._waiting:
                self._when_usable(group, index, launch)

        self._leftovers.when_gone(self._gpus_of(group, index), prepare)
        return incarnation in self._waiting or incarnation in self._workers

    def _when_usable(self, group: str, index: int, then: Usable = lambda server: None) -> None:
        """Call `then` with the fork server of this worker."""
        config = self._config.groups[group]
        if is_wanted(config, on_gpus=bool(self._gpus.get(group))):
            self._fork_servers.when_usable(config, self._environment(group, index), then)
        else:
            then(None)

    def _launch(
        self, group: str, index: int, incarnation: str, weights: GroupWeights | None, server: ForkServer | None
    ) -> None:
        process: ChildProcess | None = None
        try:
            self._make_folders()
            with open(self._log(incarnation), "wb") as output:
                environment = self._environment(group, index)
                spec = self._spec(group, index, incarnation, weights, self._stager(group, index, environment))
                environment["ENGINEPOOL_WORKER"] = msgspec.json.encode(spec).decode()
                process = self._start_process(environment, output, server)
            named = {"group": group, "index": index, "incarnation": incarnation}
            model, gpus = self._config.groups[group].model, self._gpus_of(group, index)
            record = WorkerRecord.of(process.pid, **named, model=model, gpus=gpus)
            record.write(self._path(incarnation))
        except OSError as error:
            # The next coordinator would not find a worker without a record.
            if process is not None:
                process.kill()
                process.reap()
            self._forget(incarnation)
            reason = f"the worker process could not be started: {os_error(error)}"
            event = WorkerExited(time.monotonic(), incarnation, reason, unstarted=True)
            get_running_loop().call_soon(self._context.exited, event)
            return
        self._watch(record, process)
        with contextlib.suppress(OSError):  # a log that is not removed harms no worker
            self._remove_old_logs()

    def restore_folders(self) -> None:
        with contextlib.suppress(OSError):  # the next start of a worker names the file
            self._make_folders()
            for incarnation, worker in self._workers.items():
                worker.record.write(self._path(incarnation))
        self._stagers.restore_folders()

    def _make_folders(self) -> None:
        for folder in (self._records, self._logs):
            folder.mkdir(exist_ok=True)

    def _start_process(self, environment: Mapping[str, str], output: IO[bytes], server: ForkServer | None) -> ChildProcess:
        if server is not None:
            try:
                return ChildProcess.fork(server, COMMAND, environment, log=output)
            except OSError as error:
                self._fork_servers.failed(server, error)
        return ChildProcess.start(COMMAND, environment, log=output, lifeline=self._context.lifeline)

    def _spec(self, group: str, index: int, incarnation: str, weights: GroupWeights | None, stager: str) -> dict[str, Any]:
        """The worker's configuration."""
        config, timing = self._config.groups[group], self._config.timing
        spec: dict[str, Any] = {name: getattr(config, name) for name in _GROUP_FIELDS} | {
            "endpoint": self._context.endpoint,
            "group": group,
            "incarnation": incarnation,
            "nccl_port": self._free_port(incarnation) if config.engine == "sglang" else None,
            "keys": self._key,
            "external": self._context.external,
            "lifeline_fd": self._context.lifeline,
            "orphan_s": timing.orphan_s,
            "drain_s": timing.drain_s,
            "stager": stager,
            "adapter_store": "" if self._context.external else str(self._context.directory / STORE / group),
        }
        if weights is not None:
            spec |= {"checkpoint": weights.path, "checkpoint_digest": weights.digest, "version": weights.version}
        return spec

    def _environment(self, group: str, index: int) -> dict[str, str]:
        """The environment variables of a worker and of its stager."""
        config = self._config.groups[group]
        environment = os.environ | (cache_variables(config.kernel_cache) if config.kernel_cache else {})
        if group in self._gpus:
            environment["CUDA_VISIBLE_DEVICES"] = self._gpus_of(group, index)
        elif config.engine == "sglang":
            # By default each engine on a CPU starts a thread for every core, and the threads of all engines compete.
            workers = sum(other.workers for other in self._config.groups.values())
            threads = max(1, len(os.sched_getaffinity(0)) // workers)
            environment.setdefault("OMP_NUM_THREADS", str(threads))
        return environment

    def _gpus_of(self, group: str, index: int) -> str:
        """The GPUs of a worker slot, as CUDA_VISIBLE_DEVICES has them; "": it gets none of its own, or is none."""
        gpus = self._gpus.get(group, [])
        return gpus[index] if index < len(gpus) else ""

    def _stager(self, group: str, index: int, environment: Mapping[str, str]) -> str:
        """The socket of the stager of this worker; "" where updates are impossible."""
        config = self._config.groups[group]
        if not _takes_updates(config):
            return ""
        device = "cpu" if config.engine == "sim" else config.device
        gpus = 1 if config.engine == "sim" else gpus_per_worker(config)
        return self._stagers.ensure(f"{group}.{index}", environment, device=device, gpus=gpus)

    def _free_port(self, incarnation: str) -> int:
        """A TCP port for the engine's process group. Two engines that look for one at the same time may find the same."""
        while True:
            with socket.create_server(("127.0.0.1", 0)) as server:
                port = int(server.getsockname()[1])
            if port not in self._ports.values():
                self._ports[incarnation] = port
                return port

    # --- ending --------------------------------------------------------------------------------------------------------

    def stop(self, incarnation: str, reason: str) -> None:
        worker = self._workers.get(incarnation)
        if incarnation in self._waiting:
            self._waiting.remove(incarnation)
            get_running_loop().call_soon(self._context.exited, WorkerExited(time.monotonic(), incarnation, reason))
        elif worker is not None:
            worker.stopped = worker.stopped or reason
            worker.process.kill()

    def drain(self) -> None:
        for incarnation in list(self._waiting):
            self.stop(incarnation, "the pool ends")
        for worker in self._workers.values():
            worker.process.send(signal.SIGTERM)

    def stop_all(self) -> None:
        self._stop_workers()
        self._stagers.end()

    def finish(self, finished: Callable[[], None]) -> None:
        self._stop_workers()
        self._stagers.finish(finished)

    def _stop_workers(self) -> None:
        for incarnation in (*self._waiting, *self._workers):
            self.stop(incarnation, "stopped by the pool, because the pool ends")
        self._fork_servers.end()

    def _watch(self, record: WorkerRecord, process: ChildProcess) -> None:
        worker = self._workers[record.incarnation] = _Worker(record, process)
        process.watch(lambda code: self._ended(worker, code), session=True)

    def _ended(self, worker: _Worker, code: int | None) -> None:
        incarnation = worker.record.incarnation
        del self._workers[incarnation]
        self._forget(incarnation)
        reason = worker.stopped or how_it_ended(code, cause(code, self.last_line(incarnation)))
        no_room = lacks_disk_space(reason)
        self._context.exited(
            WorkerExited(
                time.monotonic(),
                incarnation,
                f"{reason}; free: {free_space(self._context.directory)}" if no_room else reason,
                permanent=code == PERMANENT and not no_room,
                failed=not worker.stopped and failed_by_itself(code),
                out_of_memory=code == OUT_OF_MEMORY,
            )
        )

    def _forget(self, incarnation: str) -> None:
        self._ports.pop(incarnation, None)
        with contextlib.suppress(OSError):  # on a disk that cannot be written; the record names a process that has ended
            self._path(incarnation).unlink(missing_ok=True)

    def last_line(self, incarnation: str) -> str:
        """The last line in a worker's log that says something about its end; "" where there is none."""
        try:
            with open(self._log(incarnation), "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
                return last_line(file.read())
        except OSError:
            return ""

    def _remove_old_logs(self) -> None:
        used = {LOG, *self._stagers.logs, *(f"{incarnation}.log" for incarnation in self._workers)}
        ended = [path for path in self._logs.glob("*.log") if path.name not in used]
        for path in sorted(ended, key=lambda path: path.stat().st_mtime)[:-KEPT_LOGS]:
            path.unlink()

    def _path(self, incarnation: str) -> Path:
        return self._records / f"{incarnation}.json"

    def _log(self, incarnation: str) -> Path:
        return self._logs / f"{incarnation}.log"


def _takes_updates(config: GroupConfig) -> bool:
    return config.engine != "sim" or bool(config.options.get("tensors"))
