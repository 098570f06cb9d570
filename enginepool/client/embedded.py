"""The coordinator as a child of this process: started, watched, started again, and ended with it.

The child inherits the read end of a pipe, the lifeline. Only this process holds the write end, so however this process
ends, the pipe closes, and the coordinator ends its workers and itself. A coordinator that dies, or that SIGUSR1 ends alone, is
started again with the same endpoints and the same state directory, where it finds its journal and its living workers; the
client's session sends again what was not answered. A coordinator that SIGTERM ends with its workers is not started again.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from enginepool.client.arguments import meant
from enginepool.config import GroupConfig, PoolConfig
from enginepool.config_loader import check_models, check_roots, checked_config, encode_config
from enginepool.coordinator.launchers.engine_options import check_options
from enginepool.coordinator.launchers.gpus import check_gpus
from enginepool.errors import ConfigError
from enginepool.host import LONGEST_PATH, os_error
from enginepool.host.child_process import ChildProcess
from enginepool.host.folders import PrivateFolder, snapshot_folders
from enginepool.host.restart_policy import BAD_CONFIG, CANNOT_WRITE, HOST_FAULT, STOPPED, RestartPolicy, exit_text
from enginepool.protocol.messages import ErrorReply

log = logging.getLogger("enginepool")

COMMAND = (sys.executable, "-m", "enginepool.coordinator.shell.daemon")
#: Lines of the coordinator's stderr that go into an error.
_LAST_LINES = 10
#: Seconds for the child to end after its lifeline closed, before it is killed.
_END_S = 5.0
_GROUP = "default"
#: A directory whose path has more bytes is no place for the folder with all sockets: mkdtemp adds 8 to its prefix, and the
#: longest name in it is that of the last stager.
_LONGEST_PARENT = LONGEST_PATH - len(f"/enginepool-01234567/stagers/{_GROUP}.4095.sock")


def _plain_names(error: ConfigError) -> ConfigError:
    """The error in the words of a caller who named no group."""
    return ConfigError(str(error).replace(f"groups.{_GROUP}.", "").replace("groups[...].", ""))


def embedded_config(config: PoolConfig | None, group: Mapping[str, Any]) -> PoolConfig:
    """The whole configuration from the arguments of `Pool.start`. Raises ConfigError naming the key at fault."""
    try:
        if "timeout" in group:
            raise ConfigError(
                "Pool.start() has no argument 'timeout': it does not wait for the workers, "
                f"`await pool.ready(timeout={group['timeout']!r:.20})` does; start_timeout is for the coordinator"
            )
        if config is not None:
            plain = {**msgspec.structs.asdict(GroupConfig(model="")), "model": None}
            for key, value in group.items():
                if key not in plain:
                    near = meant(key, [*plain, "config", "start_timeout"])
                    raise ConfigError(f"Pool.start() has no argument {key!r}{near}")
                if value != plain[key]:
                    raise ConfigError(f"{key}: write it in the config, which was given whole")
            return _checked_here(checked_config(config))
        if group["model"] is None:
            raise ConfigError("model: name one, or give a whole config")
        return _checked_here(checked_config({"groups": {_GROUP: group}}))
    except ConfigError as error:
        raise _plain_names(error) from None
    except TypeError as error:
        raise ConfigError(f"configuration: {error}") from None


def _checked_here(config: PoolConfig) -> PoolConfig:
    where = "configuration"
    return check_gpus(check_roots(check_models(config, where), where), where)


async def check_engine_options(config: PoolConfig) -> None:
    """Raise ConfigError for an option that an engine does not have."""
    if not any(group.options for group in config.groups.values()):
        return
    try:
        await asyncio.to_thread(check_options, config, "configuration")
    except ConfigError as error:
        raise _plain_names(error) from None


class EmbeddedCoordinator:
    """A coordinator process that belongs to one `Pool`.

    Args:
        config: what it serves. A fixed `listen` and a `state_dir` of its own are kept; the defaults, and a `listen` with a port
            that the system would choose, are replaced by a private directory.
        policy: when it is started again.
    """

    def __init__(self, config: PoolConfig, *, policy: RestartPolicy | None = None) -> None:
        parent = tempfile.gettempdir()
        if len(os.fsencode(parent)) > _LONGEST_PARENT:
            parent = "/tmp"
        folder = PrivateFolder(Path(parent), "enginepool-", _forget)
        self.directory = folder.path
        self._remove = weakref.finalize(self, _remove, folder, os.getpid())
        standard = PoolConfig(groups={})
        if config.listen == standard.listen or config.listen.endswith((":*", ":0")):
            config = msgspec.structs.replace(config, listen=f"ipc://{self.directory}/pool.sock")
        if config.state_dir == standard.state_dir:
            config = msgspec.structs.replace(config, state_dir=str(self.directory))
        self.config = config
        self.address = config.listen
        #: of the client that owns it, where it listens on TCP with keys
        self.keys = f"{config.keys}/admin.key" if config.keys and config.listen.startswith("tcp://") else None
        #: times that it was started
        self.starts = 0
        self._policy = policy or RestartPolicy()
        self._settled = False
        self._stopping = False
        self._lifeline: int | None = None
        #: closes both ends of the lifeline
        self._cut: Callable[[], object] | None = None
        self._process: ChildProcess | None = None
        self._again: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int | None:
        """Of the running child."""
        return None if self._process is None else self._process.pid

    def start(self, lost: Callable[[ErrorReply], None]) -> None:
        """Start the child. `lost` is called once, if it ended and stays down."""
        self._loop = asyncio.get_running_loop()
        self._lost = lost
        self._gone = asyncio.Event()
        read, write = os.pipe()
        self._lifeline = read
        # Also when this object is garbage-collected with its loop: then the coordinator has no client left.
        self._cut = weakref.finalize(self, _close, read, write)
        _living.add(self)
        self._spawn()

    def settle(self) -> None:
        """It has served: from now on it is started again when it dies. Before, its end is the answer."""
        self._settled = True

    async def stop(self) -> None:
        """End the child and its workers: a drain first, then the lifeline, then SIGKILL. Idempotent."""
        self._stopping = True
        if self._again is not None:
            self._again.cancel()
        try:
            if self._process is not None:
                self._process.send(signal.SIGTERM)
                await self._wait_gone(self.config.timing.drain_s + _END_S)
                self.cut_lifeline()
                await self._wait_gone(_END_S)
        finally:
            self.cut_lifeline()
            if self._process is not None:
                self._process.kill()
                self._process.reap()
                self._process = None
            self._remove()

    # --- the process ---------------------------------------------------------------------------------------------------

    def _spawn(self) -> None:
        self._again = None
        if self._stopping or self._lifeline is None:
            return
        environment = {
            **os.environ,
            "ENGINEPOOL_CONFIG": encode_config(self.config).decode(),
            "ENGINEPOOL_LIFELINE": str(self._lifeline),
        }
        try:
            with open(self._log, "ab") as output:
                self._process = ChildProcess.start(COMMAND, environment, log=output, lifeline=self._lifeline)
        except OSError as error:
            text = f"the coordinator could not be started: {os_error(error)}"
            wait = self._policy.after_failed_start(error, self._loop.time())
            if not self._settled or wait is None:
                self._loop.call_soon(self._lost, ErrorReply("pool_down", text))
                return
            log.warning("%s: %s; tried again after %g s", self.address, text, wait)
            self._again = self._loop.call_later(wait, self._spawn)
            return
        self.starts += 1
        self._gone.clear()
        self._process.watch(self._exited)

    def _exited(self, code: int | None) -> None:
        self._process = None
        self._gone.set()
        if self._stopping:
            return
        if not self._settled:
            self._lost(self._failure("ended before it answered", code))
            return
        if code == STOPPED:
            text = "the pool was stopped: its coordinator was told to end with the workers (SIGTERM)"
            self._lost(ErrorReply("pool_down", text, evidence=self._last_lines()))
            return
        wait = self._policy.after_end(code, self._loop.time())
        if wait is None:
            self._lost(self._failure(self._policy.given_up, code))
        else:
            self._again = self._loop.call_later(wait, self._spawn)

    def _failure(self, story: str, code: int | None) -> ErrorReply:
        lines = self._last_lines()
        if code in (BAD_CONFIG, CANNOT_WRITE, HOST_FAULT) and lines:
            return ErrorReply("config", lines[-1].removeprefix("enginepool: "))
        return ErrorReply("pool_down", f"the coordinator {story} with {exit_text(code)}", evidence=lines)

    def _last_lines(self) -> list[str]:
        with contextlib.suppress(OSError):
            text = self._log.read_bytes()[-10_000:].decode(errors="replace")
            return [line for line in text.splitlines() if line.strip()][-_LAST_LINES:]
        return []

    @property
    def _log(self) -> Path:
        return self.directory / "coordinator.log"

    async def _wait_gone(self, within: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                await self._gone.wait()

    def cut_lifeline(self) -> None:
        """Close both ends in this process; the coordinator ends when no process holds the write end."""
        self._lifeline = None
        if self._cut is not None:
            self._cut()


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _remove(folder: PrivateFolder, owner: int) -> None:
    if os.getpid() == owner:
        folder.remove()


def _forget(directory: Path) -> None:
    """A program was killed with all of its pool, which kept its state here: its weights in memory are not needed any more."""
    shutil.rmtree(snapshot_folders(directory)["memory"], ignore_errors=True)


_living: "weakref.WeakSet[EmbeddedCoordinator]" = weakref.WeakSet()


def _cut_lifelines() -> None:
    """In a fork of this process: its copy of the write end would keep a pool alive after the owner is gone."""
    for coordinator in list(_living):
        coordinator.cut_lifeline()


os.register_at_fork(after_in_child=_cut_lifelines)
