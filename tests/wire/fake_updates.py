"""The coordinator's side of an update in a few lines, with receivers that are real processes; faults by ending those."""

import os
import signal
import threading
from typing import Any

import msgspec

from enginepool.protocol.errors import WireError
from enginepool.protocol.manifest import Tensor, decode_manifest
from enginepool.protocol.messages import ErrorReply, FromClient, Message
from enginepool.protocol.messages.weight_reports import InspectWeights, UpdateRecord, WeightsReport
from enginepool.protocol.messages.weights import (
    AbortUpdate,
    Commit,
    Join,
    Phase,
    Publish,
    Published,
    Renew,
    Sent,
    WeightsNeeded,
)
from tests.wire.fake_coordinator import PATIENCE_S, FakeCoordinator
from tests.wire.forked import fork
from tests.wire.receiver import main as receive


class Receiver:
    """One process; its words are told to `heard` as they come."""

    def __init__(self) -> None:
        self.process, self._orders = fork(receive)
        self.read()

    def tell(self, **order: Any) -> None:
        self._orders.send(order)

    def read(self) -> dict[str, Any]:
        """Its next word; {"failed"} when it has ended."""
        try:
            return self._orders.recv()
        except (EOFError, OSError):
            return {"failed": "the receiver ended"}

    def signal(self, sign: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, sign)

    def sums(self) -> dict[str, float]:
        self.tell(sums=True)
        return self.read()["sums"]

    def end(self) -> None:
        """End it in any state, stopped or not. Its connection closes with the last reference: another thread may read it."""
        self.process.kill()
        self.process.join()


class FakeUpdates:
    """Answers what a publisher says on `coordinator`, and commands `receivers`.

    Attributes:
        journal: what was committed; it may be given to a successor.
        refuse: the next `publish` is answered by this code.
        deaf: nothing is answered any more: `sent`, `commit` and `abort` fall on deaf ears.
        renew_receivers: after an abort the receivers are started again before the next update, as a stager would be.
    """

    def __init__(self, coordinator: FakeCoordinator, receivers: list[Receiver], journal: list[UpdateRecord]) -> None:
        self.coordinator = coordinator
        self.receivers = receivers
        self.journal = journal
        self.refuse = ""
        self.deaf = False
        self.renew_receivers = False
        self.published: list[Publish] = []
        self.manifests: list[list[Tensor]] = []
        self.renewed: list[Renew] = []
        self.aborted: list[AbortUpdate] = []
        #: set when all members have joined; an update waits for `may_transfer` then
        self.joined = threading.Event()
        self.may_transfer = threading.Event()
        self.may_transfer.set()
        self._link = b""
        self._open: Publish | None = None
        #: of what the receivers hold
        self.digest = ""
        self._group = ""
        #: the manifest of what is lent
        self._text = ""
        self._sent: Sent | None = None
        self._allowed: set[int] = set()
        self._lock = threading.RLock()
        self._looking = threading.Lock()
        self._renewing: threading.Thread | None = None
        coordinator.others = self.hear

    def hear(self, link: bytes, message: FromClient, payload: list[bytes]) -> None:
        with self._lock:
            self._link = link
            if isinstance(message, InspectWeights):
                last = self.journal[-1]
                report = WeightsReport(message.id, "g", last.version, last.digest, publisher=last.publisher)
                report.history = self.journal
                self._write(report)
            elif isinstance(message, Publish):
                self._publish(message, payload)
            elif self.deaf:
                return
            elif isinstance(message, Commit):
                self._allowed.add(message.id)
                self._consider()
            elif isinstance(message, Renew):
                self.renewed.append(message)
            elif isinstance(message, Sent):
                self._sent = message
                if self._open is not None and self._open.transfer == "ipc":
                    threading.Thread(target=self._look, args=(self._open, message), daemon=True).start()
                self._consider()
            elif isinstance(message, AbortUpdate):
                self.aborted.append(message)
                self.fail(f"given up: {message.reason}")

    def want(self, group: str, version: int) -> None:
        """Ask the publisher for weights that are lost."""
        self._write(WeightsNeeded(group, version))

    def fail(self, why: str) -> None:
        """Abort what is open."""
        with self._lock:
            if self._open is not None:
                self._write(ErrorReply("update_aborted", why, id=self._open.id))
                self._open = None
                if self.renew_receivers:
                    # It takes seconds, and the answer must not wait for it.
                    self._group = ""
                    self._renewing = threading.Thread(target=self._renew, daemon=True)
                    self._renewing.start()

    def _renew(self) -> None:
        for i, receiver in enumerate(self.receivers):
            receiver.end()
            self.receivers[i] = Receiver()

    def restart(self, last: UpdateRecord) -> None:
        """Be a coordinator of a new epoch, whose journal ends with `last`."""
        with self._lock:
            self._open = None
            self.deaf = False
            self.journal.append(last)
            self.coordinator.epoch += 1
            self.coordinator.forget()

    def _write(self, message: Message) -> None:
        self.coordinator.write(self._link, message)

    def _publish(self, message: Publish, payload: list[bytes]) -> None:
        if self._open is not None and self._open.id == message.id:
            return
        code = self.refuse or ("version_backwards" if message.version <= self.journal[-1].version else "")
        self.refuse = ""
        try:
            manifest = decode_manifest(payload[0]) if payload else []
        except WireError as error:
            code = error.code
            manifest = []
        if code:
            self._write(ErrorReply(code, f"refused: {code}", id=message.id, limit=str(self.journal[-1].version)))
            return
        self.published.append(message)
        self.manifests.append(manifest)
        self._open, self.digest, self._sent = message, "", None
        self.joined.clear()
        if message.transfer in ("staged", "direct"):
            threading.Thread(target=self._lead, args=(message, payload[0].decode()), daemon=True).start()
        elif message.transfer == "ipc":
            self._text = payload[0].decode()
            self._write(Phase(message.id, "transfer", len(self.receivers), 0))
        else:
            self.digest = "as it was"
            self._consider()

    def _lead(self, publish: Publish, manifest: str) -> None:
        """Bring all receivers through one update."""
        if self._renewing is not None:
            self._renewing.join()
        receivers = list(self.receivers)  # the test may replace them, and this thread reads no words of their successors
        group = f"{publish.peer}-{len(receivers)}"
        self._write(Join(group, len(receivers) + 1, id=publish.id))
        if group != self._group:
            for rank, receiver in enumerate(receivers, 1):
                receiver.tell(address=publish.address, name=group, world=len(receivers) + 1, rank=rank)
            if self._failed(publish, [receiver.read() for receiver in receivers]):
                return
            self._group = group
        self.joined.set()
        assert self.may_transfer.wait(PATIENCE_S)
        for receiver in receivers:
            receiver.tell(manifest=manifest, bucket_bytes=publish.bucket_bytes)
        self._write(Phase(publish.id, "transfer", len(receivers), 0))
        self._all_staged(publish, [receiver.read() for receiver in receivers])

    def _look(self, publish: Publish, sent: Sent) -> None:
        """Have all receivers open what is lent."""
        with self._looking:
            if self._open is not publish:
                return  # given up
            receivers = list(self.receivers)
            for receiver in receivers:
                receiver.tell(manifest=self._text, space=msgspec.to_builtins(sent.regions[0]))
            said = [receiver.read() for receiver in receivers]
        self._all_staged(publish, said)

    def _all_staged(self, publish: Publish, said: list[dict[str, Any]]) -> None:
        if not self._failed(publish, said):
            assert len({word["staged"] for word in said}) == 1
            with self._lock:
                if self._open is not publish:
                    return  # given up
                self.digest = said[0]["staged"]
                self._write(Phase(publish.id, "staged", len(self.receivers), len(self.receivers)))
                self._consider()

    def _failed(self, publish: Publish, said: list[dict[str, Any]]) -> bool:
        words = [word["failed"] for word in said if "failed" in word]
        if words:
            self._group = ""
            if self._open is publish:
                self.fail(words[0])
        return bool(words)

    def _consider(self) -> None:
        """Commit, if everything is there."""
        update = self._open
        if update is None or update.id not in self._allowed or not self.digest or self.deaf:
            return
        if update.transfer in ("staged", "direct", "ipc"):
            if self._sent is None:
                return
            if self._sent.digest != self.digest:
                self.fail("digests differ")
                return
        record = UpdateRecord(update.version, "committed", transfer=update.transfer, digest=self.digest, members=1)
        self.journal.append(record)
        self._open = None
        self._write(Published(update.id, update.version, record))
