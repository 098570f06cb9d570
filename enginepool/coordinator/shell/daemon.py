"""The coordinator process: sockets, clock, journal and worker processes around the pure machine.

    python -m enginepool.coordinator.shell.daemon

reads its whole configuration as JSON from ENGINEPOOL_CONFIG; `enginepool serve` calls `run` with the same struct. In embedded
use ENGINEPOOL_LIFELINE names the read end of a pipe of the embedding program: this process and its workers end when it closes.
"""

import asyncio
import contextlib
import os
import sys
import time
from functools import partial

import msgspec
import uvloop

from enginepool.config import PoolConfig
from enginepool.config_loader import check_endpoint, decode_config, resolve_roots
from enginepool.coordinator.core import effects as ef
from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.events import Link
from enginepool.coordinator.core.machine import Machine
from enginepool.coordinator.fleet.failures import signature
from enginepool.coordinator.launchers.base import LauncherContext, MakeLauncher
from enginepool.coordinator.launchers.local import LocalLauncher
from enginepool.coordinator.requests.memory import unread_bytes
from enginepool.coordinator.shell.adaptive_poll import FEW
from enginepool.coordinator.shell.authentication import Authenticator
from enginepool.coordinator.shell.incoming import Incoming
from enginepool.coordinator.shell.internal_errors import end_on_internal_error, on_loop_error
from enginepool.coordinator.shell.journal import ROOM, HostFault, Journal, prepare_state_dir
from enginepool.coordinator.shell.journal_writer import JournalWriter
from enginepool.coordinator.shell.log import log, say
from enginepool.coordinator.shell.process_memory import CollectorPauses, return_freed_memory
from enginepool.coordinator.shell.router import CLIENT_PROOF, WORKER_PROOF, Router, context
from enginepool.coordinator.shell.snapshots import SnapshotFolders
from enginepool.coordinator.shell.sockets import Sockets
from enginepool.coordinator.shell.startup import fit_to_host, keys_folder, listen_address, state_directory, workers_endpoint
from enginepool.coordinator.shell.stop_signals import ignore_stop_signals, on_stop_signals
from enginepool.errors import ConfigError
from enginepool.host import os_error
from enginepool.host.restart_policy import BAD_CONFIG, RESTART, STOPPED
from enginepool.protocol.frames import encode_header

#: stagers that owe nothing end within this
QUIET_S = 1.0
CONFIG_VARIABLE, LIFELINE_VARIABLE = "ENGINEPOOL_CONFIG", "ENGINEPOOL_LIFELINE"


class Daemon:
    """One coordinator on one loop."""

    def __init__(
        self,
        config: PoolConfig,
        loop: asyncio.AbstractEventLoop,
        lifeline: int | None,
        make_launcher: MakeLauncher,
    ) -> None:
        config = resolve_roots(config)
        config, connections = fit_to_host(config)
        self.config = config
        self.loop = loop
        self.machine = Machine(config)
        self.ended: asyncio.Future[int] = loop.create_future()
        self._lifeline = lifeline
        #: the epoch that is being journaled because a peer has heard a higher one
        self._raised_to = 0
        self._pauses = CollectorPauses()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")
        #: failures to start a worker that were said, until a worker is started
        self._unstarted: set[str] = set()
        with contextlib.ExitStack() as stack:
            directory = state_directory(config.state_dir)
            prepare_state_dir(directory)
            self.journal = Journal(directory)
            stack.callback(self.journal.close)
            self._writer = JournalWriter(loop, self.journal, self.handle, log, self._paths_moved)
            stack.callback(self._writer.close)
            self._snapshots = SnapshotFolders(directory, lambda text: loop.call_soon_threadsafe(log, text) and None)
            stack.callback(self._snapshots.close)
            endpoint = workers_endpoint(config, directory)
            check_endpoint(endpoint, config, "listen_workers")
            limits = config.limits
            most, timing = 2 * limits.max_message_bytes, config.timing
            # A client's window bounds what it will be sent for its requests; what else it asks for is little.
            window = limits.window_bytes * 9 // 8
            silence = timing.client_silence_s
            clients = Router(most, CLIENT_PROOF, window, silence, self._client_cut, connections.clients)
            stack.callback(clients.close)
            # A worker that may be silent for longer may also read nothing for as long.
            silence = max(silence, timing.silence_s)
            workers = Router(most, WORKER_PROOF, limits.buffer_bytes, silence, self._worker_cut, connections.workers)
            stack.callback(workers.close)
            self._gate = Authenticator(folder, context()) if (folder := keys_folder(config)) else None
            if self._gate is not None:
                stack.callback(self._gate.close)
            clients.bind(listen_address(config), self._gate)
            workers.bind(endpoint, self._gate)
            self.sockets = Sockets(loop, clients, workers, self._quiet)
            self._incoming = Incoming(self.machine, clients, workers, limits.max_message_bytes, self._pauses)
            self.launcher = make_launcher(LauncherContext(config, directory, workers.endpoint, lifeline, self._exited))
            self._stack = stack.pop_all()

    def start(self) -> None:
        """Take up the epoch, adopt or start workers, listen."""
        self.loop.set_exception_handler(lambda _, what: on_loop_error(what, self.machine.core))
        # Before a worker is started: a signal with its default action would leave workers behind.
        on_stop_signals(self.loop, self.machine.core, self.config.timing.drain_s, self.handle, self._end_now, self._end_alone)
        epoch = max(self.journal.record.epoch + 1, time.time_ns() // 1000)
        if self.journal.torn:
            log("the journal was cut off in the middle of a write: what it held before holds")
        try:
            self.journal.write(msgspec.structs.replace(self.journal.record, epoch=epoch), ROOM)
        except OSError as error:
            raise HostFault(f"{error.filename}: cannot be written: {error.strerror}", error) from None
        found = self.launcher.adopt()
        record, history = self.journal.record, self._writer.read_history(self.config.groups)
        started = ev.Started(time.monotonic(), epoch, record.weights, found, self._snapshots.paths, record.raises, history)
        self.handle(msgspec.structs.replace(started, holds=record.holds, adapters=record.adapters))
        if self._lifeline is not None:
            # The program that embeds this pool has ended, and with it all clients.
            self.loop.add_reader(self._lifeline, self._end_now, 0)
        self._writer.clean_adapters()
        self._writer.look()
        self._snapshots.start()
        self.sockets.listen(self._incoming.from_client, self._incoming.from_worker, self._act)
        for router in (self.sockets.clients, self.sockets.workers):
            self.loop.add_reader(router.connections.fd, self._connected, router)
            self._connected(router)
        if self._gate is not None:
            self._gate.watch(self.loop, log)
        self._pauses.start()
        self._tick()

    def _quiet(self) -> bool:
        return sum(group.waiting + group.running for group in self.machine.core.groups.values()) <= FEW

    # --- in ------------------------------------------------------------------------------------------------------------

    def _act(self) -> None:
        """Everything that came in together, at once."""
        events, self._incoming.events = self._incoming.events, []
        self._handle(*events)

    def _connected(self, router: Router) -> None:
        """Connections came or went."""
        if router.connections.read():
            what = "limits.clients" if router is self.sockets.clients else "the share of workers in RLIMIT_NOFILE"
            text = (
                f"{router.endpoint}: {router.connections.most} connections are open; by {what} further ones are closed at once"
            )
            log(text, "client")

    def _client_cut(self, link: Link, why: str = "") -> None:
        self.loop.call_soon(lambda: self.handle(ev.LinkCut(time.monotonic(), link, why)))

    def _worker_cut(self, link: Link, why: str) -> None:
        if not why:  # its link broke: it may return, and its process or its silence says when it does not
            return
        self.loop.call_soon(lambda: self.handle(ev.WorkerBroken(time.monotonic(), link, why, silent=True)))

    def _exited(self, event: ev.WorkerExited) -> None:
        alike = signature(event.reason) if event.unstarted else ""
        if alike not in self._unstarted:
            again = f"; tried again every {self.config.restart.backoff_max_s:g} s" if event.unstarted else ""
            log(f"worker {event.incarnation}{': ' if event.unstarted else ' ended: '}{event.reason}{again}")
        if event.unstarted:
            self._unstarted.add(alike)
        self.handle(event)

    def _paths_moved(self) -> None:
        """Paths of the state directory were removed or renamed: what else lies there is made again."""
        self.launcher.restore_folders()
        self._writer.write_history()

    def _end_all(self) -> None:
        self.launcher.stop_all()
        if self._lifeline is not None:
            # A pool that ends with its program has no successor that could want weights back from the host's memory.
            self._snapshots.remove_memory()

    def _end_now(self, code: int) -> None:
        self._end_all()
        if not self.ended.done():
            self.ended.set_result(code)

    def _end_alone(self) -> None:
        if self.machine.core.keep_workers and not self.ended.done():  # not told since to end the pool
            self.ended.set_result(STOPPED if self._lifeline is None else RESTART)

    # --- out -----------------------------------------------------------------------------------------------------------

    def handle(self, event: ev.Event) -> None:
        """An event that did not come in at the sockets. Once all is over these may be closed, and it does not count."""
        if not self.ended.done():
            self._handle(event)
            self.sockets.turn()

    def _handle(self, *events: ev.Event) -> None:
        """Events through the machine, and their effects."""
        for effect in self.machine.handle(*events):
            if type(effect) is ef.ToClient:
                if not self.sockets.clients.send(effect.link, [encode_header(effect.message), *effect.frames]):
                    self._client_cut(effect.link)
            elif type(effect) is ef.ToWorker:
                # A worker that is gone is noticed by its process or its silence.
                self.sockets.workers.send(effect.link, [encode_header(effect.message), *effect.frames])
            else:
                self._perform(effect)
        # Requests are admitted so that this holds. What else is asked for may break it, and so may a bug.
        clients, most = self.sockets.clients, unread_bytes(self.machine.core.live_bytes, self.config.limits)
        while clients.unread > most:
            clients.cut_largest()
        wake_at = self.machine.wake_at()
        if wake_at < self._timer_at:
            self._set_timer(wake_at)

    def _perform(self, effect: ef.Effect) -> None:
        if type(effect) is ef.LogLine:
            log(effect.text, effect.kind)
        elif type(effect) is ef.StartWorker:
            if self.launcher.start(effect.group, effect.index, effect.incarnation, effect.weights):
                log(f"starting worker {effect.incarnation}")
                self._unstarted.clear()
        elif type(effect) is ef.KillWorker:
            self.launcher.stop(effect.incarnation, effect.reason)
        elif type(effect) is ef.WriteJournal:
            self._writer.commit(effect, self._snapshots.committed)
        elif isinstance(effect, ef.ToDisk):
            self._writer.perform(effect)
        elif type(effect) is ef.RaiseEpoch:
            self._raise_epoch(effect)
        elif type(effect) is ef.Drained and effect.keep_workers:
            self.sockets.when_read(self._end_alone)
        elif type(effect) is ef.Drained:
            # The workers are gone; their stagers are not.
            if self._lifeline is not None:
                self.sockets.when_read(partial(self._end_now, 0))
            else:
                self.launcher.finish(partial(self.sockets.when_read, self._finished))
                self.loop.call_later(QUIET_S, self._still_finishing)
        else:
            raise AssertionError(f"no way to perform {effect}")

    def _still_finishing(self) -> None:
        if not self.ended.done():
            log("the workers have ended; committed weights are being written for later workers")

    def _finished(self) -> None:
        if not self.ended.done():
            self.ended.set_result(0)

    def _raise_epoch(self, effect: ef.RaiseEpoch) -> None:
        if effect.epoch > self._raised_to:
            self._raised_to = effect.epoch
            log(effect.reason)
            self._writer.raise_epoch(effect.epoch, self._epoch_written)

    def _epoch_written(self, why: str) -> None:
        if why:
            self._raised_to = 0  # the peer says it again
        elif not self.ended.done() and not self.machine.core.draining:
            self.ended.set_result(RESTART)

    def _set_timer(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = self.loop.call_at(at, self._tick)

    def _tick(self) -> None:
        # Sockets first: after a stall of our own, what peers said meanwhile counts before any deadline does.
        self.sockets.turn()
        self._timer_at = float("inf")
        self.handle(ev.Tick(time.monotonic()))
        self._set_timer(self.machine.wake_at())

    def close(self) -> None:
        """Close the sockets and release the locks."""
        if self._timer is not None:
            self._timer.cancel()
        self._pauses.stop()
        if self._gate is not None:
            self._gate.close()
        for router in (self.sockets.clients, self.sockets.workers):
            self.loop.remove_reader(router.connections.fd)
        self.sockets.close()
        self._stack.close()


async def _serve(config: PoolConfig, lifeline: int | None, make_launcher: MakeLauncher) -> int:
    try:
        daemon = Daemon(config, asyncio.get_running_loop(), lifeline, make_launcher)
    except OSError as error:
        # A file in the place of a folder is the operator's to move: no later start finds it gone by itself.
        text = f"cannot start: {os_error(error)}"
        misplaced = isinstance(error, FileExistsError | NotADirectoryError | IsADirectoryError)
        raise (ConfigError(text) if misplaced else HostFault(text, error)) from None
    try:
        try:
            daemon.start()
        except ConfigError:
            raise
        except Exception as error:
            end_on_internal_error(error, daemon.machine.core)
        log(
            f"listening on {daemon.sockets.clients.endpoint}, workers on {daemon.sockets.workers.endpoint}, "
            f"epoch {daemon.machine.core.epoch}"
        )
        for name, group in config.groups.items():
            if not group.workers:
                log(f"group {name} starts no workers: it waits for external workers at {daemon.sockets.workers.endpoint}")
        code = await daemon.ended
        ignore_stop_signals(daemon.loop)
        return code
    finally:
        daemon.close()


def run(config: PoolConfig, make_launcher: MakeLauncher = LocalLauncher) -> int:
    """Serve until SIGTERM or SIGINT has drained the pool, or SIGUSR1 has ended the coordinator alone; returns the exit code.

    Raises:
        ConfigError: an endpoint or the state directory is in use, or cannot be used; one line says which.
    """
    fd = os.environ.get(LIFELINE_VARIABLE)
    return_freed_memory()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config, int(fd) if fd else None, make_launcher))


def main() -> int:
    """Entry point of the process: the configuration comes in the environment."""
    text = os.environ.get(CONFIG_VARIABLE)
    if text is None:
        say(f"{CONFIG_VARIABLE} is not set: it holds the pool's configuration as JSON")
        return BAD_CONFIG
    try:
        return run(decode_config(text.encode()))
    except ConfigError as error:
        say(str(error))
        return error.exit_code if isinstance(error, HostFault) else BAD_CONFIG


if __name__ == "__main__":
    sys.exit(main())
