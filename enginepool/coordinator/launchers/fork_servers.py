"""Fork servers of this host: processes that have imported SGLang, from which workers are forked.

There is one for each environment in which engines import it; the workers of most pools share one. It is started with the first
of its workers, which waits until the import is done, as it would wait for its own. A server that cannot be used, or that does
not get ready in time, does without: its workers are started instead. One that ends after it was ready is started again with the
next worker; one that ended before that is not, as it would keep each worker waiting.
"""

import contextlib
import socket
import sys
from asyncio import TimerHandle, get_running_loop
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path

import msgspec

from enginepool.config import GroupConfig, gpus_per_worker
from enginepool.coordinator.launchers.exit_reasons import how_it_ended
from enginepool.coordinator.shell.log import log
from enginepool.host import os_error
from enginepool.host.child_process import ChildProcess
from enginepool.host.fork_server import FORK_S, ForkServer

COMMAND = (sys.executable, "-m", "enginepool.workers.fork_server")
#: the file in the folder of logs
LOG = "fork-server.log"
#: the first message of a fork server that can be used
_READY = b"ready"

#: called with the server, or with None if workers are to be started without one
Usable = Callable[[ForkServer | None], object]


def is_wanted(group: GroupConfig, *, on_gpus: bool) -> bool:
    """Whether the workers of `group` are forked. A simulated engine imports little."""
    by_default = not on_gpus or gpus_per_worker(group) == 1
    return group.engine == "sglang" and (by_default if group.fork_server is None else group.fork_server)


class _Server:
    """One fork server, from its start on."""

    def __init__(self) -> None:
        self.process: ChildProcess | None = None
        self.connection: socket.socket | None = None
        #: it can be used
        self.server: ForkServer | None = None
        #: it cannot be used, or not yet: workers do not wait for it
        self.unusable = False
        self.waiting: list[Usable] = []
        self.too_late: TimerHandle | None = None


class ForkServers:
    """The fork servers of one launcher."""

    def __init__(self, logs: Path, lifeline: int | None, gpus: str | None, ready_s: float) -> None:
        """`gpus`: all that the workers see, as CUDA_VISIBLE_DEVICES has them; None: each sees what this process does. A server
        does not ask which of them a worker has. `ready_s`: seconds that workers wait for an import."""
        self._logs = logs
        self._lifeline = lifeline
        self._gpus = gpus
        self._ready_s = ready_s
        self._servers: dict[Hashable, _Server] = {}

    def when_usable(self, group: GroupConfig, environment: Mapping[str, str], then: Usable = lambda server: None) -> None:
        """Call `then` when it is known whether a worker of `group` can be forked, often at once. Starts a server if need be."""
        settings = {"device": group.device, "compiles": bool(group.options.get("enable_torch_compile"))}
        if self._gpus is not None:
            environment = {**environment, "CUDA_VISIBLE_DEVICES": self._gpus}
        key = (tuple(settings.values()), frozenset(environment.items()))
        server = self._servers.get(key)
        if server is None:
            server = self._servers[key] = _Server()
            self._start(key, server, settings, environment)
        if server.server is None and not server.unusable:
            server.waiting.append(then)
        else:
            then(server.server)

    def _start(self, key: Hashable, server: _Server, settings: Mapping[str, object], environment: Mapping[str, str]) -> None:
        ours: socket.socket | None = None
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs, open(self._logs / LOG, "ab") as output:
                spec = msgspec.json.encode({"socket": theirs.fileno(), **settings}).decode()
                environment = {**environment, "ENGINEPOOL_FORK_SERVER": spec}
                inherited = [theirs.fileno()]
                server.process = ChildProcess.start(
                    COMMAND, environment, log=output, lifeline=self._lifeline, inherited=inherited
                )
        except OSError as error:
            if ours is not None:
                ours.close()
            del self._servers[key]  # the next worker tries it again
            self._decide(server, None, f"it could not be started: {os_error(error)}")
            return
        server.connection = ours
        server.process.watch(lambda code: self._ended(key, server, code))
        loop = get_running_loop()
        loop.add_reader(ours, self._heard, server, ours)
        late = f"it was not ready after {self._ready_s:g} s"
        server.too_late = loop.call_later(self._ready_s, self._decide, server, None, late)

    def _heard(self, server: _Server, connection: socket.socket) -> None:
        """Its first message, or its end."""
        get_running_loop().remove_reader(connection)
        with contextlib.suppress(ConnectionError):
            message = connection.recv(1000)
            if message == _READY:
                self._decide(server, ForkServer(connection))
            elif message:
                self._decide(server, None, message.decode(errors="replace"))

    def _decide(self, server: _Server, usable: ForkServer | None, why: str = "") -> None:
        if server.too_late is not None:
            server.too_late.cancel()
        server.server, server.unusable = usable, usable is None
        if why:
            log(f"workers are started without a fork server: {why}")
        waiting, server.waiting = server.waiting, []
        for then in waiting:
            then(usable)

    def _ended(self, key: Hashable, server: _Server, code: int | None) -> None:
        self._close(server)
        if self._servers.get(key) is not server:
            return  # ended by `end`
        if server.server is not None:
            log(f"the fork server of workers ended: {how_it_ended(code, '')}; it is started again with the next worker")
            del self._servers[key]
        elif not server.unusable:
            self._decide(server, None, f"it ended: {how_it_ended(code, '')}")

    def _close(self, server: _Server) -> None:
        if server.connection is not None and server.connection.fileno() >= 0:  # a fork that failed has closed it
            get_running_loop().remove_reader(server.connection)
            server.connection.close()

    def failed(self, broken: ForkServer, error: OSError) -> None:
        """It did not fork: end it. The next worker starts another one."""
        why = f"took longer than {FORK_S:g} s" if isinstance(error, TimeoutError) else f"failed: {os_error(error)}"
        log(f"the fork server of workers is ended, because a fork {why}; the worker is started without it")
        for server in self._servers.values():
            if server.server is broken and server.process is not None:
                server.process.kill()

    def end(self) -> None:
        """End all of them."""
        for server in self._servers.values():
            if server.too_late is not None:
                server.too_late.cancel()
            self._close(server)
            if server.process is not None:
                server.process.kill()
        self._servers.clear()
