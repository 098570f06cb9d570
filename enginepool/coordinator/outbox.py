"""What was sent on one link and is not read yet, in bytes. Pure.

ZeroMQ does not say how much its peer has taken, or how many bytes it holds; its high-water mark counts messages. So the
coordinator asks the peer: a `ping` with an unpredictable `at` goes out behind what was sent. The `pong` with the same `at`
proves that everything before it was read, because a link is first in, first out. A peer that does not read cannot know `at`.
"""

from collections import deque
from collections.abc import Sequence

from enginepool.coordinator.events import Buffer

#: a proof is asked for once so many bytes are unread
PROOF_BYTES = 128 * 1024


class Outbox:
    """One link's."""

    __slots__ = ("asked_at", "behind", "inode", "fd", "parked", "token", "touched", "unread")

    def __init__(self) -> None:
        #: bytes that were sent, or wait to be, and are not proved to be read
        self.unread = 0
        #: of the proof that is asked for; 0: none is
        self.token = 0
        self.asked_at = 0.0
        #: of `unread`, what was sent after the question
        self.behind = 0
        #: messages that the socket did not take, oldest first
        self.parked: deque[Sequence[Buffer]] = deque()
        #: something was sent since the last sweep
        self.touched = True
        #: the connection: its descriptor in this process, and the inode that tells whether it is still that one
        self.fd = -1
        self.inode = -1

    def sent(self, nbytes: int) -> bool:
        """So many bytes more. Whether a proof is due: then call `ask`."""
        self.unread += nbytes
        self.touched = True
        if self.token:
            self.behind += nbytes
            return False
        return self.unread >= PROOF_BYTES

    def ask(self, token: int, now: float) -> None:
        """A proof is asked for, behind all that was sent."""
        assert not self.token and token, "one question at a time"
        self.token, self.asked_at, self.behind = token, now, 0

    def proved(self, token: int) -> int:
        """Bytes that this proves to be read; 0: it is no answer to the question."""
        if not token or token != self.token:
            return 0
        read, self.unread = self.unread - self.behind, self.behind
        self.token = self.behind = 0
        return read

    def check(self) -> None:
        assert 0 <= self.behind <= self.unread, (self.behind, self.unread)
        assert self.token or not self.behind, self.behind
