"""Messages from the sockets become events of the machine; those that cannot are answered at once."""

import time

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.adapter_events import AdapterAsked
from enginepool.coordinator.core.events import Link
from enginepool.coordinator.core.machine import Machine
from enginepool.coordinator.operations.generate import GenerateWork
from enginepool.coordinator.requests.memory import NO_MEMORY_MS, UNKNOWN_HIDDEN
from enginepool.coordinator.shell.connections import pid_of
from enginepool.coordinator.shell.decode import client_event, refusal, worker_event
from enginepool.coordinator.shell.log import log
from enginepool.coordinator.shell.process_memory import CollectorPauses
from enginepool.coordinator.shell.router import LOST, ROUND_BYTES, Frame, Router
from enginepool.protocol.basis import ELEMENT_BYTES
from enginepool.protocol.errors import WireError
from enginepool.protocol.frames import encode_header
from enginepool.protocol.messages import MAX_VALUES, ErrorReply
from enginepool.protocol.nesting import Values

#: Bytes that a sequence of a request to generate counts in its round. 100 bytes can ask for 4,096 sequences, and each of these
#: is as much work as so many bytes of other messages.
SEQUENCE_WORK = 256
#: Bytes that each step counts in the round that it took to find how deep a header is nested. MAX_VALUES of them end the round.
STEP_WORK = ROUND_BYTES // MAX_VALUES


def _asked_for(work: GenerateWork) -> int:
    """What a request to generate counts in its round. A stream that is sent again is answered with all that its client has
    credit for. Whether it is sent again is not known here."""
    most = min(work.credit, work.rows * work.sampling.max_new_tokens) if work.stream else 0
    width = 1 + work.width + (UNKNOWN_HIDDEN if work.hidden_states else 0)
    return SEQUENCE_WORK * work.rows + ELEMENT_BYTES * width * most


class Incoming:
    """Collects the events of one turn of the sockets."""

    def __init__(self, machine: Machine, clients: Router, workers: Router, max_bytes: int, pauses: CollectorPauses) -> None:
        self._machine = machine
        self._clients = clients
        self._workers = workers
        self._max_bytes = max_bytes
        self._pauses = pauses
        #: received, and not handled yet
        self.events: list[ev.Event] = []

    def from_client(self, link: Link, frames: list[bytes], frame: Frame) -> int:
        """Take in one message. Returns what it counts in its round besides its bytes, also where it is refused."""
        values = Values(MAX_VALUES)
        return self._take(link, frames, frame, values) + STEP_WORK * values.steps

    def _take(self, link: Link, frames: list[bytes], frame: Frame, values: Values) -> int:
        """Returns what it counts besides its bytes and its `values`."""
        try:
            if not frames:
                raise WireError("malformed", "the message has no frame 0", field="frame 0")
            if frames[-1] is LOST:
                raise MemoryError
            peer = self._clients.peer(frame)
            event = client_event(time.monotonic(), link, frames, self._max_bytes, peer, lambda: pid_of(frame), values)
        except WireError as error:
            self._clients.send(link, [encode_header(refusal(frames[0] if frames else b"", error))])
            if error.code == "unauthorized":
                # Its key was taken away: nothing more is done for it.
                self.events.append(ev.ClientLeft(time.monotonic(), link))
            return 0
        except MemoryError:
            header = frames[0]
            frames.clear()
            failure = refusal(
                header, WireError("busy", "frames: the coordinator has no memory for this message", field="frames")
            )
            failure.retry_after_ms = NO_MEMORY_MS
            self._clients.send(link, [encode_header(failure)])
            log("no memory for a message of a client: the client is told to send it again", "client")
            return 0
        clients, more = self._clients, 0
        if type(event) is ev.Submit:
            event.unread, event.outboxes = clients.unread_of(link), clients.unread
            if isinstance(event.work, GenerateWork):
                more = _asked_for(event.work)
        elif type(event) is AdapterAsked:
            event.outboxes = clients.unread
        elif type(event) is ev.Heard:
            if event.proof and clients.proved(link, event.proof) and link not in self._machine.core.links:
                return 0  # a peer that only asks for the status: it need not say hello
        elif isinstance(event, ev.StatusAsked):
            event.client_unread_bytes = clients.unread
            event.worker_unread_bytes = self._workers.unread
            event.pauses = (self._pauses.count, self._pauses.microseconds)
        self.events.append(event)
        return more

    def from_worker(self, link: Link, frames: list[bytes], frame: Frame) -> None:
        try:
            event = worker_event(time.monotonic(), link, frames or [b""], self._workers.peer(frame))
        except WireError as error:
            self._workers.send(link, [encode_header(ErrorReply(error.code, error.message, field=error.field))])
            if error.code == "unauthorized" and link in self._machine.core.worker_links:
                self.events.append(ev.WorkerBroken(time.monotonic(), link, "its key is no longer authorized"))
            return
        if type(event) is ev.WorkerHeard:
            if event.proof:
                self._workers.proved(link, event.proof)
            event.unread = self._workers.unread_of(link)
        self.events.append(event)
