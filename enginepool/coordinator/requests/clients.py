"""Clients: who is on which link, for how long they are remembered, what they are granted.

A client is known by its random id and proves itself by its secret; links come and go, and the newest one gets its answers.
"""

import hmac

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.effects import ToClient
from enginepool.coordinator.core.epochs import RAISES_BY_CLIENTS, rise_above
from enginepool.coordinator.core.events import Link
from enginepool.coordinator.core.request import Client
from enginepool.coordinator.operations.table import OPERATIONS
from enginepool.coordinator.requests.lifecycle import RequestLifecycle
from enginepool.protocol.messages import PROTOCOL_VERSION, ErrorReply, Pong, Welcome

#: when a client for which there was no room says hello again
FULL_MS = 1000
#: Requests of clients whose links were cut or are back that are moved between two looks; the others are moved after the next
#: look. A link may say hello as one client and as another one in turn, and each time the requests of both would be moved.
MOVES = 8192


class ClientRegistry:
    """All clients of one coordinator."""

    def __init__(self, core: Context, requests: RequestLifecycle) -> None:
        self.core = core
        self.requests = requests
        #: requests that were moved since the last look
        self._moved = 0
        #: clients whose requests are to be moved after the next looks, the longest first
        self._to_move: dict[Client, None] = {}

    def hello(self, e: ev.ClientHello) -> None:
        """A link says whose it is. The newest incarnation of a client wins; its secret proves that it is the same client."""
        core = self.core
        client = core.clients.get(e.client)
        if (
            (client is None or client.link is None)
            and e.link not in core.links
            and len(core.links) >= core.config.limits.clients
        ):
            text = f"hello: {len(core.links)} clients are connected, as many as limits.clients allows"
            self._refuse(e, "busy", text, "limits.clients", FULL_MS)
            return
        if client is None and e.link in core.links and len(core.clients) >= core.config.limits.clients:
            # Clients whose links are gone are remembered for a while. One link must not leave behind any number of them.
            many = f"{len(core.clients)} clients are remembered, as many as limits.clients allows"
            text = f"hello: this link had another client, and {many}; open a new link"
            self._refuse(e, "busy", text, "limits.clients", FULL_MS)
            return
        if client is not None and not hmac.compare_digest(client.token, e.token):
            self._refuse(e, "unauthorized", "hello: the token is not this client's", "token")
            return
        if e.epoch > core.epoch and not core.draining:
            # It takes no word from this epoch; with the next one, this coordinator answers its next hello.
            if why := rise_above(core, e.epoch, f"client {e.client.hex()}", RAISES_BY_CLIENTS):
                self._refuse(e, "bad_request", f"epoch: {why}", "epoch")
            return
        if client is None:
            client = core.clients[e.client] = Client(e.client, e.token, e.incarnation, e.link, e.now)
        else:
            if e.incarnation < client.incarnation:
                self._refuse(e, "superseded", "hello: a newer link of this client exists", "incarnation")
                return
            if client.link is not None:
                core.links.pop(client.link, None)
            self._link(client, e.link)
            client.incarnation = e.incarnation
            client.heard = e.now
        limits = core.config.limits
        client.max_message = min(limits.max_message_bytes, e.max_message_bytes or limits.max_message_bytes)
        before = core.links.get(e.link)
        core.links[e.link] = client
        if before is not None:
            self._link(before, None)
            publishes = any(update.client is before for update in core.updates.values())
            if not before.live and not publishes and not core.answers.any_of(before):
                # Nothing to come back for: one link cannot leave behind more clients than have asked for something.
                self._drop(before)
        welcome = Welcome(
            core.epoch,
            protocol=PROTOCOL_VERSION,
            capabilities=[*(operation.name for operation in OPERATIONS.values()), "weights"],
            groups=list(core.groups),
            window_requests=limits.window_requests,
            window_bytes=limits.window_bytes,
            max_message_bytes=limits.max_message_bytes,
            ping_ms=int(core.config.timing.ping_s * 1000),
            incarnation=e.incarnation,
        )
        core.effects.append(ToClient(e.link, welcome))

    def _refuse(self, e: ev.ClientHello, code: str, message: str, field: str, retry_after_ms: int | None = None) -> None:
        failure = ErrorReply(code, message, field=field, incarnation=e.incarnation, retry_after_ms=retry_after_ms)
        self.core.effects.append(ToClient(e.link, failure))

    def tell_all(self, code: str, message: str) -> None:
        """Send an error without an id to every client that has a link."""
        for link in self.core.links:
            self.core.effects.append(ToClient(link, ErrorReply(code, message)))

    def heard(self, e: ev.Heard) -> None:
        """A client is alive; a link that nobody has greeted is told to say Hello."""
        if self.core.client_of(e.link, None) is not None and e.at is not None:
            self.core.effects.append(ToClient(e.link, Pong(e.at, self.core.epoch)))

    def spoke(self, link: Link) -> None:
        """Something came that needs no Hello: if a client is on the link, it is alive."""
        client = self.core.links.get(link)
        if client is not None:
            client.heard = self.core.now

    def left(self, e: ev.ClientLeft) -> None:
        """A client leaves for good."""
        client = self.core.links.get(e.link)
        if client is not None:
            self._drop(client)

    def link_cut(self, e: ev.LinkCut) -> None:
        """A client's link is gone; its requests go on, and it may come back on another link."""
        client = self.core.links.pop(e.link, None)
        if e.reason:
            who = client.id.hex()[:8] if client is not None else f"on link {e.link.hex()[:16]}"
            self.core.log(f"client {who} is cut: {e.reason}", "client")
        if client is not None and client.link == e.link:
            self._link(client, None)

    def _link(self, client: Client, link: Link | None) -> None:
        """The newest link of `client`. Without one its requests wait behind those of all others."""
        client.link = link
        if client.away == (link is None):
            self._to_move.pop(client, None)
        elif client.live and self._moved >= MOVES:
            self._to_move[client] = None
        else:
            self._move(client)

    def _move(self, client: Client) -> None:
        """Put the requests of `client` where they belong now."""
        self._to_move.pop(client, None)
        client.away = client.link is None
        if client.live:
            self._moved += len(client.live)
            for group in self.core.groups.values():
                group.queue.move(client)
                group.suspects.move(client)
                group.texts.move(client)
                group.blocked = None
                self.core.wake(group)

    def _drop(self, client: Client) -> None:
        """Nobody waits for this client's answers any more."""
        core = self.core
        if client.link is not None:
            core.links.pop(client.link, None)
            client.link = None
        self._to_move.pop(client, None)
        for request in list(client.live.values()):
            self.requests.fail(request, "cancelled", "the client left")
            core.wake(request.group)
        core.answers.drop_client(client)
        core.clients.pop(client.id, None)

    def expire(self) -> None:
        """Forget silent clients and old answers, and move requests that were left. Whose transaction is open has a lease of its
        own, and its end to hear of."""
        core = self.core
        self._moved = 0
        for client in list(self._to_move):
            if self._moved >= MOVES:
                break
            self._move(client)
        publishers = {update.client for update in core.updates.values()}
        core.answers.expire(core.now)
        limit = core.now - core.config.timing.client_silence_s
        for client in [c for c in core.clients.values() if c.heard < limit and c not in publishers]:
            if count := len(client.live):
                what = f"{count} request{'s are' if count > 1 else ' is'} cancelled"
                core.log(f"client {client.id.hex()[:8]} was silent for {core.now - client.heard:.0f} s: {what}", "client")
            self._drop(client)
