"""A simulated publisher: offers weights, broadcasts them, lets them be committed; or fails at it in every way that there is."""

from collections.abc import Sequence

import msgspec

from enginepool.protocol.frames import Buffer, decode_header
from enginepool.protocol.manifest import Tensor, encode_manifest
from enginepool.protocol.messages import ErrorReply, FrameSpec, Goodbye, Hello, Message, Ping, ToClient, Welcome
from enginepool.protocol.messages.weight_reports import Finding, InspectWeights, WeightsReport, publisher_of
from enginepool.protocol.messages.weights import (
    SEAL_BYTES,
    AbortUpdate,
    Commit,
    Join,
    MemoryRegion,
    Phase,
    Publish,
    Published,
    Renew,
    Sent,
    WeightsNeeded,
)
from tests.sim.network import Dealer, Network
from tests.sim.offers import Offer
from tests.sim.oracle import Oracle
from tests.sim.sim_stager import HOST, MODEL, Disks, Lent, Ring, Side

_decoder = msgspec.msgpack.Decoder(ToClient)
TICK_S = 0.4
SILENCE_S = 3.0


class SimPublisher:
    """One client that publishes, one offer after the other."""

    def __init__(self, network: Network, oracle: Oracle, disks: Disks, index: int) -> None:
        self.network = network
        self.world = network.world
        self.oracle = oracle
        self.disks = disks
        self.name = f"publisher-{index}"
        self.id = f"pub{index}".ljust(16, ".").encode()
        self.gone = False
        self.stalled = False
        self.dealer: Dealer | None = None
        self.incarnation = 0
        #: the coordinator knows this link; nothing else is said before
        self.welcomed = False
        self.epoch = 0
        self.heard = 0.0
        self.counter = 0
        self.peer = disks.fresh("side")
        self.waiting: list[Offer] = []
        self.offer: Offer | None = None
        self.publish: Publish | None = None
        self.frames: tuple[bytes, ...] = ()
        #: of the bytes that it broadcasts, and what it says of them
        self.digest = self.told = ""
        #: process groups that it is in, and the one of the present offer
        self.rings: dict[str, Ring] = {}
        self.ring: Ring | None = None
        #: what it lends, and where
        self.lent: Lent | None = None
        self.regions: list[MemoryRegion] = []
        self.sent = 0
        self.all_sent = self.committed = self.asking = self.sending = self.aborted = False
        self._held: list[Sequence[Buffer]] = []

    # --- the owner -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._dial()
        self._tick()

    def want(self, offer: Offer) -> None:
        """Publish this as soon as the last one is over."""
        if self.gone:
            offer.outcome = "gone"
            return
        self.waiting.append(offer)
        self._next()

    def _next(self) -> None:
        if self.offer is not None or not self.waiting or self.gone or self.stalled:
            return
        self.offer = offer = self.waiting.pop(0)
        self.counter += 1
        committed = self.oracle.latest(offer.group)
        version = committed.version + 1
        if offer.flaw == "backwards" or offer.new_run:
            # A new run may begin at a version that was there before.
            version = max(0, committed.version - (self.counter % 2))
        self.digest = f"{self.disks.count:08x}{self.counter:024x}"
        self.disks.count += 1
        if offer.again and committed.digest:
            version, self.digest = committed.version, committed.digest
        self.told = self.digest
        self.publish = publish = Publish(self.counter, version, offer.group, bucket_bytes=256, lease_ms=2500)
        publish.transfer, publish.in_flight = offer.transfer, offer.in_flight  # type: ignore[assignment]
        publish.after_drain = offer.after_drain  # type: ignore[assignment]
        publish.drain_ms = int(1000 * offer.drain_s)
        publish.partial, publish.new_run = offer.partial, offer.new_run
        self.frames = ()
        if offer.transfer == "checkpoint":
            publish.path = self.disks.fresh("/checkpoints/")
            if offer.flaw != "unknown":
                self.disks.checkpoints[publish.path] = self.digest
        elif offer.transfer != "set_version":
            if offer.transfer == "ipc":
                publish.host = "another" if offer.flaw == "elsewhere" else HOST
            else:
                publish.address, publish.peer = f"{self.name}:1", self.peer
            self.frames = (encode_manifest(_manifest(offer)),)
            publish.frames = [FrameSpec("manifest", "utf8", (len(self.frames[0]),))]
        self.sent, self.regions = 0, []
        self.all_sent = self.committed = self.asking = self.sending = self.aborted = False
        self._say(publish, self.frames)
        if offer.early and offer.fate == "commit":
            self._commit()
        elif not publish.frames:
            self.world.after(self.world.between(0.0, 0.5), self._decide, self.counter)

    def _finish(self, outcome: str) -> None:
        assert self.offer is not None
        self.world.note(self.name, f"{self.offer}: {outcome}")
        self.offer.outcome = outcome
        if outcome != "published":
            self._leave_rings()
        if self.lent is not None:
            # Its memory is for something else now, also if engines still read it.
            self.disks.take_back(self.lent)
            self.lent = None
        self.ring = None
        self.offer = self.publish = None
        self._next()

    def _leave_rings(self) -> None:
        """Its side of every process group is lost; the next one has another name."""
        for ring in self.rings.values():
            ring.leave()
        if self.rings:
            self.peer = self.disks.fresh("side")
        self.rings.clear()
        self.ring = None

    # --- the link ------------------------------------------------------------------------------------------------------

    def _dial(self) -> None:
        if self.dealer is not None:
            self.dealer.close()
        self.dealer = Dealer(self.network, self, worker=False)
        self.heard = self.world.now
        self._hello()

    def _hello(self) -> None:
        self.incarnation += 1
        self.welcomed = False
        self._say(Hello(self.id, self.id, incarnation=self.incarnation, epoch=self.epoch))

    def _say(self, message: Message, frames: tuple[bytes, ...] = ()) -> None:
        assert self.dealer is not None
        if self.welcomed or isinstance(message, Hello | InspectWeights | Goodbye):
            self.world.note(self.name, message)
            self.dealer.send(message, frames)

    def _tick(self) -> None:
        if self.gone:
            return
        self.world.after(TICK_S, self._tick)
        if self.stalled:
            return
        if self.world.now - self.heard > SILENCE_S:
            self._dial()
        elif self.asking and self.publish is not None:
            self._say(InspectWeights(1, self.publish.group))
        elif self.publish is not None and not self._silent():
            self._say(Renew(self.publish.id, self.sent))
        else:
            self._say(Ping(1))

    def _silent(self) -> bool:
        """It lives, and has forgotten its transaction."""
        offer = self.offer
        return offer is not None and offer.fate == "never" and (self.all_sent or offer.transfer == "direct")

    def connected(self, dealer: Dealer) -> None:
        """No message tells a client."""

    def disconnected(self, dealer: Dealer) -> None:
        """No message tells a client."""

    def receive(self, dealer: Dealer, frames: Sequence[Buffer]) -> None:
        if self.gone or dealer is not self.dealer:
            return
        if self.stalled:
            self._held.append(frames)
            return
        self.world.mix(frames[0])  # type: ignore[arg-type]
        message: Message = decode_header(_decoder, frames[0])
        self.heard = self.world.now
        if isinstance(message, Welcome):
            self._welcome(message)
        elif isinstance(message, ErrorReply) and message.code == "hello_required":
            self._hello()
        elif isinstance(message, WeightsNeeded):
            if not any(offer.group == message.group for offer in (*self.waiting, *filter(None, [self.offer]))):
                offer = Offer(self.world.now, message.group)
                offer.again = self.counter % 2 == 0
                self.want(offer)
        elif isinstance(message, WeightsReport):
            self._reported(message)
        elif self.publish is None or getattr(message, "id", None) != self.publish.id or self.offer is None:
            return
        elif isinstance(message, ErrorReply):
            lapsed = self.oracle.leases.lapsed(self.world.now, self.id, self.publish.id)
            self.oracle.update_failed(self.offer, message, lapsed=lapsed)
            self._finish(message.code)
        elif isinstance(message, Published):
            self.oracle.published(self.offer, self.publish.version, message)
            self._finish("published")
        elif isinstance(message, Join):
            self._join(message)
        elif isinstance(message, Phase) and message.phase == "transfer" and not self.sending:
            # What it was told to join may have been lost with a link, and comes again.
            self.sending = True
            if self.ring is not None or self.publish.transfer == "ipc":
                self._transfer(self.publish.id, 4)
        elif isinstance(message, Phase) and message.phase == "join" and self.publish.transfer == "direct":
            # Bytes go straight into engines, which have to stand still before.
            self.world.after(self.world.between(0.0, 0.3), self._decide, self.publish.id)

    def _welcome(self, welcome: Welcome) -> None:
        self.welcomed = True
        new = welcome.epoch != self.epoch
        self.epoch = welcome.epoch
        if self.publish is None:
            return
        if new and self.incarnation > 1:
            # Its transaction ended with the old coordinator, or was committed.
            self.asking = True
            self._say(InspectWeights(1, self.publish.group))
            return
        self._say(self.publish, self.frames)
        if self.all_sent:
            self._say(Sent(self.publish.id, self.told, self.sent, self.regions))
        if self.committed:
            self._say(Commit(self.publish.id))
        if self.aborted:
            self._say(AbortUpdate(self.publish.id, "as was said before"))

    def _reported(self, report: WeightsReport) -> None:
        if not self.asking or self.publish is None or self.offer is None or report.group != self.publish.group:
            return
        self.asking = False
        mine = publisher_of(self.id, self.publish.id)
        committed = {report.publisher, *(one.publisher for one in report.history if one.outcome == "committed")}
        if mine in committed:
            self.oracle.known_as_published(self.offer, self.publish.version, self.digest)
        self._finish("published" if mine in committed else "restarted")

    # --- the process group ---------------------------------------------------------------------------------------------

    def _join(self, join: Join) -> None:
        assert self.publish is not None
        if self.ring is not None and self.ring.name == join.rendezvous:
            return
        id_ = self.publish.id
        self.ring = ring = self.rings[join.rendezvous] = self.disks.ring(join.rendezvous, join.world)

        def told(what: str, digest: str, findings: list[Finding]) -> None:
            self._told(id_, ring, what)

        ring.join(0, Side(self.name, told))
        if self.sending:
            self._transfer(id_, 4)

    def _told(self, id_: int, ring: Ring, what: str) -> None:
        if what == "broken" and self.rings.get(ring.name) is ring and not self.gone:
            mine = ring is self.ring
            self._leave_rings()
            if mine and self.publish is not None and self.publish.id == id_ and not self.all_sent:
                self._abort("the process group broke", broken=True)

    def _transfer(self, id_: int, steps: int) -> None:
        offer = self.offer
        if self.gone or self.publish is None or offer is None or self.publish.id != id_ or self.all_sent:
            return
        if self.stalled:
            self.world.after(0.2, self._transfer, id_, steps)
            return
        if offer.transfer != "ipc" and (self.ring is None or self.ring.broken):
            self._abort("the process group broke", broken=True)
            return
        if steps == 2 and offer.fate == "vanish":
            self.vanish()
            return
        if steps:
            self.sent += 100
            self._say(Renew(id_, self.sent))
            self.world.after(offer.seconds * self.world.between(0.1, 0.4), self._transfer, id_, steps - 1)
            return
        found = {"nan": [Finding("w", "nan", 1)], "zero": [Finding("v", "zero", 9)]}
        findings = found.get(offer.flaw, [])
        if self.ring is None:
            self.lent = self.disks.lend(self.digest, findings)
            self.regions = [MemoryRegion("file", 1, path=self.lent.path, seal=bytes(SEAL_BYTES))]
        else:
            self.ring.broadcast(self.digest, findings)
        self.all_sent = True
        if offer.flaw == "truncated":
            self.told = self.disks.fresh("other")
        self._say(Sent(id_, self.told, self.sent, self.regions))
        self.world.after(self.world.between(0.0, 0.5), self._decide, id_)

    def _decide(self, id_: int) -> None:
        offer = self.offer
        if self.gone or offer is None or self.publish is None or self.publish.id != id_:
            return
        if self.stalled:
            self.world.after(0.2, self._decide, id_)
        elif offer.fate == "commit":
            self._commit()
        elif offer.fate == "abort":
            self._abort("the trainer has changed its mind")
        elif offer.fate == "vanish":
            self.vanish()

    def _commit(self) -> None:
        assert self.publish is not None
        if not self.committed:
            self.committed = True
            self._say(Commit(self.publish.id))

    def _abort(self, reason: str, *, broken: bool = False) -> None:
        if self.publish is not None and not self.aborted:
            self.aborted = True
            self._say(AbortUpdate(self.publish.id, reason, broken))

    # --- what befalls it -----------------------------------------------------------------------------------------------

    def stall(self) -> None:
        self.stalled = True
        self.world.note(self.name, "stalls")

    def go_on(self) -> None:
        if self.gone or not self.stalled:
            return
        self.world.note(self.name, "goes on")
        self.stalled = False
        held, self._held = self._held, []
        assert self.dealer is not None
        for frames in held:
            self.receive(self.dealer, frames)
        self._next()

    def vanish(self) -> None:
        """The process is killed."""
        if self.gone:
            return
        self.world.note(self.name, "vanishes")
        self.gone = True
        for offer in (*self.waiting, *filter(None, [self.offer])):
            offer.outcome = "gone"
        self._leave_rings()
        if self.lent is not None:
            self.disks.lent.pop(self.lent.path, None)
        if self.dealer is not None:
            self.dealer.close()

    def leave(self) -> None:
        """It ends in peace."""
        if not self.gone and self.dealer is not None:
            self._say(Goodbye())
            self.gone = True
            self.dealer.close(linger=True)


def _manifest(offer: Offer) -> list[Tensor]:
    if offer.flaw == "unknown":
        return [*MODEL, Tensor("x", "float32", (1,))]
    if offer.flaw == "missing":
        return MODEL[:-1]
    if offer.flaw == "shape":
        return [Tensor("w", "float32", (4, 4)), *MODEL[1:]]
    return MODEL[:2] if offer.partial else MODEL
