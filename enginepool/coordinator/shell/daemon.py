"""The coordinator process: sockets, clock, journal and worker processes around the pure machine.

    python -m enginepool.coordinator.shell.daemon

reads its whole configuration as JSON from ENGINEPOOL_CONFIG; `enginepool serve` calls `run` with the same struct. In embedded
use ENGINEPOOL_LIFELINE names the read end of a pipe that the embedding program holds: when it closes, this process and its
workers end.
"""

import asyncio
import contextlib
import ctypes
import gc
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, Literal, NoReturn

import msgspec
import uvloop

from enginepool.config import PoolConfig, check_endpoint, decode_config, resolve_roots
from enginepool.coordinator.core import effects as ef
from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.events import Link
from enginepool.coordinator.core.machine import Machine
from enginepool.coordinator.core.story import story
from enginepool.coordinator.fleet.failures import signature
from enginepool.coordinator.launchers.base import LauncherContext, MakeLauncher
from enginepool.coordinator.launchers.local import LocalLauncher
from enginepool.coordinator.requests.lifecycle import NO_MEMORY_MS
from enginepool.coordinator.requests.memory import misfit, unread_bytes
from enginepool.coordinator.shell.adaptive_poll import FEW
from enginepool.coordinator.shell.authentication import Authenticator, read_keys
from enginepool.coordinator.shell.connections import pid_of, raise_open_files, shares
from enginepool.coordinator.shell.decode import client_event, refusal, worker_event
from enginepool.coordinator.shell.host_memory import bounds
from enginepool.coordinator.shell.journal import ROOM, HostFault, Journal, prepare_state_dir
from enginepool.coordinator.shell.journal_writer import JournalWriter
from enginepool.coordinator.shell.log import log, say
from enginepool.coordinator.shell.router import CLIENT_PROOF, LOST, WORKER_PROOF, Frame, Router, context
from enginepool.coordinator.shell.snapshots import SnapshotFolders
from enginepool.coordinator.shell.socket_files import check_socket_folder
from enginepool.coordinator.shell.sockets import Sockets
from enginepool.errors import ConfigError
from enginepool.host import os_error
from enginepool.host.folders import make_private
from enginepool.host.restart_policy import BAD_CONFIG, HOST_FAULT, INTERNAL_ERROR, RESTART, STOPPED
from enginepool.net.address import default_address
from enginepool.protocol.errors import WireError
from enginepool.protocol.frames import encode_header
from enginepool.protocol.messages import ErrorReply

#: stagers that owe nothing end within this
QUIET_S = 1.0
#: how often the file of authorized keys is looked at
KEYS_S = 1.0
CONFIG_VARIABLE = "ENGINEPOOL_CONFIG"
LIFELINE_VARIABLE = "ENGINEPOOL_LIFELINE"
#: What requests are made of is freed by reference counts; a full collection over a long queue would stop everything.
GC_THRESHOLDS = (50_000, 50, 1000)


#: Allocations of so many bytes go back to the system when they are freed. glibc raises its own threshold with each large
#: message, up to 32 MB, and then keeps the memory of large answers.
MMAP_BYTES = 256 * 1024
#: So many free bytes at the end of a heap are kept. The default is 128 KiB, and fixed once the other threshold is set.
#: Requests that come together take more: their pages would be given back, and faulted in again, each time.
TRIM_BYTES = 4 * 1024 * 1024
#: as malloc.h has them
M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -3, -1


def give_memory_back() -> None:
    """Let large messages leave no memory behind, where the C library is glibc."""
    with contextlib.suppress(AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, TRIM_BYTES)


class Pauses:
    """Counts garbage collections and their time, which every request in flight waits for."""

    def __init__(self) -> None:
        self.count = 0
        self.microseconds = 0
        self._began = 0.0

    def __call__(self, phase: Literal["start", "stop"], info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self.count += 1
            self.microseconds += int((time.perf_counter() - self._began) * 1e6)


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
        files = raise_open_files()
        self._shares = connections = shares(files, config.limits.clients, sum(g.workers for g in config.groups.values()))
        if connections.welcome < (wanted := config.limits.clients):
            log(f"limits.clients = {wanted}: with RLIMIT_NOFILE = {files} at most {connections.welcome} clients can connect")
            if not connections.proven:
                log(
                    "a burst of connections can take all descriptors, and end this process: raise RLIMIT_NOFILE to 4096 or more"
                )
            limits = msgspec.structs.replace(config.limits, clients=connections.welcome)
            config = msgspec.structs.replace(config, limits=limits)
        _check_memory(config)
        self.config = config
        self.loop = loop
        self.machine = Machine(config)
        self.ended: asyncio.Future[int] = loop.create_future()
        self._lifeline = lifeline
        #: the epoch that is being journaled because a peer has heard a higher one
        self._raised_to = 0
        self._pauses = Pauses()
        self._timer: asyncio.TimerHandle | None = None
        self._keys_timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")
        self._max_bytes = config.limits.max_message_bytes
        #: failures to start a worker that were said, until a worker is started
        self._unstarted: set[str] = set()
        #: came in and is not handled yet
        self._events: list[ev.Event] = []
        with contextlib.ExitStack() as stack:
            directory = _home_known(config.state_dir)
            prepare_state_dir(directory)
            self.journal = Journal(directory)
            stack.callback(self.journal.close)
            self._writer = JournalWriter(loop, self.journal, self.handle, log, self._paths_moved)
            stack.callback(self._writer.close)
            self._snapshots = SnapshotFolders(directory, lambda text: loop.call_soon_threadsafe(log, text) and None)
            stack.callback(self._snapshots.close)
            # Workers find the successor of a dead coordinator at the same place, so the place is derived, not random.
            workers_endpoint = _workers_endpoint(config, directory)
            check_endpoint(workers_endpoint, config, "listen_workers")
            limits = config.limits
            most, timing = 2 * limits.max_message_bytes, config.timing
            # A client's window bounds what it will be sent for its requests; what else it asks for is little.
            window = limits.window_bytes * 9 // 8
            clients = stack.enter_context(
                Router(most, CLIENT_PROOF, window, timing.client_silence_s, self._client_cut, connections.clients)
            )
            workers = stack.enter_context(
                Router(most, WORKER_PROOF, limits.buffer_bytes, timing.client_silence_s, self._worker_cut, connections.workers)
            )
            self._gate = Authenticator(folder, context()) if (folder := _keys_folder(config)) else None
            if self._gate is not None:
                stack.callback(self._gate.close)
            clients.bind(_listen(config), self._gate)
            workers.bind(workers_endpoint, self._gate)
            self.sockets = Sockets(loop, clients, workers, self._quiet)
            self.launcher = make_launcher(LauncherContext(config, directory, workers.endpoint, lifeline, self._exited))
            self._stack = stack.pop_all()

    def start(self) -> None:
        """Take up the epoch, adopt or start workers, listen."""
        self.loop.set_exception_handler(self._raised)
        # Before there is a worker: whoever ends this process by its signals' defaults would leave workers alone.
        for number in (signal.SIGTERM, signal.SIGINT):
            self.loop.add_signal_handler(number, self._signalled)
        self.loop.add_signal_handler(signal.SIGUSR1, self._stop_alone)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
            self.loop.add_signal_handler(signal.SIGHUP, self._hung_up)
        epoch = max(self.journal.record.epoch + 1, time.time_ns() // 1000)
        if self.journal.torn:
            log("the journal was cut off in the middle of a write: what it held before holds")
        try:
            self.journal.write(msgspec.structs.replace(self.journal.record, epoch=epoch), ROOM)
        except OSError as error:
            raise HostFault(f"{error.filename}: cannot be written: {error.strerror}") from None
        alive = self.launcher.adopt()
        weights, raises = dict(self.journal.record.weights), self.journal.record.raises
        history = self._writer.read_history(self.config.groups)
        self.handle(ev.Started(time.monotonic(), epoch, weights, alive, self._snapshots.paths, raises, history))
        if self._lifeline is not None:
            self.loop.add_reader(self._lifeline, self._owner_gone)
        self._writer.look()
        self._snapshots.start()
        self.sockets.listen(self._from_client, self._from_worker, self._act)
        for router in (self.sockets.clients, self.sockets.workers):
            self.loop.add_reader(router.connections.fd, self._connected, router)
            self._connected(router)
        if self._gate is not None:
            self._look_at_keys(self._gate)
        gc.collect()
        gc.freeze()
        gc.callbacks.append(self._pauses)
        gc.set_threshold(*GC_THRESHOLDS)
        self._tick()

    def _quiet(self) -> bool:
        return sum(group.waiting + group.running for group in self.machine.core.groups.values()) <= FEW

    # --- in ------------------------------------------------------------------------------------------------------------

    def _from_client(self, link: Link, frames: list[bytes], frame: Frame) -> None:
        try:
            if not frames:
                raise WireError("malformed", "the message has no frame 0", field="frame 0")
            if frames[-1] is LOST:
                raise MemoryError
            peer = self.sockets.clients.peer(frame)
            event = client_event(time.monotonic(), link, frames, self._max_bytes, peer, lambda: pid_of(frame))
        except WireError as error:
            self.sockets.clients.send(link, [encode_header(refusal(frames[0] if frames else b"", error))])
            if error.code == "unauthorized":
                # Its key was taken away: nothing more is done for it.
                self._events.append(ev.ClientLeft(time.monotonic(), link))
            return
        except MemoryError:
            header = frames[0]
            frames.clear()
            failure = refusal(
                header, WireError("busy", "frames: the coordinator has no memory for this message", field="frames")
            )
            failure.retry_after_ms = NO_MEMORY_MS
            self.sockets.clients.send(link, [encode_header(failure)])
            log("no memory for a message of a client: it is told to send it again", "client")
            return
        clients = self.sockets.clients
        if type(event) is ev.Submit:
            event.unread, event.outboxes = clients.unread_of(link), clients.unread
        elif type(event) is ev.Heard:
            if event.proof and clients.proved(link, event.proof) and link not in self.machine.core.links:
                return  # a peer that only asks for the status: it need not say hello
        elif isinstance(event, ev.StatusAsked):
            event.client_unread_bytes = clients.unread
            event.worker_unread_bytes = self.sockets.workers.unread
            event.pauses = (self._pauses.count, self._pauses.microseconds)
        self._events.append(event)

    def _from_worker(self, link: Link, frames: list[bytes], frame: Frame) -> None:
        try:
            event = worker_event(time.monotonic(), link, frames or [b""], self.sockets.workers.peer(frame))
        except WireError as error:
            self.sockets.workers.send(link, [encode_header(ErrorReply(error.code, error.message, field=error.field))])
            if error.code == "unauthorized" and link in self.machine.core.worker_links:
                self._events.append(ev.WorkerBroken(time.monotonic(), link, "its key is no longer authorized"))
            return
        if type(event) is ev.WorkerHeard and event.proof:
            self.sockets.workers.proved(link, event.proof)
        self._events.append(event)

    def _act(self) -> None:
        """Everything that came in together, at once."""
        events, self._events = self._events, []
        self._handle(*events)

    def _connected(self, router: Router) -> None:
        """Connections came or went."""
        if router.connections.read():
            what = "limits.clients" if router is self.sockets.clients else "a quarter of RLIMIT_NOFILE"
            text = (
                f"{router.endpoint}: {router.connections.most} connections are open; by {what} further ones are closed at once"
            )
            log(text, "client")

    def _client_cut(self, link: Link, why: str = "") -> None:
        self.loop.call_soon(lambda: self.handle(ev.LinkCut(time.monotonic(), link, why)))

    def _worker_cut(self, link: Link, why: str) -> None:
        why = why or "it does not read its messages"
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
        for router in (self.sockets.clients, self.sockets.workers):
            if line := router.bind_again():
                log(line)

    def _signalled(self) -> None:
        core = self.machine.core
        if core.draining and not core.keep_workers:
            log("asked again to end: ending now")
            self._end_now(1)
            return
        log(f"draining for at most {self.config.timing.drain_s:g} s")
        self.handle(ev.DrainAsked(time.monotonic(), self.config.timing.drain_s))

    def _hung_up(self) -> None:
        # A terminal that is closed says so twice, itself and through its shell: that is no hurry.
        if not self.machine.core.draining:
            self._signalled()

    def _stop_alone(self) -> None:
        core, within = self.machine.core, self.config.timing.drain_s
        if core.draining and not core.keep_workers:
            log("SIGUSR1 changes nothing: the pool is already ending with its workers")
        elif core.draining:
            log("asked again to end: ending now; the workers stay")
            self._end_alone()
        else:
            log(f"ending without the workers, which the next coordinator adopts; batches in flight have {within:g} s")
            self.handle(ev.DrainAsked(time.monotonic(), within, keep_workers=True))

    def _owner_gone(self) -> None:
        # The program that embeds this pool is gone, and so is everybody who could want an answer.
        self._end_now(0)

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
        if not self.ended.done():
            self.ended.set_result(STOPPED if self._lifeline is None else RESTART)

    def _raised(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is None:
            log(f"event loop: {context.get('message', '')}")
        else:
            self.fail(error)

    def fail(self, error: BaseException) -> NoReturn:
        """An internal error: what the machine was about to do is lost, so it must not decide anything more. The process ends at
        once, as by SIGKILL; its successor adopts the workers, and clients send again what has no answer."""
        try:
            for line in story(error, self.machine.core):
                log(line, "error")
            log(f"the coordinator ends with exit code {INTERNAL_ERROR}, because of this internal error", "error")
        finally:
            os._exit(INTERNAL_ERROR)

    def _look_at_keys(self, gate: Authenticator) -> None:
        for line in gate.refused():
            log(line, "refused")
        if line := gate.reload():
            log(line)
        self._keys_timer = self.loop.call_later(KEYS_S, self._look_at_keys, gate)

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
        elif type(effect) is ef.CheckJournal:
            self._writer.check(effect)
        elif type(effect) is ef.WriteJournal:
            self._writer.commit(effect, self._snapshots.committed)
        elif type(effect) is ef.KeepHistory:
            self._writer.keep_history(effect)
        elif type(effect) is ef.RaiseEpoch:
            self._raise_epoch(effect)
        elif type(effect) is ef.Drained and effect.keep_workers:
            self._end_alone()
        elif type(effect) is ef.Drained:
            # The workers are gone; their stagers are not.
            if self._lifeline is not None:
                self._end_now(0)
            else:
                self.launcher.finish(self._finished)
                self.loop.call_later(QUIET_S, self._still_finishing)
        else:
            raise AssertionError(f"no way to perform {effect}")

    def _still_finishing(self) -> None:
        if not self.ended.done():
            log("the workers have ended; committed weights are being written for those who come after them")

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
        """Let go of sockets and locks."""
        for timer in (self._timer, self._keys_timer):
            if timer is not None:
                timer.cancel()
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(self._pauses)
        if self._gate is not None:
            self._gate.close()
        for router in (self.sockets.clients, self.sockets.workers):
            self.loop.remove_reader(router.connections.fd)
        self.sockets.close()
        self._stack.close()


def _listen(config: PoolConfig) -> str:
    """Where clients connect. The directory of the default socket is made; any other one is the operator's to make."""
    if config.listen:
        return config.listen
    address = default_address()
    make_private(Path(address.removeprefix("ipc://")).parent)
    return address


def _home_known(state_dir: str) -> Path:
    try:
        return Path(state_dir).expanduser()
    except RuntimeError as error:  # no HOME, and a user of no name
        raise ConfigError(f"state_dir = {state_dir!r}: {error}") from None


def _workers_endpoint(config: PoolConfig, directory: Path) -> str:
    return config.listen_workers or f"ipc://{directory / 'workers.sock'}"


def _keys_folder(config: PoolConfig) -> Path | None:
    return Path(config.keys).expanduser() if config.keys else None


def _check_memory(config: PoolConfig) -> None:
    what, impossible = misfit(config.limits, bounds())
    if impossible:
        raise ConfigError(what)
    if what:
        log(what)


def check_host(config: PoolConfig) -> None:
    """Refuse what `run` would refuse of memory, the state directory, the keys and the folders of sockets, but for those in use.

    Raises:
        ConfigError: one line says what cannot be used.
    """
    _check_memory(config)
    directory = _home_known(config.state_dir)
    prepare_state_dir(directory)
    if folder := _keys_folder(config):
        read_keys(folder)
    for endpoint in (_listen(config), _workers_endpoint(config, directory)):
        check_socket_folder(endpoint)


async def _serve(config: PoolConfig, lifeline: int | None, make_launcher: MakeLauncher) -> int:
    try:
        daemon = Daemon(config, asyncio.get_running_loop(), lifeline, make_launcher)
    except OSError as error:
        # A file in the place of a folder is the operator's to move: no later start finds it gone by itself.
        fault = ConfigError if isinstance(error, FileExistsError | NotADirectoryError | IsADirectoryError) else HostFault
        raise fault(f"cannot start: {os_error(error)}") from None
    try:
        try:
            daemon.start()
        except ConfigError:
            raise
        except Exception as error:
            daemon.fail(error)
        log(
            f"listening on {daemon.sockets.clients.endpoint}, workers on {daemon.sockets.workers.endpoint}, "
            f"epoch {daemon.machine.core.epoch}"
        )
        for name, group in config.groups.items():
            if not group.workers:
                log(f"group {name} starts no workers: it waits for external workers at {daemon.sockets.workers.endpoint}")
        return await daemon.ended
    finally:
        daemon.close()


def run(config: PoolConfig, make_launcher: MakeLauncher = LocalLauncher) -> int:
    """Serve until SIGTERM or SIGINT has drained the pool, or SIGUSR1 has ended the coordinator alone; returns the exit code.

    Raises:
        ConfigError: an endpoint or the state directory is in use, or cannot be used; one line says which.
    """
    fd = os.environ.get(LIFELINE_VARIABLE)
    give_memory_back()
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
        return HOST_FAULT if isinstance(error, HostFault) else BAD_CONFIG


if __name__ == "__main__":
    sys.exit(main())
