"""Whether the link of a client's session stands, and when the next Hello, ping or new socket is due.

Part of the pure machine in `machine.py`, which says what a lost link means for everything else. How it thinks:

The link goes new → greeting → welcomed, and back to greeting whenever the coordinator does not know this client (it answers
`hello_required`, or speaks of a higher epoch) or says nothing for `silence_s`; finally it is ended. Silence counts from the
first ping without an answer, and a tick that comes late forgives it, so a client that was itself stopped does not take its own
pause for the coordinator's. Each Hello has a higher incarnation than the one before. Silence also opens a new socket: what is
queued on the old one would otherwise arrive some day. What a coordinator of a lower epoch says does not count;
a Hello tells the epoch, and that coordinator goes above it.
"""

from math import inf
from typing import Literal

from enginepool.client.session.events import OpenLink, SendMessage, SessionEffect
from enginepool.client.session.settings import SessionSettings
from enginepool.protocol.messages import Hello, Ping, Welcome

State = Literal["new", "greeting", "welcomed", "ended"]
#: what a tick finds: no answer ever; silence on this socket; no answer to the Hello yet; nothing
Due = Literal["never_answered", "silent", "hello", ""]

#: strikes are counted together when each is within this many seconds of the one before
_STRIKE_S = 10.0


class LinkState:
    """The link of one client. Methods with `out` append to it what is to be done.

    Args:
        client: 16 random bytes: who this is.
        token: 16 secret random bytes.
        settings: times.
        agent: name and version of the software, for the operator.
    """

    def __init__(self, client: bytes, token: bytes, settings: SessionSettings, agent: str) -> None:
        self.settings = settings
        self.state: State = "new"
        #: of the coordinator; 0 before the first Welcome; only grows
        self.epoch: int = 0
        #: of the last Hello
        self.incarnation = 0
        self._client, self._token, self._agent = client, token, agent
        self._ping_s = 1.0
        self._strikes = 0
        self._strike_at = -inf
        self._hello_after = -inf
        # inf: nothing is to be done.
        self._connect_by = inf  # until the first Welcome
        self._greet_by = inf  # while greeting
        self._hello_at = inf  # while greeting
        self._ping_at = inf  # while welcomed
        self._silent_at = inf  # while a ping is unanswered

    @property
    def stands(self) -> bool:
        """Everything may be sent."""
        return self.state == "welcomed"

    @property
    def wake_at(self) -> float:
        """When `due` or `ping` has something to do."""
        return min(self._connect_by, self._greet_by, self._hello_at, self._ping_at, self._silent_at)

    def connect_by(self, time: float | None) -> None:
        """When a coordinator must have answered for the first time."""
        self._connect_by = inf if time is None else time

    def greet(self, now: float, out: list[SessionEffect], *, open_link: bool) -> None:
        """Say Hello, on a new socket or on the one that there is."""
        settings = self.settings
        if open_link or self.state == "welcomed":
            self._greet_by = now + settings.silence_s
        self.state = "greeting"
        self.incarnation += 1
        self._hello_at = now + settings.hello_s
        self._hello_after = now + settings.hello_gap_s
        self._ping_at = self._silent_at = inf
        if open_link:
            out.append(OpenLink())
        hello = Hello(client=self._client, token=self._token, incarnation=self.incarnation, agent=self._agent, epoch=self.epoch)
        out.append(SendMessage(hello))

    def forgotten(self, now: float) -> bool:
        """Whether to send a new Hello to a coordinator that does not know this link. An error within the gap is about messages
        before the last Hello."""
        return self.state == "welcomed" and now >= self._hello_after

    def superseded(self, now: float) -> Literal["ignored", "greet", "end"]:
        """An old link of this client, or another process with its identity (a fork). The second never stops."""
        if now < self._hello_after:
            return "ignored"
        if now - self._strike_at > _STRIKE_S:
            self._strikes = 0
        self._strike_at = now
        self._strikes += 1
        return "end" if self._strikes > self.settings.superseded_limit else "greet"

    def heard(self) -> None:
        """The coordinator said something."""
        self._silent_at = inf

    def welcomed(self, message: Welcome, now: float) -> None:
        """The link stands. Its epoch is not lower than the one before."""
        again = self.state == "welcomed" and message.epoch == self.epoch
        self._silent_at = inf
        self.state = "welcomed"
        self.epoch = message.epoch
        self._ping_s = max(message.ping_ms, 1) / 1000
        if not again:
            self._connect_by = self._greet_by = self._hello_at = inf
            self._ping_at = now + self._ping_s

    def due(self, now: float) -> Due:
        """What the time brings."""
        if now >= self._connect_by:
            return "never_answered"
        if now >= self._greet_by or now >= self._silent_at:
            return "silent"
        return "hello" if now >= self._hello_at else ""

    def ping(self, now: float, out: list[SessionEffect]) -> None:
        """Ping, when it is time."""
        if now >= self._ping_at:
            self._ping_at = now + self._ping_s
            self._silent_at = min(self._silent_at, now + self.settings.silence_s)
            out.append(SendMessage(Ping(at=max(int(now * 1e6), 0))))

    def seek(self, now: float) -> None:
        """The coordinator ends: the next one is found by a ping, which it answers with `hello_required`."""
        if self.state == "welcomed":
            self._ping_s = min(self._ping_s, self.settings.seek_s)
            self._ping_at = min(self._ping_at, now + self._ping_s)

    def forgive(self, now: float) -> None:
        """This process was stopped. Messages of the coordinator may still be on the way, so all waits are extended."""
        if self._silent_at < inf:
            self._silent_at = max(self._silent_at, now + self.settings.silence_s)
        if self._greet_by < inf:
            self._greet_by = max(self._greet_by, now + self.settings.silence_s)
        if self._connect_by < inf:
            self._connect_by = max(self._connect_by, now + self.settings.hello_s)

    def end(self) -> None:
        """Nothing more is said."""
        self.state = "ended"
        self._connect_by = self._greet_by = self._hello_at = self._ping_at = self._silent_at = inf
