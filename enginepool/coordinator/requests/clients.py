"""Clients: which link each of them uses, how long the coordinator remembers them, and which limits they get.

A client is known by its random id and proves its identity by its secret. It may use one link after another: its answers go to
the newest link.
"""

import hmac
import itertools
from math import inf

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.context import ENDS, Context
from enginepool.coordinator.core.effects import ToClient
from enginepool.coordinator.core.epochs import RAISES_BY_CLIENTS, rise_above
from enginepool.coordinator.core.events import Link
from enginepool.coordinator.core.request import Client
from enginepool.coordinator.operations.table import OPERATIONS
from enginepool.coordinator.requests.lifecycle import RequestLifecycle
from enginepool.protocol.messages import PROTOCOL_VERSION, ErrorReply, Pong, Welcome

#: milliseconds after which a refused client says hello again, when there was no room for it
FULL_MS = 1000
#: The requests of a client are moved in the queue when its link is cut or is back. At most so many requests are moved between
#: two calls of `expire`; the others are moved after the next call. Without this limit a link that says hello as two clients in
#: turn could have the requests of both moved each time.
MOVES = 8192
#: what it costs to forget a client, in ends of requests
_CLIENT = 32


class ClientRegistry:
    """All clients of one coordinator."""

    def __init__(self, core: Context, requests: RequestLifecycle) -> None:
        self.core = core
        self.requests = requests
        self._numbers = itertools.count(1)
        #: requests that were moved since the last `expire`
        self._moved = 0
        #: requests that ended since then because their clients were forgotten
        self._ended = 0
        #: clients whose requests are to be moved after the next calls of `expire`; the client that has waited longest is first
        self._to_move: dict[Client, None] = {}

    def hello(self, e: ev.ClientHello) -> None:
        """A link says which client it belongs to. The newest incarnation of a client wins; its secret proves its identity."""
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
            # The coordinator remembers clients without a link for a while. One link must not leave any number of them behind.
            many = f"{len(core.clients)} clients are remembered, as many as limits.clients allows"
            text = f"hello: this link had another client, and {many}; open a new link"
            self._refuse(e, "busy", text, "limits.clients", FULL_MS)
            return
        if client is not None and not hmac.compare_digest(client.token, e.token):
            self._refuse(e, "unauthorized", "hello: the token is not this client's", "token")
            return
        client = self._unless_left(client)
        if e.epoch > core.epoch and not core.draining:
            # The client ignores messages of this epoch. The coordinator raises its epoch, and then answers the next hello.
            if why := rise_above(core, e.epoch, f"client {e.client.hex()}", RAISES_BY_CLIENTS):
                self._refuse(e, "bad_request", f"epoch: {why}", "epoch")
            return
        if client is None:
            client = core.clients[e.client] = Client(e.client, e.token, e.incarnation, e.link, e.now, next(self._numbers))
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
                # This client has no requests and no answers to return to. So one link leaves behind only clients with requests.
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

    def _unless_left(self, client: Client | None) -> Client | None:
        """A client that has left is forgotten at the latest now: who says hello under its id is a new client."""
        if client is not None and client.heard == -inf:
            self._drop(client)
            return None
        return client

    def _refuse(self, e: ev.ClientHello, code: str, message: str, field: str, retry_after_ms: int | None = None) -> None:
        failure = ErrorReply(code, message, field=field, incarnation=e.incarnation, retry_after_ms=retry_after_ms)
        self.core.effects.append(ToClient(e.link, failure))

    def tell_all(self, code: str, message: str) -> None:
        """Send an error without an id to every client that has a link."""
        for link in self.core.links:
            self.core.effects.append(ToClient(link, ErrorReply(code, message)))

    def heard(self, e: ev.Heard) -> None:
        """The client on this link is alive. A link without a client is told to say hello."""
        if self.core.client_of(e.link, None) is not None and e.at is not None:
            self.core.effects.append(ToClient(e.link, Pong(e.at, self.core.epoch)))

    def spoke(self, link: Link) -> None:
        """A message arrived that needs no hello. If a client uses the link, the client is alive."""
        client = self.core.links.get(link)
        if client is not None:
            client.heard = self.core.now

    def left(self, e: ev.ClientLeft) -> None:
        """A client leaves and does not come back. If many requests ended since the last `expire`, a later one forgets it."""
        client = self.core.links.get(e.link)
        if client is None:
            return
        if self._ended + len(client.live) <= ENDS:
            self._drop(client)
            return
        self.core.links.pop(e.link)
        client.heard = -inf
        self._link(client, None)

    def link_cut(self, e: ev.LinkCut) -> None:
        """A client's link is gone; its requests go on, and it may come back on another link."""
        client = self.core.links.pop(e.link, None)
        if e.reason:
            who = client.id.hex()[:8] if client is not None else f"on link {e.link.hex()[:16]}"
            self.core.log(f"client {who} is cut: {e.reason}", "client")
        if client is not None and client.link == e.link:
            self._link(client, None)

    def _link(self, client: Client, link: Link | None) -> None:
        """Set the newest link of `client`. The requests of a client without a link wait behind those of all other clients."""
        client.link = link
        for request in client.live.values():
            if request.generation is not None and request.generation.credit:
                request.generation.expect()
        if client.away == (link is None):
            self._to_move.pop(client, None)
        elif client.live and self._moved >= MOVES:
            self._to_move[client] = None
        else:
            self._move(client)

    def _move(self, client: Client) -> None:
        """Move the requests of `client` to their new position in the queue."""
        self._to_move.pop(client, None)
        client.away = client.link is None
        if client.live:
            self._moved += len(client.live)
            for group in self.core.groups.values():
                for queue in group.queues:
                    queue.move(client)
                group.blocked = None
                self.core.wake(group)

    def _drop(self, client: Client) -> None:
        """Forget a client, whose answers are not needed any more."""
        core = self.core
        if client.link is not None:
            core.links.pop(client.link, None)
            client.link = None
        self._to_move.pop(client, None)
        self._ended += _CLIENT + len(client.live)
        for request in list(client.live.values()):
            self.requests.fail(request, "cancelled", "the client left")
            core.wake(request.group)
        core.answers.drop_client(client)
        core.clients.pop(client.id, None)

    def expire(self) -> None:
        """Forget silent clients and old answers, and move the requests that still have to be moved. What is too much at once
        follows in the next call.

        A client with an open transaction is kept: the lease of the transaction decides, and the client gets its result.
        """
        core = self.core
        self._moved = self._ended = 0
        for client in list(self._to_move):
            if self._moved >= MOVES:
                break
            self._move(client)
        publishers = {update.client for update in core.updates.values()}
        core.answers.expire(core.now)
        limit = core.now - core.config.timing.client_silence_s
        for client in [c for c in core.clients.values() if c.heard < limit and c not in publishers]:
            if self._ended >= ENDS:
                break
            if client.heard > -inf and (count := len(client.live)):
                what = f"{count} request{'s are' if count > 1 else ' is'} cancelled"
                core.log(f"client {client.id.hex()[:8]} was silent for {core.now - client.heard:.0f} s: {what}", "client")
            self._drop(client)
