"""What reached the coordinator of each update: where links break, a good publisher can be silent for longer than its lease.

Counted from the events alone. A word counts on the newest link on which its client said hello, as PROTOCOL.md has it.
"""

from enginepool.coordinator.core import events as ev

#: the client, and the id of its transaction
Key = tuple[bytes, int]
#: events that begin, renew or move a lease
COUNTED = {ev.ClientHello, ev.LinkCut, ev.PublishAsked, ev.PublisherSaid}


class Leases:
    """The leases of all updates of a simulation."""

    def __init__(self) -> None:
        self._links: dict[bytes, bytes] = {}
        #: of each client, the incarnation of its newest hello, and the link
        self._newest: dict[bytes, tuple[int, bytes]] = {}
        self._lease_s: dict[Key, float] = {}
        #: when each lease ends, unless something is said before
        self._until: dict[Key, float] = {}
        self._lapsed: set[Key] = set()

    def came(self, event: ev.Event) -> None:
        """The coordinator handles this now, one of COUNTED."""
        if isinstance(event, ev.ClientHello):
            incarnation, link = self._newest.get(event.client, (0, b""))
            if event.incarnation >= incarnation:
                self._links.pop(link, None)
                self._links[event.link] = event.client
                self._newest[event.client] = event.incarnation, event.link
        elif isinstance(event, ev.LinkCut):
            self._links.pop(event.link, None)
        elif isinstance(event, ev.PublishAsked | ev.PublisherSaid):
            client = self._links.get(event.link)
            if client is not None:
                key = client, event.message.id
                if isinstance(event, ev.PublishAsked):
                    self._lease_s[key] = event.message.lease_ms / 1000
                if self.lapsed(event.now, *key):
                    self._lapsed.add(key)
                self._until[key] = event.now + self._lease_s.get(key, float("inf"))

    def lapsed(self, now: float, client: bytes, id: int) -> bool:
        """Whether nothing of this transaction reached the coordinator for as long as its lease, at some time before `now`."""
        key = client, id
        return key in self._lapsed or now >= self._until.get(key, float("inf"))
