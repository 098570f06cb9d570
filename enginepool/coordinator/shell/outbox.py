"""What was sent on one link and is not read yet, in bytes. Pure.

ZeroMQ does not say how much its peer has taken, or how many bytes it holds; its high-water mark counts messages. So the
coordinator asks the peer: a `ping` with an unpredictable `at` goes out behind what was sent. The `pong` with the same `at`
proves that everything before it was read, because a link is first in, first out. A peer that does not read cannot know `at`.
"""


class Outbox:
    """One link's.

    Args:
        proof: bytes unread for which a proof is asked; half of `most` if that is less, so that the question comes in time.
        most: bytes that may be unread.
    """

    __slots__ = ("_most", "_proof", "asked_at", "before", "fd", "inode", "mark", "swept", "token", "unread")

    def __init__(self, proof: int, most: int) -> None:
        self._proof = min(proof, most // 2 + 1)
        self._most = most
        #: bytes that were sent and are not proved to be read; `Router.send` adds to it
        self.unread = 0
        #: bytes unread for which there is something to do: ask, or where that was done, disconnect
        self.mark = self._proof
        #: of the proof that is asked for; 0: none is
        self.token = 0
        self.asked_at = 0.0
        #: the part of `unread` that was sent before the question
        self.before = 0
        #: `unread` at the last sweep
        self.swept = -1
        #: the connection: its descriptor in this process, and the inode that tells whether it is still that one
        self.fd = -1
        self.inode = -1

    def ask(self, token: int, now: float) -> None:
        """A proof is asked for, behind all that was sent."""
        assert not self.token and token, "one question at a time"
        self.token, self.asked_at, self.before = token, now, self.unread
        self.mark = self._most + 1

    def proved(self, token: int) -> int:
        """Bytes that this proves to be read; 0: it is no answer to the question."""
        if not token or token != self.token:
            return 0
        read = self.before
        self.unread -= read
        self.token = self.before = 0
        self.mark = self._proof
        return read

    def check(self) -> None:
        assert 0 <= self.before <= self.unread, (self.before, self.unread)
        assert self.token or not self.before, self.before
