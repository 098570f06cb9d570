"""A transaction under test: a publisher, members and the journal in a few words, on the pool of `machines`."""

from typing import Any, TypeVar

import msgspec

from enginepool.coordinator.core import effects as ef
from enginepool.coordinator.core import events as ev
from enginepool.coordinator.shell.decode import client_event, worker_event
from enginepool.coordinator.weights.update import Update
from enginepool.protocol.frames import encode_header
from enginepool.protocol.manifest import Tensor, encode_manifest
from enginepool.protocol.messages import FrameSpec, Message
from enginepool.protocol.messages.weight_reports import Finding, UpdateRecord, publisher_of
from enginepool.protocol.messages.weights import (
    Commit,
    Join,
    Joined,
    LoadWeights,
    Prepare,
    Prepared,
    Publish,
    Renew,
    Sent,
    Staged,
    WeightsLoaded,
)
from tests.core.machines import Pool, config
from tests.core.machines import Sent as Message_

M = TypeVar("M", bound=Message)
MANIFEST = [Tensor("w", "float32", (2, 3)), Tensor("b", "float32", (3,))]
DIGEST = "d" * 32
ADDRESS = "127.0.0.1:29500"
#: what the history calls the publisher of a trainer's first update
FIRST = publisher_of(b"trainer".ljust(16, b"."), 1)


class Trainer:
    """A publisher, and what it heard."""

    def __init__(self, pool: "UpdatePool", name: bytes = b"trainer") -> None:
        self.pool = pool
        self.link = pool.client(name)
        self.ids = 0

    def publish(self, version: int, *, id: int | None = None, **changes: Any) -> list[Message_]:
        """Offer weights; what was sent to anybody."""
        self.ids = self.ids + 1 if id is None else id
        manifest: tuple[bytes, ...] = (encode_manifest(changes.pop("manifest", MANIFEST)),)
        if changes.get("transfer") in ("checkpoint", "set_version"):
            manifest = ()
        offer = Publish(self.ids, version, address=ADDRESS, peer=self.link.decode())
        offer.frames = [FrameSpec("manifest", "utf8", (len(manifest[0]),))] if manifest else []
        return self.say(msgspec.structs.replace(offer, **changes), manifest)

    def say(self, message: Message, frames: tuple[bytes, ...] = ()) -> list[Message_]:
        return self.pool.do(client_event(0, self.link, [encode_header(message), *frames], 1 << 30))

    def renew(self, sent_bytes: int = 0) -> list[Message_]:
        return self.say(Renew(self.ids, sent_bytes))

    def sent(self, digest: str = DIGEST) -> list[Message_]:
        return self.say(Sent(self.ids, digest, 512))

    def commit(self) -> list[Message_]:
        return self.say(Commit(self.ids))


class UpdatePool(Pool):
    """A pool whose workers answer what an update asks of them, unless a test says otherwise."""

    def __init__(self, **kwargs: Any) -> None:
        self.journal: list[ef.WriteJournal] = []
        self._checks: list[ef.CheckJournal] = []
        #: the histories of updates that were to be written
        self.histories: list[list[UpdateRecord]] = []
        #: why the journal cannot be written
        self.disk = ""
        super().__init__(config(**kwargs))

    def other(self, effect: ef.Effect) -> None:
        if isinstance(effect, ef.WriteJournal):
            self.journal.append(effect)
        elif isinstance(effect, ef.CheckJournal):
            self._checks.append(effect)
        elif isinstance(effect, ef.KeepHistory):
            self.histories.append(list(effect.records))

    def do(self, *events: ev.Event) -> list[Message_]:
        """As `Pool.do`; the journal is checked at once."""
        out = super().do(*events)
        while self._checks:
            out += super().do(ev.JournalChecked(0, self._checks.pop().update, self.disk))
        return out

    @property
    def update(self) -> Update:
        """The open transaction of group g."""
        update = self.machine.core.updates.get("g")
        assert update is not None
        return update

    def live(self, seconds: float) -> list[Message_]:
        """Let time pass, in which everybody is heard."""
        out: list[Message_] = []
        end = self.now + seconds
        while self.now < end:
            core = self.machine.core
            for link in list(core.worker_links):
                out += self.do(ev.WorkerHeard(0, link))
            for link in list(core.links):
                out += self.do(ev.Heard(0, link))
            out += self.wait(min(2.5, end - self.now))
        return out

    def tell(self, link: bytes, message: Message, frames: tuple[bytes, ...] = ()) -> list[Message_]:
        """A worker says something."""
        return self.do(worker_event(0, link, [encode_header(message), *frames]))

    def written(self, error: str = "") -> list[Message_]:
        """The journal has taken what it was given."""
        return self.do(ev.JournalWritten(0, self.journal[-1].update, error))

    def answer(self, sent: list[Message_], **changes: Any) -> list[Message_]:
        """Every worker does what it is asked in `sent`; what follows."""
        out: list[Message_] = []
        for one in sent:
            reply = reply_to(one.message)
            if reply is not None:
                out += self.tell(one.link, msgspec.structs.replace(reply, **changes))
        return out

    def stage(self, links: list[bytes], digest: str = DIGEST, findings: list[Finding] | None = None) -> list[Message_]:
        """These workers have all bytes."""
        update = self.update.id
        return [s for link in links for s in self.tell(link, Staged(update, digest, findings or []))]

    def publish(self, trainer: Trainer, version: int, links: list[bytes], **changes: Any) -> list[Message_]:
        """A whole staged update, up to what the journal is given."""
        joins = self.answer(trainer.publish(version, **changes))
        self.answer(joins)
        trainer.sent()
        self.stage(links)
        return self.answer(trainer.commit())


def reply_to(message: Message) -> Message | None:
    """What a worker answers when all is well."""
    if isinstance(message, Prepare):
        return Prepared(message.update, peer="peer", ranks=1, staging="host", generations=message.generations)
    if isinstance(message, Join) and message.update != (0, 0):
        return Joined(message.update)
    if isinstance(message, LoadWeights):
        return WeightsLoaded(message.update, message.version, DIGEST)
    return None


def of_type(sent: list[Message_], kind: type[M]) -> list[M]:
    return [s.message for s in sent if isinstance(s.message, kind)]
