"""The link to the coordinator: a thread that owns the ZeroMQ socket and answers pings while the main thread is busy.

Messages go to the worker's loop through `handle`, and from it through `send`. The thread is also the last resort: a
main thread that stands still in an engine's code cannot notice that its owner or every coordinator is gone, or that a
coordinator tells it to end, so the thread ends the process then.

ZMQ_IMMEDIATE is on: nothing is queued for a link that is not up, because a coordinator refuses what comes before `register`.
"""

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from enginepool.errors import ConfigError
from enginepool.net.dealer import connect
from enginepool.net.keys import Key, read_key
from enginepool.protocol.errors import WireError
from enginepool.protocol.frames import decode_header, encode_header
from enginepool.protocol.messages import Accept, ErrorReply, Message, Ping, Pong, ToWorker
from enginepool.workers.codec import name_task
from enginepool.workers.events import Connected, Disconnected, Exit, Frame, FromCoordinator, LifelineClosed, WorkerEvent
from enginepool.workers.log import say
from enginepool.workers.machine import FINAL_REFUSALS
from enginepool.workers.process import end_process
from enginepool.workers.silence import STALL_S
from enginepool.workers.spec import SpecError

#: frames over this are sent without a copy (below it, copying is cheaper)
ZERO_COPY_BYTES = 1 << 16
#: messages read before the outbox gets its turn
READ_AT_MOST = 256
#: the main thread has this long to end the process once the lifeline is closed, or a coordinator refuses the worker
LIFELINE_GRACE_S = 3.0
#: and this factor of `orphan_s` once no coordinator speaks
ORPHAN_GRACE = 2.0
_POLL_MS = 500


class WorkerLink:
    """One DEALER in one thread.

    Args:
        endpoint: where the coordinator listens for workers.
        handle: called on the loop for every event, in the order in which they happened.
        after: called on the loop when a run of events has been taken.
        lifeline_fd: read end of a pipe whose end of file means that the owner is gone.
        orphan_s: see `WorkerMachine`; `accept` replaces it, unless it is infinite.
        keys: the file with the key of this worker, for TCP; empty: none.
    """

    def __init__(
        self,
        endpoint: str,
        handle: Callable[[WorkerEvent], None],
        after: Callable[[], None],
        *,
        lifeline_fd: int | None = None,
        orphan_s: float = 60.0,
        keys: str = "",
    ) -> None:
        self.endpoint = endpoint
        self._keys = keys
        #: what a pong says; a plain attribute, written by the loop and read by the thread
        self.stage = "starting"
        self._handle = handle
        self._after = after
        self._lifeline = lifeline_fd
        self._orphan_s = orphan_s
        self._loop = asyncio.get_running_loop()
        self._inbox: deque[WorkerEvent] = deque()
        self._taking = False
        self._outbox: deque[list[Frame]] = deque()
        self._woken = False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._linger_ms: int | None = None
        #: when the process is ended by this thread, the exit code, and why
        self._doomed: tuple[float, Exit, str] | None = None
        self._decoder = msgspec.msgpack.Decoder(ToWorker)
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)

    def start(self) -> None:
        """Connect in the background.

        Raises:
            SpecError: the endpoint is none that ZeroMQ can connect to, or the key cannot be read.
        """
        key: Key | None = None
        if self._keys and self.endpoint.startswith("tcp://"):
            try:
                key = read_key(Path(self._keys))
            except ConfigError as error:
                raise SpecError(str(error)) from None
        self._context = zmq.Context()
        self._socket = socket = self._context.socket(zmq.DEALER)
        socket.set(zmq.SNDHWM, 10_000)
        socket.set(zmq.RCVHWM, 10_000)
        self._monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        try:
            connect(socket, self.endpoint, key, again_ms=100)
        except zmq.ZMQError as error:
            socket.disable_monitor()
            self._context.destroy(linger=0)
            raise SpecError(f"endpoint {self.endpoint}: {error}") from None
        self._thread.start()

    def send(self, message: Message, frames: tuple[Frame, ...] = ()) -> None:
        """Queue a message; it leaves at the next `flush`."""
        self._outbox.append([encode_header(message), *frames])

    def flush(self) -> None:
        """Let the thread send what is queued."""
        if self._outbox and not self._woken:
            self._wake()

    def stop(self, linger_s: float) -> None:
        """Send what is queued, wait at most `linger_s` for it to leave, and close. Idempotent."""
        if self._thread.is_alive():
            self._linger_ms = int(linger_s * 1000)
            self._wake()
            self._thread.join(linger_s + 1.0)

    def _wake(self) -> None:
        self._woken = True
        try:
            os.write(self._wake_write, b"\0")
        except BlockingIOError:
            return  # the pipe is full of wake-ups already

    # --- on the loop ----------------------------------------------------------------------------------------------------

    def deliver_all(self) -> None:
        """Hand over the messages that arrived. Also called before timers act, so that they know them."""
        self._taking = False
        inbox = self._inbox
        for _ in range(len(inbox)):
            self._handle(inbox.popleft())
        self._after()

    # --- in the thread --------------------------------------------------------------------------------------------------

    def _deliver(self, event: WorkerEvent) -> None:
        self._inbox.append(event)
        if not self._taking:
            self._taking = True
            self._loop.call_soon_threadsafe(self.deliver_all)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        if self._lifeline is not None:
            poller.register(self._lifeline, zmq.POLLIN)
        looked_at = self._heard_at = time.monotonic()
        while self._linger_ms is None:
            # A blocked outbox means that the link is down or full; POLLOUT says when it is worth another try.
            poller.modify(self._socket, zmq.POLLIN | zmq.POLLOUT if self._outbox else zmq.POLLIN)
            ready = dict(poller.poll(_POLL_MS))
            if self._wake_read in ready:
                os.read(self._wake_read, 1 << 16)
            self._woken = False
            if self._monitor in ready:
                self._read_monitor()
            if self._socket in ready:
                self._read_socket()
            if self._lifeline is not None and self._lifeline in ready and not os.read(self._lifeline, 1 << 16):
                poller.unregister(self._lifeline)
                self._doom(Exit.OWNER_GONE, "the owner is gone")
                self._deliver(LifelineClosed(time.monotonic()))
            self._write()
            now = time.monotonic()
            if now - looked_at > STALL_S:
                # This process stood still, and maybe all others with it: the coordinator was not silent.
                self._heard_at = min(self._heard_at + now - looked_at, now)
            looked_at = now
            if self._doomed is not None and now > self._doomed[0]:
                say(f"{self._doomed[2]} and the main thread does not answer: killed")
                end_process(self._doomed[1])
            if now - self._heard_at > ORPHAN_GRACE * self._orphan_s + LIFELINE_GRACE_S:
                say("no coordinator speaks and the main thread does not answer: killed")
                end_process(Exit.ORPHANED)
        self._write()
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._context.destroy(linger=self._linger_ms)

    def _doom(self, code: Exit, why: str) -> None:
        """The main thread is about to end this process; if it does not, this thread does."""
        self._doomed = self._doomed or (time.monotonic() + LIFELINE_GRACE_S, code, why)

    def _read_monitor(self) -> None:
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            now = time.monotonic()
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._deliver(Connected(now))
            elif event == zmq.EVENT_DISCONNECTED:
                self._outbox.clear()
                self._deliver(Disconnected(now))

    def _read_socket(self) -> None:
        for _ in range(READ_AT_MOST):
            try:
                header, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            now = self._heard_at = time.monotonic()
            try:
                message: Message = decode_header(self._decoder, header)
            except WireError as error:
                task = name_task(header)
                if task is None:
                    say(f"dropped a message of the coordinator: {error.message}")
                else:
                    self._deliver(
                        FromCoordinator(now, task, unreadable=f"the worker was sent work that cannot be read: {error.message}")
                    )
                continue
            if type(message) is Ping:
                self._outbox.append([encode_header(Pong(message.at, stage=self.stage))])
            elif type(message) is Accept and self._orphan_s != float("inf"):
                self._orphan_s = message.orphan_s
            elif type(message) is ErrorReply and message.code in FINAL_REFUSALS:
                self._doom(Exit.REFUSED, "the coordinator refuses this worker")
            self._deliver(FromCoordinator(now, message, tuple(frames)))

    def _write(self) -> None:
        outbox = self._outbox
        while outbox:
            frames = outbox[0]
            copy = all(len(frame) <= ZERO_COPY_BYTES for frame in frames)
            try:
                self._socket.send_multipart(frames, zmq.NOBLOCK, copy=copy)
            except zmq.Again:
                return
            outbox.popleft()
