"""The network: links that delay, repeat and lose messages as ZeroMQ's do, between dealers and the coordinator's routers.

A link is first in, first out in each direction. When it breaks, what is on the way is lost, except for what the other side's
socket had received already: that is still read, perhaps after messages of the link's successor. Either side may take a while to
notice. A dealer connects again by itself; the new link has a new id. A repeated message comes directly after the first one, or
(for messages that say nothing about their sender's state) later. Tokens of a worker are not repeated: no layer does that, and a
worker whose positions go back is lost.
"""

from collections.abc import Sequence
from math import log
from typing import Protocol

from enginepool.protocol.frames import Buffer, encode_header
from enginepool.protocol.messages import Ack, Cancel, Done, ErrorReply, GenerationProgress, Message, Result, Score, Tokenized
from tests.sim.world import World

#: These may be repeated long after. Work may not: nothing repeats it later than the coordinator itself, after a new
#: registration, and a worker that has long forgotten a batch would run it next to what fills its budget.
LATE = (Ack, Cancel, Done, Result, Score, Tokenized)
#: a dealer that is not connected queues at most this many messages
QUEUED = 1000


class Server(Protocol):
    """The side that binds."""

    def receive(self, link: "Link", frames: Sequence[Buffer]) -> None: ...

    def knows(self, group: str, incarnation: str) -> bool: ...


class Owner(Protocol):
    """A process that has a dealer."""

    name: str

    def receive(self, dealer: "Dealer", frames: Sequence[Buffer]) -> None: ...

    def connected(self, dealer: "Dealer") -> None: ...

    def disconnected(self, dealer: "Dealer") -> None: ...


class Conditions:
    """How bad this network is. Times in seconds."""

    def __init__(
        self,
        delay: float,
        repeat: float = 0.0,
        late: float = 0.0,
        notice: float = 0.0,
        survive: float = 0.0,
        flaky: float = 0.0,
    ) -> None:
        #: mean delay of a message
        self.delay = delay
        self.rate = 1 / delay
        #: probability that a message comes twice, and that the second one is late
        self.repeat, self.late = repeat, late
        #: longest time until a side notices that a link is broken
        self.notice = notice
        #: longest time after the break in which a side still reads what its socket had received
        self.survive = survive
        #: probability that a new link breaks while the first words are exchanged
        self.flaky = flaky


class Link:
    """One connection, as a router names it."""

    __slots__ = ("broken", "dealer", "dropped", "id", "last_in", "last_out", "server", "until_in", "until_out", "worker")

    def __init__(self, id: bytes, dealer: "Dealer", server: Server) -> None:
        self.id = id
        self.dealer = dealer
        self.server = server
        self.worker = dealer.worker
        self.broken = False
        self.last_in = self.last_out = 0.0
        self.until_in = self.until_out = float("inf")
        #: the router has dropped what it would have delivered until then
        self.dropped = -1.0


class Network:
    """All links of one pool. `server` is the coordinator that is up, if one is."""

    def __init__(self, world: World, conditions: Conditions) -> None:
        self.world = world
        self.conditions = conditions
        self.server: Server | None = None
        #: links that the router still believes in
        self.links: dict[bytes, Link] = {}
        self.dealers: dict[Dealer, None] = {}
        self._count = 0

    def open(self, dealer: "Dealer", server: Server) -> Link:
        self._count += 1
        link = Link(b"%c%d" % (b"w" if dealer.worker else b"c", self._count), dealer, server)
        self.links[link.id] = link
        if self.world.chance(self.conditions.flaky):
            self.world.after(self.world.between(0, 6 * self.conditions.delay), self.cut, link)
        return link

    def stop_server(self) -> None:
        """The coordinator's process is gone, and every link with it."""
        self.server = None
        for dealer in list(self.dealers):
            if dealer.link is not None:
                self.cut(dealer.link)
        self.links.clear()

    def cut(self, link: Link) -> None:
        """Break a link."""
        if link.broken:
            return
        world, conditions = self.world, self.conditions
        link.broken = True
        link.until_in = world.now + (world.between(0, conditions.survive) if world.chance(0.5) else 0.0)
        link.until_out = world.now + (world.between(0, conditions.survive) if world.chance(0.5) else 0.0)
        world.note(link.dealer.owner.name, f"link {link.id.decode()} breaks")
        world.after(world.between(0, conditions.notice), self.forget, link)
        world.after(world.between(0, conditions.notice), link.dealer.lost, link)

    def forget(self, link: Link) -> None:
        """The router notices."""
        self.links.pop(link.id, None)

    def send(self, id: bytes, message: Message, frames: Sequence[Buffer]) -> bool:
        """The router sends; False when it knows no such link."""
        link = self.links.get(id)
        if link is None:
            return False
        if not link.broken:
            self.carry(link, message, frames, inward=False)
        return True

    def carry(self, link: Link, message: Message, frames: Sequence[Buffer], *, inward: bool) -> None:
        """Put a message on the way."""
        world, conditions = self.world, self.conditions
        # As `expovariate` draws it, without the call.
        arrival = world.now - log(1.0 - world.random.random()) / conditions.rate
        if inward:
            if arrival < link.last_in:
                arrival = link.last_in
            link.last_in, deliver = arrival, self._deliver_in
        else:
            if arrival < link.last_out:
                arrival = link.last_out
            link.last_out, deliver = arrival, self._deliver_out
        whole = (encode_header(message), *frames)
        world.at(arrival, deliver, link, whole)
        if conditions.repeat and type(message) is not GenerationProgress and world.chance(conditions.repeat):
            refusal = isinstance(message, ErrorReply) and message.id is not None
            late = (refusal or isinstance(message, LATE)) and world.chance(conditions.late)
            world.at(arrival + world.between(0, 5.0) if late else arrival, deliver, link, whole)

    def _deliver_in(self, link: Link, frames: Sequence[Buffer]) -> None:
        if self.world.now <= link.until_in and link.server is self.server:
            link.server.receive(link, frames)

    def _deliver_out(self, link: Link, frames: Sequence[Buffer]) -> None:
        if link.dropped < self.world.now <= link.until_out and not link.dealer.closed:
            link.dealer.owner.receive(link.dealer, frames)


class Dealer:
    """A connecting socket. A worker's is told of its connections, and forgets what is queued when one ends."""

    def __init__(self, network: Network, owner: Owner, *, worker: bool) -> None:
        self.network = network
        self.owner = owner
        self.worker = worker
        self.link: Link | None = None
        self.closed = False
        #: no connection succeeds before this
        self.not_before = 0.0
        self._queue: list[tuple[Message, Sequence[Buffer]]] = []
        network.dealers[self] = None
        network.world.after(network.world.random.expovariate(1 / network.conditions.delay), self._connect)

    def _connect(self) -> None:
        network = self.network
        world = network.world
        if self.closed or self.link is not None:
            return
        if network.server is None or world.now < self.not_before:
            world.at(max(self.not_before, world.now + world.between(0.02, 0.4)), self._connect)
            return
        self.link = network.open(self, network.server)
        queued, self._queue = self._queue, []
        for message, frames in queued:
            network.carry(self.link, message, frames, inward=True)
        self.owner.connected(self)

    def send(self, message: Message, frames: Sequence[Buffer]) -> None:
        if self.link is None:
            if len(self._queue) < QUEUED:
                self._queue.append((message, frames))
        elif not self.link.broken:
            self.network.carry(self.link, message, frames, inward=True)

    def lost(self, link: Link) -> None:
        """This side notices that its link is broken."""
        if self.closed or self.link is not link:
            return
        self.link = None
        if self.worker:
            self._queue.clear()
        self.owner.disconnected(self)
        self.network.world.after(self.network.world.between(0.001, 0.2), self._connect)

    def close(self, *, linger: bool = False) -> None:
        """Close the socket; with `linger` what was sent still arrives."""
        self.closed = True
        self.network.dealers.pop(self, None)
        if self.link is not None:
            self.network.cut(self.link)
            if linger:
                self.link.until_in = float("inf")
