"""Acknowledgements of final answers, sent in batches: a full batch at once, a part of one after `ack_delay_s`."""

from math import inf

from enginepool.client.session.events import SendMessage, SessionEffect
from enginepool.client.session.link_state import LinkState
from enginepool.client.session.settings import SessionSettings
from enginepool.protocol.messages import MAX_ACKS, Ack


class Acknowledgements:
    """The ids of final answers that are not acknowledged yet. They are sent while the `link` stands."""

    def __init__(self, settings: SessionSettings, link: LinkState) -> None:
        self.settings = settings
        self._link = link
        self._ids: list[int] = []
        #: when `flush` is due; inf: nothing waits on a standing link
        self.wake_at = inf

    def add(self, id_: int, now: float, out: list[SessionEffect]) -> None:
        """`id_` has its final answer. Without a standing link it waits for the next one."""
        self._ids.append(id_)
        if not self._link.stands:
            return
        if len(self._ids) >= self.settings.ack_batch:
            self.flush(out)
        elif self.wake_at == inf:
            self.wake_at = now + self.settings.ack_delay_s

    def flush(self, out: list[SessionEffect]) -> None:
        """Acknowledge everything."""
        self.wake_at = inf
        for at in range(0, len(self._ids), MAX_ACKS):
            out.append(SendMessage(Ack(self._ids[at : at + MAX_ACKS])))
        self._ids = []

    def shelve(self) -> None:
        """The link is lost."""
        self.wake_at = inf

    def clear(self) -> None:
        """A coordinator of a new epoch knows none of them, or the session ended."""
        self._ids = []
        self.wake_at = inf
